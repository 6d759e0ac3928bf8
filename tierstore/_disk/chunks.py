"""Records in chunks that are decoded whole; the most recently decoded ones are cached."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

_CACHED_CHUNKS = 16
_CACHED_BYTES = 256 << 20
"""Size of the cache of decoded chunks; a single chunk is cached whatever its size."""


class ChunkedRecords(ABC):
    """Records read in whole chunks of `chunk_rows`, since rows of a batch often share chunks."""

    def __init__(self, rows: int, record_bytes: int, chunk_rows: int) -> None:
        """Start with an empty cache."""
        self.rows = rows
        self.record_bytes = record_bytes
        self._chunk_rows = chunk_rows
        chunk_bytes = chunk_rows * record_bytes
        self._kept_chunks = max(1, min(_CACHED_CHUNKS, _CACHED_BYTES // chunk_bytes))
        self._decoded: OrderedDict[int, npt.NDArray[np.uint8]] = OrderedDict()
        self._lock = threading.Lock()  # so that the cache agrees with the files

    @abstractmethod
    def _decode(self, number: int) -> npt.NDArray[np.uint8]:
        """Return the records of a chunk `(n, record_bytes)`; they are cached."""

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`."""
        chunks = rows // self._chunk_rows
        order = np.argsort(chunks, kind="stable")
        bounds = np.flatnonzero(np.diff(chunks[order], prepend=-1))
        for part in np.split(order, bounds[1:]):
            if part.size:
                number = int(chunks[part[0]])
                out[part] = self._chunk(number)[rows[part] - number * self._chunk_rows]

    def forget(self) -> None:
        """Drop the decoded chunks: another process may have replaced their files."""
        with self._lock:
            self._decoded.clear()

    def _chunk(self, number: int) -> npt.NDArray[np.uint8]:
        """Return the records of a chunk, read-only."""
        with self._lock:
            chunk = self._decoded.get(number)
            if chunk is None:
                chunk = self._decode(number)
            self._keep(number, chunk)
        return chunk

    def _keep(self, number: int, chunk: npt.NDArray[np.uint8]) -> None:
        self._decoded[number] = chunk
        self._decoded.move_to_end(number)
        if len(self._decoded) > self._kept_chunks:
            self._decoded.popitem(last=False)
