"""Trees of dicts, lists, tensors and JSON scalars as a safetensors file, without pickle.

The file holds the tensors, and as metadata the tree with a reference in place of each. It is read
without trust: whatever is not exactly as it is written here is a FormatError, before memory is
taken for it, and each tensor is read into its own array. Format: safetensors, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from io import BufferedIOBase, RawIOBase
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.allowance import DEFAULT_MEMORY, JSON_COST, Allowance
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError
from tierstore.strictjson import Section, parse

__all__ = ["decode_tree", "encode_tree"]

_MAX_HEADER = DEFAULT_MEMORY // JSON_COST
"""Bytes of a header that is written: what is read without being allowed more memory."""
_MAX_DEPTH = 100
_MAX_DIMS = 32
_MAX_DIGITS = 4000
_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_CODES = {np.dtype(text): code for code, text in _NAMES.items() if code != "BF16"}
_NOT_FINITE = ("nan", "inf", "-inf")

Leaf = tuple[str, npt.NDArray[Any]]
"""The safetensors name of an element type, and an array whose elements have that size."""


def encode_tree(value: object) -> Iterator[bytes]:
    """Return the pieces of a file that holds a tree.

    Raises InvalidTypeError or InvalidInputError, before anything is yielded, for what cannot be
    stored.
    """
    leaves: dict[str, Leaf] = {}
    skeleton = _skeleton(value, leaves, "payload", 0)
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(skeleton)}}
    offset = 0
    for name, (code, array) in leaves.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise InvalidInputError(
            f"a payload without its tensors takes {len(text)} bytes, at most {_MAX_HEADER} are "
            "written; give large values as arrays or bytes"
        )
    return _pieces(text, leaves)


def _pieces(header: bytes, leaves: Mapping[str, Leaf]) -> Iterator[bytes]:
    yield struct.pack("<Q", len(header)) + header
    for _, array in leaves.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def decode_tree(
    stream: RawIOBase | BufferedIOBase,
    size: int,
    name: str,
    make: Callable[[npt.NDArray[Any], str], Any],
    allowance: Allowance,
) -> Any:
    """Return the tree in a file of `size` bytes; `make(array, code)` makes each tensor.

    Each tensor is read into a fresh array of its own. The rest of the tree is bounded by the
    `allowance`. Raises FormatError; `name` is the file's, for messages.
    """
    length = int.from_bytes(_exactly(stream, min(8, size), name).tobytes(), "little")
    if size < 8 or length > size - 8:
        raise FormatError(f"{name} is no tree: its header does not fit into {size} bytes")
    allowance.check(JSON_COST * length, f"a tree with a header of {length} bytes")
    header = Section(parse(_exactly(stream, length, name).tobytes(), name), name)
    metadata = header.section("__metadata__")
    metadata.only({"tree"})
    skeleton = parse(metadata.text("tree").encode("utf-8", "surrogatepass"), name)
    leaves, end, data_bytes = {}, 0, size - 8 - length
    for key in header:
        if key != "__metadata__":
            code, dtype, shape, stop = _tensor(header.section(key), end, data_bytes)
            values = _exactly(stream, stop - end, name)
            leaves[key] = make(_array(values, code, dtype, shape, f"{name}: {key}"), code)
            end = stop
    if end != data_bytes:
        raise FormatError(f"{name} holds {data_bytes} bytes of tensors, {end} are named")
    return _assemble(skeleton, leaves, name, 0)


def _exactly(stream: RawIOBase | BufferedIOBase, nbytes: int, name: str) -> npt.NDArray[np.uint8]:
    """Return the next bytes in an array of their own; raises FormatError if the stream ends."""
    found = np.empty(nbytes, np.uint8)
    filled = 0
    while filled < nbytes:
        count = stream.readinto(found[filled:].data)
        if not count:
            raise FormatError(f"{name} ends within bytes that its header names")
        filled += count
    return found


def _tensor(
    entry: Section, start: int, data_bytes: int
) -> tuple[str, np.dtype[Any], list[int], int]:
    """Return what a tensor is that begins at `start`, where the one before ended, and its end."""
    entry.only({"dtype", "shape", "data_offsets"})
    code, shape, span = entry.text("dtype"), entry.items("shape"), entry.items("data_offsets")
    if code not in _NAMES:
        raise FormatError(f"{entry.name}: no element type: {code[:80]!r}")
    if any(type(size) is not int or size < 0 for size in [*shape, *span]):
        raise FormatError(f"{entry.name}: sizes and offsets are whole numbers, not negative")
    dtype = np.dtype(_NAMES[code])
    stop = start + math.prod(shape) * dtype.itemsize
    if len(shape) > _MAX_DIMS or span != [start, stop] or stop > data_bytes:
        raise FormatError(f"{entry.name}: a tensor of this shape does not lie at its offsets")
    return code, dtype, shape, stop


def _array(
    values: npt.NDArray[np.uint8], code: str, dtype: np.dtype[Any], shape: list[int], name: str
) -> npt.NDArray[Any]:
    if code == "BOOL" and values.max(initial=0) > 1:
        raise FormatError(f"{name}: a truth value is 0 or 1")
    try:
        return values.view(dtype).reshape(shape)
    except (ValueError, OverflowError):  # no elements, but a side no array can have
        raise FormatError(f"{name}: no array has this shape") from None


def _skeleton(value: object, leaves: dict[str, Leaf], where: str, depth: int) -> Any:
    """Return `value` as JSON with tagged containers, its arrays moved to `leaves`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if value.bit_length() > _MAX_DIGITS:
            raise InvalidInputError(f"{where}: an int of {value.bit_length()} bits is too large")
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(float(value))}
    if depth == _MAX_DEPTH:
        raise InvalidInputError(
            f"{where[:80]}…: a payload is at most {_MAX_DEPTH} levels deep; does it hold itself?"
        )
    if isinstance(value, Mapping):
        items = [
            [_key(key, where), _skeleton(item, leaves, f"{where}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"dict": items}
    if isinstance(value, list | tuple):
        parts = [
            _skeleton(item, leaves, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)
        ]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    name = f"{len(leaves)}"
    leaves[name] = _leaf(value, where)
    return {"tensor": name}


def _key(key: object, where: str) -> str | int:
    if type(key) is str or (type(key) is int and key.bit_length() <= _MAX_DIGITS):
        return key
    if type(key) is int:
        raise InvalidInputError(f"{where}: an int of {key.bit_length()} bits is too large")
    raise InvalidTypeError(f"{where}: a key of a payload is a text or an int, not {key!r:.80}")


def _leaf(value: Any, where: str) -> Leaf:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if value.dtype == torch.bfloat16:
            return "BF16", value.view(torch.uint16).numpy()
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype in _CODES and array.ndim <= _MAX_DIMS:
            return _CODES[array.dtype], array
        raise InvalidTypeError(f"{where}: arrays of {array.dtype} cannot be stored")
    raise InvalidTypeError(
        f"{where}: a {type(value).__name__} cannot be stored; a payload is bytes, a Path, or dicts "
        "and lists of tensors, arrays, numbers, texts, booleans and None"
    )


def _assemble(node: Any, leaves: Mapping[str, Any], name: str, depth: int) -> Any:
    """Return what a skeleton stands for."""
    if node is None or type(node) in (bool, str, int, float):
        return node
    if type(node) is not dict or len(node) != 1 or depth > _MAX_DEPTH:
        raise FormatError(f"{name} holds no tree")
    ((tag, content),) = node.items()
    if tag == "tensor" and type(content) is str and content in leaves:
        return leaves[content]
    if tag == "float" and content in _NOT_FINITE:
        return float(content)
    if tag == "dict" and type(content) is list:
        found = {}
        for pair in content:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int):
                raise FormatError(f"{name}: an item of a dict is a key and a value")
            found[pair[0]] = _assemble(pair[1], leaves, name, depth + 1)
        if len(found) != len(content):
            raise FormatError(f"{name}: a key occurs twice")
        return found
    if tag in ("list", "tuple") and type(content) is list:
        parts = [_assemble(item, leaves, name, depth + 1) for item in content]
        return tuple(parts) if tag == "tuple" else parts
    raise FormatError(f"{name} holds no tree: {tag[:80]!r}")
