"""Payload: what a trainer commits together with the tables, without pickle.

A value is bytes, the path of a file, or a tree of dicts and lists with tensors, arrays and JSON
scalars. A tree is stored as a safetensors file: the tensors, and the tree with a reference in place
of each as metadata. Format: safetensors, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import io
from tierstore.bfloat16 import to_float32
from tierstore.checksum import crc32c
from tierstore.errors import CorruptStoreError, InvalidInputError, InvalidTypeError
from tierstore.manifest import PayloadInfo, unique_name

__all__ = ["Payload", "copy_payload", "remove_payloads", "write_payload", "write_payloads"]

_CHUNK = 8 << 20
_MAX_HEADER = 100 << 20
_NAMES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
_CODES = {np.dtype(text): code for code, text in _NAMES.items() if code != "BF16"}


class Payload:
    """One committed value; nothing is read before it is asked for."""

    def __init__(self, directory: io.Directory, info: PayloadInfo) -> None:
        """Refer to a payload file of an open store."""
        self._directory = directory
        self._info = info

    @property
    def kind(self) -> str:
        """How the value was given: "bytes", "file" or "tree"."""
        return self._info.kind

    @property
    def nbytes(self) -> int:
        """Bytes of the value's file."""
        return self._info.size

    def read(self) -> bytes:
        """Return the bytes of the value's file, checked against its checksum."""
        data = bytearray()
        for chunk in self.chunks():
            data += chunk
        return bytes(data)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the value's file to `path`, which appears complete or not at all."""
        with io.publish(path, force=force) as temporary, open(temporary, "xb") as target:
            for chunk in self.chunks():
                target.write(chunk)

    def verify(self) -> None:
        """Raise CorruptStoreError if the file is missing, or not the one that was committed."""
        for _ in self.chunks():
            pass

    def tree(self) -> Any:
        """Return a committed tree, its tensors as fresh NumPy arrays (bfloat16 as float32)."""
        return self._decode(lambda array, code: to_float32(array) if code == "BF16" else array)

    def state_dict(self) -> Any:
        """Return a committed tree with its tensors as torch tensors on the CPU."""
        import torch

        def tensor(array: npt.NDArray[Any], code: str) -> Any:
            made = torch.from_numpy(array)
            return made.view(torch.bfloat16) if code == "BF16" else made

        return self._decode(tensor)

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the value's file in pieces; a mismatch is raised after the last."""
        name = self._info.name
        try:
            file = self._directory.open_file(name)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{self._directory.join(name)} is missing; restore it from a copy, "
                "or open an older version"
            ) from None
        with file:
            found = 0
            size = file.size
            for offset in range(0, size, _CHUNK):
                chunk = file.read(_CHUNK, offset)
                found = crc32c(chunk, found)
                yield chunk
            if (size, found) != (self._info.size, self._info.crc32c):
                raise CorruptStoreError(
                    f"{file.path} does not match its size and checksum; restore it from a copy, "
                    "or open an older version"
                )

    def _decode(self, make: Any) -> Any:
        if self.kind != "tree":
            raise InvalidTypeError(f"this payload is {self.kind}, not a tree; use read() or save()")
        data = self.read()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        skeleton = json.loads(header.pop("__metadata__")["tree"])
        leaves = {}
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            raw = np.frombuffer(data, np.uint8, stop - start, 8 + length + start)
            array = raw.view(_NAMES[entry["dtype"]]).reshape(entry["shape"]).copy()
            leaves[name] = make(array, entry["dtype"])
        return _assemble(skeleton, leaves)


def write_payload(directory: io.Directory, name: str, value: object) -> PayloadInfo:
    """Write a value to a new file and make it durable; its name is not, until the directory is.

    Raises InvalidTypeError, before anything is written, for what cannot be stored.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _write(directory, name, "bytes", [bytes(value)])
    if isinstance(value, str | os.PathLike):
        return _write(directory, name, "file", _file_chunks(Path(value)))
    leaves: dict[str, tuple[str, npt.NDArray[Any]]] = {}
    skeleton = _skeleton(value, leaves, "payload")
    return _write(directory, name, "tree", _safetensors(json.dumps(skeleton), leaves))


def write_payloads(
    directory: io.Directory, seq: int, payload: Mapping[str, object]
) -> dict[str, PayloadInfo]:
    """Write the values of a commit, names included, durably; after an error none is left."""
    files: dict[str, PayloadInfo] = {}
    try:
        for name, value in payload.items():
            files[name] = write_payload(directory, unique_name("payload-", seq), value)
        if files:
            directory.sync()
    except BaseException:
        remove_payloads(directory, files)
        raise
    return files


def remove_payloads(directory: io.Directory, files: Mapping[str, PayloadInfo]) -> None:
    """Remove the values of a commit that did not take place."""
    for info in files.values():
        directory.unlink(info.name)


def copy_payload(value: Payload, directory: io.Directory, name: str) -> PayloadInfo:
    """Copy a committed value to a new, durable file of another store, checking it on the way."""
    return _write(directory, name, value.kind, value.chunks())


def _write(directory: io.Directory, name: str, kind: str, chunks: Iterable[bytes]) -> PayloadInfo:
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
    try:
        source = path.open("rb")
    except OSError as error:
        raise InvalidInputError(f"cannot read the payload {path}: {error.strerror}") from None
    with source:
        while chunk := source.read(_CHUNK):
            yield chunk


def _safetensors(tree: str, leaves: Mapping[str, tuple[str, npt.NDArray[Any]]]) -> Iterator[bytes]:
    header: dict[str, Any] = {"__metadata__": {"tree": tree}}
    offset = 0
    for name, (code, array) in leaves.items():
        span = [offset, offset + array.nbytes]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": span}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, array in leaves.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def _skeleton(value: object, leaves: dict[str, tuple[str, npt.NDArray[Any]]], where: str) -> Any:
    """Return `value` as JSON with tagged containers, its arrays moved to `leaves`."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Mapping):
        items = [
            [_key(key, where), _skeleton(item, leaves, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {"dict": items}
    if isinstance(value, list | tuple):
        parts = [_skeleton(item, leaves, f"{where}[{at}]") for at, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    name = f"{len(leaves)}"
    leaves[name] = _leaf(value, where)
    return {"tensor": name}


def _key(key: object, where: str) -> str | int:
    if type(key) not in (str, int):
        raise InvalidTypeError(f"{where}: a key of a payload is a text or an int, not {key!r}")
    return key  # type: ignore[return-value]


def _leaf(value: Any, where: str) -> tuple[str, npt.NDArray[Any]]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if value.dtype == torch.bfloat16:
            return "BF16", value.view(torch.uint16).numpy()
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype in _CODES:
            return _CODES[array.dtype], array
        raise InvalidTypeError(f"{where}: arrays of {array.dtype} cannot be stored")
    raise InvalidTypeError(
        f"{where}: a {type(value).__name__} cannot be stored; a payload is bytes, a path, or dicts "
        "and lists of tensors, arrays, numbers, texts, booleans and None"
    )


def _assemble(node: Any, leaves: Mapping[str, Any]) -> Any:
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    if tag == "tensor":
        return leaves[content]
    if tag == "float":
        return float(content)
    if tag == "dict":
        return {key: _assemble(item, leaves) for key, item in content}
    parts = [_assemble(item, leaves) for item in content]
    return tuple(parts) if tag == "tuple" else parts
