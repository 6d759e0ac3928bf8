""".fvecs, .bvecs, .ivecs, .fbin, .u8bin, .i8bin, .ibin: the plain matrices of faiss and DiskANN.

In those with vecs each row begins with its number of elements, an int32. The others begin with
the numbers of rows and elements, two uint32. All are little-endian and hold no
keys. Those of whole numbers are read only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tierstore._formats.base import (
    Array,
    Content,
    MatrixFormat,
    Source,
    SpanSource,
    Wanted,
    Write,
    element_of,
    exactly,
)
from tierstore._formats.files import InputFile, end_sparsely, write_sparsely
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import MAX_RECORD_BYTES

_COUNTS = struct.Struct("<II")
_LENGTH = np.dtype("<i4")


class _VecsSource(SpanSource):
    """Rows that stand after their lengths."""

    def stored(self) -> None:
        """Return None: a row and its length are no row of a table."""

    def _block(self, start: int, count: int) -> Array:
        row = np.dtype([("length", _LENGTH), ("numbers", self._stored, (self.dim,))])
        data = self._file.read_at(start * row.itemsize, count * row.itemsize)
        rows = np.frombuffer(data, row)
        wrong = np.flatnonzero(rows["length"] != self.dim)
        if len(wrong):
            raise FormatError(
                f"{self.path}: row {start + wrong[0]} has {rows['length'][wrong[0]]} "
                f"elements, the first has {self.dim}"
            )
        return exactly(self.path, np.ascontiguousarray(rows["numbers"]), self.dtype)


class _Vecs(MatrixFormat):
    """Rows of the only type of `elements`, each after its length."""

    keys = "never"

    def matrix(self, file: InputFile, wanted: Wanted) -> Source:
        """Return the rows; the size of the file must be a multiple of the size of the first."""
        number = np.dtype(self.elements)
        dim = int.from_bytes(file.read_at(0, 4), "little", signed=True)
        nbytes = _LENGTH.itemsize + dim * number.itemsize
        if not 1 <= dim <= MAX_RECORD_BYTES // number.itemsize or file.size % nbytes:
            raise FormatError(
                f"{file.path}: {file.size} bytes are no rows of {dim} elements, as in the first; "
                f"truncated, or no {self.suffixes[0]} file"
            )
        dtype = str(element_of(number))
        return _VecsSource(file, file.size // nbytes, dim, dtype, offset=0, stored=number)


class _Bin(MatrixFormat):
    """Counts, then rows of the only type of `elements`."""

    keys = "never"

    def matrix(self, file: InputFile, wanted: Wanted) -> Source:
        """Return the rows; the size of the file must match its counts."""
        number = np.dtype(self.elements)
        rows, dim = _COUNTS.unpack(file.read_at(0, _COUNTS.size))
        expected = _COUNTS.size + number.itemsize * rows * dim
        if file.size != expected:
            raise FormatError(
                f"{file.path}: {file.size} bytes, but {rows} rows of {dim} {number} take {expected}"
            )
        dtype = str(element_of(number))
        return SpanSource(file, rows, dim, dtype, offset=_COUNTS.size, stored=number)


class Fvecs(_Vecs):
    """Rows of float32, each after its length."""

    suffixes = (".fvecs",)
    elements = "float32"

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write rows; raises InvalidInputError without rows, whose length would be unknown."""
        if content.rows == 0:
            raise InvalidInputError(".fvecs holds at least one row; write .fbin or .npy instead")
        with path.open("xb") as file:

            def write(start: int, block: Array) -> None:
                lengths = np.full((len(block), 1), content.dim, _LENGTH).view("u1")
                file.write(np.hstack([lengths, block.view("u1")]).tobytes())

            yield write


class Bvecs(_Vecs):
    """Rows of bytes, each after its length."""

    suffixes = (".bvecs",)
    elements = "uint8"


class Ivecs(_Vecs):
    """Rows of int32, each after its length, as faiss has the neighbours of queries."""

    suffixes = (".ivecs",)
    elements = "int32"


class Fbin(_Bin):
    """Counts, then rows of float32."""

    suffixes = (".fbin",)
    elements = "float32"

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write counts and rows; raises InvalidInputError for more than the counts hold."""
        if content.rows >= 1 << 32:
            raise InvalidInputError(f"{content.rows} rows; .fbin holds fewer than 2**32")
        with path.open("xb") as file:
            file.write(_COUNTS.pack(content.rows, content.dim))
            yield lambda _, block: write_sparsely(file, block)
            end_sparsely(file)


class U8bin(_Bin):
    """Counts, then rows of uint8."""

    suffixes = (".u8bin",)
    elements = "uint8"


class Ibin(_Bin):
    """Counts, then rows of int32."""

    suffixes = (".ibin",)
    elements = "int32"


class I8bin(_Bin):
    """Counts, then rows of int8."""

    suffixes = (".i8bin",)
    elements = "int8"
