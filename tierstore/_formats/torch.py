""".pt, .pth and .ckpt: files of `torch.save`, read without torch and without executing their code.

The file contains a tensor or a dict of tensors, possibly nested, such as a state dict. It is a zip
archive with a pickle, which describes the tensors, and their storages. A block of rows is read from
its storage on demand.

A pickle is a program. This module interprets it without any instruction that calls functions: it
supports containers, strings and numbers, and records the location of a tensor instead of creating
it. Other names of torch, such as a dtype, become placeholders; all other names are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats.base import (
    Array,
    Format,
    Source,
    Wanted,
    choose,
    element_of,
    note_unread,
    reject_name,
)
from tierstore._formats.files import ZIP_ERRORS, Archive, open_input, parsing, unless_it_fails
from tierstore._formats.keys import Keys
from tierstore.budget import OBJECT_BYTES, Allowance
from tierstore.errors import FormatError

__all__ = ["Torch"]

_WHAT = ".pt file of tensors alone"
_PICKLE = "data.pkl"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a file that is no zip archive: torch's number for such files."""
_KEYS = "keys"
_KEY_DTYPE = np.dtype("<i8")
_PICKLE_COST = 8
"""Memory per byte of the pickle in addition to objects: the byte itself, and as text."""
_WASTE = 8
"""A span of a storage is read whole up to this multiple of the requested elements."""

MAX_DEPTH = 16
MAX_DIMENSIONS = 64

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_HARMLESS = {("collections", "OrderedDict"), ("_codecs", "encode")}
_BY_VALUE = {
    "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "UNICODE", "BININT", "BININT1", "BININT2",
    "LONG1", "LONG4", "BINFLOAT",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING"}


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor: elements of `dtype` from `offset` on in the storage `key`.

    `strides` are in elements, as given in the file; they may exceed the storage.
    """

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Global:
    """A name in the pickle, which is never resolved."""

    module: str
    name: str


_OTHER = object()
"""Placeholder for everything that neither is nor contains a tensor."""


def tensors_by_name(content: object, allowance: Allowance) -> dict[str, StoredTensor]:
    """Return the tensors in nested dicts, their names joined by dots."""
    return dict(_walk(content, "", 0, allowance))


def _walk(
    content: object, prefix: str, depth: int, allowance: Allowance
) -> Iterator[tuple[str, StoredTensor]]:
    if not isinstance(content, dict) or depth > MAX_DEPTH:
        return
    for name, entry in content.items():
        # A dict with several parents is traversed repeatedly, so steps are counted.
        allowance.take(OBJECT_BYTES + 4 * len(prefix), "the names of its tensors")
        if isinstance(entry, StoredTensor):
            yield f"{prefix}{name}", entry
        else:
            yield from _walk(entry, f"{prefix}{name}.", depth + 1, allowance)


def read_pickle(data: bytes, path: Path, allowance: Allowance) -> Any:
    """Return the contents of a pickle: dicts, lists, tuples, strings, numbers and StoredTensors.

    Raises FormatError for a pickle with any other instruction or name.
    """
    return _Machine(path, allowance).run(data)


class _Machine:
    """The state of the interpreter: a stack, marks on it, and the memo."""

    def __init__(self, path: Path, allowance: Allowance) -> None:
        self._path = path
        self._allowance = allowance
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                self._allowance.take(OBJECT_BYTES, "its pickle")
                self._step(opcode.name, argument)
            (result,) = self._stack
        except FormatError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{self._path}: its pickle is damaged: {error!s:.200}") from None
        return result

    def _step(self, opcode: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        if opcode in _BY_VALUE:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _BYTES:
            stack.append(_OTHER)
        elif opcode == "MARK":
            self._marks.append(len(stack))
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif opcode == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode in _MAKERS:
            stack.append(_MAKERS[opcode](self))
        elif opcode in _CHANGERS:
            _CHANGERS[opcode](self)
        elif opcode == "GLOBAL":
            stack.append(self._named(*argument.split(" ", 1)))
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise FormatError(f"{self._path}: its pickle has the unsupported instruction {opcode}")

    def _marked(self) -> list[Any]:
        """Pop everything above the last mark."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _popped(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise IndexError("nothing left on the stack")
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        return items

    def _named(self, module: str, name: str) -> _Global:
        if (module, name) in _HARMLESS or module.partition(".")[0] == "torch":
            return _Global(module, name)
        raise FormatError(
            f"{self._path}: holds {f'{module}.{name}'!r:.100}, which would run code; save tensors, "
            "numbers and strings only, such as model.state_dict()"
        )

    def _named_by_stack(self) -> _Global:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name is not a string")
        return self._named(module, name)

    def _storage(self) -> _Storage:
        """Return what a persistent id names: ("storage", type, key, location, elements)."""
        kind, storage, key, _, _ = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or type(key) is not str:
            raise TypeError("a persistent id is not a storage")
        return _Storage(_STORAGES.get(storage.name, storage.name), key)

    def _reduced(self) -> Any:
        """Return the result of a known function without calling it; three are known."""
        function, arguments = self._popped(2)
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise TypeError("a call of something that is not a function")
        if function.name == "OrderedDict" and not arguments:
            return {}
        if function.name == "_rebuild_tensor_v2":
            return self._tensor(*arguments[:4])
        if function.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return arguments[0]
        return _OTHER

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> StoredTensor:
        if not isinstance(storage, _Storage) or type(shape) is not tuple:
            raise TypeError("a tensor without a storage or a shape")
        if type(strides) is not tuple or not len(strides) == len(shape) <= MAX_DIMENSIONS:
            raise TypeError("the strides of a tensor do not match its shape")
        if any(type(n) is not int or not 0 <= n < 2**63 for n in (offset, *shape, *strides)):
            raise ValueError("the shape, strides or offset of a tensor are not counts")
        return StoredTensor(storage.dtype, storage.key, offset, shape, strides)

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        """Set items of a dict, ignoring keys that cannot be part of a tensor's name."""
        if isinstance(self._stack[-1], dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) in (str, int, float, bool):
                    self._stack[-1][key] = value


_MAKERS: dict[str, Any] = {
    "EMPTY_DICT": lambda machine: {},
    "EMPTY_LIST": lambda machine: [],
    "EMPTY_TUPLE": lambda machine: (),
    "EMPTY_SET": lambda machine: _OTHER,
    "TUPLE": lambda machine: tuple(machine._marked()),
    "TUPLE1": lambda machine: machine._popped(1),
    "TUPLE2": lambda machine: machine._popped(2),
    "TUPLE3": lambda machine: machine._popped(3),
    "STACK_GLOBAL": _Machine._named_by_stack,
    "BINPERSID": _Machine._storage,
    "REDUCE": _Machine._reduced,
    "NEWOBJ": lambda machine: machine._popped(2) and _OTHER,
}
"""Instructions that pop any number of items and push one."""

_CHANGERS: dict[str, Any] = {
    "APPEND": lambda machine: machine._extend([*machine._popped(1)]),
    "APPENDS": lambda machine: machine._extend(machine._marked()),
    "ADDITEMS": _Machine._marked,
    "SETITEM": lambda machine: machine._update([*machine._popped(2)]),
    "SETITEMS": lambda machine: machine._update(machine._marked()),
    "BUILD": lambda machine: machine._popped(1),
    "POP": lambda machine: machine._popped(1),
    "POP_MARK": _Machine._marked,
}
"""Instructions that pop items and may add them to the item below."""


class _Tensors:
    """The tensors of a file and their elements."""

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
            stream.read(1)  # the end, where the checksum is verified
            return data

    def check(self, tensor: StoredTensor) -> None:
        """Raise FormatError unless a tensor's storage exists and contains all its elements."""
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
        data = self.file.read_at(self._start(tensor) + first * dtype.itemsize, nbytes)
        span = np.frombuffer(data, dtype.newbyteorder(self._byte_order))
        down, across = (dtype.itemsize * stride for stride in tensor.strides)
        view = np.lib.stride_tricks.as_strided(span, shape, (down, across), writeable=False)
        return np.ascontiguousarray(view, dtype)

    def integer_keys(self, rows: int) -> Keys | None:
        """Return the tensor `keys`, if it has one int64 per row."""
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
        return self._tensors.integer_keys(self.rows)

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
            if file.size > len(_LEGACY) and file.read_at(0, len(_LEGACY)) == _LEGACY:
                raise FormatError(
                    f"{path}: saved in the format of PyTorch before 1.6; load it with torch, and "
                    "save it again"
                )
            tensors = _Tensors(Archive(file, _WHAT))
            found = tensors.content
            if isinstance(found, StoredTensor):
                reject_name(path, wanted)
                if not _is_matrix(found):
                    raise FormatError(f"{path}: holds {found}; need floats of shape (rows, dim)")
                return _PtSource(tensors, found)
            named: Mapping[str, StoredTensor] = tensors_by_name(found, file.allowance)
            matrices = {name: tensor for name, tensor in named.items() if _is_matrix(tensor)}
            floats = {name: tensor for name, tensor in matrices.items() if _is_float(tensor)}
            tensor = named[choose(path, wanted, floats, named, matrices)]
            source = _PtSource(tensors, tensor)
            shapes = {name: each.shape for name, each in named.items() if name != _KEYS}
            source.notes = note_unread(source.rows, shapes, "save it under the name 'keys'")
            if _KEYS in named:
                source.called_keys = f"a tensor of {named[_KEYS]}"
            return source
