"""NumPy's .npy files."""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES, ElementType
from tierstore._formats.base import (
    Array,
    Content,
    Format,
    Source,
    SpanSource,
    Wanted,
    Write,
    block_rows_for,
)
from tierstore._formats.files import InputFile, open_input, unless_it_fails
from tierstore._formats.keys import Keys, integers_of, strings_of
from tierstore.budget import Size
from tierstore.errors import FormatError, InvalidInputError

__all__ = ["Npy", "NpyHeader", "format_header", "read_header"]


MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000
"""NumPy's own limit; a literal of this length cannot exhaust the parser."""

MAX_ITEM_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclass(frozen=True)
class NpyHeader:
    """What the header says: the array it declares and the number of bytes before its data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    nbytes: int

    @property
    def data_bytes(self) -> int:
        """Bytes of the data that must follow."""
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count

    @property
    def element(self) -> str | None:
        """Name of the element type if a table can hold these numbers, of either byte order."""
        element = ELEMENT_TYPES.get(self.dtype.name)
        return None if element is None or element.as_bits else element.name

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class _Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


def read_header(stream: _Readable, path: Path) -> NpyHeader:
    """Read a header from the start of an array; raises FormatError if it is not plain numbers."""
    start = stream.read(8)
    if len(start) < 8 or start[:6] != MAGIC:
        raise FormatError(f"{path}: not a .npy array: it does not start with the NumPy magic")
    if (start[6], start[7]) not in ((1, 0), (2, 0), (3, 0)):
        raise FormatError(
            f"{path}: .npy version {start[6]}.{start[7]} is unknown; 1.0 to 3.0 are read"
        )

    prefix = "<H" if start[6] == 1 else "<I"
    length_bytes = stream.read(struct.calcsize(prefix))
    if len(length_bytes) < struct.calcsize(prefix):
        raise FormatError(f"{path}: truncated in the .npy header")
    (length,) = struct.unpack(prefix, length_bytes)
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"{path}: a .npy header of {length} bytes; at most {MAX_HEADER_BYTES}")
    text = stream.read(length)
    if len(text) < length:
        raise FormatError(f"{path}: truncated in the .npy header")
    return _parse(text, len(start) + len(length_bytes) + length, path)


def _parse(text: bytes, nbytes: int, path: Path) -> NpyHeader:
    try:
        header = ast.literal_eval(text.decode("utf-8").strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise FormatError(f"{path}: the .npy header is not a dictionary of literals") from None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise FormatError(f"{path}: the .npy header must hold descr, fortran_order and shape")

    descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    if not isinstance(fortran, bool):
        raise FormatError(f"{path}: fortran_order must be True or False, not {fortran!r:.100}")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise FormatError(f"{path}: not a shape: {shape!r:.100}")
    return NpyHeader(_plain_dtype(descr, path), shape, fortran, nbytes)


def _plain_dtype(descr: object, path: Path) -> np.dtype[Any]:
    if isinstance(descr, str):
        try:
            dtype = np.dtype(descr)
        except (TypeError, ValueError, SyntaxError, OverflowError):
            dtype = np.dtype(object)
        plain = dtype.kind in "fiuU" and dtype.str == descr
        if plain and 0 < dtype.itemsize <= MAX_ITEM_BYTES:
            return dtype
    raise FormatError(
        f"{path}: elements of type {descr!r:.100}; need floats, not objects or records"
    )


def format_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a C-ordered array, its length such that the data is 64-byte aligned."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    fixed = len(MAGIC) + 4
    padding = -(fixed + len(text) + 1) % _ALIGNMENT
    body = (text + " " * padding + "\n").encode()
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(body)) + body


def _is_column_major(header: NpyHeader) -> bool:
    return header.fortran_order and min(header.shape) > 1


class _ColumnMajorSource(SpanSource):
    """A Fortran-ordered array, such as a transposed one that was saved: a read for each column."""

    def _block(self, start: int, count: int) -> Array:
        block = np.empty((count, self.dim), self._stored.newbyteorder("<"))
        for column in range(self.dim):
            block[:, column] = self._elements(column * self.rows + start, count)
        return block


class Npy(Format):
    """One array; element types that NumPy has."""

    suffixes = (".npy",)
    keys = "never"

    def holds(self, element: ElementType) -> bool:
        """Whether NumPy has the type."""
        return not element.as_bits

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a matrix in either order and byte order."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            header = read_header(file.stream(), path)
            if header.element is None or len(header.shape) != 2:
                raise FormatError(f"{path}: holds {header}; need floats of shape (rows, dim)")
            expected = header.nbytes + header.data_bytes
            if file.size != expected:
                raise FormatError(
                    f"{path}: {file.size} bytes, but {header} makes {expected}: "
                    f"{'truncated' if file.size < expected else 'something follows the array'}"
                )
            rows, dim = header.shape
            kind = _ColumnMajorSource if _is_column_major(header) else SpanSource
            big_endian = header.dtype.str.startswith(">")
            return kind(
                file, rows, dim, header.element, offset=header.nbytes, big_endian=big_endian
            )

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write the header, then blocks as they come."""
        with path.open("xb") as file:
            file.write(format_header(content.storage, (content.rows, content.dim)))
            yield lambda _, block: file.write(block.data)

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read a 1-D array of integers or of fixed-width strings."""
        if name is not None:
            raise InvalidInputError(f"{path}:{name}: a .npy file holds one array without a name")
        with open_input(path, memory) as file:
            return _read_keys(file)


def _read_keys(file: InputFile) -> Keys:
    header = read_header(file.stream(), file.path)
    if len(header.shape) != 1 or header.dtype.kind not in "iuU":
        raise FormatError(f"{file.path}: holds {header}; need one dimension of integers or strings")
    if file.size != header.nbytes + header.data_bytes:
        raise FormatError(f"{file.path}: {file.size} bytes do not fit {header}")
    blocks = _npy_blocks(file, header)
    if header.dtype.kind == "U":
        return strings_of(file.path, blocks, file.allowance)
    return integers_of(blocks, header.shape[0], file.allowance)


def _npy_blocks(file: InputFile, header: NpyHeader) -> Iterator[Array]:
    """Yield the elements of an array in blocks."""
    size = header.dtype.itemsize
    step = block_rows_for(size) * size
    for at in range(0, header.data_bytes, step):
        nbytes = min(step, header.data_bytes - at)
        yield np.frombuffer(file.read_at(header.nbytes + at, nbytes), header.dtype)
