""".pt, .pth and .ckpt: files of `torch.save`, read without torch and without executing their code.

The file contains a tensor or a dict of tensors, possibly nested, such as a state dict: a pickle,
which describes the tensors (`_torch_pickle`), and their storages (`_torch_storages`). A block of
rows is read from its storage on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._torch_pickle import Entry, StoredTensor, entries_by_name
from tierstore._formats._torch_storages import storages_of
from tierstore._formats.base import Array, block_rows_for, element_of
from tierstore._formats.files import InputFile
from tierstore._formats.keys import Keys, integers_of, typed
from tierstore._formats.reading import Column, ColumnFormat, FileReader, array_column
from tierstore.errors import FormatError

_KEY_ROWS = block_rows_for(8)
_SHOWN = 4
_WASTE = 8
"""A span of a storage is read whole up to this multiple of the requested elements."""


class _TorchTensors(FileReader):
    """The tensors of a file and their elements, and lists of whole numbers or texts."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file)
        storages = storages_of(file)
        self._storages = storages
        content = storages.content
        self._entries: dict[str, Any] = (
            {"": content}
            if isinstance(content, StoredTensor)
            else entries_by_name(content, self._file.allowance)
        )
        self.columns = {name: _column(entry) for name, entry in self._entries.items()}
        objects = [f"{name!r:.100}" for name in storages.objects]
        shown = ", ".join([*objects[:_SHOWN], *(["…"] if len(objects) > _SHOWN else [])])
        if objects:
            self.notes = (f"not read: what objects of {shown} hold",)
        if objects and not any(isinstance(each, StoredTensor) for each in self._entries.values()):
            raise FormatError(
                f"{self.path}: holds objects of {shown}, which are not made, as that would run "
                "code, and no tensors beside them; save tensors, such as model.state_dict()"
            )

    def _tensor(self, name: str) -> StoredTensor:
        """Return a tensor whose storage exists and contains all its elements, or FormatError."""
        tensor: StoredTensor = self._entries[name]
        self._storages.start(tensor.key)
        if 0 in tensor.shape:
            return tensor
        last = tensor.offset + _reach(tensor.shape, tensor.strides)
        stored = self._storages.size(tensor.key)
        if (last + 1) * _dtype(tensor).itemsize > stored:
            raise FormatError(f"{self.path}: {tensor} reaches beyond the {stored} bytes stored")
        return tensor

    def blocks(self, names: Sequence[str], dim: int, block_rows: int) -> Iterator[Array]:
        """Yield the rows of a tensor."""
        tensor = self._tensor(names[0])
        for start in range(0, tensor.shape[0], block_rows):
            yield self._read(tensor, start, min(block_rows, tensor.shape[0] - start))

    def check(self, name: str) -> None:
        """Raise FormatError unless a tensor is within its storage."""
        self._tensor(name)

    def _read(self, tensor: StoredTensor, start: int, count: int) -> Array:
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
        self._file.allowance.check(nbytes, f"a block of {tensor}")
        data = self._file.read_at(self._storages.start(tensor.key) + first * dtype.itemsize, nbytes)
        span = np.frombuffer(data, dtype.newbyteorder(self._storages.byte_order))
        down, across = (dtype.itemsize * stride for stride in tensor.strides)
        view = np.lib.stride_tricks.as_strided(span, shape, (down, across), writeable=False)
        return np.ascontiguousarray(view, dtype)

    def keys(self, name: str) -> Keys:
        """Return a tensor or list of whole numbers, or a list of texts."""
        entry = self._entries[name]
        if isinstance(entry, list | tuple):
            return list(entry) if self.columns[name].kind == "text" else typed(entry)
        keys = self._tensor(name)
        rows = keys.shape[0]
        column = replace(keys, shape=(rows, 1), strides=(*keys.strides, 1))
        blocks = (
            self._read(column, start, min(_KEY_ROWS, rows - start))[:, 0]
            for start in range(0, rows, _KEY_ROWS)
        )
        return integers_of(blocks, rows, _dtype(keys), self._file.allowance)


def _column(entry: Entry) -> Column:
    if isinstance(entry, StoredTensor):
        return array_column(str(entry), entry.dtype, entry.shape)
    kinds = set() if isinstance(entry, dict) else set(map(type, entry))
    kind = "text" if kinds == {str} else "integer" if kinds == {int} else "other"
    return Column(f"a {type(entry).__name__} of {len(entry)}", len(entry), kind)


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the distance from the first element to the last, in elements."""
    return sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _dtype(tensor: StoredTensor) -> np.dtype[Any]:
    """Return the type of stored elements of a matrix or of keys."""
    return ELEMENT_TYPES[tensor.dtype].stored if _is_float(tensor) else np.dtype(tensor.dtype)


def _is_float(tensor: StoredTensor) -> bool:
    return tensor.dtype in ELEMENT_TYPES and element_of(tensor.dtype) in (None, tensor.dtype)


class Torch(ColumnFormat):
    """A tensor or named tensors; read-only."""

    suffixes = (".pt", ".pth", ".ckpt")
    in_file = _TorchTensors
