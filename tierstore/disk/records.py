"""Records that lie row after row in one or more files, mapped to be read and patched by writes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import io
from tierstore.disk import paging
from tierstore.disk.paging import Place
from tierstore.errors import CorruptStoreError
from tierstore.unique import unique

__all__ = ["BLOCK_BYTES", "LaidRecords", "RecordFiles"]

BLOCK_BYTES = 4 << 20
"""Bytes that are staged at a time: small enough for the caches, large enough for the disk."""

_DENSE_PAGES = 1 / 8
"""Share of the pages between the first and the last row above which all are rewritten."""
_SENT_AT_ONCE = 1 << 20
"""Bytes written in one piece that go to the disk at once, so that a sync has less to wait for."""

_Way = Callable[[npt.NDArray[np.int64], npt.NDArray[np.uint8]], None]
"""Writes records over rows of a block."""


class LaidRecords:
    """Fixed-size records in files of `rows_per_file` each, the first of which starts at `offset`.

    Where there is more than one file, each starts at 0 and holds whole pages.
    """

    def __init__(
        self,
        files: Sequence[io.File],
        *,
        rows: int,
        record_bytes: int,
        offset: int = 0,
        rows_per_file: int | None = None,
    ) -> None:
        """Take over the files, which must be complete."""
        self.rows = rows
        self.record_bytes = record_bytes
        self._files = files
        self._offset = offset
        self._rows_per_file = rows_per_file or rows

    def forget(self) -> None:
        """Do nothing: bytes are read from the files each time."""

    def damaged_files(self) -> list[str]:
        """Return the last file's name if the rest of it, behind the last row, is not zero."""
        last = self.rows - (len(self._files) - 1) * self._rows_per_file
        end = self._offset + last * self.record_bytes
        rest = self._rows_per_file * self.record_bytes + self._offset - end
        block = np.frombuffer(self._files[-1].read(rest, end), np.uint8)
        return [os.path.basename(self._files[-1].path)] if block.any() else []


class RecordFiles(LaidRecords):
    """Records that are mapped to be read, and written to the files."""

    def __init__(self, files: Sequence[io.File], **laid: Any) -> None:
        """Map the files and keep them for writing; see `LaidRecords`."""
        super().__init__(files, **laid)
        self._written: list[tuple[io.File, int, int]] = []
        length = self._offset + self._rows_per_file * self.record_bytes
        mapped = io.map_files(files, length, advice=mmap.MADV_RANDOM)
        data = mapped[self._offset : self._offset + self.rows * self.record_bytes]
        self.records: npt.NDArray[np.uint8] = data.reshape(self.rows, self.record_bytes)
        """The rows, `(rows, record_bytes)`, read-only."""

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`, pages all at once."""
        np.take(self.records, rows, axis=0, out=out, mode="clip")

    def places(self, rows: npt.NDArray[np.int64]) -> list[Place]:
        """Return where `rows` lie, for their pages to be announced."""
        return [Place(self.records, rows)]

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write `records` `(n, record_bytes)` over `rows` `(n,)`, ascending and distinct.

        Where many pages of a block change, the block is read, patched and written in one piece;
        elsewhere a write to part of a page must read it, and pages of the next block are on their
        way while one is written. What had to be read is not kept in memory: others need that more.
        """
        span = max(1, BLOCK_BYTES // self.record_bytes)
        starts = np.flatnonzero(np.diff(rows // span, prepend=-1)).tolist()
        blocks = [slice(*ends) for ends in pairwise([*starts, rows.size])]
        ways = [self._way(rows[block]) for block in blocks[:1]]
        for block, following in zip_longest(blocks, blocks[1:]):
            if following is not None:
                ways.append(self._way(rows[following]))
            ways.pop(0)(rows[block], records[block])

    def _let_go(self) -> None:
        """Wait until the pages before are on the disk, and let the system forget them."""
        written, self._written = self._written, []
        for file, offset, nbytes in written:
            file.write_out(offset, nbytes)

    def _way(self, rows: npt.NDArray[np.int64]) -> _Way:
        """Return how best to write `rows` of a block, and have the disk read what that needs."""
        if int(rows[-1] - rows[0]) + 1 == rows.size:
            return self._put_all
        cached = paging.looks_resident(self.records, rows)
        if self._is_dense(rows):
            return self._rewrite if cached else self._rewrite_past_cache
        if cached:
            return self._put_runs
        paging.announce(self.records, rows)
        return self._put_runs_and_forget

    def _is_dense(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether `rows` touch so many pages that all between are best written too."""
        pages = unique(rows * self.record_bytes // mmap.PAGESIZE).size
        between = int(rows[-1] - rows[0] + 1) * self.record_bytes / mmap.PAGESIZE
        return pages > _DENSE_PAGES * between

    def _put_all(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write a block of rows that lie side by side."""
        self._put(int(rows[0]), records)

    def _put_runs(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write rows that lie far apart, each with those right behind it."""
        runs = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1).tolist()
        for begin, end in pairwise([*runs, rows.size]):
            self._put(int(rows[begin]), records[begin:end])

    def _put_runs_and_forget(
        self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]
    ) -> None:
        """Do the same, and let go of the pages that the block before this one needed."""
        self._put_runs(rows, records)
        self._let_go()
        self._written = [*self._ranges(int(rows[0]), int(rows[-1]))]

    def _rewrite(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write a block from the first row to the last, with all that lies in between."""
        for file, offset, data in self._patched(rows, records, io.File.read_into):
            _send(file, data, offset)

    def _rewrite_past_cache(
        self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]
    ) -> None:
        """Do the same with a block that is not in memory, and leave it so."""
        for file, offset, data in self._patched(rows, records, io.direct.read):
            io.direct.write(file, data, offset)

    def _patched(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        read: Callable[[io.File, npt.NDArray[np.uint8], int], None],
    ) -> Iterator[tuple[io.File, int, npt.NDArray[np.uint8]]]:
        """Yield a file, where in it, and what is to be there, from the first row to the last.

        `read` fills memory with what is there.
        """
        first, done = int(rows[0]), 0
        for file, offset, nbytes in self._ranges(first, int(rows[-1])):
            data = io.direct.memory_for(nbytes, offset)
            read(file, data, offset)
            block = data.reshape(-1, self.record_bytes)
            stop = int(np.searchsorted(rows, first + len(block)))
            block[rows[done:stop] - first] = records[done:stop]
            yield file, offset, data
            first, done = first + len(block), stop

    def _put(self, first: int, records: npt.NDArray[np.uint8]) -> None:
        """Write consecutive records, each part into the file that holds it."""
        data, done = np.ascontiguousarray(records).reshape(-1), 0
        for file, offset, nbytes in self._ranges(first, first + len(records) - 1):
            _send(file, data[done : done + nbytes], offset)
            done += nbytes

    def _ranges(self, first: int, last: int) -> Iterator[tuple[io.File, int, int]]:
        """Yield where rows `first` to `last` lie: a file, where in it, and how many bytes."""
        while first <= last:
            number, row = divmod(first, self._rows_per_file)
            count = min(last + 1 - first, self._rows_per_file - row)
            offset = self._offset + row * self.record_bytes
            yield self._files[number], offset, count * self.record_bytes
            first += count

    def sync(self) -> None:
        """Make every write durable.

        Raises CorruptStoreError if another program put a file in the place of one of these, as zarr
        does with chunks it writes: what was written here would be lost with the old one.
        """
        self._let_go()
        for file in self._files:
            file.sync()
            if file.nameless:
                raise CorruptStoreError(
                    f"{file.path} was replaced by another program while the store was open; "
                    "what was committed since the last fold is intact: open it again and verify it"
                )

    def close(self) -> None:
        """Close the files; the mapping goes with the last view of it."""
        for file in self._files:
            file.close()
        self.records = np.empty((0, self.record_bytes), np.uint8)


def _send(file: io.File, data: npt.NDArray[np.uint8], offset: int) -> None:
    """Write bytes, and have many of them go to the disk from now on."""
    file.write(data, offset)
    if data.nbytes >= _SENT_AT_ONCE:
        file.start_writing(offset, data.nbytes)
