"""The pickle in a file of `torch.save`, interpreted without calling a function.

A pickle is a program. This module supports the instructions for containers, strings and numbers,
and records the location of a tensor instead of creating it. Other names of torch, such as a dtype,
become placeholders, and so do objects of all other names: nothing is run to make them, and what
hangs on them is left out.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.budget import OBJECT_BYTES, Allowance
from tierstore.errors import FormatError

MAX_DEPTH = 16
MAX_DIMENSIONS = 64
_STEP_BYTES = 8

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}  # fmt: skip
"""The elements of each storage; an untyped one has bytes, whose type its tensors name."""

_HARMLESS = {("collections", "OrderedDict"), ("_codecs", "encode")}
_BY_VALUE = {
    "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE", "UNICODE", "BININT", "BININT1", "BININT2",
    "LONG1", "LONG4", "BINFLOAT",
}  # fmt: skip
_DENSE = {"Tensor", "Parameter", "Buffer"}
"""Classes of torch whose tensors are their elements alone."""
_BITS = {"neg": "negated", "conj": "conjugated"}
"""What torch notes of a tensor instead of changing its elements."""
_WITHOUT_ELEMENTS = {"device", "Size", "TorchVersion", "_get_layout", "encode"}
"""Names that make what holds no elements."""
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
class _StorageRef:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Global:
    """A name in the pickle, which is never resolved."""

    module: str
    name: str


_OTHER = object()
"""Placeholder for objects that neither are nor contain a tensor."""


Entry = StoredTensor | list[Any] | tuple[Any, ...] | dict[Any, Any]
_CONTAINERS = (dict, list, tuple)


def entries_by_name(content: object, allowance: Allowance) -> dict[str, Entry]:
    """Return the tensors in nested dicts, lists and tuples, and those of texts, numbers, objects.

    Dots join their names, or numbers.
    """
    return dict(_walk(content, "", 0, allowance))


def _walk(
    content: object, prefix: str, depth: int, allowance: Allowance
) -> Iterator[tuple[str, Entry]]:
    if not isinstance(content, _CONTAINERS) or depth > MAX_DEPTH:
        return
    for name, entry in content.items() if isinstance(content, dict) else enumerate(content):
        # A dict with several parents is traversed repeatedly, so steps are counted.
        if not isinstance(entry, (StoredTensor, *_CONTAINERS)):
            allowance.take(_STEP_BYTES, "the names of its tensors")
            continue
        allowance.take(OBJECT_BYTES + 4 * len(prefix), "the names of its tensors")
        if isinstance(entry, StoredTensor):
            yield f"{prefix}{name}", entry
            continue
        allowance.take(_STEP_BYTES * len(entry), "the names of its tensors")
        values = entry.values() if isinstance(entry, dict) else entry
        if any(isinstance(each, (StoredTensor, *_CONTAINERS)) for each in values):
            yield from _walk(entry, f"{prefix}{name}.", depth + 1, allowance)
        elif entry:
            yield f"{prefix}{name}", entry


def read_pickle(
    data: Any,
    path: Path,
    allowance: Allowance,
    storages: dict[str, tuple[str, int]] | None = None,
    objects: dict[str, None] | None = None,
) -> Any:
    """Return the contents of a pickle: dicts, lists, tuples, strings, numbers and StoredTensors.

    `data` are its bytes, or a stream that is read up to its end. The element type and number of
    elements of each storage that it names go to `storages`, and the names of classes and functions
    whose results are left out to `objects`. Raises FormatError for a pickle with any other
    instruction.
    """
    machine = _Unpickler(path, allowance, {} if storages is None else storages)
    contents = machine.run(data)
    if objects is not None:
        objects.update(machine.objects)
    return contents


class _Unpickler:
    """The state of the interpreter: a stack, marks on it, and the memo."""

    def __init__(
        self, path: Path, allowance: Allowance, storages: dict[str, tuple[str, int]]
    ) -> None:
        self._path = path
        self._allowance = allowance
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self.objects: dict[str, None] = {}

    def run(self, data: Any) -> Any:
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

    def _named(self, module: str, name: str) -> object:
        """Return a name that means something here, or a placeholder for what it would make."""
        if (module, name) in _HARMLESS or module.partition(".")[0] == "torch":
            return _Global(module, name)
        self.objects.setdefault(f"{module}.{name}")
        return _OTHER

    def _named_by_stack(self) -> object:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name is not a string")
        return self._named(module, name)

    def _storage(self) -> object:
        """Return the storage of a persistent id: ("storage", type, key, location, elements).

        Before PyTorch 1.6 a view follows, which is None in all but the oldest files.
        """
        named = self._stack.pop()
        if named[0] == "module":
            return _OTHER  # the source of a class
        kind, storage, key, _, elements, *view = named
        if kind != "storage" or not isinstance(storage, _Global) or type(key) is not str:
            raise TypeError("a persistent id is not a storage")
        if view not in ([], [None]) or type(elements) is not int or elements < 0:
            raise TypeError("a storage is a view of another, or has no number of elements")
        dtype = _STORAGES.get(storage.name, storage.name)
        self._storages[key] = dtype, elements
        return _StorageRef(dtype, key)

    def _reduced(self) -> Any:
        """Return the result of a known function without calling it."""
        return self._made(*self._popped(2))

    def _made(self, function: Any, arguments: Any) -> Any:
        if function is _OTHER:
            return _OTHER
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise TypeError("a call of something that is not a function")
        if function.name == "OrderedDict" and not arguments:
            return {}
        if function.name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return self._tensor(*arguments[:4], *arguments[6:7])
        if function.name == "_rebuild_tensor_v3":  # of a type that came after typed storages
            storage, offset, shape, strides, _, _, dtype, *bits = arguments
            if not isinstance(dtype, _Global):
                raise TypeError("the type of a tensor is not a name")
            return self._tensor(_StorageRef(dtype.name, storage.key), offset, shape, strides, *bits)
        if function.name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return arguments[0]
        if function.name == "_rebuild_from_type_v2":  # of a class, or with attributes
            made, kind, own, _ = arguments
            if isinstance(kind, _Global) and kind.name in _DENSE:
                return self._made(made, own)
        return self._left_out(function)

    def _instance(self) -> object:
        kind, _ = self._popped(2)
        return self._left_out(kind)

    def _left_out(self, maker: object) -> object:
        """Return the placeholder of what a maker makes, and note those of what holds elements."""
        if isinstance(maker, _Global) and maker.name not in _WITHOUT_ELEMENTS:
            self.objects.setdefault(f"{maker.module}.{maker.name}")
        return _OTHER

    def _tensor(
        self, storage: Any, offset: Any, shape: Any, strides: Any, bits: Any = None
    ) -> StoredTensor:
        """Return a tensor; `bits` says that its elements are negated or conjugated."""
        if not isinstance(storage, _StorageRef) or type(shape) is not tuple:
            raise TypeError("a tensor without a storage or a shape")
        if type(strides) is not tuple or not len(strides) == len(shape) <= MAX_DIMENSIONS:
            raise TypeError("the strides of a tensor do not match its shape")
        if any(type(n) is not int or not 0 <= n < 2**63 for n in (offset, *shape, *strides)):
            raise ValueError("the shape, strides or offset of a tensor are not counts")
        changed = [_BITS.get(name, name) for name, is_set in (bits or {}).items() if is_set]
        dtype = " ".join([storage.dtype, *changed])
        return StoredTensor(dtype, storage.key, offset, shape, strides)

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
    "STACK_GLOBAL": _Unpickler._named_by_stack,
    "BINPERSID": _Unpickler._storage,
    "REDUCE": _Unpickler._reduced,
    "NEWOBJ": _Unpickler._instance,
}
"""Instructions that pop any number of items and push one."""

_CHANGERS: dict[str, Any] = {
    "APPEND": lambda machine: machine._extend([*machine._popped(1)]),
    "APPENDS": lambda machine: machine._extend(machine._marked()),
    "ADDITEMS": _Unpickler._marked,
    "SETITEM": lambda machine: machine._update([*machine._popped(2)]),
    "SETITEMS": lambda machine: machine._update(machine._marked()),
    "BUILD": lambda machine: machine._popped(1),
    "POP": lambda machine: machine._popped(1),
    "POP_MARK": _Unpickler._marked,
}
"""Instructions that pop items and may add them to the item below."""
