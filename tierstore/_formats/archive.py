"""Zip archives whose directory is bounded before it is read: .npz and .pt are such."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import IO

from tierstore._formats.files import InputFile, parsing
from tierstore.errors import FormatError

__all__ = ["ERRORS", "Archive"]

ERRORS = (
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
"""What zipfile raises about archives that are damaged, encrypted or too new."""

_DIRECTORY_COST = 16
"""Bytes of objects that zipfile makes of one byte of a directory, at most."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Archive:
    """The entries of a zip archive, by name.

    Attributes:
        entries: what the directory says of each; of a name that occurs twice the last.
    """

    def __init__(self, file: InputFile, what: str) -> None:
        """Read the directory of `file`, which the caller closes; `what` it is, for messages."""
        self.file = file
        self._what = what
        stream = _DirectoryStream(file)
        with parsing(file.path, what, *ERRORS):
            self._zip = zipfile.ZipFile(stream)
        stream.in_directory = False
        self.entries = {entry.filename: entry for entry in self._zip.infolist()}

    def open(self, name: str) -> IO[bytes]:
        """Open an entry as a stream, which may raise ERRORS."""
        with parsing(self.file.path, self._what, *ERRORS):
            return self._zip.open(self.entries[name])

    def start(self, name: str) -> int:
        """Return where the bytes of an entry lie in the file, which must not be packed.

        Raises FormatError if they are, or do not lie within the file.
        """
        entry = self.entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise FormatError(f"{self.file.path}: {name!r} is packed; save it uncompressed")
        header = self.file.read_at(entry.header_offset, _LOCAL_HEADER.size)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start: int = entry.header_offset + len(header) + name_bytes + extra_bytes
        if magic != b"PK\3\4" or start + entry.file_size > self.file.size:
            raise FormatError(f"{self.file.path}: {name!r} does not lie within the file")
        return start


class _DirectoryStream(io.BufferedReader):
    """A stream that asks before the directory is read, which zipfile does in one piece."""

    def __init__(self, file: InputFile) -> None:
        super().__init__(file.raw())
        self._allowance = file.allowance
        self.in_directory = True

    def read(self, size: int | None = -1, /) -> bytes:
        if self.in_directory and size is not None and size > 0:
            self._allowance.take(_DIRECTORY_COST * size, "its directory")
        return super().read(size)
