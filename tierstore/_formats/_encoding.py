"""Text files as UTF-8: unpacked, and without a byte order mark, as one stream; and packed ones."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib.util
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tierstore._formats.files import (
    FREE_BYTES,
    MAX_RATIO,
    Archive,
    InputFile,
    in_archive,
    open_input,
    parsing,
)
from tierstore.errors import FormatError, InvalidInputError, MissingExtraError

UNPACKING_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""Errors that unpackers raise for damaged files."""

_BUFFER = 1 << 20
_WIDE = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_CR, _LF = b"\r", b"\n"


def _pyarrow() -> Any:
    if importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError(".zst files need pyarrow: pip install 'tierstore[parquet]'")
    import pyarrow

    return pyarrow


def _unzstd(file: InputFile) -> Any:
    pyarrow = _pyarrow()
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file.stream(), "r"), "zstd")


class _Xz(io.RawIOBase):
    """The content of an .xz file; its dictionary may use the memory left for the file."""

    def __init__(self, file: InputFile) -> None:
        self._stream = file.stream()
        self._memory = max(1, file.allowance.left)
        self._decoder = self._new()

    def _new(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=self._memory)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            given = b""
            if self._decoder.eof:  # another stream, or zeros, may follow
                given = (self._decoder.unused_data or self._stream.read(_BUFFER)).lstrip(b"\0")
                if not given:
                    return 0
                self._decoder = self._new()
            elif self._decoder.needs_input:
                given = self._stream.read(_BUFFER)
                if not given:
                    raise EOFError("the file ends before the end of its stream")
            data = self._decoder.decompress(given, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _xz(stream: IO[bytes]) -> Any:
    return lzma.LZMAFile(stream, "w")


def _unzip(file: InputFile) -> Any:
    archive = Archive(file, "zip file")
    return archive.open(_member(file.path, archive) if file.member is None else file.member)


def _member(path: Path, archive: Archive) -> str:
    """Return the name of the only file in an archive, without those that macOS adds."""
    names = [
        name
        for name in archive.entries
        if not name.endswith("/") and not name.startswith("__MACOSX/")
    ]
    if len(names) != 1:
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        raise FormatError(
            f"{path}: an archive of {len(names)} files{f' ({shown})' if names else ''}, of which "
            f"one is to be named, as in {path}:{names[0] if names else 'FILE'}"
        )
    return names[0]


def packed_name(file: InputFile) -> str:
    """Return the name of the only file in a zip archive; raises FormatError."""
    return Path(_member(file.path, Archive(file, "zip file"))).name


def _zstd(stream: IO[bytes]) -> Any:
    pyarrow = _pyarrow()
    return pyarrow.CompressedOutputStream(pyarrow.PythonFile(stream, "w"), "zstd")


@dataclass(frozen=True)
class _Packing:
    """Functions that unpack a file, and pack into a stream that stays open at the end."""

    unpack: Callable[[InputFile], Any]
    pack: Callable[[IO[bytes]], Any] | None = None


_PACKINGS = {
    ".bz2": _Packing(
        lambda file: bz2.BZ2File(file.stream()), lambda stream: bz2.BZ2File(stream, "w")
    ),
    ".gz": _Packing(
        lambda file: gzip.GzipFile(fileobj=file.stream()),
        # The level of the program gzip. Without a time, equal rows make equal files.
        lambda stream: gzip.GzipFile("", "wb", 6, stream, mtime=0),
    ),
    ".xz": _Packing(_Xz, _xz),
    ".zip": _Packing(_unzip),
    ".zst": _Packing(_unzstd, _zstd),
}
"""By the suffix after that of the format."""


def is_packed(path: Path) -> bool:
    """Whether the last suffix is that of a compressed file, or the path is of a file in one."""
    return path.suffix.lower() in _PACKINGS or in_archive(path) is not None


class PackedFile:
    """A place that a format writes to as to a path: it opens it once, and writes are packed.

    `place` is a path or another such place, `name` ends in the suffix of the packing.
    """

    def __init__(self, place: Any, name: Path) -> None:
        pack = _PACKINGS[name.suffix.lower()].pack
        if pack is None:
            raise InvalidInputError(
                f"{name}: {name.suffix} files are read, not written; pack text with .gz, .bz2, .xz "
                "or .zst"
            )
        self._place, self._pack = place, pack

    @contextmanager
    def open(self, mode: str) -> Iterator[Any]:
        """Open the file, as a stream of bytes."""
        with self._place.open(mode) as file, self._pack(file) as packed:
            yield packed


class _Utf8(io.RawIOBase):
    """UTF-8 with line feeds at the ends of lines, made from a stream of text.

    Attributes:
        mark: bytes of the mark before UTF-8.
        is_plain: whether the stream is such text after them.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path = path
        self._stream = stream
        start = stream.read(_BUFFER) or b""
        mark = start[:2]
        self._wide = codecs.getincrementaldecoder(_WIDE[mark])() if mark in _WIDE else None
        if self._wide is None and b"\0" in start[:64]:
            raise FormatError(
                f"{path}: no UTF-8: it holds zero bytes; UTF-16 needs a byte order mark"
            )
        self.mark = len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0
        text = self._utf8(start[2:]) if self._wide else start[self.mark :]
        # Lines of old Macs end with a carriage return alone.
        self._returns = _CR in text and _LF not in text
        self.is_plain = self._wide is None and not self._returns
        self._rest = text

    def _utf8(self, data: bytes) -> bytes:
        if self._wide is None:
            return data
        try:
            return self._wide.decode(data, final=not data).encode()
        except UnicodeError as error:
            raise FormatError(f"{self._path}: not UTF-16: {error!s:.100}") from None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            data = self._stream.read(_BUFFER) or b""
            self._rest = self._utf8(data)
            if not data:
                break
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part.replace(_CR, _LF) if self._returns else part
        return len(part)


def text_stream(file: InputFile) -> io.BufferedReader:
    """Return a file as a stream of UTF-8 from its start, unpacked according to its last suffix.

    UTF-16 has a byte order mark. Unpacked text is held in pieces of a MiB. The stream raises
    FormatError, or UNPACKING_ERRORS of a damaged packed file.
    """
    text = _Utf8(file.path, _unpacked(file))
    if is_packed(file.path) or not text.is_plain:
        return io.BufferedReader(text, _BUFFER)
    stream = file.stream()
    stream.seek(text.mark)
    return stream


def _unpacked(file: InputFile) -> Any:
    suffix = file.path.suffix.lower() if file.member is None else ".zip"
    return _PACKINGS[suffix].unpack(file) if suffix in _PACKINGS else file.stream()


def unpack(packed: Path, path: Path) -> None:
    """Write what a packed file holds to a new one; raises FormatError for more than is trained."""
    with (
        open_input(packed) as file,
        parsing(packed, "packed file", *UNPACKING_ERRORS),
        path.open("xb") as copy,
    ):
        stream, most = _unpacked(file), FREE_BYTES + MAX_RATIO * file.size
        while data := stream.read(_BUFFER):
            copy.write(data)
            if copy.tell() > most:
                raise FormatError(
                    f"{packed}: unpacks to more than {MAX_RATIO} times its size; if you trust it, "
                    "unpack it first"
                )
