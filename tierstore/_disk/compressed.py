"""Records in compressed chunks: smaller on disk, but a row costs decoding a whole chunk.

Intended for tables that are archived, or read more often than trained. A chunk is replaced by
renaming a complete new file to its name, so a crash leaves either the old chunk or the new one.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.chunks import ChunkedRecords
from tierstore._disk.readahead import MappedRows
from tierstore.errors import FILE_CURE, CorruptStoreError
from tierstore.spec import TableSpec


class _Codec(Protocol):
    def encode(self, data: Any) -> Any: ...

    def decode(self, data: Any, out: Any = None) -> Any: ...


def _codec(name: str | None) -> _Codec:
    """Return the numcodecs codec that implements one of the zarr v3 codecs."""
    import numcodecs

    if name == "lz4":
        codec: _Codec = numcodecs.Blosc(cname="lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE)
    else:
        codec = numcodecs.Zstd(level=3)
    return codec


def _blosc_bytes(packed: bytes) -> int:
    """Return the decoded size of a Blosc chunk; raises ValueError if the chunk is truncated.

    A decoder would read beyond the end of a truncated chunk. Format: Blosc chunk; the last four of
    its 16 header bytes are the total length.
    """
    if len(packed) < 16 or int.from_bytes(packed[12:16], "little") != len(packed):
        raise ValueError(f"{len(packed)} bytes differ from the length in the header")
    return int.from_bytes(packed[4:8], "little")


def _zstd_bytes(packed: bytes) -> int:
    """Return the decoded size that a zstd frame declares; raises ValueError if it does not.

    A decoder silently leaves the rest of a larger output unfilled. Format: RFC 8878, 3.1.1.1.
    """
    if len(packed) < 6:
        raise ValueError("its header is truncated")
    descriptor = packed[4]
    single_segment = descriptor >> 5 & 1
    size = (single_segment, 2, 4, 8)[descriptor >> 6]
    first = 5 + (not single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if not size or len(packed) < first + size:
        raise ValueError("it does not declare its size")
    return int.from_bytes(packed[first : first + size], "little") + 256 * (size == 2)


class CompressedRecords(ChunkedRecords):
    """The records of a compressed array, read and replaced in whole chunks.

    One thread may write while another reads.
    """

    def __init__(self, directory: _io.Held[_io.Directory], spec: TableSpec) -> None:
        """Take over the array's directory."""
        super().__init__(spec.rows, spec.layout.record_bytes, spec.chunk_rows or spec.rows)
        self._directory = directory
        self._codec = _codec(spec.compression)
        self._is_blosc = spec.compression == "lz4"

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return nothing: chunks are read and decoded whole, not mapped."""
        return []

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Overwrite ascending, distinct `rows` `(n,)` with `records` `(n, record_bytes)`."""
        chunks = rows // self._chunk_rows
        bounds = np.flatnonzero(np.diff(chunks, prepend=-1))
        for part in np.split(np.arange(rows.size), bounds[1:]):
            if part.size:
                number = int(chunks[part[0]])
                chunk = self._chunk(number).copy()
                chunk[rows[part] - number * self._chunk_rows] = records[part]
                self._replace(number, chunk)

    def sync(self) -> None:
        """Make every write durable: chunks were synced when written, this syncs their names."""
        self._directory.sync()

    def damaged_files(self) -> list[str]:
        """Return the last chunk's name if it is unreadable or not zero after the last row."""
        number = (self.rows - 1) // self._chunk_rows
        try:
            rest = self._decode(number)[self.rows - number * self._chunk_rows :]
        except CorruptStoreError:
            return [f"c.{number}.0"]
        return [f"c.{number}.0"] if rest.any() else []

    def close(self) -> None:
        """Close the directory and drop the decoded chunks."""
        self._decoded.clear()
        self._directory.close()

    def reread(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records of ascending `rows` `(n,)` from the disk into `out`, bypassing caches."""
        numbers = rows // self._chunk_rows
        cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for begin, end in pairwise([0, *cuts, rows.size]):
            number = int(numbers[begin])
            chunk = self._decode(number, past_cache=True)
            out[begin:end] = chunk[rows[begin:end] - number * self._chunk_rows]

    def _decode(self, number: int, *, past_cache: bool = False) -> npt.NDArray[np.uint8]:
        shape = (self._chunk_rows, self.record_bytes)
        name = f"c.{number}.0"
        nbytes = self._chunk_rows * self.record_bytes
        try:
            packed = self._packed(name, nbytes + nbytes // 8 + 4096, past_cache=past_cache)
        except FileNotFoundError:
            return np.zeros(shape, np.uint8)
        chunk = np.empty(nbytes, np.uint8)
        try:
            held = _blosc_bytes(packed) if self._is_blosc else _zstd_bytes(packed)
            if held == nbytes:
                self._codec.decode(packed, out=chunk)
        except (RuntimeError, ValueError) as error:
            raise CorruptStoreError(
                f"{self._path(name)} cannot be decoded ({error}); " + FILE_CURE
            ) from None
        if held != nbytes:
            raise CorruptStoreError(
                f"{self._path(name)} holds {held} bytes of records, not {nbytes}; {FILE_CURE}"
            )
        return chunk.reshape(shape)

    def _path(self, name: str) -> str:
        return os.path.join(self._directory.path, name)

    def _packed(self, name: str, limit: int, *, past_cache: bool) -> bytes:
        """Read the file of a chunk, of at most `limit` bytes."""
        with self._directory.use() as place:
            if not past_cache:
                return place.read_file(name, limit)
            file = place.open_file(name)
        with file:
            data = np.empty((1, file.size), np.uint8)
            _io.direct.gather(file, np.zeros(1, np.int64), data)
            return data.tobytes()

    def _replace(self, number: int, chunk: npt.NDArray[np.uint8]) -> None:
        name = f"c.{number}.0"
        temporary = f"{name}.{uuid.uuid4().hex[:8]}.partial"
        packed = bytes(self._codec.encode(chunk))
        with self._directory.use() as place:
            try:
                place.write_file(temporary, packed)
            except BaseException:
                with contextlib.suppress(OSError):
                    place.unlink(temporary)
                raise
            with self._lock:
                place.rename(temporary, name)
                self._keep(number, chunk)
