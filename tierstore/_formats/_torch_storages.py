"""Finds the storages of tensors in a file of `torch.save`: a zip archive, or an older file.

Since PyTorch 1.6 a file is a zip archive with a pickle and an entry for each storage. Before, it is
five pickles one after another: torch's number for such files, a version, facts on the machine, what
was saved, and the names of the storages, which follow in this order.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import IO, Any, Literal

import numpy as np

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats._torch_pickle import read_pickle
from tierstore._formats.files import ZIP_ERRORS, Archive, InputFile, parsing
from tierstore.budget import Allowance
from tierstore.errors import FormatError

WHAT = ".pt file of tensors alone"
_PICKLE = "data.pkl"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of a file that is no zip archive: torch's number for such files."""
_LEGACY_VERSION = 1001
_PICKLE_COST = 8
"""Memory per byte of the pickle in addition to objects: the byte itself, and as text."""


class Storages(ABC):
    """The content of a file, and the bytes of the storages that tensors refer to.

    Attributes:
        file: the file.
        content: what was saved, with StoredTensors.
        objects: names of classes and functions whose results are left out.
        byte_order: of the elements.
    """

    file: InputFile
    content: Any
    objects: dict[str, None]
    byte_order: Literal["<", ">"]

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the bytes of a storage; raises FormatError if there is none of that name."""

    @abstractmethod
    def start(self, key: str) -> int:
        """Return the offset of a storage in the file."""

    def _missing(self, key: str) -> FormatError:
        return FormatError(f"{self.file.path}: the storage {key!r:.100} is missing")


def storages_of(file: InputFile) -> Storages:
    """Return the content of a file; raises FormatError for another kind of file or for code."""
    legacy = file.size > len(LEGACY) and file.read_at(0, len(LEGACY)) == LEGACY
    return _Legacy(file) if legacy else _Zip(Archive(file, WHAT))


class _Zip(Storages):
    def __init__(self, archive: Archive) -> None:
        self.file = archive.file
        self._archive = archive
        names = [name for name in archive.entries if name.rpartition("/")[2] == _PICKLE]
        if len(names) != 1:
            raise FormatError(f"{self.file.path}: not a {WHAT}: {len(names)} entries are {_PICKLE}")
        self._root = names[0].removesuffix(_PICKLE)
        order = f"{self._root}byteorder"
        little = order not in archive.entries or self._read(order, 16) == b"little"
        self.byte_order = "<" if little else ">"
        size = archive.entries[names[0]].file_size
        self.file.allowance.take(_PICKLE_COST * size, f"its pickle of {size} bytes")
        data = self._read(names[0], size)
        self.objects = {}
        self.content = read_pickle(data, self.file.path, self.file.allowance, objects=self.objects)

    def _read(self, name: str, limit: int) -> bytes:
        with self._archive.open(name) as stream, parsing(self.file.path, WHAT, *ZIP_ERRORS):
            data = stream.read(limit)
            stream.read(1)  # the end, where the checksum is verified
            return data

    def _entry(self, key: str) -> str:
        name = f"{self._root}data/{key}"
        if name not in self._archive.entries:
            raise self._missing(key)
        return name

    def size(self, key: str) -> int:
        return int(self._archive.entries[self._entry(key)].file_size)

    def start(self, key: str) -> int:
        return self._archive.start(self._entry(key))


class _Legacy(Storages):
    def __init__(self, file: InputFile) -> None:
        self.file = file
        stream = _Metered(file.stream(), file.allowance)
        known: dict[str, tuple[str, int]] = {}
        _, version, machine = (read_pickle(stream, file.path, file.allowance) for _ in range(3))
        if version != _LEGACY_VERSION or not isinstance(machine, dict):
            raise FormatError(
                f"{file.path}: version {version!r:.20} of the format before PyTorch 1.6 is "
                "unknown; load it with torch, and save it again"
            )
        self.byte_order = "<" if machine.get("little_endian", True) else ">"
        self.objects = {}
        self.content = read_pickle(stream, file.path, file.allowance, known, self.objects)
        keys = read_pickle(stream, file.path, file.allowance)
        self._places: dict[str, tuple[int, int]] = {}
        at = stream.tell()
        for key in keys if isinstance(keys, list) else ():
            if key not in known:
                raise FormatError(f"{file.path}: no tensor has its storage {key!r:.100}")
            dtype, elements = known[key]
            (count,) = struct.unpack(f"{self.byte_order}q", file.read_at(at, 8))
            size = elements * _itemsize(dtype, file)
            if count != elements or at + 8 + size > file.size:
                raise FormatError(
                    f"{file.path}: the storage {key!r:.100} has {count} elements, where "
                    f"{elements} were announced, or does not end within the file"
                )
            self._places[key] = at + 8, size
            at += 8 + size

    def size(self, key: str) -> int:
        return self._place(key)[1]

    def start(self, key: str) -> int:
        return self._place(key)[0]

    def _place(self, key: str) -> tuple[int, int]:
        if key not in self._places:
            raise self._missing(key)
        return self._places[key]


def _itemsize(dtype: str, file: InputFile) -> int:
    """Return the bytes of an element of a storage: the distance to the next one."""
    if dtype in ELEMENT_TYPES:
        return ELEMENT_TYPES[dtype].stored.itemsize
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        raise FormatError(
            f"{file.path}: a storage of {dtype!r:.100}, whose length is not known; load it with "
            "torch, and save it again"
        ) from None


class _Metered:
    """A stream of pickles, whose bytes count as memory when they are read."""

    def __init__(self, stream: IO[bytes], allowance: Allowance) -> None:
        self._stream = stream
        self._allowance = allowance

    def read(self, nbytes: int) -> bytes:
        self._allowance.take(_PICKLE_COST * nbytes, "its pickle")
        return self._stream.read(nbytes)

    def readline(self) -> bytes:
        line = self._stream.readline(max(1, self._allowance.left // _PICKLE_COST))
        self._allowance.take(_PICKLE_COST * len(line), "its pickle")
        return line

    def tell(self) -> int:
        return self._stream.tell()
