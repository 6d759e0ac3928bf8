"""The memmap base: a plain .npy file, which `np.load(path, mmap_mode="r")` opens."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore import io
from tierstore.disk.ranged import RangedRecords, record_files
from tierstore.disk.records import RecordFiles
from tierstore.errors import CorruptStoreError
from tierstore.spec import RecordLayout, TableSpec

__all__ = ["create", "names", "open_records"]

ROWS = "rows.npy"
DATA_OFFSET = 4096
"""The header fills one page, so that records start at a page boundary."""


def header(layout: RecordLayout, rows: int) -> bytes:
    """Return the .npy header of a table, padded to DATA_OFFSET bytes.

    Format: NumPy enhancement proposal 1, version 1.0.
    """
    if layout.dtype.names is None:
        descr: Any = layout.dtype.str
        shape: tuple[int, ...] = (rows, layout.record_bytes // layout.dtype.itemsize)
    else:
        descr, shape = np.lib.format.dtype_to_descr(layout.dtype), (rows,)
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode("ascii")
    magic = b"\x93NUMPY\x01\x00" + (DATA_OFFSET - 10).to_bytes(2, "little")
    return magic + text.ljust(DATA_OFFSET - 11) + b"\n"


def names(spec: TableSpec) -> list[str]:
    """Names of the files of this backend, relative to the generation."""
    return [ROWS]


def create(directory: io.Directory, spec: TableSpec) -> RecordFiles | RangedRecords:
    """Create the file, with space for every row unless the table is sparse, and open it."""
    file = directory.create(ROWS)
    nbytes = DATA_OFFSET + spec.nbytes
    if spec.sparse:
        file.truncate(nbytes)
    else:
        file.allocate(0, nbytes)
    file.write(header(spec.layout, spec.rows), 0)
    return _records(file, spec)


def open_records(
    directory: io.Directory, spec: TableSpec, *, write: bool
) -> RecordFiles | RangedRecords:
    """Open the file, whose header must be the one the spec gives; it is never evaluated."""
    file = directory.open_file(ROWS, write=write)
    if file.read(DATA_OFFSET) != header(spec.layout, spec.rows):
        raise CorruptStoreError(
            f"{file.path}: the header is not that of a table of {spec.rows} rows; "
            "restore the file from a copy"
        )
    if file.size != DATA_OFFSET + spec.nbytes:
        raise CorruptStoreError(
            f"{file.path} has {file.size} bytes, {DATA_OFFSET + spec.nbytes} are expected; "
            "restore it from a copy"
        )
    return _records(file, spec)


def _records(file: io.File, spec: TableSpec) -> RecordFiles | RangedRecords:
    return record_files(
        [file], rows=spec.rows, record_bytes=spec.layout.record_bytes, offset=DATA_OFFSET
    )
