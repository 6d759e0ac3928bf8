""".npz: a zip archive of .npy arrays, the matrix under its field's name and keys under `keys`.

Entries are streamed both ways. What is written is stored uncompressed, as by `np.savez`; what
`np.savez_compressed` wrote is read too. String keys are a NumPy array of fixed-width strings, which
`np.load` opens without pickle.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from tierstore._dtypes import ElementType
from tierstore._formats.base import (
    Array,
    Content,
    Format,
    Source,
    Wanted,
    Write,
    block_rows_for,
    choose,
)
from tierstore._formats.files import (
    ZIP_ERRORS,
    Archive,
    InputFile,
    open_input,
    parsing,
    unless_it_fails,
)
from tierstore._formats.keys import KeyColumn, Keys, integers_of, strings_of
from tierstore._formats.npy import NpyHeader, format_header, read_header
from tierstore.errors import FormatError, InvalidInputError

__all__ = ["Arrays", "Npz"]

MAX_ENTRIES = 10_000
MAX_RATIO = 200
"""Bytes an entry may unpack to for each of its packed bytes, beyond the first FREE_BYTES."""
FREE_BYTES = 64 << 20
MAX_KEY_LENGTH = 1024
"""NumPy pads every string to the longest one, so that a long key costs its length in each row."""

_KEYS = "keys"


class Arrays:
    """The arrays of a .npz file by name."""

    def __init__(self, file: InputFile) -> None:
        """Read the header of each array in `file`, which the caller closes."""
        self.path = file.path
        self._archive = Archive(file, ".npz archive")
        names = [name for name in self._archive.entries if name.endswith(".npy")]
        if len(names) > MAX_ENTRIES:
            raise FormatError(f"{self.path}: {len(names)} arrays; at most {MAX_ENTRIES} are read")
        self.headers: dict[str, NpyHeader] = {}
        self.described: dict[str, object] = {}
        for name in (name.removesuffix(".npy") for name in names):
            try:
                self.described[name] = self.headers[name] = self._header(name)
            except FormatError as error:  # no harm as long as another array is wanted
                self.described[name] = f"unreadable ({str(error).removeprefix(f'{self.path}: ')})"

    def _header(self, name: str) -> NpyHeader:
        entry = self._archive.entries[f"{name}.npy"]
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FormatError(f"{self.path}: {name!r} is packed in a way NumPy does not use")
        if entry.file_size > FREE_BYTES + MAX_RATIO * entry.compress_size:
            raise FormatError(
                f"{self.path}: {name!r} would unpack {entry.compress_size} bytes to "
                f"{entry.file_size}, over {MAX_RATIO} times as many; save it with np.savez"
            )
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
                raise FormatError(f"{self.path}: something follows the array {name!r}")


class _NpzSource(Source):
    def __init__(self, file: InputFile, archive: Arrays, name: str) -> None:
        header = archive.headers[name]
        super().__init__(file.path, header.shape[0], header.shape[1], str(header.element))
        self._file = file
        self._archive = archive
        self._name = name

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for block in self._archive.read(self._name, block_rows * self.dim):
            yield block.reshape(-1, self.dim)

    @cached_property
    def keys(self) -> Keys | None:
        header = self._archive.headers.get(_KEYS)
        if header is None and _KEYS in self._archive.described:
            raise FormatError(f"{self.path}: {_KEYS!r} is {self._archive.described[_KEYS]}")
        if header is None or header.shape != (self.rows,) or header.dtype.kind not in "iuU":
            return None
        blocks = self._archive.read(_KEYS, block_rows_for(header.dtype.itemsize))
        if header.dtype.kind == "U":
            return strings_of(self.path, blocks, self._file.allowance)
        return integers_of(blocks, self.rows, self._file.allowance)

    def close(self) -> None:
        self._file.close()


def _write_keys(archive: zipfile.ZipFile, keys: KeyColumn) -> None:
    dtype = np.dtype("<i8") if keys.integers else _string_dtype(keys)
    with archive.open(zipfile.ZipInfo(f"{_KEYS}.npy"), "w", force_zip64=True) as entry:
        entry.write(format_header(dtype, (len(keys),)))
        for block in keys.integer_blocks() if keys.integers else keys.string_blocks():
            entry.write(np.array(block, dtype).tobytes())


def _string_dtype(keys: KeyColumn) -> np.dtype[np.str_]:
    keys.reject(lambda key: key.endswith("\0"), "ends in NUL, which .npz cannot hold")
    longest = max((len(key) for block in keys.string_blocks() for key in block), default=0)
    if longest > MAX_KEY_LENGTH:
        raise InvalidInputError(
            f"the longest key has {longest} characters and .npz would pad all others to it; "
            f"at most {MAX_KEY_LENGTH}: write .parquet or .safetensors instead"
        )
    return np.dtype(f"<U{max(1, longest)}")


class Npz(Format):
    """Arrays by name; element types that NumPy has."""

    suffixes = (".npz",)

    def holds(self, element: ElementType) -> bool:
        """Whether NumPy has the type."""
        return not element.as_bits

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a matrix among the arrays."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            archive = Arrays(file)
            matrices = {
                name: header
                for name, header in archive.headers.items()
                if header.element and len(header.shape) == 2
            }
            name = choose(path, wanted, matrices, archive.described)
            if archive.headers[name].fortran_order and min(archive.headers[name].shape) > 1:
                raise FormatError(
                    f"{path}: {name!r} is stored column by column; save np.ascontiguousarray of it"
                )
            return _NpzSource(file, archive, name)

    @contextmanager
    def write(self, path: Path, content: Content) -> Iterator[Write]:
        """Write the keys, then the matrix as it comes."""
        with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
            if content.keys is not None:
                _write_keys(archive, content.keys)
            with archive.open(
                zipfile.ZipInfo(f"{content.field}.npy"), "w", force_zip64=True
            ) as entry:
                entry.write(format_header(content.storage, (content.rows, content.dim)))
                yield lambda _, block: entry.write(block.data)
