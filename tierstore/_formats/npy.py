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
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES, ElementType
from tierstore._formats._remote import RemoteFile
from tierstore._formats.base import (
    Array,
    Content,
    Format,
    Source,
    SpanSource,
    Wanted,
    Write,
    block_rows_for,
    choose,
    element_of,
    note_unread,
    reject_name,
    scales_beside,
)
from tierstore._formats.files import (
    ZIP_ERRORS,
    Archive,
    InputFile,
    end_sparsely,
    open_input,
    parsing,
    unless_it_fails,
    write_sparsely,
)
from tierstore._formats.keys import KeyColumn, Keys, integers_of, strings_of
from tierstore._io import explained
from tierstore.budget import Size
from tierstore.errors import FormatError, InvalidInputError

__all__ = ["Arrays", "Npy", "NpyHeader", "Npz", "format_header", "read_header", "write_keys"]

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
    def element(self) -> str | None:
        """Name of the element type if a table supports these numbers, in either byte order."""
        return element_of(self.dtype.name)

    @property
    def is_matrix(self) -> bool:
        """Whether a table supports these numbers, in rows."""
        return self.element is not None and len(self.shape) == 2

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class _Readable(Protocol):
    def read(self, nbytes: int, /) -> bytes: ...


def read_header(stream: _Readable, path: Path) -> NpyHeader:
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
        plain = dtype.kind in "fiuU" and dtype.str == descr
        if plain and 0 < dtype.itemsize <= MAX_ITEM_BYTES:
            return dtype
    raise FormatError(
        f"{path}: elements of type {descr!r:.100}; need floats, not objects or records; "
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
        block = np.empty((count, self.dim), ELEMENT_TYPES[self.dtype].stored)
        for column in range(self.dim):
            block[:, column] = self._elements(column * self.rows + start, count)
        return block


class Npy(Format):
    """One array, of an element type that NumPy supports."""

    suffixes = (".npy",)
    keys = "never"

    def holds(self, element: ElementType) -> bool:
        """Whether NumPy supports the type."""
        return not element.as_bits

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a matrix in either order and byte order."""
        reject_name(path, wanted)
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            header = read_header(file.stream(), path)
            if header.element is None or not header.is_matrix:
                raise FormatError(f"{path}: holds {header}; need floats of shape (rows, dim)")
            expected = header.nbytes + header.data_bytes
            if file.size != expected:
                raise FormatError(
                    f"{path}: {file.size} bytes, but {header} makes {expected}: "
                    f"{'truncated' if file.size < expected else 'extra bytes follow the array'}"
                )
            rows, dim = header.shape
            kind = _ColumnMajorSource if _is_column_major(header) else SpanSource
            source = kind(
                file, rows, dim, header.element, offset=header.nbytes, stored=header.dtype
            )
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

    def read_keys(self, path: Path, name: str | None, memory: Size) -> Keys:
        """Read a 1-D array of integers or fixed-width strings."""
        if name is not None:
            raise InvalidInputError(f"{path}:{name}: a .npy file holds one array without a name")
        with open_input(path, memory) as file:
            return _read_keys(file)


def _read_keys(file: InputFile) -> Keys:
    header = read_header(file.stream(), file.path)
    if len(header.shape) != 1 or header.dtype.kind not in "iuU":
        raise FormatError(f"{file.path}: holds {header}; need one dimension of integers or strings")
    if file.size != header.nbytes + header.data_bytes:
        raise FormatError(f"{file.path}: {file.size} bytes do not match {header}")
    blocks = _key_blocks(file, header)
    if header.dtype.kind == "U":
        return strings_of(file.path, blocks, file.allowance)
    return integers_of(blocks, header.shape[0], header.dtype, file.allowance)


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


class Arrays:
    """The arrays of a .npz file by name."""

    def __init__(self, file: InputFile) -> None:
        """Read the header of each array in `file`, which the caller closes."""
        self.path = file.path
        self._archive = Archive(file, ".npz archive")
        names = [name for name in self._archive.entries if name.endswith(".npy")]
        if len(names) > MAX_ENTRIES:
            raise FormatError(f"{self.path}: {len(names)} arrays; the limit is {MAX_ENTRIES}")
        self.headers: dict[str, NpyHeader] = {}
        self.described: dict[str, object] = {}
        for name in (name.removesuffix(".npy") for name in names):
            try:
                self.described[name] = self.headers[name] = self._header(name)
            except FormatError as error:  # no error unless this array is requested
                self.described[name] = f"unreadable ({str(error).removeprefix(f'{self.path}: ')})"

    def _header(self, name: str) -> NpyHeader:
        entry = self._archive.entries[f"{name}.npy"]
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(f"{self.path}: {name!r} has a compression that NumPy does not use")
        with self.open(name) as stream, parsing(self.path, ".npz archive", *ZIP_ERRORS):
            header = read_header(stream, self.path)
        if entry.file_size != header.nbytes + header.data_bytes:
            raise FormatError(
                f"{self.path}: {name!r} has {entry.file_size} bytes, but {header} makes "
                f"{header.nbytes + header.data_bytes}"
            )
        return header

    def open(self, name: str) -> IO[bytes]:
        """Open the entry of an array as a stream, at its header."""
        return self._archive.open(f"{name}.npy")

    def read(self, name: str, block_items: int) -> Iterator[Array]:
        """Yield the elements of an array in blocks, flat, in order and little-endian."""
        header = self.headers[name]
        left = header.data_bytes
        with self.open(name) as stream, parsing(self.path, ".npz archive", *ZIP_ERRORS):
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

    @contextmanager
    def unpacked(self, name: str) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
        """Yield what reads bytes from an offset, and the offset of the elements of an array."""
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


class _NpzSource(Source):
    def __init__(self, file: InputFile, archive: Arrays, name: str) -> None:
        header = archive.headers[name]
        super().__init__(file.path, header.shape[0], header.shape[1], str(header.element))
        self._file = file
        self._archive = archive
        self._name = name
        shapes = {n: h.shape for n, h in archive.headers.items() if n != _KEYS}
        self.notes = note_unread(self.rows, shapes, "save it under the name 'keys'")
        unread = [n for n in archive.described if n not in archive.headers and n != _KEYS]
        if unread:
            self.notes += (f"not read, as they hold objects or records: {', '.join(unread[:8])}",)
        self.scales = scales_beside(name, header.dtype.name, archive.described)
        if _KEYS in archive.headers:
            self.called_keys = f"an array of {archive.headers[_KEYS]}"

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for block in self._archive.read(self._name, block_rows * self.dim):
            yield block.reshape(-1, self.dim).astype(ELEMENT_TYPES[self.dtype].stored, copy=False)

    @cached_property
    def keys(self) -> Keys | None:
        header = self._archive.headers.get(_KEYS)
        if header is None and _KEYS in self._archive.described:
            raise FormatError(f"{self.path}: {_KEYS!r} is {self._archive.described[_KEYS]}")
        if header is None or header.shape != (self.rows,) or header.dtype.kind not in "iuU":
            return None
        blocks = self._archive.read(_KEYS, block_rows_for(header.dtype.itemsize, _KEY_BLOCK_BYTES))
        if header.dtype.kind == "U":
            return strings_of(self.path, blocks, self._file.allowance)
        return integers_of(blocks, self.rows, header.dtype, self._file.allowance)

    def close(self) -> None:
        self._file.close()


class _NpzColumnsSource(_NpzSource):
    """A Fortran-ordered array, whose rows need one read per column.

    A compressed array is unpacked into a temporary file without a name.
    """

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        header = self._archive.headers[self._name]
        size, stored = header.dtype.itemsize, ELEMENT_TYPES[self.dtype].stored
        with self._archive.unpacked(self._name) as (read, first):
            for start in range(0, self.rows, block_rows):
                count = min(block_rows, self.rows - start)
                block = np.empty((count, self.dim), stored)
                for column in range(self.dim):
                    at = first + size * (start + column * self.rows)
                    block[:, column] = np.frombuffer(read(at, count * size), header.dtype)
                yield block


def write_keys(path: Path | RemoteFile, keys: KeyColumn) -> None:
    """Write keys to a new .npy file; raises InvalidInputError for those it cannot hold."""
    with path.open("xb") as file:
        _write_keys(file, keys)


def _write_keys(file: IO[bytes], keys: KeyColumn) -> None:
    dtype = keys.dtype if keys.integers else _string_dtype(keys)
    file.write(format_header(dtype, (len(keys),)))
    for block in keys.integer_blocks() if keys.integers else keys.string_blocks():
        file.write(np.array(block, dtype).tobytes())


def _string_dtype(keys: KeyColumn) -> np.dtype[np.str_]:
    keys.reject(lambda key: key.endswith("\0"), "ends in NUL, which arrays of NumPy cannot hold")
    longest = max((len(key) for block in keys.string_blocks() for key in block), default=0)
    if longest > MAX_KEY_LENGTH:
        raise InvalidInputError(
            f"the longest key has {longest} characters and NumPy would pad all others to it; "
            f"at most {MAX_KEY_LENGTH}: write .parquet or .safetensors instead"
        )
    return np.dtype(f"<U{max(1, longest)}")


class Npz(Format):
    """Named arrays, of element types that NumPy supports."""

    suffixes = (".npz",)

    def holds(self, element: ElementType) -> bool:
        """Whether NumPy supports the type."""
        return not element.as_bits

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a matrix among the arrays."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            archive = Arrays(file)
            able = {name: each for name, each in archive.headers.items() if each.is_matrix}
            floats = {name: each for name, each in able.items() if each.dtype.kind == "f"}
            name = choose(path, wanted, floats, archive.described, able)
            kind = _NpzColumnsSource if _is_column_major(archive.headers[name]) else _NpzSource
            return kind(file, archive, name)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write the keys, then the matrix block by block."""
        with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
            if content.keys is not None:
                name = zipfile.ZipInfo(f"{_KEYS}.npy")
                with archive.open(name, "w", force_zip64=True) as entry:
                    _write_keys(entry, content.keys)
            with archive.open(
                zipfile.ZipInfo(f"{content.field}.npy"), "w", force_zip64=True
            ) as entry:
                entry.write(format_header(content.storage, (content.rows, content.dim)))
                yield lambda _, block: entry.write(block.data)
