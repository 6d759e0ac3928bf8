"""The base of a table: every row as of the last fold, and beside it a checksum of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tierstore import _checksum, _io
from tierstore._disk import readahead
from tierstore._disk.backends import Records
from tierstore._disk.files import Files
from tierstore._disk.readahead import MappedRows
from tierstore._disk.remote import record_files
from tierstore.errors import (
    ROW_CURE,
    CorruptRowError,
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
)
from tierstore.spec import BACKENDS, TableSpec

__all__ = ["Base"]

CHECKSUMS = "rows.crc"

Progress = Callable[[int, int], None]


class Base:
    """Records and their checksums. Only creation and folding write to it."""

    def __init__(self, records: Records, checksums: Records, *, sparse: bool, gap: int) -> None:
        """Take over open files; pages at most `gap` bytes apart are fetched in one piece."""
        self._records = records
        self._checksums = checksums
        self._sparse = sparse
        self.rows: int = records.rows
        self.record_bytes: int = records.record_bytes
        self.gap = gap

    @classmethod
    def create(
        cls,
        directory: _io.Directory,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]],
        progress: Progress | None = None,
    ) -> Base:
        """Create the files of a table and fill them, in order, from blocks of records.

        `blocks` yields `(n, record_bytes)` arrays that add up to every row; in a sparse table rows
        that are missing at the end, or zero, take no space. The files are synced; the directory is
        not.
        """
        files = _checksum_files(directory, spec)
        checksums = _checksums(files, spec, files.create(sparse=spec.sparse))
        records = BACKENDS[spec.backend].create(directory, spec)
        gap = readahead.merge_gap(directory.path)
        base = cls(records, checksums, sparse=spec.sparse, gap=gap)
        try:
            done = 0
            for block in blocks:
                count = len(block)
                _check_block(block, base, done + count)
                rows = np.arange(done, done + count, dtype=np.int64)
                if spec.sparse:
                    rows = rows[block.any(axis=1)]
                    block = block[rows - done]
                base.write(rows, block, _checksum.row_checksums(rows, block))
                done += count
                if progress is not None:
                    progress(done, spec.rows)
            if done != spec.rows and not spec.sparse:
                raise InvalidInputError(f"{done} rows were given for a table of {spec.rows}")
            base.sync()
        except BaseException:
            base.close()
            raise
        return base

    @classmethod
    def open(cls, directory: _io.Holder, spec: TableSpec) -> Base:
        """Open the files of a table, whose names, sizes and headers must be what the spec gives.

        What is written later is opened then, through `directory`, which must stay open or held.

        Raises CorruptStoreError if a file is missing, cut, extended or another table's.
        """
        try:
            records = BACKENDS[spec.backend].open(directory, spec)
            checksums = _checksums(_checksum_files(directory, spec), spec)
        except FileNotFoundError as error:
            raise CorruptStoreError(
                f"a file of {directory.path} is missing: {error.filename}; restore it from a copy"
            ) from None
        gap = readahead.merge_gap(directory.path)
        return cls(records, checksums, sparse=spec.sparse, gap=gap)

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)` and check each.

        Raises CorruptRowError, with `out` undefined, if a checksum does not match.
        """
        wrong = self._read(rows, out)
        if wrong.size:
            bad = np.unique(rows[wrong]).tolist()
            raise CorruptRowError(
                f"{len(bad)} rows of the base do not match their checksum, the first is row "
                f"{bad[0]}; {ROW_CURE}",
                rows=bad,
                file="base",
            )

    def _read(
        self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.intp]:
        """Copy records into `out` and return the positions that fail their checksum."""
        self._records.read(rows, out)
        sums = np.empty((rows.size, 4), np.uint8)
        self._checksums.read(rows, sums)
        return _checksum.mismatches(rows, out, sums.view("<u4").ravel(), sparse=self._sparse)

    def damaged(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those of `rows` that cannot be read or fail their checksum."""
        out = np.empty((rows.size, self.record_bytes), np.uint8)
        try:
            bad: list[int] = rows[self._read(rows, out)].tolist()
            return bad
        except CorruptStoreError:
            if rows.size == 1:
                return [int(rows[0])]
            half = rows.size // 2
            return self.damaged(rows[:half]) + self.damaged(rows[half:])

    def computed_checksums(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return what the checksums of `rows` are by their records, whatever the file says.

        A row of a sparse table that was never written has 0.
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
        """Return names of files whose bytes outside any row are not as they must be."""
        return self._records.damaged_files()

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return where `rows` and their checksums are mapped."""
        return self._records.places(rows) + self._checksums.places(rows)

    def prefetch(self, rows: npt.NDArray[np.int64]) -> None:
        """Have the disk read the pages of `rows`."""
        for place in self.places(rows):
            place.announce(self.gap)

    def write(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        checksums: npt.NDArray[np.uint32],
    ) -> None:
        """Write records and checksums over `rows`, ascending and distinct, not yet durable."""
        if rows.size:
            self._records.write(rows, records)
            self._checksums.write(rows, checksums.astype("<u4").view(np.uint8).reshape(-1, 4))

    def sync(self) -> None:
        """Make every write durable."""
        self._records.sync()
        self._checksums.sync()

    def forget(self) -> None:
        """Read from the files again what a fold of another process may have replaced."""
        self._records.forget()

    def unproven(
        self, rows: npt.NDArray[np.int64], checksums: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.int64]:
        """Return those of ascending `rows` `(n,)` that the disk has not as they were written.

        Records and checksums are read from the disk itself, past the page cache where the file
        system allows it, and compared with the checksums `(n,)` of what was written.
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
        self._records.close()
        self._checksums.close()


def _check_block(block: npt.NDArray[np.uint8], base: Base, done: int) -> None:
    if not isinstance(block, np.ndarray):
        raise InvalidTypeError(f"a block of records is a NumPy array, not {block!r}")
    if block.dtype != np.uint8 or block.shape[1:] != (base.record_bytes,):
        raise InvalidInputError(
            f"a block of records is uint8 of shape (n, {base.record_bytes}), "
            f"not {block.dtype} of {block.shape}"
        )
    if done > base.rows:
        raise InvalidInputError(f"{done} rows or more were given for a table of {base.rows}")


def _checksum_files(directory: _io.Holder, spec: TableSpec) -> Files:
    return Files(directory, lambda number: CHECKSUMS, 4 * spec.rows)


def _checksums(files: Files, spec: TableSpec, created: Sequence[_io.File] = ()) -> Records:
    return record_files(files, created, rows=spec.rows, record_bytes=4)
