"""Payload: what a trainer commits together with the tables, without pickle.

A value is bytes, a `Path` whose file is copied, or a tree of dicts and lists with tensors, arrays
and JSON scalars (see `tree`). A str is a scalar, never the name of a file: a text that comes from
elsewhere must not choose which file is copied into a store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tierstore import io
from tierstore.allowance import DEFAULT_MEMORY, Allowance
from tierstore.bfloat16 import to_float32
from tierstore.budget import Size
from tierstore.checksum import crc32c
from tierstore.errors import (
    FILE_CURE,
    CorruptStoreError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
)
from tierstore.manifest import PayloadInfo, unique_name
from tierstore.store.tree import decode_tree, encode_tree

__all__ = ["Payload", "copy_payload", "remove_payloads", "write_payload", "write_payloads"]

_CHUNK = 8 << 20
_VOUCHED = 64
"""Bytes of a file that a byte on the disk vouches for: file systems compress, and copies of files
leave out zeros."""


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

    def read(self, *, memory: Size = DEFAULT_MEMORY) -> bytes:
        """Return the bytes of the value's file, checked against its checksum.

        Raises FormatError for a file that is nearly all holes and larger than `memory` bytes.
        """
        self._check_holes(memory)
        data = BytesIO()
        for chunk in self.chunks():
            data.write(chunk)
        return data.getvalue()  # not a copy

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the value's file to `path`, which appears complete or not at all."""
        with io.publish(path, force=force) as temporary, open(temporary, "xb") as target:
            for chunk in self.chunks():
                target.write(chunk)

    def verify(self) -> None:
        """Raise CorruptStoreError if the file is missing, or not the one that was committed."""
        for _ in self.chunks():
            pass

    def tree(self, *, memory: Size = DEFAULT_MEMORY) -> Any:
        """Return a committed tree, its tensors as fresh NumPy arrays (bfloat16 as float32).

        Raises FormatError where the tree without its tensors takes more than `memory` bytes.
        """

        def array_of(array: npt.NDArray[Any], code: str) -> npt.NDArray[Any]:
            return to_float32(array) if code == "BF16" else array

        return self._decode(array_of, memory)

    def state_dict(self, *, memory: Size = DEFAULT_MEMORY) -> Any:
        """Return a committed tree with its tensors as torch tensors on the CPU.

        Raises FormatError as `tree` does.
        """
        import torch

        def tensor(array: npt.NDArray[Any], code: str) -> Any:
            made = torch.from_numpy(array)
            return made.view(torch.bfloat16) if code == "BF16" else made

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

    def _check_holes(self, memory: Size) -> None:
        """Refuse a file that is nearly all holes and takes more than `memory` bytes.

        Bytes on the disk had to be written, but holes cost nothing to make.
        """
        file = self._held or self._open()
        size = min(file.size, self._info.size)
        Allowance(file.path, memory).check(size - _VOUCHED * file.written, "a file of holes")

    def _decode(self, make: Callable[[npt.NDArray[Any], str], Any], memory: Size) -> Any:
        if self.kind != "tree":
            raise InvalidTypeError(f"this payload is {self.kind}, not a tree; use read() or save()")
        self._check_holes(memory)
        name = self._directory.join(self._info.name)
        stream = _Pieces(self.chunks())
        try:
            found = decode_tree(stream, self.nbytes, name, make, Allowance(name, memory))
        except FormatError:
            stream.drain()  # a file that is damaged is not one that was made up
            raise
        stream.drain()
        return found


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
        """Read the rest; raises what the pieces raise after the last."""
        for _ in self._pieces:
            pass


def write_payload(directory: io.Directory, name: str, value: object) -> PayloadInfo:
    """Write a value to a new file and make it durable; its name is not, until the directory is.

    Raises InvalidTypeError, before anything is written, for what cannot be stored.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return _write(directory, name, "bytes", [bytes(value)])
    if isinstance(value, os.PathLike):
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
    """Yield the bytes of a regular file, as many as it has now, whether it grows or not."""
    with _source(path) as source:
        size = source.size
        for offset in range(0, size, _CHUNK):
            chunk = source.read(min(_CHUNK, size - offset), offset)
            if len(chunk) < min(_CHUNK, size - offset):
                raise InvalidInputError(f"the payload {path} was cut while it was copied")
            yield chunk


def _source(path: Path) -> io.File:
    """Open a file to be copied; a FIFO does not block. Raises InvalidInputError."""
    try:
        real = path.resolve(strict=True)
        with io.Directory.open(real.parent) as parent:
            return parent.open_file(real.name)
    except FormatError:
        raise InvalidInputError(f"the payload {path} is not a regular file") from None
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a link that leads to itself"
        raise InvalidInputError(f"cannot read the payload {path}: {reason}") from None
