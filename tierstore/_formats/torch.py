""".pt, .pth and .ckpt: files of `torch.save`, read without torch and without executing their code.

The file contains a tensor or a dict of tensors, possibly nested, such as a state dict: a pickle,
which describes the tensors (`_torch_pickle`), and their storages (`_torch_storages`). A block of
rows is read from its storage on demand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._torch_pickle import StoredTensor, tensors_by_name
from tierstore._formats._torch_storages import Storages, storages_of
from tierstore._formats.base import (
    Array,
    Format,
    Source,
    Wanted,
    block_rows_for,
    choose,
    element_of,
    note_unread,
    reject_name,
    scales_beside,
)
from tierstore._formats.files import open_input, unless_it_fails
from tierstore._formats.keys import Keys, integers_of, typed
from tierstore.errors import FormatError

__all__ = ["Torch"]

_KEYS = "keys"
_INTEGER = re.compile("u?int(8|16|32|64)")
_KEY_ROWS = block_rows_for(8)
_SHOWN = 4
_WASTE = 8
"""A span of a storage is read whole up to this multiple of the requested elements."""


class _Tensors:
    """The tensors of a file and their elements."""

    def __init__(self, storages: Storages) -> None:
        self.file, self.path = storages.file, storages.file.path
        self.content = storages.content
        self.objects = list(storages.objects)
        self._storages = storages

    def check(self, tensor: StoredTensor) -> None:
        """Raise FormatError unless a tensor's storage exists and contains all its elements."""
        self._storages.start(tensor.key)
        if 0 in tensor.shape:
            return
        last = tensor.offset + _reach(tensor.shape, tensor.strides)
        stored = self._storages.size(tensor.key)
        if (last + 1) * _dtype(tensor).itemsize > stored:
            raise FormatError(f"{self.path}: {tensor} reaches beyond the {stored} bytes stored")

    def read(self, tensor: StoredTensor, start: int, count: int) -> Array:
        """Return `count` rows of a matrix, read as one span, or by columns or rows."""
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
        data = self.file.read_at(self._storages.start(tensor.key) + first * dtype.itemsize, nbytes)
        span = np.frombuffer(data, dtype.newbyteorder(self._storages.byte_order))
        down, across = (dtype.itemsize * stride for stride in tensor.strides)
        view = np.lib.stride_tricks.as_strided(span, shape, (down, across), writeable=False)
        return np.ascontiguousarray(view, dtype)

    def keys(self, rows: int) -> Keys | None:
        """Return the tensor or list `keys`, if it has one integer or text per row."""
        keys = self._called_keys()
        if isinstance(keys, list):
            return _listed(keys) if len(keys) == rows else None
        if keys is None or keys.shape != (rows,) or not _INTEGER.fullmatch(keys.dtype):
            return None
        self.check(keys)
        column = replace(keys, shape=(rows, 1), strides=(*keys.strides, 1))
        blocks = (
            self.read(column, start, min(_KEY_ROWS, rows - start))[:, 0]
            for start in range(0, rows, _KEY_ROWS)
        )
        return integers_of(blocks, rows, _dtype(keys), self.file.allowance)

    def named_objects(self) -> str:
        """Name the classes and functions whose results are left out."""
        shown = [f"{name!r:.100}" for name in self.objects[:_SHOWN]]
        return ", ".join([*shown, *(["…"] if len(self.objects) > _SHOWN else [])])

    def notes(self, rows: int) -> tuple[str, ...]:
        """Return notes on objects, and on lists and dicts of an entry for each row."""
        found = []
        if self.objects:
            found.append(f"not read: what objects of {self.named_objects()} hold")
        content = self.content
        entries = content.items() if isinstance(content, dict) else enumerate(content)
        for name, each in entries:
            tensors = isinstance(each, dict | list | tuple) and any(
                isinstance(one, StoredTensor)
                for one in (each.values() if isinstance(each, dict) else each)
            )
            listed = isinstance(each, dict | list | tuple) and len(each) == rows and not tensors
            if listed and name != _KEYS:
                found.append(
                    f"not read, though it has an entry for each row: {name!s:.100}; save it as a "
                    "list under the name 'keys'"
                )
        return tuple(found)

    def describe_keys(self) -> str | None:
        """Say what the file has under the name `keys`; None for nothing that could be keys."""
        keys = self._called_keys()
        if isinstance(keys, list):
            return f"a list of {len(keys)}"
        return None if keys is None else f"a tensor of {keys}"

    def _called_keys(self) -> StoredTensor | list[Any] | None:
        keys = self.content.get(_KEYS) if isinstance(self.content, dict) else None
        return keys if isinstance(keys, StoredTensor | list) else None


def _listed(keys: list[Any]) -> Keys | None:
    """Return keys that were saved as a list, if they are all integers or all texts."""
    kinds = set(map(type, keys))
    if kinds == {str}:
        return keys
    return typed(keys) if kinds == {int} else None


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance from the first element to the last, in elements."""
    return sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _dtype(tensor: StoredTensor) -> np.dtype[Any]:
    """Return the type of stored elements of a matrix or of keys."""
    return ELEMENT_TYPES[tensor.dtype].stored if _is_float(tensor) else np.dtype(tensor.dtype)


class _PtSource(Source):
    def __init__(self, tensors: _Tensors, tensor: StoredTensor) -> None:
        rows, dim = tensor.shape
        dtype = tensor.dtype if _is_float(tensor) else str(element_of(tensor.dtype))
        super().__init__(tensors.path, rows, dim, dtype)
        tensors.check(tensor)
        self._tensors = tensors
        self._tensor = tensor

    @cached_property
    def keys(self) -> Keys | None:
        return self._tensors.keys(self.rows)

    def _blocks(self, block_rows: int) -> Iterator[Array]:
        stored = ELEMENT_TYPES[self.dtype].stored
        for start in range(0, self.rows, block_rows):
            block = self._tensors.read(self._tensor, start, min(block_rows, self.rows - start))
            yield block.astype(stored, copy=False)

    def close(self) -> None:
        """Close the file."""
        self._tensors.file.close()


def _is_float(tensor: StoredTensor) -> bool:
    return tensor.dtype in ELEMENT_TYPES and element_of(tensor.dtype) in (None, tensor.dtype)


def _is_matrix(tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and (_is_float(tensor) or element_of(tensor.dtype) is not None)


class Torch(Format):
    """A tensor or named tensors; read-only."""

    suffixes = (".pt", ".pth", ".ckpt")

    def open(self, path: Path, wanted: Wanted) -> Source:
        """Open a matrix among the tensors."""
        with unless_it_fails(open_input(path, wanted.memory)) as file:
            tensors = _Tensors(storages_of(file))
            found = tensors.content
            if isinstance(found, StoredTensor):
                reject_name(path, wanted)
                if not _is_matrix(found):
                    raise FormatError(f"{path}: holds {found}; need floats of shape (rows, dim)")
                return _PtSource(tensors, found)
            named: Mapping[str, StoredTensor] = tensors_by_name(found, file.allowance)
            if not named and tensors.objects:
                raise FormatError(
                    f"{path}: holds objects of {tensors.named_objects()}, which are not made, as "
                    "that would run code, and no tensors beside them; save tensors, such as "
                    "model.state_dict()"
                )
            matrices = {name: tensor for name, tensor in named.items() if _is_matrix(tensor)}
            floats = {name: tensor for name, tensor in matrices.items() if _is_float(tensor)}
            chosen = choose(path, wanted, floats, named, matrices)
            tensor = named[chosen]
            source = _PtSource(tensors, tensor)
            shapes = {name: each.shape for name, each in named.items() if name != _KEYS}
            source.notes = note_unread(source.rows, shapes, "save it under the name 'keys'")
            source.notes += tensors.notes(source.rows)
            source.scales = scales_beside(chosen, tensor.dtype, named)
            source.called_keys = tensors.describe_keys()
            return source
