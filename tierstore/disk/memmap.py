"""The memmap base: a plain .npy file, which `np.load(path, mmap_mode="r")` opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tierstore import io
from tierstore.disk.files import Files
from tierstore.disk.ranged import RangedRecords, record_files
from tierstore.disk.records import RecordFiles
from tierstore.errors import CorruptStoreError
from tierstore.spec import RecordLayout, TableSpec

__all__ = ["create", "open_records"]

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


def create(directory: io.Directory, spec: TableSpec) -> RecordFiles | RangedRecords:
    """Create the file, with space for every row unless the table is sparse, and open it."""
    files = _files(directory, spec)
    created = files.create(sparse=spec.sparse, head=header(spec.layout, spec.rows))
    return _records(files, spec, created)


def open_records(directory: io.Holder, spec: TableSpec) -> RecordFiles | RangedRecords:
    """Open the file, whose header must be the one the spec gives; it is never evaluated."""
    files = _files(directory, spec)
    with files.open(0) as file:
        if file.read(DATA_OFFSET) != header(spec.layout, spec.rows):
            raise CorruptStoreError(
                f"{file.path}: the header is not that of a table of {spec.rows} rows; "
                "restore the file from a copy"
            )
    return _records(files, spec)


def _files(directory: io.Holder, spec: TableSpec) -> Files:
    return Files(directory, lambda number: ROWS, DATA_OFFSET + spec.nbytes)


def _records(
    files: Files, spec: TableSpec, created: Sequence[io.File] = ()
) -> RecordFiles | RangedRecords:
    return record_files(
        files, created, rows=spec.rows, record_bytes=spec.layout.record_bytes, offset=DATA_OFFSET
    )
