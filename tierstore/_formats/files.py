"""Untrusted files and zip archives, opened for reading."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore._closing import Closing
from tierstore._io import Directory, File, explained
from tierstore.budget import DEFAULT_MEMORY, Allowance, Size
from tierstore.errors import FormatError, MissingFileError, TierStoreError

BUFFER_BYTES = 1 << 20
FREE_BYTES = 64 << 20
"""Bytes of rows that any file may claim: they harm no disk."""
MAX_RATIO = 200
"""Bytes of rows beyond these that a byte of a file may stand for; trained rows hardly compress."""


class InputFile(Closing):
    """A regular file of a fixed size, read at positions or as independent streams.

    Attributes:
        path: its name in messages.
        size: size of the file when it was opened.
        allowance: memory limit for the contents of the file.
        file: the open file.
        member: the file in it, if it is an archive of which one is to be read.
    """

    member: str | None = None

    def __init__(self, file: File, path: Path, memory: Size) -> None:
        """Take ownership of the open `file`."""
        self.file = file
        self.path = path
        self.size = file.size
        self.allowance = Allowance(path, memory)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes from `offset`; raises FormatError if the file ends."""
        data = self.file.read(nbytes, offset)
        if len(data) != nbytes:
            raise FormatError(
                f"{self.path}: truncated: expected {nbytes} bytes at {offset}, found {len(data)}"
            )
        return data

    def stream(self) -> io.BufferedReader:
        """Return a seekable stream from the start, with an independent position."""
        return io.BufferedReader(self.raw(), BUFFER_BYTES)

    def raw(self) -> io.RawIOBase:
        """Return a stream like `stream`, but unbuffered."""
        return _Position(self.file)

    @property
    def fd(self) -> int:
        """The descriptor of the file, for a process that reads it."""
        return self.file.fd

    def close(self) -> None:
        """Close the file and its streams."""
        self.file.close()


class _Position(io.RawIOBase):
    """An independent position in a shared file."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.read_some(buffer, self._position)
        self._position += count
        return count


def open_input(path: Path, memory: Size = DEFAULT_MEMORY) -> InputFile:
    """Open a file for reading, with a limit of `memory` bytes, following links.

    Of a path ZIP:MEMBER the archive is opened. Raises MissingFileError, FormatError if it is no
    regular file, StoreIOError if it cannot be opened. A FIFO does not block.
    """
    inside = in_archive(path)
    if inside is not None:
        file = open_input(inside[0], memory)
        file.path, file.member = path, inside[1]
        with unless_it_fails(file):
            if inside[1] not in (entries := Archive(file, "zip file").entries):
                raise MissingFileError(
                    f"{inside[0]}: no {inside[1]!r} in it, only {', '.join(list(entries)[:8])}",
                    filename=path,
                )
        return file
    try:
        with explained("open", str(path)):
            real = path.resolve(strict=True)
        with Directory.open(real.parent, list=False) as parent:
            return InputFile(parent.open_file(real.name), path, memory)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file", filename=path) from None
    except NotADirectoryError:
        raise FormatError(f"{path}: a component of this path is not a directory") from None
    except RuntimeError:
        raise FormatError(f"{path}: a link that points to itself") from None
    except FormatError:
        raise FormatError(f"{path}: not a regular file") from None


def in_archive(path: Path) -> tuple[Path, str] | None:
    """Return the archive and the name of a file in it, of a path ZIP:MEMBER; None of others."""
    archive, found, member = str(path).partition(f"{_ZIP}:")
    is_member = bool(found and member) and not path.exists() and Path(archive + _ZIP).is_file()
    return (Path(archive + _ZIP), member) if is_member else None


def by_numbers(name: str) -> list[Any]:
    """Return what sorts names by the value of the numbers in them: part-2 before part-10."""
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


_ZIP = ".zip"
_BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the blocks of the file system are."""


def taken_by(path: Path, enough: int) -> int:
    """Return the bytes that a file, or all below a directory, take on the disk, without holes.

    Counting may stop at `enough`. A file system that counts no blocks is believed its sizes.
    """
    if not path.is_dir():
        return _taken(path)
    taken = 0
    for parent, _, names in os.walk(path):
        for name in names:
            taken += _taken(Path(parent, name))
            if taken >= enough:
                return taken
    return taken


def _taken(path: Path) -> int:
    status = path.stat()
    on_disk = status.st_blocks * _BLOCK_BYTES
    if on_disk or not status.st_size:
        return min(status.st_size, on_disk)
    with open_input(path) as file:
        try:
            os.lseek(file.fd, 0, os.SEEK_DATA)
        except OSError as error:  # one hole; where holes are not known, all of a file is data
            return 0 if error.errno == errno.ENXIO else status.st_size
    return status.st_size


_PIECE_BYTES = 1 << 16


def write_sparsely(file: IO[bytes], block: npt.NDArray[Any]) -> None:
    """Write a C-contiguous block, with a hole for each piece of zeros if the file can have holes.

    A last hole becomes part of a file only in `end_sparsely`.
    """
    data = block.reshape(-1).view(np.uint8)
    if not isinstance(file, io.BufferedWriter):  # a stream to another place
        file.write(data.data)
        return
    for start in range(0, data.size, _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        if piece.any():
            file.write(piece.data)
        else:
            file.seek(piece.size, io.SEEK_CUR)


def end_sparsely(file: IO[bytes]) -> None:
    """End a file that `write_sparsely` wrote at its position."""
    if isinstance(file, io.BufferedWriter):
        file.truncate(file.tell())


class HeldScales:
    """The scales of a matrix, which follow it in the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def beside(self, file: IO[bytes]) -> Callable[..., object]:
        """Return what writes blocks to `file`, and holds their scales."""

        def write(_: int, block: npt.NDArray[Any], *scales: npt.NDArray[Any]) -> None:
            file.write(block.data)
            for each in scales:
                self._file.write(each.data)

        return write

    def copy_to(self, file: IO[bytes]) -> None:
        """Write the scales."""
        self._file.seek(0)
        shutil.copyfileobj(self._file, file)


@contextlib.contextmanager
def held_scales(name: str | None) -> Iterator[HeldScales]:
    """Yield a place for scales called `name`, in a temporary file; None if there are none."""
    with io.BytesIO() if name is None else tempfile.TemporaryFile() as file:
        yield HeldScales(file)


class _Closeable(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Closeable)


@contextlib.contextmanager
def unless_it_fails(file: _C) -> Iterator[_C]:
    """Yield `file`, and close it only if the body raises, so that the body may return it."""
    try:
        yield file
    except BaseException:
        file.close()
        raise


@contextlib.contextmanager
def parsing(path: Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of a parser into a FormatError; pass errors of this library unchanged."""
    try:
        yield
    except TierStoreError:
        raise
    except errors as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        reason = "".join(c if c.isprintable() else "?" for c in reason)
        raise FormatError(f"{path}: not a readable {what}: {reason}") from error


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of these names; raises ValueError if one stands twice: one would go."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:80]!r} stands twice in an object")
    return entries


def document(path: Path, text: bytes) -> Any:
    """Return what JSON in UTF-8 says; raises FormatError."""
    try:
        return json.loads(text, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        lines = "; of a value a line, name it .jsonl" if "Extra data" in str(error) else ""
        raise FormatError(f"{path}: not JSON: {error!s:.200}{lines}") from None


ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    KeyError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""Errors that zipfile raises for damaged, encrypted or unsupported archives."""

_DIRECTORY_COST = 16
"""Maximum bytes of objects that zipfile creates per byte of a directory."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Archive:
    """The entries of a zip archive by name; its directory is limited before it is read.

    Attributes:
        entries: the directory entries; the last one if a name occurs twice.
    """

    def __init__(self, file: InputFile, what: str) -> None:
        """Read the directory of `file`, which the caller closes; messages call it `what`."""
        self.file = file
        self._what = what
        stream = _DirectoryStream(file)
        with parsing(file.path, what, *ZIP_ERRORS):
            self._zip = zipfile.ZipFile(stream)
        stream.in_directory = False
        self.entries = {entry.filename: entry for entry in self._zip.infolist()}

    def open(self, name: str) -> IO[bytes]:
        """Open an entry as a stream, which may raise ZIP_ERRORS."""
        with parsing(self.file.path, self._what, *ZIP_ERRORS):
            return self._zip.open(self.entries[name])

    def start(self, name: str) -> int:
        """Return the offset of an uncompressed entry's bytes in the file.

        Raises FormatError if the entry is compressed, or not within the file.
        """
        entry = self.entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise FormatError(f"{self.file.path}: {name!r} is compressed; save it uncompressed")
        header = self.file.read_at(entry.header_offset, _LOCAL_HEADER.size)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start: int = entry.header_offset + len(header) + name_bytes + extra_bytes
        if magic != b"PK\3\4" or start + entry.file_size > self.file.size:
            raise FormatError(f"{self.file.path}: {name!r} is not within the file")
        return start


class _DirectoryStream(io.BufferedReader):
    """A stream that checks the limit before zipfile reads the directory in one piece."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file.raw())
        self._allowance = file.allowance
        self.in_directory = True

    def read(self, size: int | None = -1, /) -> bytes:
        if self.in_directory and size is not None and size > 0:
            self._allowance.take(_DIRECTORY_COST * size, "its directory")
        return super().read(size)
