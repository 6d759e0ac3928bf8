"""The base of a table: every row as of the last fold, and beside it a checksum of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore import checksum, io
from tierstore.disk import memmap, zarr
from tierstore.disk.records import RecordFiles
from tierstore.errors import CorruptRowError, InvalidInputError
from tierstore.spec import TableSpec

__all__ = ["Base", "Records"]

CHECKSUMS = "rows.crc"

Progress = Callable[[int, int], None]
_BACKENDS: dict[str, ModuleType] = {"memmap": memmap, "zarr": zarr}


class Records(Protocol):
    """The seam of a backend: whole records by row, and nothing else."""

    rows: int
    record_bytes: int

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`."""

    def prefetch(self, rows: npt.NDArray[np.int64]) -> None:
        """Start reading `rows` without waiting."""

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write over `rows`, ascending and distinct."""

    def sync(self) -> None:
        """Make every write durable."""

    def close(self) -> None:
        """Close the files."""


class Base:
    """Records and their checksums. Only creation and folding write to it."""

    def __init__(self, records: Records, checksums: RecordFiles, *, sparse: bool) -> None:
        """Take over open records and checksums."""
        self._records = records
        self._checksums = checksums
        self._sparse = sparse
        self.rows = records.rows
        self.record_bytes = records.record_bytes

    @classmethod
    def create(
        cls,
        directory: io.Directory,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]],
        progress: Progress | None = None,
    ) -> Base:
        """Create the files of a table and fill them, in order, from blocks of records.

        `blocks` yields `(n, record_bytes)` arrays that add up to every row; a sparse table takes
        none. The files are synced; the directory is not.
        """
        records: Records = _BACKENDS[spec.backend].create(directory, spec)
        sums = directory.create(CHECKSUMS)
        sums.truncate(4 * spec.rows) if spec.sparse else sums.allocate(0, 4 * spec.rows)
        base = cls(records, _checksum_file(sums, spec), sparse=spec.sparse)
        try:
            done = 0
            for block in blocks:
                rows = np.arange(done, done + len(block), dtype=np.int64)
                base.write(rows, block, checksum.row_checksums(rows, block))
                done += len(block)
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
    def open(cls, directory: io.Directory, spec: TableSpec, *, write: bool) -> Base:
        """Open the files of a table, whose names, sizes and headers must be what the spec gives."""
        records = _BACKENDS[spec.backend].open_records(directory, spec, write=write)
        sums = directory.open_file(CHECKSUMS, write=write)
        return cls(records, _checksum_file(sums, spec), sparse=spec.sparse)

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)` and check each.

        Raises CorruptRowError, with `out` undefined, if a checksum does not match.
        """
        self.prefetch(rows)
        self._records.read(rows, out)
        sums = np.empty((rows.size, 4), np.uint8)
        self._checksums.read(rows, sums)
        expected = sums.view("<u4").ravel()
        wrong = checksum.mismatches(rows, out, expected, sparse=self._sparse)
        if wrong.size:
            bad = np.unique(rows[wrong]).tolist()
            raise CorruptRowError(
                f"{len(bad)} rows of the base do not match their checksum, the first is row "
                f"{bad[0]}; run 'tierstore verify' for the whole list",
                rows=bad,
                file="base",
            )

    def prefetch(self, rows: npt.NDArray[np.int64]) -> None:
        """Start reading `rows` without waiting."""
        self._records.prefetch(rows)
        self._checksums.prefetch(rows)

    def write(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        checksums: npt.NDArray[np.uint32],
    ) -> None:
        """Write records and checksums over `rows`, ascending and distinct; not durable until synced."""
        if rows.size:
            self._records.write(rows, records)
            self._checksums.write(rows, checksums.astype("<u4").view(np.uint8).reshape(-1, 4))

    def sync(self) -> None:
        """Make every write durable."""
        self._records.sync()
        self._checksums.sync()

    def close(self) -> None:
        """Close the files."""
        self._records.close()
        self._checksums.close()


def _checksum_file(file: io.File, spec: TableSpec) -> RecordFiles:
    return RecordFiles([file], rows=spec.rows, record_bytes=4)
