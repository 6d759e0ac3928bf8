"""The memmap base: a plain .npy file, which `np.load(path, mmap_mode="r")` opens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tierstore import _io
from tierstore._disk.backends import Backend, PlainFiles, Records
from tierstore._disk.records import Files, RecordFiles, record_files
from tierstore.errors import CorruptStoreError
from tierstore.spec import RecordLayout, TableSpec

DATA_OFFSET = 4096
"""The header fills one page, so that records start at a page boundary."""
_SHAPE = re.compile(rb"'shape': \((\d{1,16}),")


def header(layout: RecordLayout, rows: int) -> bytes:
    """Return the .npy header of a table, padded to DATA_OFFSET bytes.

    Format: NumPy enhancement proposal 1, version 1.0.
    """
    return _header(layout.dtype, layout.record_bytes, rows)


@lru_cache(maxsize=64)
def _header(dtype: np.dtype[Any], record_bytes: int, rows: int) -> bytes:
    if dtype.names is None:
        descr: Any = dtype.str
        shape: tuple[int, ...] = (rows, record_bytes // dtype.itemsize)
    else:
        descr, shape = np.lib.format.dtype_to_descr(dtype), (rows,)
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode("ascii")
    magic = b"\x93NUMPY\x01\x00" + (DATA_OFFSET - 10).to_bytes(2, "little")
    return magic + text.ljust(DATA_OFFSET - 11) + b"\n"


class Memmap(Backend):
    """One .npy file, whose rows `np.load` can map."""

    name = "memmap"
    summary = "a plain .npy file"
    entry = "rows.npy"
    on_objects = "zarr"

    def create(self, directory: _io.Directory, spec: TableSpec) -> Records:
        """Create the file and open it."""
        files = _files(directory, spec)
        created = files.create(sparse=spec.sparse, head=header(spec.layout, spec.rows))
        return _records(files, spec, created)

    def open(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open the file and check that its header matches the spec byte for byte."""
        files = _files(directory, spec)
        with files.open(0) as file:
            _check_header(file.read(DATA_OFFSET), file.path, spec)
        return _records(files, spec)

    def examine(self, directory: _io.Directory, spec: TableSpec) -> int | None:
        """Check size and header; return the inode number, which identifies the file."""
        if not directory.removable or directory.filesystem not in _io.LASTING_INODES:
            return None
        found = _files(directory, spec).glimpse(0, DATA_OFFSET)
        _check_header(found.data, directory.join(self.entry), spec)
        return found.inode

    def grow(self, records: Records, spec: TableSpec, *, extend: bool) -> None:
        """Extend the file, and update its header."""
        if isinstance(records, RecordFiles):
            records.grow(spec.rows, header(spec.layout, spec.rows) if extend else None)

    def plain_files(self, spec: TableSpec) -> PlainFiles:
        """Return the single file."""
        return PlainFiles(_file_name, 1, spec.rows, DATA_OFFSET)

    def opening_line(self, layout: RecordLayout, path: str) -> str:
        """Load the file, and select a field if the records have several."""
        line = f"np.load({path!r}, mmap_mode='r')"
        return line + f"[{layout.fields[0][0]!r}]" if layout.dtype.names else line


def _check_header(found: bytes, path: str, spec: TableSpec) -> None:
    rows = spec.rows
    if spec.grows and (shape := _SHAPE.search(found)) is not None:
        rows = max(rows, int(shape.group(1)))  # of a later version
    if found != header(spec.layout, rows):
        raise CorruptStoreError(
            f"{path}: the header does not match a table of {spec.rows} rows; "
            "restore the file from a copy"
        )


def _file_name(number: int) -> str:
    del number
    return Memmap.entry


def _files(directory: _io.Holder, spec: TableSpec) -> Files:
    return Files(directory, _file_name, DATA_OFFSET + spec.nbytes, grows=spec.grows)


def _records(files: Files, spec: TableSpec, created: Sequence[_io.File] = ()) -> Records:
    return record_files(
        files, created, rows=spec.rows, record_bytes=spec.layout.record_bytes, offset=DATA_OFFSET
    )
