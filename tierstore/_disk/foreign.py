"""The base of an attached table: rows in files of others, read in place and never written.

Each field is a matrix in a span of a file. There are no checksums, so damage to the files is not
noticed; a file that has become too short is, before its mapping is touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk import readahead
from tierstore._disk.readahead import MappedRows
from tierstore.errors import CorruptStoreError

__all__ = ["ForeignBase", "ForeignField"]


class ForeignField(NamedTuple):
    """A field in a file of others.

    Attributes:
        file: the file, open for reading.
        offset: the byte in the file at which the first row begins.
        start, stop: the bytes of the field within a record.
    """

    file: _io.File
    offset: int
    start: int
    stop: int


class ForeignBase:
    """Records whose fields are in files of others. It closes the files."""

    def __init__(self, rows: int, record_bytes: int, fields: Sequence[ForeignField]) -> None:
        """Map the files; raises CorruptStoreError if one is too short."""
        self.rows = rows
        self.record_bytes = record_bytes
        self._fields = fields
        self._is_padded = sum(each.stop - each.start for each in fields) < record_bytes
        self._mapped = [_mapped(each, rows) for each in fields]

    @cached_property
    def gap(self) -> int:
        """Maximum gap in bytes between pages that are read in one piece."""
        return readahead.merge_gap(self._fields[0].file.path)

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`.

        Raises CorruptStoreError if a file was shortened: touching its mapping would end the
        process.
        """
        if self._is_padded:
            out[:] = 0
        for each, mapped in zip(self._fields, self._mapped, strict=True):
            _check_length(each, self.rows)
            if each.stop - each.start == self.record_bytes:
                np.take(mapped, rows, axis=0, out=out, mode="clip")
            else:
                out[:, each.start : each.stop] = mapped.take(rows, axis=0, mode="clip")

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped memory of `rows`, so that their pages can be prefetched."""
        return [MappedRows(mapped, rows) for mapped in self._mapped]

    def forget(self) -> None:
        """Do nothing: nothing is cached."""

    def close(self) -> None:
        """Close the files; the mappings go with the last view of them."""
        self._mapped = []
        for each in self._fields:
            each.file.close()


def _mapped(field: ForeignField, rows: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a field, `(rows, width)`, read-only."""
    width = field.stop - field.start
    end = field.offset + rows * width
    data = _io.map_files([field.file], end, advice=mmap.MADV_RANDOM)
    return data[field.offset : end].reshape(rows, width)


def _check_length(field: ForeignField, rows: int) -> None:
    nbytes = field.offset + rows * (field.stop - field.start)
    if field.file.size < nbytes:
        raise CorruptStoreError(
            f"{field.file.path} was shortened to {field.file.size} bytes while it was attached; "
            f"its rows end at byte {nbytes}: restore the file and attach it again"
        )
