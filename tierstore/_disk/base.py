"""The base of a table: all rows as of the last fold, their checksums, and a digest of those.

A fold overwrites the files of a base in place. In files of a different point in time, from a backup
or a partial copy, the rows still match their checksums. To detect such files, each manifest names a
digest: an immutable file with the crc32c of each block of 65,536 row checksums. Every fold writes a
new digest.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._checksum import crc32c
from tierstore._closing import call_each
from tierstore._disk import readahead
from tierstore._disk.backends import Records, backend_of
from tierstore._disk.manifest import DigestInfo
from tierstore._disk.readahead import MappedRows
from tierstore._disk.records import BLOCK_BYTES, Files, RecordFiles, pass_on, record_files
from tierstore._progress import Progress
from tierstore._rowcopy import Target
from tierstore.errors import (
    ROW_CURE,
    CorruptRowError,
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
    counted,
)
from tierstore.spec import TableSpec

CHECKSUMS = "rows.crc"


class Base:
    """Records and their checksums; only creation and folding write to them.

    `examine` checks the files, which are mapped on first use: of a thousand tables in a store, few
    may be read.
    """

    def __init__(
        self, directory: _io.Holder, spec: TableSpec, opened: tuple[Records, Records] | None = None
    ) -> None:
        """Use the given records and checksums, or open them later through `directory`."""
        self.rows: int = spec.rows
        self.record_bytes: int = spec.layout.record_bytes
        self._directory = directory
        self._spec = spec
        self._sparse = spec.sparse
        self._opened = opened
        self._examined: tuple[int, ...] = ()
        self._opening = threading.Lock()

    def check_other(self, files: RecordFiles) -> None:
        """Refuse files that are not those that were examined; a reader sets what examines them."""
        raise files.replaced()

    @property
    def _files(self) -> tuple[Records, Records]:
        """The open records and checksums; raises CorruptStoreError as `open` does."""
        if self._opened is None:
            with self._opening, _missing_explained(self._directory):
                if self._opened is None:  # otherwise another thread was faster
                    records = backend_of(self._spec).open(self._directory, self._spec)
                    try:
                        sums = _checksums(_checksum_files(self._directory, self._spec), self._spec)
                        self._opened = records, sums
                        for files, inode in zip((records, sums), self._examined, strict=False):
                            if isinstance(files, RecordFiles) and not files.is_file(inode):
                                self.check_other(files)
                    except BaseException:
                        self._opened = None
                        records.close()
                        raise
        return self._opened

    @property
    def _records(self) -> Records:
        return self._files[0]

    @property
    def _checksums(self) -> Records:
        return self._files[1]

    @cached_property
    def gap(self) -> int:
        """Maximum gap in bytes between pages that are read in one piece."""
        return readahead.merge_gap(self._directory.path)

    @classmethod
    def create(
        cls,
        directory: _io.Directory,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]],
        progress: Progress | None = None,
    ) -> Base:
        """Create the files of a table and fill them in order from blocks of records.

        `blocks` yields `(n, record_bytes)` arrays that together hold all rows. In a sparse table,
        zero rows and missing rows at the end take no space. The files are synced, the directory is
        not.
        """
        base = cls.begin(directory, spec)
        try:
            done = 0
            for block in blocks:
                base.append(done, block)
                done += len(block)
                if progress is not None and len(block):
                    progress(done, spec.rows)
            if done != spec.rows and not spec.sparse:
                raise InvalidInputError(f"the blocks hold {done} rows, the table {spec.rows}")
            base.sync()
        except BaseException:
            base.close()
            raise
        return base

    @classmethod
    def begin(cls, directory: _io.Directory, spec: TableSpec) -> Base:
        """Create the files of a table, to be filled by `append` and synced."""
        files = _checksum_files(directory, spec)
        checksums = _checksums(files, spec, files.create(sparse=spec.sparse))
        return cls(directory, spec, (backend_of(spec).create(directory, spec), checksums))

    def grow(self, rows: int, *, extend: bool) -> None:
        """Add rows: a writer extends the files, a reader maps what a writer added."""
        records, checksums = self._files
        self._spec = self._spec.with_rows(rows)
        backend_of(self._spec).grow(records, self._spec, extend=extend)
        if isinstance(checksums, RecordFiles):
            checksums.grow(rows, b"" if extend else None)
        self.rows = rows

    def append(self, done: int, block: npt.NDArray[np.uint8]) -> None:
        """Write the records `(n, record_bytes)` after the first `done` rows of a new table."""
        _check_block(block, self, done + len(block))
        rows = np.arange(done, done + len(block), dtype=np.int64)
        if self._sparse:
            rows = rows[block.any(axis=1)]
            block = block[rows - done]
        self.write(rows, block, _checksum.row_checksums(rows, block))

    @classmethod
    def open(cls, directory: _io.Holder, spec: TableSpec) -> Base:
        """Open the files of a table and check names, sizes and headers against the spec.

        Later reads and writes open their files through `directory`, which must stay open or held.

        Raises CorruptStoreError if a file is missing, truncated, extended or from another table.
        """
        base = cls(directory, spec)
        base.examine()
        return base

    def examine(self) -> None:
        """Do what `open` does of files that are not open yet."""
        directory, spec = self._directory, self._spec
        with _missing_explained(directory), directory.use() as generation:
            inode = backend_of(spec).examine(generation, spec)
            if inode is None:
                self._records.forget()  # this opens them
                return
            status = generation.status(CHECKSUMS)
            if status.st_size < 4 * spec.rows or (
                status.st_size > 4 * spec.rows and not spec.grows
            ):
                raise CorruptStoreError(
                    f"{generation.join(CHECKSUMS)} has {status.st_size} bytes, "
                    f"not {4 * spec.rows}; restore it from a copy"
                )
            self._examined = inode, status.st_ino

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)` and verify their checksums.

        Raises CorruptRowError, leaving `out` undefined, if a checksum does not match.
        """
        _refuse(rows, self._read(rows, out))

    def _read(
        self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.int64]:
        """Copy records into `out`; return the positions of checksum mismatches.

        Records that are not mapped come before their checksums: an error names their file.
        """
        records = self._files[0]
        if isinstance(records, RecordFiles):
            return self._copy(records, rows, Target(out))
        records.read(rows, out)
        return _checksum.mismatches(rows, out, self._sums(rows), sparse=self._sparse)

    def _copy(
        self, records: RecordFiles, rows: npt.NDArray[np.int64], target: Target
    ) -> npt.NDArray[np.int64]:
        """Copy records that are mapped, as `_read` does."""
        given = records.records, rows, rows, self._sums(rows), target
        return _checksum.copy(*given, sparse=self._sparse)

    def _sums(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return the checksums that records `rows` must have."""
        sums = np.empty((rows.size, 4), np.uint8)
        self._files[1].read(rows, sums)
        return sums.view("<u4").ravel()

    def deliver(self, rows: npt.NDArray[np.int64], target: Target) -> None:
        """Copy the records of `rows` `(n,)` to a target, as `read` does."""
        records = self._files[0]
        if isinstance(records, RecordFiles):
            _refuse(rows, self._copy(records, rows, target))
        else:
            pass_on(self.read, rows, target)

    def damaged(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those of `rows` that cannot be read or do not match their checksum."""
        out = np.empty((rows.size, self.record_bytes), np.uint8)
        try:
            bad: list[int] = rows[self._read(rows, out)].tolist()
            for place in self.places(rows):
                place.let_go()
            return bad
        except CorruptStoreError:
            if rows.size == 1:
                return [int(rows[0])]
            half = rows.size // 2
            return self.damaged(rows[:half]) + self.damaged(rows[half:])

    def computed_checksums(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Compute the checksums of `rows` from their records, ignoring the checksum file.

        A row of a sparse table that was never written has checksum 0.
        """
        records = np.empty((rows.size, self.record_bytes), np.uint8)
        self._records.read(rows, records)
        sums = _checksum.row_checksums(rows, records)
        if self._sparse:
            stored = np.empty((rows.size, 4), np.uint8)
            self._checksums.read(rows, stored)
            sums[(stored.view("<u4").ravel() == 0) & ~records.any(axis=1)] = 0
        return sums

    def damaged_files(self) -> list[str]:
        """Return the names of files whose bytes outside the rows are damaged."""
        return self._records.damaged_files()

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped memory of `rows` and of their checksums."""
        records, checksums = self._files
        return records.places(rows) + checksums.places(rows)

    def prefetch(self, rows: npt.NDArray[np.int64]) -> None:
        """Prefetch the pages of `rows`."""
        for place in self.places(rows):
            place.prefetch(self.gap)

    def write(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        checksums: npt.NDArray[np.uint32],
    ) -> None:
        """Overwrite ascending, distinct `rows` and their checksums, without making them durable."""
        if rows.size:
            self._records.write(rows, records)
            self._checksums.write(rows, checksums.astype("<u4").view(np.uint8).reshape(-1, 4))

    def own(self, rows: npt.NDArray[np.int64]) -> Iterator[None]:
        """Prepare to write `rows` `(n,)`, in steps: copy files that have other names too."""
        for files in self._files:
            if isinstance(files, RecordFiles):
                yield from files.own(rows)

    def linked_bytes(self, rows: npt.NDArray[np.int64]) -> int:
        """Return how much `own` would copy."""
        return sum(
            files.linked_bytes(rows) for files in self._files if isinstance(files, RecordFiles)
        )

    def is_named(self) -> bool:
        """Whether the files that are mapped still have their names; see `own`."""
        mapped = self._opened or ()
        return all(each.is_named() for each in mapped if isinstance(each, RecordFiles))

    def sync(self) -> None:
        """Make every write durable."""
        self._records.sync()
        self._checksums.sync()

    def forget(self) -> None:
        """Drop cached contents that a fold of another process may have replaced."""
        self._records.forget()

    def unproven(
        self, rows: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.int64]:
        """Return those of ascending `rows` `(n,)` whose records on the disk are not as written.

        Records and checksums are read from the disk itself, bypassing the page cache if the file
        system allows it, and compared with the checksums `(n,)` of the written records.
        """
        records = np.empty((rows.size, self.record_bytes), np.uint8)
        stored = np.empty((rows.size, 4), np.uint8)
        self._records.reread(rows, records)
        self._checksums.reread(rows, stored)
        wrong = stored.view("<u4").ravel() != checksums
        wrong[_checksum.mismatches(rows, records, checksums)] = True
        bad: npt.NDArray[np.int64] = rows[wrong]
        return bad

    def close(self) -> None:
        """Close the files."""
        call_each(*(files.close for files in self._opened or ()))


def _refuse(rows: npt.NDArray[np.int64], wrong: npt.NDArray[np.int64]) -> None:
    """Raise CorruptRowError if any of `rows` `(n,)`, at positions `wrong`, do not match."""
    if wrong.size:
        bad = np.unique(rows[wrong]).tolist()
        raise CorruptRowError(
            f"{counted(len(bad), 'row does', 'rows do')} not match the checksum in the base, "
            f"the first is row {bad[0]}; {ROW_CURE}",
            rows=bad,
            file="base",
        )


@contextlib.contextmanager
def _missing_explained(directory: _io.Holder) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptStoreError(
            f"a file of {directory.path} is missing: {error.filename}; restore it from a copy"
        ) from None


def _check_block(block: npt.NDArray[np.uint8], base: Base, done: int) -> None:
    if not isinstance(block, np.ndarray):
        raise InvalidTypeError(f"a block of records must be a NumPy array, not {block!r}")
    if block.dtype != np.uint8 or block.shape[1:] != (base.record_bytes,):
        raise InvalidInputError(
            f"a block of records must be uint8 of shape (n, {base.record_bytes}), "
            f"not {block.dtype} of {block.shape}"
        )
    if done > base.rows:
        raise InvalidInputError(f"the blocks hold at least {done} rows, the table {base.rows}")


def _checksum_files(directory: _io.Holder, spec: TableSpec) -> Files:
    return Files(directory, lambda number: CHECKSUMS, 4 * spec.rows, grows=spec.grows)


def _checksums(files: Files, spec: TableSpec, created: Sequence[_io.File] = ()) -> Records:
    return record_files(files, created, rows=spec.rows, record_bytes=4)


DIGEST_ROWS = 1 << 16
"""Row checksums per block."""

Blocks = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint32]


class Computing(Protocol):
    """A base, or the tier above it."""

    record_bytes: int

    def computed_checksums(self, rows: npt.NDArray[np.int64]) -> Sums:
        """Compute the checksums of `rows` of the base from their records."""


def block_sums(generation: _io.Directory, rows: int, blocks: Blocks | None = None) -> Sums:
    """Return the crc32c of blocks `(n,)` of row checksums, or of all blocks for None."""
    numbers = range(_block_count(rows)) if blocks is None else blocks.tolist()
    if len(numbers) == 1 and rows <= DIGEST_ROWS:
        return np.array([crc32c(generation.glimpse(CHECKSUMS, 4 * rows).data)], np.uint32)
    with generation.open_file(CHECKSUMS) as file:
        return np.fromiter((_block_sum(file, rows, number) for number in numbers), np.uint32)


def _block_sum(file: _io.File, rows: int, number: int) -> int:
    first = number * DIGEST_ROWS
    offset, nbytes = 4 * first, 4 * min(DIGEST_ROWS, rows - first)
    if file.is_hole(offset, nbytes):
        return _zeros_sum(nbytes)
    return crc32c(file.read(nbytes, offset))


@cache
def _zeros_sum(nbytes: int) -> int:
    return crc32c(bytes(nbytes))


def foreign_blocks(
    generation: _io.Directory,
    base: Computing,
    rows: int,
    digest: Sums,
    touched: Blocks,
    *,
    most: int | None = None,
) -> list[int]:
    """Return the blocks of row checksums that belong to a different time than the digest.

    Blocks `touched` by deltas that a fold may be merging are skipped; at most `most` of the others
    are compared, evenly spread. If checksums computed from the records match the digest, the base
    is the right one and its checksum file is damaged: only the rows concerned cannot be read.
    """
    blocks = np.arange(digest.size)
    if touched.size:
        blocks = np.delete(blocks, touched[touched < digest.size])
    if most is not None and blocks.size > most:
        blocks = blocks[np.linspace(0, blocks.size - 1, most).astype(np.int64)]
    differing = blocks[block_sums(generation, rows, blocks) != digest[blocks]].tolist()
    return [block for block in differing if not _gives(base, rows, block, int(digest[block]))]


def _gives(base: Computing, rows: int, block: int, expected: int) -> bool:
    """Whether the checksums computed from a block's records have the expected crc32c."""
    stop = min((block + 1) * DIGEST_ROWS, rows)
    step = max(1, BLOCK_BYTES // base.record_bytes)
    value = 0
    try:
        for start in range(block * DIGEST_ROWS, stop, step):
            sums = base.computed_checksums(np.arange(start, min(start + step, stop)))
            value = crc32c(sums.astype("<u4").view(np.uint8), value)
    except CorruptStoreError:
        return True  # a chunk that cannot be decoded does not tell when it was written
    return value == expected


def _block_count(rows: int) -> int:
    return -(-rows // DIGEST_ROWS)


def write_digest(generation: _io.Directory, sums: Sums, name: str) -> DigestInfo:
    """Write a digest under a new name; its bytes are durable, its name is not."""
    data = sums.astype("<u4").tobytes()
    generation.write_file(name, data)
    return DigestInfo(name, len(data), crc32c(data))


def padded(sums: Sums, rows: int) -> Sums:
    """Extend the digest of a base that has grown since by the checksums of empty blocks."""
    missing = _block_count(rows) - sums.size
    if missing <= 0:
        return sums
    return np.append(sums, np.full(missing, _zeros_sum(4 * DIGEST_ROWS), np.uint32))


def read_digest(generation: _io.Directory, info: DigestInfo, spec: TableSpec) -> Sums | None:
    """Return the digest of the base of a table; None if it is damaged.

    Raises CorruptStoreError if it is missing or has the wrong size, as in a generation restored
    from a copy of a different time.
    """
    path, size = generation.join(info.name), 4 * _block_count(spec.rows)
    if spec.grows:
        size = min(size, info.size)
    try:
        found = generation.glimpse(info.name, size)
    except FileNotFoundError:
        raise CorruptStoreError(
            f"{path}, the digest of the base, is missing; restore the whole store from one copy"
        ) from None
    if not found.size == info.size == size:
        raise CorruptStoreError(
            f"{path} has {found.size} bytes instead of {size}; restore the whole store from one "
            "copy"
        )
    if crc32c(found.data) != info.crc32c:
        return None
    return padded(np.frombuffer(found.data, "<u4"), spec.rows)
