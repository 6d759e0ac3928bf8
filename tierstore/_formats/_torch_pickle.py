"""The pickle in what `torch.save` wrote, read for its tensors alone.

A pickle is a program. Here it is run by a machine without an instruction that calls anything: it
knows containers, texts and numbers, and records where a tensor is instead of making it. Other names
of torch, such as a dtype, become a placeholder, and names of anything else are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore._allowance import OBJECT_BYTES, Allowance
from tierstore.errors import FormatError

__all__ = ["StoredTensor", "read_pickle", "tensors_by_name"]

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
    """Where a tensor is: elements of `dtype`, from number `offset` of the storage `key` on.

    `strides` are in elements, as the file gives them: nothing says that they stay in the storage.
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
    """A name that the pickle refers to, and all that is ever known of it."""

    module: str
    name: str


_OTHER = object()
"""Stands for everything that is neither a tensor nor leads to one."""


def tensors_by_name(content: object, allowance: Allowance) -> dict[str, StoredTensor]:
    """Return the tensors in nested dicts, their names joined by dots."""
    return dict(_walk(content, "", 0, allowance))


def _walk(
    content: object, prefix: str, depth: int, allowance: Allowance
) -> Iterator[tuple[str, StoredTensor]]:
    if not isinstance(content, dict) or depth > MAX_DEPTH:
        return
    for name, entry in content.items():
        # A dict that many others hold is walked as often, so what counts is the steps.
        allowance.take(OBJECT_BYTES + 4 * len(prefix), "the names of its tensors")
        if isinstance(entry, StoredTensor):
            yield f"{prefix}{name}", entry
        else:
            yield from _walk(entry, f"{prefix}{name}.", depth + 1, allowance)


def read_pickle(data: bytes, path: Path, allowance: Allowance) -> Any:
    """Return what a pickle holds: dicts, lists, tuples, texts, numbers and StoredTensors.

    Raises FormatError for a pickle that does or names anything else.
    """
    return _Machine(path, allowance).run(data)


class _Machine:
    """A stack, marks on it, and what was put aside."""

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
            raise FormatError(
                f"{self._path}: its pickle has the instruction {opcode}, not run here"
            )

    def _marked(self) -> list[Any]:
        """Take what is above the last mark."""
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
            "numbers and texts alone"
        )

    def _named_by_stack(self) -> _Global:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name is no text")
        return self._named(module, name)

    def _storage(self) -> _Storage:
        """Return what a persistent id names: ("storage", type, key, location, elements)."""
        kind, storage, key, _, _ = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or type(key) is not str:
            raise TypeError("a persistent id is no storage")
        return _Storage(_STORAGES.get(storage.name, storage.name), key)

    def _reduced(self) -> Any:
        """Return what a call would: of all functions, three are known and none is called."""
        function, arguments = self._popped(2)
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise TypeError("a call of something that is no function")
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
            raise TypeError("the strides of a tensor do not fit its shape")
        if any(type(n) is not int or not 0 <= n < 2**63 for n in (offset, *shape, *strides)):
            raise ValueError("the shape, strides or offset of a tensor are no counts")
        return StoredTensor(storage.dtype, storage.key, offset, shape, strides)

    def _extend(self, items: list[Any]) -> None:
        if isinstance(self._stack[-1], list):
            self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        """Set items of a dict, but for keys that no tensor can be named by."""
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
"""Instructions that take something from the stack, or nothing, and leave one thing."""

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
"""Instructions that take things from the stack and may put them into what is below."""
