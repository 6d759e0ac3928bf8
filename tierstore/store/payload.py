"""Payload: what a trainer commits together with the tables, without pickle.

A value is bytes, the path of a file, or a tree of dicts and lists with tensors, arrays and JSON
scalars (see `tree`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tierstore import io
from tierstore.bfloat16 import to_float32
from tierstore.checksum import crc32c
from tierstore.errors import FILE_CURE, CorruptStoreError, InvalidInputError, InvalidTypeError
from tierstore.manifest import PayloadInfo, unique_name
from tierstore.store.tree import decode_tree, encode_tree

__all__ = ["Payload", "copy_payload", "remove_payloads", "write_payload", "write_payloads"]

_CHUNK = 8 << 20


class Payload:
    """One committed value; nothing is read before it is asked for."""

    def __init__(self, directory: io.Directory, info: PayloadInfo, *, hold: bool = False) -> None:
        """Refer to a payload file of an open store.

        With `hold` the file is opened now, and can be read when its name has been swept away.
        """
        self._directory = directory
        self._info = info
        self._held = self._open() if hold else None

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
        """Close the file that is held, if any."""
        if self._held is not None:
            self._held.close()

    def _open(self) -> io.File:
        name = self._info.name
        try:
            return self._directory.open_file(name)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{self._directory.join(name)} is missing; open an older version, {FILE_CURE}"
            ) from None

    def _decode(self, make: Callable[[npt.NDArray[Any], str], Any]) -> Any:
        if self.kind != "tree":
            raise InvalidTypeError(f"this payload is {self.kind}, not a tree; use read() or save()")
        return decode_tree(self.read(), self._directory.join(self._info.name), make)


def write_payload(directory: io.Directory, name: str, value: object) -> PayloadInfo:
    """Write a value to a new file and make it durable; its name is not, until the directory is.

    Raises InvalidTypeError, before anything is written, for what cannot be stored.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _write(directory, name, "bytes", [bytes(value)])
    if isinstance(value, str | os.PathLike):
        return _write(directory, name, "file", _file_chunks(Path(value)))
    return _write(directory, name, "tree", encode_tree(value))


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
