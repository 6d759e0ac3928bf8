"""The lowest tier of a table that has no files: where its rows begin."""

from __future__ import annotations

import threading
from collections.abc import Generator

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._disk.generation import initial_records
from tierstore._tiers.base import Bytes, Rows
from tierstore.initializers import BLOCK_ROWS
from tierstore.spec import TableSpec
from tierstore.stats import TierStats, tally

__all__ = ["Origin"]

_PART_BYTES = 2 << 20


class Origin:
    """Gives rows their first values, by their fields' initializers, and keeps what is handed down.

    Where a tier above holds every row nothing is handed down, and no memory is taken for it. Rows
    are made in blocks, so reading them in order costs each block once.
    """

    deltas: tuple[()] = ()
    live = None
    index_bytes = 0
    queue_bytes = 0

    def __init__(self, spec: TableSpec) -> None:
        """Make nothing yet."""
        self.rows = spec.rows
        self.record_bytes = spec.layout.record_bytes
        self.stats = TierStats()
        self._spec = spec.seeded()
        initializers = [item.init for item in spec.fields.values()]
        self._lock = threading.Lock()
        self._kept = np.zeros(self.rows, np.bool_)
        self._records: Bytes | None = None
        self._zero = all(initializer is None or initializer.is_zero for initializer in initializers)
        self._last_block: tuple[int, Bytes] = (-1, np.empty((0, self.record_bytes), np.uint8))

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)` into `out` `(n, record_bytes)`."""
        with self._lock:
            self._read(rows, out)

    def _read(self, rows: Rows, out: Bytes) -> None:
        tally(self.stats, requested=rows.size, bytes_out=rows.size * self.record_bytes)
        kept = self._kept[rows]
        if self._zero and not kept.any():
            out[:] = 0
            return
        if self._records is not None and kept.any():
            out[kept] = self._records[rows[kept]]
        fresh = np.flatnonzero(~kept)
        blocks = rows[fresh] // BLOCK_ROWS
        for number in np.unique(blocks).tolist():
            which = fresh[blocks == number]
            out[which] = self._block(number)[rows[which] - number * BLOCK_ROWS]

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows` part by part; an array is good until the next one."""
        step = max(1, _PART_BYTES // self.record_bytes)
        block = np.empty((min(rows.size, step), self.record_bytes), np.uint8)
        for start in range(0, rows.size, step):
            part = slice(start, min(start + step, rows.size))
            self.read(rows[part], block[: part.stop - start])
            yield part, block[: part.stop - start]

    def _block(self, number: int) -> Bytes:
        """Return the first records of a block of rows; the last one made is at hand."""
        if self._last_block[0] != number:
            block = next(initial_records(self._spec, number * BLOCK_ROWS))
            self._last_block = number, block
        return self._last_block[1]

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Keep `records` `(n, record_bytes)` as those of `rows` `(n,)`, distinct."""
        with self._lock:
            if self._records is None:
                # Pages are taken as they are written to.
                self._records = np.zeros((self.rows, self.record_bytes), np.uint8)
            _rowcopy.scatter(self._records, rows, np.ascontiguousarray(records))
            self._kept[rows] = True
            tally(self.stats, written=rows.size, bytes_in=rows.size * self.record_bytes)

    def stage(self, rows: Rows) -> None:
        """Return nothing to do: there is nowhere to bring rows nearer from."""

    def flush(self) -> None:
        """Do nothing: there is no tier below."""

    def discard(self) -> npt.NDArray[np.int64]:
        """Return no rows: there are no versions to go back to."""
        return np.empty(0, np.int64)
