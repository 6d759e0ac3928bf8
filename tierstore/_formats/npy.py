"""NumPy's files: .npy, a matrix, or only keys; .npz, a zip archive of .npy arrays.

The keys of a matrix in .npy are written to a separate file next to it, `items.keys.npy`.

In .npz the matrix has the name of its field and the keys the name `keys`. Entries are streamed in
both directions. They are written uncompressed, as by `np.savez`; files of `np.savez_compressed` can
be read too. String keys are an array of fixed-width strings, which `np.load` opens without pickle.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._remote import RemoteFile
from tierstore._formats.base import (
    Array,
    Content,
    MatrixFormat,
    Source,
    SpanSource,
    Wanted,
    Write,
    block_rows_for,
)
from tierstore._formats.files import (
    ZIP_ERRORS,
    Archive,
    InputFile,
    end_sparsely,
    held_scales,
    parsing,
    write_sparsely,
)
from tierstore._formats.keys import KeyColumn, Keys, integers_of, strings_of
from tierstore._formats.reading import Column, ColumnFormat, FileReader, array_column
from tierstore._io import explained
from tierstore.budget import Allowance
from tierstore.errors import FormatError, InvalidInputError

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000
"""NumPy's own limit; a literal of this length cannot exhaust the parser."""

MAX_ITEM_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclass(frozen=True)
class NpyHeader:
    """A parsed header: the declared array and the number of bytes before its data."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran_order: bool
    nbytes: int

    @property
    def data_bytes(self) -> int:
        """Required bytes of data after the header."""
        count = self.dtype.itemsize
        for length in self.shape:
            count *= length
        return count

    @property
    def column(self) -> Column:
        """What the array is."""
        return array_column(str(self), self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def read_header(stream: IO[bytes], path: Path) -> NpyHeader:
    """Read the header of an array; raises FormatError if it is not an array of plain numbers."""
    start = stream.read(8)
    if len(start) < 8 or start[:6] != MAGIC:
        raise FormatError(f"{path}: not a .npy array: it does not start with the NumPy magic")
    if (start[6], start[7]) not in ((1, 0), (2, 0), (3, 0)):
        raise FormatError(
            f"{path}: .npy version {start[6]}.{start[7]} is unknown; supported are 1.0 to 3.0"
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


def _literal(text: str) -> object:
    """Evaluate a literal, again if another thread of Python 3.11 interfered.

    All threads share a counter of the depth there, and SystemError reports that the counter is
    wrong, for any text: https://github.com/python/cpython/issues/106905.
    """
    for _ in range(100):
        with contextlib.suppress(SystemError):
            return ast.literal_eval(text)
    return ast.literal_eval(text)


def _parse(text: bytes, nbytes: int, path: Path) -> NpyHeader:
    try:
        header = _literal(text.decode("utf-8").strip())
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
        plain = dtype.kind in "fiuUS" and dtype.str == descr
        plain = plain or (dtype.kind == "V" and descr[1:] == dtype.str[1:])
        if plain and 0 < dtype.itemsize <= MAX_ITEM_BYTES:
            return dtype
    raise FormatError(
        f"{path}: elements of type {descr!r:.100}, objects or records; need floats; "
        "keys may be integers or strings of fixed width, as astype(str) makes them"
    )


def format_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a C-ordered array, padded so that the data is 64-byte aligned."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    fixed = len(MAGIC) + 4
    padding = -(fixed + len(text) + 1) % _ALIGNMENT
    body = (text + " " * padding + "\n").encode()
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(body)) + body


def _is_column_major(header: NpyHeader) -> bool:
    return header.fortran_order and min(header.shape) > 1


class _ColumnMajorSource(SpanSource):
    """A Fortran-ordered array, such as a saved transposed one: needs one read per column."""

    def stored(self) -> None:
        """Return None: a row is in as many places as it has elements."""

    def _block(self, start: int, count: int) -> Array:
        return _by_columns(self._elements, start, count, (self.rows, self.dim))


def _by_columns(
    read: Callable[[int, int], Array], start: int, count: int, shape: tuple[int, int]
) -> Array:
    """Return `count` rows from `start` on of a matrix of a shape that is stored by columns.

    `read` returns elements from a number on, so many.
    """
    return np.stack([read(start + at * shape[0], count) for at in range(shape[1])], axis=1)


class Npy(MatrixFormat):
    """One array, of an element type that NumPy supports."""

    suffixes = (".npy",)
    keys = "never"
    elements = "numpy"
    names = tuple(each.name for each in ELEMENT_TYPES.values() if each.as_bits)

    def matrix(self, file: InputFile, wanted: Wanted) -> Source:
        """Return a matrix in either order and byte order; the name is the type of bare bytes."""
        path, header = file.path, read_header(file.stream(), file.path)
        column = header.column
        if header.dtype.kind == "V" and len(header.shape) == 2:
            size = header.dtype.itemsize
            able = [name for name in self.names if ELEMENT_TYPES[name].stored.itemsize == size]
            if wanted.name not in able:
                shown = f"; name it, as in {path.name}:{able[0]}" if able else ""
                raise FormatError(
                    f"{path}: holds {header}, bytes without a type, which is what numpy.save makes "
                    f"of types that NumPy lacks{shown}"
                )
            header = replace(header, dtype=ELEMENT_TYPES[wanted.name].stored)
            column = array_column(str(header), wanted.name, header.shape)
        elif wanted.name is not None:
            raise FormatError(f"{path}: holds {header}, which no {wanted.name} can be")
        if not column.is_matrix or column.read_as is None:
            raise FormatError(f"{path}: holds {header}; need floats of shape (rows, dim)")
        _check_end(file, header)
        rows, dim = header.shape
        kind = _ColumnMajorSource if _is_column_major(header) else SpanSource
        source = kind(file, rows, dim, column.read_as, offset=header.nbytes, stored=header.dtype)
        beside = path.with_name(f"{path.stem}.keys.npy")
        if beside.exists():
            how = f"keys={str(beside)!r} reads them (--keys)"
            source.notes = (f"not read: the keys in {beside.name}; {how}",)
        return source

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write the header, then the blocks."""
        with path.open("xb") as file:
            file.write(format_header(content.storage, (content.rows, content.dim)))
            yield lambda _, block: write_sparsely(file, block)
            end_sparsely(file)

    def keys_in(self, file: InputFile) -> Keys:
        """Return a 1-D array of integers or fixed-width strings."""
        header = read_header(file.stream(), file.path)
        if header.column.kind not in ("integer", "text"):
            raise FormatError(
                f"{file.path}: holds {header}; need one dimension of integers or strings"
            )
        _check_end(file, header)
        return _keys_in(_key_blocks(file, header), header, file.path, file.allowance)


def _check_end(file: InputFile, header: NpyHeader) -> None:
    """Raise FormatError unless the array ends where the file does."""
    expected = header.nbytes + header.data_bytes
    if file.size != expected:
        raise FormatError(
            f"{file.path}: {file.size} bytes, but {header} makes {expected}: "
            f"{'truncated' if file.size < expected else 'extra bytes follow the array'}"
        )


def _key_blocks(file: InputFile, header: NpyHeader) -> Iterator[Array]:
    """Yield keys in blocks."""
    size = header.dtype.itemsize
    step = block_rows_for(size, _KEY_BLOCK_BYTES) * size
    for at in range(0, header.data_bytes, step):
        nbytes = min(step, header.data_bytes - at)
        yield np.frombuffer(file.read_at(header.nbytes + at, nbytes), header.dtype)


MAX_ENTRIES = 10_000
MAX_KEY_LENGTH = 1024
"""NumPy pads every string to the longest one, so a long key costs its length in each row."""

_COPIED_ITEMS = 1 << 17
_KEYS = "keys"
_KEY_BLOCK_BYTES = 1 << 18
"""Small, because every string of a block is a Python object until it is packed."""


class Arrays(FileReader):
    """The arrays of a .npz file.

    Attributes:
        headers: of the arrays that can be read, by name.
    """

    def __init__(self, file: InputFile) -> None:
        """Read the header of each array in `file`, which is closed with this."""
        super().__init__(file)
        self.allowance = file.allowance
        self._archive = Archive(file, ".npz archive")
        names = [name for name in self._archive.entries if name.endswith(".npy")]
        if len(names) > MAX_ENTRIES:
            raise FormatError(f"{self.path}: {len(names)} arrays; the limit is {MAX_ENTRIES}")
        self.headers: dict[str, NpyHeader] = {}
        self.columns = {}
        for name in (name.removesuffix(".npy") for name in names):
            try:
                self.headers[name] = self._header(name)
                self.columns[name] = self.headers[name].column
            except FormatError as error:  # no error unless this array is requested
                reason = str(error).removeprefix(f"{self.path}: ").partition(";")[0]
                self.columns[name] = Column(f"unreadable ({reason})", None, "other")

    def _header(self, name: str) -> NpyHeader:
        entry = self._archive.entries[f"{name}.npy"]
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(f"{self.path}: {name!r} has a compression that NumPy does not use")
        with self._stream(name) as stream, parsing(self.path, ".npz archive", *ZIP_ERRORS):
            header = read_header(stream, self.path)
        if entry.file_size != header.nbytes + header.data_bytes:
            raise FormatError(
                f"{self.path}: {name!r} has {entry.file_size} bytes, but {header} makes "
                f"{header.nbytes + header.data_bytes}"
            )
        return header

    def _stream(self, name: str) -> IO[bytes]:
        return self._archive.open(f"{name}.npy")

    def read(self, name: str, block_items: int) -> Iterator[Array]:
        """Yield the elements of an array in blocks, flat, in order and little-endian."""
        header = self.headers[name]
        left = header.data_bytes
        with self._stream(name) as stream, parsing(self.path, ".npz archive", *ZIP_ERRORS):
            stream.read(header.nbytes)
            while left:
                nbytes = min(left, block_items * header.dtype.itemsize)
                data = stream.read(nbytes)
                if len(data) < nbytes:
                    raise FormatError(f"{self.path}: {name!r} is truncated")
                left -= nbytes
                yield np.frombuffer(data, header.dtype).astype(
                    header.dtype.newbyteorder("<"), copy=False
                )
            if stream.read(1):
                raise FormatError(f"{self.path}: extra bytes follow the array {name!r}")

    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Yield the rows of an array; one with columns first takes a read for each of them."""
        (name,) = names
        header = self.headers[name]
        if not _is_column_major(header):
            for block in self.read(name, block_rows * dim):
                yield block.reshape(-1, dim)
            return
        rows, size = header.shape[0], header.dtype.itemsize
        with self._unpacked(name) as (read, first):

            def elements(number: int, count: int) -> Array:
                return np.frombuffer(read(first + size * number, count * size), header.dtype)

            for start in range(0, rows, block_rows):
                block = _by_columns(elements, start, min(block_rows, rows - start), (rows, dim))
                yield block.astype(header.dtype.newbyteorder("<"), copy=False)

    @contextmanager
    def _unpacked(self, name: str) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
        """Yield what reads bytes from an offset, and the offset of the elements of an array.

        A compressed array is unpacked into a temporary file without a name.
        """
        header, entry = self.headers[name], self._archive.entries[f"{name}.npy"]
        if entry.compress_type == zipfile.ZIP_STORED:
            start = self._archive.start(f"{name}.npy") + header.nbytes
            yield self._archive.file.read_at, start
            return
        with tempfile.TemporaryFile(prefix="tierstore-") as file:
            with explained("write", f"a temporary copy of {self.path}"):
                for block in self.read(name, _COPIED_ITEMS):
                    file.write(block.astype(header.dtype, copy=False).data)
                file.flush()
            yield lambda at, nbytes: os.pread(file.fileno(), nbytes, at), 0

    def keys(self, name: str) -> Keys:
        """Return an array of whole numbers or fixed-width strings."""
        header = self.headers[name]
        blocks = self.read(name, block_rows_for(header.dtype.itemsize, _KEY_BLOCK_BYTES))
        return _keys_in(blocks, header, self.path, self.allowance)


def _keys_in(blocks: Iterator[Array], header: NpyHeader, path: Path, allowance: Allowance) -> Keys:
    if header.dtype.kind == "S":
        blocks = (np.char.decode(block, "utf-8") for block in blocks)
    if header.dtype.kind in "US":
        return strings_of(path, blocks, allowance)
    return integers_of(blocks, header.shape[0], header.dtype, allowance)


def write_keys(path: Path | RemoteFile, keys: KeyColumn) -> None:
    """Write keys to a new .npy file; raises InvalidInputError for those it cannot hold."""
    with path.open("xb") as file:
        _write_keys(file, keys)


def _write_keys(file: IO[bytes], keys: KeyColumn) -> None:
    dtype = keys.dtype if keys.integers else _string_dtype(keys)
    file.write(format_header(dtype, (len(keys),)))
    for block in keys.blocks():
        file.write(np.array(block, dtype).tobytes())


def _string_dtype(keys: KeyColumn) -> np.dtype[np.str_]:
    keys.reject(re.compile(r"\0\Z"), "ends in NUL, which arrays of NumPy cannot hold")
    longest = max((len(key) for block in keys.blocks() for key in block), default=0)
    if longest > MAX_KEY_LENGTH:
        raise InvalidInputError(
            f"the longest key has {longest} characters and NumPy would pad all others to it; "
            f"at most {MAX_KEY_LENGTH}: write .parquet or .safetensors instead"
        )
    return np.dtype(f"<U{max(1, longest)}")


class Npz(ColumnFormat):
    """Named arrays, of element types that NumPy supports."""

    suffixes = (".npz",)
    elements = "numpy"
    in_file = Arrays

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write the keys, then the matrix block by block, then its scales."""

        def entry(name: str) -> IO[bytes]:
            return archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True)

        with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
            if content.keys is not None:
                with entry(_KEYS) as part:
                    _write_keys(part, content.keys)
            with held_scales(content.scale) as scales:
                with entry(content.field) as part:
                    part.write(format_header(content.storage, (content.rows, content.dim)))
                    yield scales.beside(part)
                if content.scale is not None:
                    with entry(content.scale) as part:
                        part.write(format_header(np.dtype("<f4"), (content.rows, 1)))
                        scales.copy_to(part)
