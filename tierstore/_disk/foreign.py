"""The base of an attached table: rows of other programs' files, read in place and never written.

Each column of a record is a matrix, either mapped or decoded chunk by chunk. The files must stay as
they were when they were attached: their identity, size and time of change are compared before a
mapping is touched and after its rows were copied.
"""

from __future__ import annotations

import copy
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk import readahead
from tierstore._disk.chunks import ChunkedRecords
from tierstore._disk.readahead import MappedRows
from tierstore._disk.records import pass_on
from tierstore._io import system
from tierstore._rowcopy import Target
from tierstore.errors import CorruptStoreError, TierStoreError

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_CURE = "restore the file as it was, or attach it again"


class Watch:
    """Notices files that vanish or change.

    Attributes:
        groups: the files that each part of a matrix is in; one that is missing must stay so.
    """

    def __init__(self, groups: Sequence[Sequence[Path]]) -> None:
        """Remember the files as they are."""
        self.groups = [[os.path.abspath(path) for path in group] for group in groups]
        self._seen = [list(map(_status, group)) for group in self.groups]

    def check(self, numbers: Iterable[int]) -> None:
        """Raise CorruptStoreError if a file of these groups has changed."""
        for number in numbers:
            for path, seen in zip(self.groups[number], self._seen[number], strict=True):
                if (found := _status(path)) != seen:
                    raise CorruptStoreError(
                        f"{path} {_difference(seen, found)} while it was attached; {_CURE}"
                    )


_Status = tuple[int, int, int, int]
"""Device, inode, size and time of the last change of a file."""


def _status(path: str) -> _Status | None:
    """Return the status of a file, None if it is missing."""
    try:
        status = system.calls.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _difference(seen: _Status | None, found: _Status | None) -> str:
    if found is None:
        return "vanished"
    if seen is None:
        return "appeared"
    if found[:2] != seen[:2]:
        return "was replaced"
    if found[2] != seen[2]:
        return f"was {'shortened' if found[2] < seen[2] else 'extended'} to {found[2]} bytes"
    return "was written to"


class Column(ABC):
    """Bytes `start:stop` of each record, from one matrix.

    Attributes:
        watch: its files.
        rows_per_part: rows of each group of files.
    """

    def __init__(self, watch: Watch, start: int, stop: int, rows_per_part: int) -> None:
        """Refer to the files."""
        self.watch = watch
        self.start = start
        self.stop = stop
        self.rows_per_part = rows_per_part

    def check(self, rows: Rows) -> None:
        """Raise CorruptStoreError if a file that holds some of `rows` has changed."""
        single = len(self.watch.groups) == 1
        self.watch.check((0,) if single else np.unique(rows // self.rows_per_part).tolist())

    @abstractmethod
    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the column of `rows` `(n,)` into `out` `(n, stop - start)`, of any strides."""

    def places(self, rows: Rows) -> list[MappedRows]:
        """Return the mapped memory of `rows`, so that their pages can be prefetched."""
        return []

    def close(self) -> None:
        """Drop the mapping or the cache."""


class MappedColumn(Column):
    """A matrix stored row by row in files, the same number of rows in each."""

    def __init__(
        self,
        files: Iterator[_io.File],
        watch: Watch,
        start: int,
        stop: int,
        *,
        rows: int,
        offset: int,
        rows_per_file: int,
    ) -> None:
        """Map `files`, whose rows begin at byte `offset`; raises CorruptStoreError.

        Several files have no offset, and their rows fill whole pages.
        """
        super().__init__(watch, start, stop, rows_per_file)
        width, count = stop - start, len(watch.groups)
        nbytes = offset + (rows if count == 1 else rows_per_file) * width
        data = _io.map_files(files, nbytes, count=count, advice=mmap.MADV_RANDOM, lasting=True)
        self._rows = data[offset : offset + rows * width].reshape(rows, width)

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy rows out of the mapping."""
        if out.flags.c_contiguous:
            np.take(self._rows, rows, axis=0, out=out, mode="clip")
        else:
            out[:] = self._rows.take(rows, axis=0, mode="clip")

    def places(self, rows: Rows) -> list[MappedRows]:
        """Return the mapping."""
        return [MappedRows(self._rows, rows)]

    def close(self) -> None:
        """Drop the mapping, which goes with its last view."""
        self._rows = np.empty((0, self.stop - self.start), np.uint8)


class _Chunks(ChunkedRecords):
    def __init__(self, decode: Callable[[int], Bytes], rows: int, width: int, step: int) -> None:
        super().__init__(rows, width, step)
        self._decoder = decode

    def _decode(self, number: int) -> Bytes:
        return self._decoder(number)


class ChunkedColumn(Column):
    """A matrix in chunks of whole rows that are decoded, a few of which are cached."""

    def __init__(
        self,
        decode: Callable[[int], npt.NDArray[Any]],
        watch: Watch,
        start: int,
        stop: int,
        *,
        rows: int,
        rows_per_chunk: int,
    ) -> None:
        """Read chunks with `decode`, which returns the rows of a chunk by its number."""
        super().__init__(watch, start, stop, rows_per_chunk)
        width = stop - start

        def rows_of(number: int) -> Bytes:
            watch.check([number])
            try:
                chunk = decode(number)
            except Exception as error:
                watch.check([number])
                if isinstance(error, OSError | MemoryError):
                    raise
                where = watch.groups[number][0]
                reason = error if isinstance(error, TierStoreError) else repr(error)
                raise CorruptStoreError(f"{where} cannot be decoded ({reason}); {_CURE}") from error
            return np.ascontiguousarray(chunk).view(np.uint8).reshape(-1, width)

        self._chunks = _Chunks(rows_of, rows, width, rows_per_chunk)

    def read(self, rows: Rows, out: Bytes) -> None:
        """Decode the chunks of `rows`, one after the other."""
        self._chunks.read(rows, out)

    def close(self) -> None:
        """Drop the cache."""
        self._chunks.forget()


class JoinedColumn(Column):
    """A matrix of which each of several columns has a range of rows."""

    def __init__(self, parts: Sequence[Column], rows: Sequence[int], start: int, stop: int) -> None:
        """Join `parts`, which have so many `rows` each, one at least."""
        super().__init__(parts[0].watch, start, stop, rows[0])
        self._parts = parts
        self._ends = np.cumsum(rows)

    def _divided(self, rows: Rows) -> Iterator[tuple[Column, npt.NDArray[np.intp], Rows]]:
        """Yield each part of some rows, which of `rows` these are, and their numbers in it."""
        which = np.searchsorted(self._ends, rows, "right").clip(max=len(self._parts) - 1)
        for number in np.unique(which).tolist():
            at = np.flatnonzero(which == number)
            yield self._parts[number], at, rows[at] - (self._ends[number - 1] if number else 0)

    def check(self, rows: Rows) -> None:
        """Raise CorruptStoreError if a file that holds some of `rows` has changed."""
        for part, _, own in self._divided(rows):
            part.check(own)

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the rows of each part."""
        for part, at, own in self._divided(rows):
            found = np.empty((len(own), self.stop - self.start), np.uint8)
            part.read(own, found)
            out[at] = found

    def places(self, rows: Rows) -> list[MappedRows]:
        """Return the mappings."""
        return [place for part, _, own in self._divided(rows) for place in part.places(own)]

    def close(self) -> None:
        """Close the parts."""
        for part in self._parts:
            part.close()


class RowChecksums(Protocol):
    """Checksums of the records, computed earlier."""

    def check(self, rows: Rows, records: Bytes) -> None:
        """Raise CorruptRowError for records `(n, record_bytes)` that do not match theirs."""

    def places(self, rows: Rows) -> list[MappedRows]:
        """Return the mapped checksums of `rows`."""

    def close(self) -> None:
        """Drop the mapping."""


class ForeignBase:
    """Records whose columns are in other programs' files.

    Attributes:
        checksums: checks what is read, if there are any.
    """

    checksums: RowChecksums | None = None

    def __init__(self, rows: int, record_bytes: int, columns: Sequence[Column]) -> None:
        """Combine columns, which it closes."""
        self.rows = rows
        self.record_bytes = record_bytes
        self._columns = columns
        self._is_padded = sum(each.stop - each.start for each in columns) < record_bytes

    @cached_property
    def gap(self) -> int:
        """Maximum gap in bytes between pages that are read in one piece."""
        return readahead.merge_gap(self._columns[0].watch.groups[0][0])

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`.

        Raises CorruptStoreError if a file changed: touching the mapping of a shorter one would end
        the process. Raises CorruptRowError if there are checksums and one does not match.
        """
        if self._is_padded:
            out[:] = 0
        for each in self._columns:
            each.check(rows)
            each.read(rows, out[:, each.start : each.stop])
            each.check(rows)
        if self.checksums is not None:
            self.checksums.check(rows, out)

    def deliver(self, rows: Rows, target: Target) -> None:
        """Copy the records of `rows` `(n,)` to a target; raises as `read` does."""
        pass_on(self.read, rows, target)

    def select(self, pieces: Iterable[tuple[int, int, int]], nbytes: int) -> ForeignBase | None:
        """Return a base of some bytes of each record, which reads only the files of these bytes.

        Bytes `lo:hi` of a record are at byte `at` of one of `nbytes`. Returns None where whole
        records are to be read: a matrix has bytes of both kinds, or the checksums are of records.
        """
        if self.checksums is not None:
            return None
        columns = []
        for lo, hi, at in pieces:
            for each in self._columns:
                if max(lo, each.start) < min(hi, each.stop):
                    if each.start < lo or hi < each.stop:
                        return None
                    moved = copy.copy(each)
                    moved.start, moved.stop = each.start - lo + at, each.stop - lo + at
                    columns.append(moved)
        return ForeignBase(self.rows, nbytes, columns)

    def places(self, rows: Rows) -> list[MappedRows]:
        """Return the mapped memory of `rows`, so that their pages can be prefetched."""
        found = [place for each in self._columns for place in each.places(rows)]
        return found if self.checksums is None else found + self.checksums.places(rows)

    def forget(self) -> None:
        """Do nothing: the files do not change."""

    def close(self) -> None:
        """Drop the mappings and caches."""
        for each in self._columns:
            each.close()
        if self.checksums is not None:
            self.checksums.close()
