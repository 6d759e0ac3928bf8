"""Backends: the layouts of a base's records in files. One backend is one module here.

A backend's files are opened by other programs too, so each says with which line of Python.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.readahead import MappedRows
from tierstore.spec import BACKENDS, RecordLayout, TableSpec

__all__ = ["Backend", "PlainFiles", "Records"]


class Records(Protocol):
    """An open base, or the checksums of one: whole records by row, and nothing else."""

    rows: int
    record_bytes: int

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`."""

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return where `rows` are mapped, for their pages to be announced before they are read."""

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Write over `rows`, ascending and distinct."""

    def sync(self) -> None:
        """Make every write durable."""

    def reread(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows`, ascending, into `out` as the disk has them, past every cache."""

    def damaged_files(self) -> list[str]:
        """Return names of files whose bytes outside any row are not as they must be."""

    def forget(self) -> None:
        """Drop what is kept in memory of files that another process may have replaced."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class PlainFiles:
    """Files in which records follow one another as they are.

    Attributes:
        name: returns the name of a file by its number.
        count: the number of files.
        rows: rows of a file; the last may be padded.
        offset: the bytes before the first record of each.
        directory: the directory within the generation that they are in, or None.
    """

    name: Callable[[int], str]
    count: int
    rows: int
    offset: int = 0
    directory: str | None = None


class Backend(ABC):
    """A kind of base file, found by its name.

    Attributes:
        name: the name in specs and manifests.
        summary: what it is, in a few words for users.
        entry: the file or directory that it makes in the directory of a generation.
        inner: the names of the files within `entry`, where that is a directory.
        partial: those that a fold which was cut short may have left there.
        compressions: the compressions it offers.
        on_objects: the backend that copies in object stores have: one whose files can be sent as
            objects, each as a whole.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    entry: ClassVar[str]
    inner: ClassVar[re.Pattern[str] | None] = None
    partial: ClassVar[re.Pattern[str] | None] = None
    compressions: ClassVar[tuple[str, ...]] = ()
    on_objects: ClassVar[str]

    def __init_subclass__(cls) -> None:
        """Register the backend under its name."""
        BACKENDS.add(cls.name, cls())

    def check(self, spec: TableSpec) -> None:
        """Raise InvalidInputError if a spec asks for what the backend cannot do.

        The compression is one of the backend's, and the numbers are within their limits.
        """
        del spec

    def completed(self, spec: TableSpec) -> TableSpec:
        """Return the spec of a table to be made, with what it left open decided.

        Raises InvalidInputError.
        """
        return spec

    @abstractmethod
    def create(self, directory: _io.Directory, spec: TableSpec) -> Records:
        """Create the files, with space for every row unless sparse or compressed; open them."""

    @abstractmethod
    def open(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open the files, whose headers must be what the spec gives; they are never evaluated.

        What is written later is opened then, through `directory`, which must stay open or held.

        Raises CorruptStoreError, FileNotFoundError.
        """

    def examine(self, directory: _io.Directory, spec: TableSpec) -> int | None:
        """Check what `open` does and map nothing; return the number of the file's inode.

        None: that is not possible, and the files are to be opened. Raises CorruptStoreError,
        FileNotFoundError.
        """
        del directory, spec
        return None

    @abstractmethod
    def plain_files(self, spec: TableSpec) -> PlainFiles | None:
        """Return the places of records in files, for repairs; None if they are packed."""

    def open_unchecked(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open packed records for repairs, whatever the header says; raises as `open`."""
        return self.open(directory, spec)

    def disk_bytes(self, directory: _io.Holder, spec: TableSpec) -> int:
        """Return the bytes of the records in files; they may be holes."""
        del directory
        return spec.nbytes

    @abstractmethod
    def opening_line(self, layout: RecordLayout, path: str) -> str:
        """Return a line of Python that opens the first field from `path` without tierstore."""
