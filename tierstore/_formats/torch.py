""".pt: what `torch.save` wrote, read without torch and without running the file's code.

Either a tensor, or a dict of tensors, such as a state dict, in which names may be nested. The file
is a zip archive of a pickle, which says where each tensor is, and of storages, which are read
where a block of rows is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._torch_pickle import StoredTensor, read_pickle, tensors_by_name
from tierstore._formats.base import Array, Format, Source, Wanted, choose
from tierstore._formats.files import ZIP_ERRORS, Archive, open_input, parsing, unless_it_fails
from tierstore._formats.keys import Keys
from tierstore.errors import FormatError

__all__ = ["Torch"]

_WHAT = ".pt file of tensors alone"
_PICKLE = "data.pkl"
_KEYS = "keys"
_KEY_DTYPE = np.dtype("<i8")
_PICKLE_COST = 8
"""Bytes that a byte of the pickle takes beside the objects: itself, and as text."""
_WASTE = 8
"""A span of a storage is read whole if it has at most so many times the elements wanted."""


class _Tensors:
    """The tensors of a file and the elements of each."""

    def __init__(self, archive: Archive) -> None:
        self.file, self.path = archive.file, archive.file.path
        self._archive = archive
        names = [name for name in archive.entries if name.rpartition("/")[2] == _PICKLE]
        if len(names) != 1:
            raise FormatError(f"{self.path}: not a {_WHAT}: {len(names)} entries are {_PICKLE}")
        self._root = names[0].removesuffix(_PICKLE)
        order = f"{self._root}byteorder"
        little = order not in archive.entries or self._read(order, 16) == b"little"
        self._byte_order: Literal["<", ">"] = "<" if little else ">"
        size = archive.entries[names[0]].file_size
        self.file.allowance.take(_PICKLE_COST * size, f"its pickle of {size} bytes")
        self.content = read_pickle(self._read(names[0], size), self.path, self.file.allowance)

    def _read(self, name: str, limit: int) -> bytes:
        with self._archive.open(name) as stream, parsing(self.path, _WHAT, *ZIP_ERRORS):
            data = stream.read(limit)
            stream.read(1)  # the end, where the checksum is compared
            return data

    def check(self, tensor: StoredTensor) -> None:
        """Raise FormatError unless a tensor's storage is there and holds all its elements."""
        self._start(tensor)
        if 0 in tensor.shape:
            return
        last = tensor.offset + _reach(tensor.shape, tensor.strides)
        stored = self._archive.entries[self._name(tensor)].file_size
        if (last + 1) * _dtype(tensor).itemsize > stored:
            raise FormatError(f"{self.path}: {tensor} reaches beyond the {stored} bytes stored")

    def _name(self, tensor: StoredTensor) -> str:
        return f"{self._root}data/{tensor.key}"

    def _start(self, tensor: StoredTensor) -> int:
        if self._name(tensor) not in self._archive.entries:
            raise FormatError(f"{self.path}: the storage {tensor.key!r:.100} is missing")
        return self._archive.start(self._name(tensor))

    def read(self, tensor: StoredTensor, start: int, count: int) -> Array:
        """Return `count` rows of a matrix: as one span, or a column or a row at a time."""
        dim, (down, across) = tensor.shape[1], tensor.strides
        first = tensor.offset + start * down
        if _reach((count, dim), (down, across)) < _WASTE * count * dim:
            return self._strided(tensor, first, (count, dim))
        block = np.empty((count, dim), _dtype(tensor))
        if down < across:
            for column in range(dim):
                part = self._strided(tensor, first + column * across, (count, 1))
                block[:, column] = part[:, 0]
        else:
            for row in range(count):
                block[row] = self._strided(tensor, first + row * down, (1, dim))[0]
        return block

    def _strided(self, tensor: StoredTensor, first: int, shape: tuple[int, int]) -> Array:
        dtype = _dtype(tensor)
        nbytes = dtype.itemsize * (_reach(shape, tensor.strides) + 1)
        self.file.allowance.check(nbytes, f"a block of {tensor}")
        data = self.file.read_at(self._start(tensor) + first * dtype.itemsize, nbytes)
        span = np.frombuffer(data, dtype.newbyteorder(self._byte_order))
        down, across = (dtype.itemsize * stride for stride in tensor.strides)
        view = np.lib.stride_tricks.as_strided(span, shape, (down, across), writeable=False)
        return np.ascontiguousarray(view, dtype)

    def integer_keys(self, rows: int) -> Keys | None:
        """Return the tensor `keys`, if it is one int64 for each of `rows`."""
        keys = self.content.get(_KEYS) if isinstance(self.content, dict) else None
        if not isinstance(keys, StoredTensor) or (keys.dtype, keys.shape) != (
            _KEY_DTYPE.name,
            (rows,),
        ):
            return None
        self.check(keys)
        self.file.allowance.take(8 * rows, f"{rows} keys")
        column = replace(keys, shape=(rows, 1), strides=(*keys.strides, 1))
        return self.read(column, 0, rows)[:, 0]


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance from the first element to the last, in elements."""
    return sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _dtype(tensor: StoredTensor) -> np.dtype[Any]:
    return ELEMENT_TYPES[tensor.dtype].stored if tensor.dtype in ELEMENT_TYPES else _KEY_DTYPE


class _PtSource(Source):
    def __init__(self, tensors: _Tensors, tensor: StoredTensor) -> None:
        rows, dim = tensor.shape
        super().__init__(tensors.path, rows, dim, tensor.dtype)
        tensors.check(tensor)
        self._tensors = tensors
        self._tensor = tensor

    @cached_property
    def keys(self) -> Keys | None:
        return self._tensors.integer_keys(self.rows)

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        for start in range(0, self.rows, block_rows):
            yield self._tensors.read(self._tensor, start, min(block_rows, self.rows - start))

    def close(self) -> None:
        """Close the file."""
        self._tensors.file.close()


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.dtype in ELEMENT_TYPES


class Torch(Format):
    """A tensor, or tensors by name; read only."""

    suffixes = (".pt",)

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a matrix among the tensors."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            tensors = _Tensors(Archive(file, _WHAT))
            found = tensors.content
            if isinstance(found, StoredTensor):
                if not _is_matrix(found):
                    raise FormatError(f"{path}: holds {found}; need floats of shape (rows, dim)")
                return _PtSource(tensors, found)
            named: Mapping[str, StoredTensor] = tensors_by_name(found, file.allowance)
            matrices = {name: tensor for name, tensor in named.items() if _is_matrix(tensor)}
            tensor = named[choose(path, wanted, matrices, named)]
            return _PtSource(tensors, tensor)
