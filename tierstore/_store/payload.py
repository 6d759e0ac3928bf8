"""Payloads: values that a trainer commits together with the tables, without pickle."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedIOBase, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.manifest import PayloadInfo, unique_name
from tierstore._dtypes import ELEMENT_TYPES, check_unmasked, imported_class
from tierstore._strictjson import Section, parse
from tierstore.budget import DEFAULT_MEMORY, JSON_COST, Allowance, Size, format_bytes
from tierstore.errors import (
    FILE_CURE,
    CorruptStoreError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    UnknownNameError,
)

_MAX_HEADER = DEFAULT_MEMORY // JSON_COST
"""Maximum size of a written header, which can be read with the default memory limit."""
_MAX_DEPTH = 100
_MAX_DIMS = 32
_MAX_DIGITS = 4000
_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_AS_BITS = {each.safetensors: each for each in ELEMENT_TYPES.values() if each.as_bits}
_CODES = {np.dtype(text): code for code, text in _NAMES.items() if code not in _AS_BITS}
_NOT_FINITE = ("nan", "inf", "-inf")

Leaf = tuple[str, npt.NDArray[Any]]
"""The safetensors name of an element type, and an array with elements of that size."""


def encode_tree(value: object, where: str = "payload") -> Iterator[bytes]:
    """Return the pieces of a file that contains a tree, which messages call `where`.

    Raises InvalidTypeError or InvalidInputError for values that cannot be stored, before the first
    piece is yielded.
    """
    leaves: dict[str, Leaf] = {}
    skeleton = _skeleton(value, leaves, where, 0)
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
            f"a payload without its tensors takes {len(text)} bytes; at most {_MAX_HEADER}: "
            "give large values as arrays or bytes"
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

    Each tensor is read into a new array. The `allowance` limits the rest of the tree. Raises
    FormatError; `name` is the file's name, for messages.
    """
    length = int.from_bytes(_exactly(stream, min(8, size), name).tobytes(), "little")
    if size < 8 or length > size - 8:
        raise FormatError(f"{name} is not a tree: its header does not fit into {size} bytes")
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
        raise FormatError(f"{name} has {data_bytes} bytes of tensors, but its header names {end}")
    return _assemble(skeleton, leaves, name, 0)


def _exactly(stream: RawIOBase | BufferedIOBase, nbytes: int, name: str) -> npt.NDArray[np.uint8]:
    """Return the next bytes in a new array; raises FormatError if the stream ends."""
    data = np.empty(nbytes, np.uint8)
    filled = 0
    while filled < nbytes:
        count = stream.readinto(data[filled:].data)
        if not count:
            raise FormatError(f"{name} ends before the last byte that its header names")
        filled += count
    return data


def _tensor(
    entry: Section, start: int, data_bytes: int
) -> tuple[str, np.dtype[Any], list[int], int]:
    """Parse the entry of a tensor that starts at `start`; return it and its end."""
    entry.only({"dtype", "shape", "data_offsets"})
    code, shape, span = entry.text("dtype"), entry.items("shape"), entry.items("data_offsets")
    if code not in _NAMES:
        raise FormatError(f"{entry.name}: not an element type: {code[:80]!r}")
    if any(type(size) is not int or size < 0 for size in [*shape, *span]):
        raise FormatError(f"{entry.name}: sizes and offsets must be non-negative integers")
    dtype = np.dtype(_NAMES[code])
    stop = start + math.prod(shape) * dtype.itemsize
    if len(shape) > _MAX_DIMS or span != [start, stop] or stop > data_bytes:
        raise FormatError(f"{entry.name}: the offsets do not match the shape of the tensor")
    return code, dtype, shape, stop


def _array(
    values: npt.NDArray[np.uint8], code: str, dtype: np.dtype[Any], shape: list[int], name: str
) -> npt.NDArray[Any]:
    if code == "BOOL" and values.max(initial=0) > 1:
        raise FormatError(f"{name}: a boolean must be 0 or 1")
    try:
        return values.view(dtype).reshape(shape)
    except (ValueError, OverflowError):  # no elements, but a dimension that no array can have
        raise FormatError(f"{name}: no array can have this shape") from None


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
            f"{where[:80]}…: a payload has at most {_MAX_DEPTH} levels; does it contain itself?"
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
    raise InvalidTypeError(f"{where}: a key of a payload must be a str or an int, not {key!r:.80}")


def _leaf(value: Any, where: str) -> Leaf:
    if isinstance(value, imported_class("torch", "Tensor")):
        value = value.detach().cpu().contiguous()
        for code, element in _AS_BITS.items():
            if value.dtype == element.torch_dtype():
                return code, element.from_torch(value)
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        check_unmasked(value, where)
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype in _CODES and array.ndim <= _MAX_DIMS:
            return _CODES[array.dtype], array
        raise InvalidTypeError(f"{where}: arrays of {array.dtype} cannot be stored")
    raise InvalidTypeError(
        f"{where} cannot be stored, of type {type(value).__name__}; a payload is bytes, a Path, or "
        "dicts and lists of tensors, arrays, numbers, strings, booleans and None"
    )


def _assemble(node: Any, leaves: Mapping[str, Any], name: str, depth: int) -> Any:
    """Return the value that a skeleton represents."""
    if node is None or type(node) in (bool, str, int, float):
        return node
    if type(node) is not dict or len(node) != 1 or depth > _MAX_DEPTH:
        raise FormatError(f"{name} does not contain a tree")
    ((tag, content),) = node.items()
    if tag == "tensor" and type(content) is str and content in leaves:
        return leaves[content]
    if tag == "float" and content in _NOT_FINITE:
        return float(content)
    if tag == "dict" and type(content) is list:
        entries = {}
        for pair in content:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) not in (str, int):
                raise FormatError(f"{name}: an item of a dict must be a key and a value")
            entries[pair[0]] = _assemble(pair[1], leaves, name, depth + 1)
        if len(entries) != len(content):
            raise FormatError(f"{name}: a key occurs twice")
        return entries
    if tag in ("list", "tuple") and type(content) is list:
        parts = [_assemble(item, leaves, name, depth + 1) for item in content]
        return tuple(parts) if tag == "tuple" else parts
    raise FormatError(f"{name} does not contain a tree: {tag[:80]!r}")


_CHUNK = 8 << 20
_VOUCHED = 64
"""Plausible bytes of a file per allocated byte: file systems compress, and copies skip zeros."""


class Payloads(dict[str, "Payload"]):
    """The values of a version by name; another name raises UnknownNameError."""

    def __missing__(self, name: object) -> Payload:
        names = ", ".join(self) or "none"
        raise UnknownNameError(f"the version has no payload {name!r}; it has {names}")


class Payload:
    """One committed value, read on demand."""

    def __init__(self, directory: _io.Directory, info: PayloadInfo, *, hold: bool = False) -> None:
        """Refer to a payload file of an open store.

        With `hold` the file is opened now, and stays readable after its name was removed.
        """
        self._directory = directory
        self._info = info
        self._held = self._open() if hold else None

    def __repr__(self) -> str:
        return f"Payload({self.kind}, {format_bytes(self.nbytes)})"

    @property
    def kind(self) -> str:
        """How the value was given, one of "bytes", "file" and "tree"."""
        return self._info.kind

    @property
    def nbytes(self) -> int:
        """Size of the value's file in bytes."""
        return self._info.size

    def read(self, *, memory: Size = DEFAULT_MEMORY) -> bytes:
        """Return the bytes of the value's file after verifying its checksum.

        Raises FormatError for a file that consists mostly of holes and exceeds `memory` bytes.
        """
        self._check_holes(memory)
        data = BytesIO()
        for chunk in self.chunks():
            data.write(chunk)
        return data.getvalue()  # not a copy

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Copy the value's file to `path`, which appears complete or not at all."""
        with _io.publish(path, force=force) as temporary, open(temporary, "xb") as target:
            for chunk in self.chunks():
                target.write(chunk)

    def verify(self) -> None:
        """Raise CorruptStoreError if the file is missing or differs from what was committed."""
        for _ in self.chunks():
            pass

    def tree(self, *, memory: Size = DEFAULT_MEMORY) -> Any:
        """Return a committed tree with its tensors as new NumPy arrays (bfloat16 as float32).

        Raises FormatError if the tree without its tensors needs more than `memory` bytes.
        """

        def array_of(array: npt.NDArray[Any], code: str) -> npt.NDArray[Any]:
            return _AS_BITS[code].decode(array) if code in _AS_BITS else array

        return self._decode(array_of, memory)

    def state_dict(self, *, memory: Size = DEFAULT_MEMORY) -> Any:
        """Return a committed tree with its tensors as torch tensors on the CPU.

        Raises FormatError like `tree`.
        """
        import torch

        def tensor(array: npt.NDArray[Any], code: str) -> Any:
            return _AS_BITS[code].to_torch(array) if code in _AS_BITS else torch.from_numpy(array)

        return self._decode(tensor, memory)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the value's file in pieces; a mismatch is raised after the last."""
        file = self._held or self._open()
        found = 0
        size = file.size
        for offset in range(0, size, _CHUNK):
            chunk = file.read(_CHUNK, offset)
            found = crc32c(chunk, found)
            yield chunk
        if (size, found) != (self._info.size, self._info.crc32c):
            raise CorruptStoreError(
                f"{file.path} does not match its size and checksum; open an older "
                f"version, {FILE_CURE}"
            )

    def close(self) -> None:
        """Close the held file, if any."""
        if self._held is not None:
            self._held.close()

    def _open(self) -> _io.File:
        name = self._info.name
        try:
            return self._directory.open_file(name)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{self._directory.join(name)} is missing; open an older version, {FILE_CURE}"
            ) from None

    def _check_holes(self, memory: Size) -> None:
        """Reject a file that consists mostly of holes and exceeds `memory` bytes.

        Allocated bytes had to be written, but creating holes costs an attacker nothing.
        """
        file = self._held or self._open()
        size = min(file.size, self._info.size)
        Allowance(file.path, memory).check(size - _VOUCHED * file.written, "a file of holes")

    def _decode(self, make: Callable[[npt.NDArray[Any], str], Any], memory: Size) -> Any:
        if self.kind != "tree":
            raise InvalidTypeError(f"the payload is {self.kind}, not a tree; use read() or save()")
        self._check_holes(memory)
        name = self._directory.join(self._info.name)
        stream = _Pieces(self.chunks())
        try:
            value = decode_tree(stream, self.nbytes, name, make, Allowance(name, memory))
        except FormatError:
            stream.drain()  # a damaged file is not a forged one
            raise
        stream.drain()
        return value


class _Pieces(RawIOBase):
    """The pieces of a file as a stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._piece:
            self._piece = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._piece))
        buffer[:count] = self._piece[:count]
        self._piece = self._piece[count:]
        return count

    def drain(self) -> None:
        """Read the rest; raises the errors that the pieces raise at their end."""
        for _ in self._pieces:
            pass


class Encoded(NamedTuple):
    """A value as the bytes of its file, for example from another store."""

    kind: str
    chunks: Iterable[bytes]


def write_payload(
    directory: _io.Directory, name: str, value: object, where: str = "payload"
) -> PayloadInfo:
    """Write a value to a new file and make it durable, except for its name.

    Messages call it `where`.

    Raises InvalidTypeError for values that cannot be stored, before anything is written.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _write(directory, name, "bytes", [bytes(value)])
    if isinstance(value, Encoded):
        return _write(directory, name, value.kind, value.chunks)
    if isinstance(value, os.PathLike):
        return _write(directory, name, "file", _file_chunks(Path(value)))
    return _write(directory, name, "tree", encode_tree(value, where))


def write_payloads(
    directory: _io.Directory, seq: int, payload: Mapping[str, object]
) -> dict[str, PayloadInfo]:
    """Write the values of a commit durably, including names; after an error none remains."""
    files: dict[str, PayloadInfo] = {}
    try:
        for name, value in payload.items():
            files[name] = write_payload(
                directory, unique_name("payload-", seq), value, f"payload[{name!r}]"
            )
        if files:
            directory.sync()
    except BaseException:
        remove_payloads(directory, files)
        raise
    return files


def remove_payloads(directory: _io.Directory, files: Mapping[str, PayloadInfo]) -> None:
    """Remove the values of a failed commit."""
    for info in files.values():
        directory.unlink(info.name)


def copy_payload(value: Payload, directory: _io.Directory, name: str) -> PayloadInfo:
    """Copy a committed value to a new, durable file of another store, verifying it."""
    return _write(directory, name, value.kind, value.chunks())


def _write(directory: _io.Directory, name: str, kind: str, chunks: Iterable[bytes]) -> PayloadInfo:
    size = found = 0
    file = directory.create(name)
    try:
        with file:
            for chunk in chunks:
                file.write(chunk, size)
                size += len(chunk)
                found = crc32c(chunk, found)
            file.sync()
    except BaseException:
        directory.unlink(name)
        raise
    return PayloadInfo(name, kind, size, found)


def _file_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a regular file up to its current size, even if it grows."""
    with _source(path) as source:
        size = source.size
        for offset in range(0, size, _CHUNK):
            chunk = source.read(min(_CHUNK, size - offset), offset)
            if len(chunk) < min(_CHUNK, size - offset):
                raise InvalidInputError(f"the payload {path} was truncated while it was copied")
            yield chunk


def _source(path: Path) -> _io.File:
    """Open a file to copy without blocking on a FIFO. Raises InvalidInputError."""
    try:
        real = path.resolve(strict=True)
        with _io.Directory.open(real.parent) as parent:
            return parent.open_file(real.name)
    except FormatError:
        raise InvalidInputError(f"the payload {path} is not a regular file") from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link that points to itself"
        raise InvalidInputError(f"cannot read the payload {path}: {reason}") from None
