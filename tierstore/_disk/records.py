"""Records stored row by row in files, which are mapped and patched by writes, or in objects.

The files have the same size and are numbered. They are open only while they are used: a mapping
needs no descriptor, so a table of a thousand chunks keeps none of them open. Objects cannot be
mapped; they are read in ranges and written once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap, zip_longest
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk import readahead
from tierstore._disk.readahead import MappedRows
from tierstore._parts import most_threads
from tierstore._rowcopy import Target, gather, unique
from tierstore.errors import CorruptStoreError, InvalidInputError


@dataclass(frozen=True)
class Files:
    """`count` files of `nbytes` each.

    Attributes:
        directory: the directory of the generation.
        name: returns the name of a file, given its number.
        inside: the subdirectory that contains the files, if any.
        grows: whether a file may be longer, for rows of later versions.
    """

    directory: _io.Holder
    name: Callable[[int], str]
    nbytes: int
    count: int = 1
    inside: str | None = None
    grows: bool = False

    @contextlib.contextmanager
    def place(self) -> Iterator[_io.Directory]:
        """Open the directory of the files."""
        with self.directory.use() as generation:
            if self.inside is None:
                yield generation
            else:
                with generation.directory(self.inside) as place:
                    yield place

    def create(self, *, sparse: bool, head: bytes = b"") -> list[_io.File]:
        """Create the files, each starting with `head`; allocate their space unless sparse.

        Files on a disk are durable and closed on return; objects are filled later.
        """
        made = []
        with self.place() as place:
            for number in range(self.count):
                with place.create(self.name(number)) as file:
                    file.truncate(self.nbytes) if sparse else file.allocate(0, self.nbytes)
                    if head:
                        file.write(head, 0)
                    if file.mappable:
                        file.sync()
                made.append(file)
        return made

    def open(self, number: int, *, write: bool = False) -> _io.File:
        """Open a file and check its size; raises FileNotFoundError, CorruptStoreError."""
        with self.place() as place:
            return self._open(place, number, write=write)

    def glimpse(self, number: int, nbytes: int) -> _io.Glimpse:
        """Return the beginning of a file and check its size; raises as `open` does."""
        with self.place() as place:
            name = self.name(number)
            beginning = place.glimpse(name, nbytes)
            self._check_size(beginning.size, place.join(name))
            return beginning

    def each(self) -> Generator[_io.File]:
        """Yield every file; each stays open until the next iteration."""
        with self.place() as place:
            for number in range(self.count):
                with self._open(place, number) as file:
                    yield file

    def _open(self, place: _io.Directory, number: int, *, write: bool = False) -> _io.File:
        file = place.open_file(self.name(number), write=write)
        try:
            self._check_size(file.size, file.path)
        except BaseException:
            file.close()
            raise
        return file

    def _check_size(self, size: int, path: str) -> None:
        if size < self.nbytes or (size > self.nbytes and not self.grows):
            raise CorruptStoreError(
                f"{path} has {size} bytes instead of {self.nbytes}; restore it from a copy"
            )


BLOCK_BYTES = 4 << 20
"""Bytes staged at a time: small enough for the CPU caches, large enough for the disk."""
_READERS = 4
"""Most threads for each of which there is a block to read to."""

_DENSE_PAGES = 1 / 8
"""Fraction of changed pages between first and last row above which all are rewritten."""
_WRITTEN_AT_ONCE = 16
"""Files written before a sync, which limits the descriptors that a fold needs."""
_SENT_AT_ONCE = 1 << 20
"""Size from which a write is sent to the disk at once, so that a sync waits for less."""

_Way = Callable[[npt.NDArray[np.int64], npt.NDArray[np.uint8]], None]
"""Overwrites rows of a block with records, or reads them."""


def block_rows(record_bytes: int) -> int:
    """Return the number of records that all threads read at a time."""
    return max(1, BLOCK_BYTES // record_bytes) * min(most_threads(), _READERS)


def pass_on(read: _Way, rows: npt.NDArray[np.int64], target: Target) -> None:
    """Copy the records of `rows` `(n,)` to a target, which `read` verifies block by block."""
    if target.slots is None:
        read(rows, target.records)
        return
    width = target.records.shape[1]
    step = block_rows(width)
    block = np.empty((min(rows.size, step), width), np.uint8)
    for at in range(0, rows.size, step):
        part = slice(at, min(at + step, rows.size))
        records = block[: part.stop - at]
        read(rows[part], records)
        target.of(part).put(records)


class LaidRecords:
    """Fixed-size records in files of `rows_per_file` each, starting at `offset`.

    If there is more than one file, the offset is 0 and each file contains whole pages.
    """

    def __init__(
        self,
        *,
        rows: int,
        record_bytes: int,
        offset: int = 0,
        rows_per_file: int | None = None,
    ) -> None:
        """Record the layout."""
        self.rows = rows
        self.record_bytes = record_bytes
        self._offset = offset
        self._rows_per_file = rows_per_file or rows

    def forget(self) -> None:
        """Do nothing: nothing is cached."""

    def _damaged(self, last: _io.File) -> list[str]:
        """Return the last file's name if its bytes after the last row are not zero."""
        rows = (self.rows - 1) % self._rows_per_file + 1
        end = self._offset + rows * self.record_bytes
        rest = self._rows_per_file * self.record_bytes + self._offset - end
        block = np.frombuffer(last.read(rest, end), np.uint8)
        return [os.path.basename(last.path)] if block.any() else []


class RecordFiles(LaidRecords):
    """Records that are read through a mapping and written to the files."""

    def __init__(self, files: Files, **laid: Any) -> None:
        """Map the files; see `LaidRecords`."""
        super().__init__(**laid)
        self._files = files
        self._inodes = np.empty(files.count, np.uint64)
        self._writing: dict[int, _io.File] = {}
        self._written: list[tuple[int, int, int]] = []
        self.records: npt.NDArray[np.uint8] = self._mapped()
        """The rows, `(rows, record_bytes)`, read-only."""

    def _mapped(self) -> npt.NDArray[np.uint8]:
        files = self._files
        with contextlib.closing(files.each()) as each:  # also the file at which it is interrupted
            mapped = _io.map_files(
                starmap(self._noted, enumerate(each)),
                files.nbytes,
                count=files.count,
                advice=mmap.MADV_RANDOM,
            )
        data = mapped[self._offset : self._offset + self.rows * self.record_bytes]
        return data.reshape(self.rows, self.record_bytes)

    def grow(self, rows: int, head: bytes | None = None) -> None:
        """Add rows to a single file; a writer extends it and rewrites its `head`.

        What another thread writes meanwhile stays; the file is to be synced.
        """
        nbytes = self._offset + rows * self.record_bytes
        if head is not None:
            with self._files.open(0, write=True) as file:
                if file.size < nbytes:
                    file.truncate(nbytes)
                if head:
                    file.write(head, 0)
                file.sync()
        self._files = replace(self._files, nbytes=nbytes)
        self.rows = self._rows_per_file = rows
        self.records = self._mapped()

    def _noted(self, number: int, file: _io.File) -> _io.File:
        """Record the identity of a file."""
        self._inodes[number] = file.inode
        return file

    def is_file(self, inode: int) -> bool:
        """Whether the first file has this inode number."""
        return inode == int(self._inodes[0])

    def replaced(self) -> CorruptStoreError:
        """Return the error of a first file that has another inode number."""
        with self._files.place() as place:
            return _replaced(place.join(self._files.name(0)))

    def linked_bytes(self, rows: npt.NDArray[np.int64]) -> int:
        """Return how much `own` would copy before these rows `(n,)` are overwritten."""
        with self._files.place() as place:
            return self._files.nbytes * len(self._linked(place, rows))

    def own(self, rows: npt.NDArray[np.int64]) -> Iterator[None]:
        """Copy the files of `rows` `(n,)` that have other names too, in steps.

        What is written in place would change a copy of the store by hard links, such as that of
        `cp -al`, or the store that this is a copy of. The new file takes the name when it is
        durable; a reader keeps the old one mapped, with the same bytes.
        """
        with self._files.place() as place:
            linked = self._linked(place, rows)
            for number in linked:
                yield from _separated(place, self._files.name(number))
            if linked:
                place.sync()
                self.records = self._mapped()

    def _linked(self, place: _io.Directory, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return the files of rows that have other names too."""
        numbers = unique(rows // self._rows_per_file).tolist()
        return [each for each in numbers if place.status(self._files.name(each)).st_nlink > 1]

    def is_named(self) -> bool:
        """Whether every file still has its name; a writer may have copied one."""
        with self._files.place() as place:
            found = (
                place.status(self._files.name(each)).st_ino for each in range(self._files.count)
            )
            return all(map(int.__eq__, found, self._inodes.tolist()))

    def _file(self, number: int) -> _io.File:
        """Return a file to write to, which stays open until it is synced.

        The system reports a write error to descriptions that were open when it happened.
        """
        file = self._writing.get(number)
        if file is None:
            if len(self._writing) == _WRITTEN_AT_ONCE:
                self.sync()
            file = self._writing[number] = self._open_mapped(number)
        return file

    def _open_mapped(self, number: int) -> _io.File:
        """Open a file for writing; raises CorruptStoreError if it is not the mapped file."""
        try:
            file = self._files.open(number, write=True)
        except FileNotFoundError as error:
            raise _replaced(str(error.filename)) from None
        try:
            if file.inode != int(self._inodes[number]):
                raise _replaced(file.path)
        except BaseException:  # which would keep it open as long as the traceback exists
            file.close()
            raise
        return file

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`, prefetching all pages."""
        gather(self.records, rows, out)

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped memory of `rows`, so that their pages can be prefetched."""
        return [MappedRows(self.records, rows)]

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Overwrite ascending, distinct `rows` `(n,)` with `records` `(n, record_bytes)`.

        If many pages of a block change, the block is read, patched and written in one piece.
        Otherwise a write to part of a page must read the page, so the pages of the next block are
        prefetched while one is written. Pages that had to be read are dropped from the cache again.
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
        """Wait until the preceding pages are on the disk, and drop them from the page cache."""
        written, self._written = self._written, []
        for number, offset, nbytes in written:
            if number in self._writing:  # otherwise it was synced meanwhile
                self._writing[number].write_out(offset, nbytes)

    def _way(self, rows: npt.NDArray[np.int64]) -> _Way:
        """Choose how to write `rows` of a block, and prefetch the pages for it."""
        if int(rows[-1] - rows[0]) + 1 == rows.size:
            return self._put_all
        cached = readahead.looks_resident(self.records, rows)
        if self._is_dense(rows):
            return self._rewrite if cached else self._rewrite_past_cache
        if cached:
            return self._put_runs
        readahead.prefetch(self.records, rows)
        return self._put_runs_and_forget

    def _is_dense(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether `rows` touch so many pages that rewriting the whole range is faster."""
        pages = unique(rows * self.record_bytes // mmap.PAGESIZE).size
        between = int(rows[-1] - rows[0] + 1) * self.record_bytes / mmap.PAGESIZE
        return pages > _DENSE_PAGES * between

    def _put_all(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write a block of contiguous rows."""
        self._put(int(rows[0]), records)

    def _put_runs(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write scattered rows, one write per contiguous run."""
        runs = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1).tolist()
        for begin, end in pairwise([*runs, rows.size]):
            self._put(int(rows[begin]), records[begin:end])

    def _put_runs_and_forget(
        self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]
    ) -> None:
        """Do the same, and drop the pages of the previous block from the cache."""
        self._put_runs(rows, records)
        self._let_go()
        self._written = [*self._ranges(int(rows[0]), int(rows[-1]))]

    def _rewrite(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Rewrite a block from its first to its last row, including the rows in between."""
        for number, offset, data in self._patched(rows, records, _io.File.read_into):
            _send(self._file(number), data, offset)

    def _rewrite_past_cache(
        self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]
    ) -> None:
        """Do the same with a block that is not in the page cache, bypassing the cache."""
        for number, offset, data in self._patched(rows, records, _io.direct.read):
            _io.direct.write(self._file(number), data, offset)

    def _patched(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        read: Callable[[_io.File, npt.NDArray[np.uint8], int], None],
    ) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
        """Yield file, offset and new contents, from the first to the last row.

        `read` fills memory with the current contents.
        """
        first, done = int(rows[0]), 0
        for number, offset, nbytes in self._ranges(first, int(rows[-1])):
            data = _io.direct.memory_for(nbytes, offset)
            read(self._file(number), data, offset)
            block = data.reshape(-1, self.record_bytes)
            stop = int(np.searchsorted(rows, first + len(block)))
            block[rows[done:stop] - first] = records[done:stop]
            yield number, offset, data
            first, done = first + len(block), stop

    def _put(self, first: int, records: npt.NDArray[np.uint8]) -> None:
        """Write consecutive records, split by file."""
        data, done = np.ascontiguousarray(records).reshape(-1), 0
        for number, offset, nbytes in self._ranges(first, first + len(records) - 1):
            _send(self._file(number), data[done : done + nbytes], offset)
            done += nbytes

    def _ranges(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield file, offset and size of the parts that contain rows `first` to `last`."""
        while first <= last:
            number, row = divmod(first, self._rows_per_file)
            count = min(last + 1 - first, self._rows_per_file - row)
            offset = self._offset + row * self.record_bytes
            yield number, offset, count * self.record_bytes
            first += count

    def sync(self) -> None:
        """Make every write durable.

        Raises CorruptStoreError if another program replaced one of the files, as zarr does when it
        writes a chunk: writes to the old file would be lost.
        """
        self._let_go()
        for number, file in list(self._writing.items()):
            file.sync()
            if file.nameless:
                raise _replaced(file.path)
            del self._writing[number]
            file.close()

    def reread(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records of ascending `rows` `(n,)` from the disk into `out`, bypassing the cache."""
        numbers, within = np.divmod(rows, self._rows_per_file)
        cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for begin, end in pairwise([0, *cuts, rows.size]):
            with self._open_mapped(int(numbers[begin])) as file:
                offsets = self._offset + within[begin:end] * self.record_bytes
                _io.direct.gather(file, offsets, out[begin:end])

    def damaged_files(self) -> list[str]:
        """Return the last file's name if its bytes after the last row are not zero."""
        with self._files.open(self._files.count - 1) as file:
            return self._damaged(file)

    def close(self) -> None:
        """Close the files; the mapping is freed with its last view."""
        for file in self._writing.values():
            file.discard()
        self._writing.clear()
        self._written.clear()
        self.records = np.empty((0, self.record_bytes), np.uint8)


def _replaced(path: str) -> CorruptStoreError:
    return CorruptStoreError(
        f"{path} was replaced by another program while the store was open; "
        "commits since the last fold are intact: open it again and verify it"
    )


_COPIED_AT_ONCE = 4 << 20


def _separated(place: _io.Directory, name: str) -> Iterator[None]:
    """Give the name of a file to a durable copy of it, whose name is not durable yet, in steps."""
    temporary = f"{name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        with place.open_file(name) as file, place.create(temporary) as copy:
            size = file.size
            if file.written >= size:
                copy.allocate(0, size)
            copy.truncate(size)
            for offset in range(0, size, _COPIED_AT_ONCE):
                nbytes = min(_COPIED_AT_ONCE, size - offset)
                if not file.is_hole(offset, nbytes):
                    copy.write(file.read(nbytes, offset), offset)
                yield
            copy.sync()
        place.rename(temporary, name)
    except BaseException:
        with contextlib.suppress(OSError):
            place.unlink(temporary)
        raise


def _send(file: _io.File, data: npt.NDArray[np.uint8], offset: int) -> None:
    """Write bytes; start sending large writes to the disk at once."""
    file.write(data, offset)
    if data.nbytes >= _SENT_AT_ONCE:
        file.start_writing(offset, data.nbytes)


_GAP = 64 << 10
"""Maximum gap between records read in one range: the bytes that a remote store transfers in the
time of one more request, with 64 requests in flight.
"""
_RANGE_BYTES = 4 << 20
_HELD_BYTES = 32 << 20
"""Bytes read before the first of them is used."""


def record_files(
    files: Files, created: Sequence[_io.File] = (), **laid: Any
) -> RecordFiles | RangedRecords:
    """Return the records in these files, mapped if possible; see `LaidRecords`.

    `created` are the files themselves if they are new.
    """
    with contextlib.ExitStack() as stack:
        first = created[0] if created else stack.enter_context(files.open(0))
        if first.mappable:
            return RecordFiles(files, **laid)
    return RangedRecords(created or [files.open(number) for number in range(files.count)], **laid)


class RangedRecords(LaidRecords):
    """Records in objects, written once from the first row to the last.

    Records that are skipped are zero.
    """

    _writing = 0

    def __init__(self, files: Sequence[_io.File], **laid: Any) -> None:
        """Use the objects; see `LaidRecords`."""
        super().__init__(**laid)
        self._files = files

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`, nearby ones in one range."""
        order = np.argsort(rows, kind="stable")
        numbers, within = np.divmod(rows[order], self._rows_per_file)
        begins = self._offset + within * self.record_bytes
        for first, last in self._groups(numbers, begins):
            runs = self._runs(numbers[first:last], begins[first:last])
            wanted = [
                (
                    cast(_io.ObjectFile, self._files[int(numbers[first + at])]),
                    int(begins[first + at]),
                    int(begins[first + end - 1]) + self.record_bytes,
                )
                for at, end in runs
            ]
            for (at, end), (_, begin, _), data in zip(
                runs, wanted, _io.read_ranges(wanted), strict=True
            ):
                records = np.frombuffer(data, np.uint8).reshape(-1, self.record_bytes)
                part = slice(first + at, first + end)
                out[order[part]] = records[(begins[part] - begin) // self.record_bytes]

    def _groups(
        self, numbers: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, int]]:
        """Yield parts of sorted records whose ranges have a limited total size."""
        apart = np.diff(begins, prepend=0)
        near = (np.diff(numbers, prepend=-1) == 0) & (apart <= self.record_bytes + _GAP)
        total = np.cumsum(np.where(near, apart, self.record_bytes))
        first = 0
        while first < begins.size:
            limit = total[first] + _HELD_BYTES
            last = max(first + 1, int(np.searchsorted(total, limit)))
            yield first, last
            first = last

    def _runs(
        self, numbers: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Group sorted records by the range in which they are read."""
        far = np.diff(begins) > self.record_bytes + _GAP
        full = np.diff(begins // _RANGE_BYTES) != 0
        cuts = np.flatnonzero(far | full | (np.diff(numbers) != 0)) + 1
        return list(pairwise([0, *cuts.tolist(), begins.size]))

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return nothing: there are no pages to prefetch."""
        return []

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write `records` `(n, record_bytes)` of `rows` `(n,)`, which ascend across all calls."""
        numbers = rows // self._rows_per_file
        consecutive = (np.diff(rows) == 1) & (np.diff(numbers) == 0)
        cuts = (np.flatnonzero(~consecutive) + 1).tolist()
        for at, end in pairwise([0, *cuts, rows.size]):
            number = int(numbers[at])
            if number < self._writing:
                raise InvalidInputError(f"row {rows[at]} is written after a higher row")
            for file in self._files[self._writing : number]:
                file.sync()
            self._writing = number
            within = int(rows[at]) - number * self._rows_per_file
            offset = self._offset + within * self.record_bytes
            self._files[number].write(np.ascontiguousarray(records[at:end]), offset)

    def reread(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Read the records: there is no cache to bypass."""
        self.read(rows, out)

    def damaged_files(self) -> list[str]:
        """Return the last object's name if its bytes after the last row are not zero."""
        return self._damaged(self._files[-1])

    def sync(self) -> None:
        """Send the remaining data."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Do nothing: objects are not kept open."""
