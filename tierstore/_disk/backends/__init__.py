"""Backends: file layouts for the records of a base. Each backend is one module in this package.

Other programs can open the files too; each backend gives the line of Python for it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.readahead import MappedRows
from tierstore.spec import BACKENDS, RecordLayout, TableSpec

__all__ = ["Backend", "PlainFiles", "Records", "backend_of", "backends"]


class Records(Protocol):
    """An open base, or its checksums: access to whole records by row."""

    rows: int
    record_bytes: int

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records `rows` `(n,)` into `out` `(n, record_bytes)`."""

    def places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped memory of `rows`, so that their pages can be prefetched."""

    def write(self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8]) -> None:
        """Overwrite the records of `rows`, which are ascending and distinct."""

    def sync(self) -> None:
        """Make every write durable."""

    def reread(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records of ascending `rows` from the disk into `out`, bypassing every cache."""

    def damaged_files(self) -> list[str]:
        """Return the names of files whose bytes outside the rows are damaged."""

    def forget(self) -> None:
        """Drop cached contents of files that another process may have replaced."""

    def close(self) -> None:
        """Close the files."""


@dataclass(frozen=True)
class PlainFiles:
    """Files that store uncompressed records one after another.

    Attributes:
        name: returns the name of a file, given its number.
        count: number of files.
        rows: rows per file; the last file may be padded.
        offset: bytes before the first record of each file.
        directory: their directory within the generation, or None.
    """

    name: Callable[[int], str]
    count: int
    rows: int
    offset: int = 0
    directory: str | None = None


class Backend(ABC):
    """A file layout for bases, registered under a name.

    Attributes:
        name: the name in specs and manifests.
        summary: a short description for users.
        entry: the file or directory that it creates in the directory of a generation.
        inner: pattern of the file names within `entry`, if that is a directory.
        partial: pattern of the files that an interrupted fold may leave there.
        compressions: the supported compressions.
        on_objects: the backend for copies in object stores, whose files can be uploaded whole.
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
        """Raise InvalidInputError if the backend does not support a spec.

        The caller has checked the compression and the ranges of the numbers.
        """
        del spec

    def completed(self, spec: TableSpec) -> TableSpec:
        """Return the spec for a new table, with all open choices made.

        Raises InvalidInputError.
        """
        return spec

    @abstractmethod
    def create(self, directory: _io.Directory, spec: TableSpec) -> Records:
        """Create and open the files; allocate space for all rows unless sparse or compressed."""

    @abstractmethod
    def open(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open the files and check that their headers match the spec; they are never evaluated.

        Later writes open their files through `directory`, which must stay open or held.

        Raises CorruptStoreError, FileNotFoundError.
        """

    def examine(self, directory: _io.Directory, spec: TableSpec) -> int | None:
        """Perform the checks of `open` without mapping; return the file's inode number.

        Returns None if the layout does not support this and must be opened. Raises
        CorruptStoreError, FileNotFoundError.
        """
        del directory, spec
        return None

    def grow(self, records: Records, spec: TableSpec, *, extend: bool) -> None:
        """Grow open records to `spec.rows` rows; a writer extends the files durably."""
        raise NotImplementedError(f"backend {self.name!r} has a fixed number of rows")

    @abstractmethod
    def plain_files(self, spec: TableSpec) -> PlainFiles | None:
        """Return where records are in the files, for repairs; None if they are compressed."""

    def open_unchecked(self, directory: _io.Holder, spec: TableSpec) -> Records:
        """Open compressed records for repairs, ignoring the header; raises the errors of `open`."""
        return self.open(directory, spec)

    def disk_bytes(self, directory: _io.Holder, spec: TableSpec) -> int:
        """Return the total size of the record files, including holes."""
        del directory
        return spec.nbytes

    @abstractmethod
    def opening_line(self, layout: RecordLayout, path: str) -> str:
        """Return a line of Python that opens the first field without tierstore."""


def backend_of(spec: TableSpec) -> Backend:
    """Return the backend of a table."""
    return cast(Backend, BACKENDS[spec.backend])


def backends() -> Iterable[Backend]:
    """Return all backends."""
    return cast(Iterable[Backend], BACKENDS.values())
