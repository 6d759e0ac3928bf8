"""Every error this library raises, in one tree, and every warning.

Each class also derives from the builtin that a caller would catch anyway, and each message says
what happened, the numbers involved and the next step. Classes derived from OSError set `errno`, and
`filename` when a single file or store is at fault; that of a store is an absolute path.

    TierStoreError
    ├── NotAStoreError         FileNotFoundError   the path holds no store
    ├── FormatError            ValueError          a file that does not have the claimed format
    │   ├── AmbiguousFileError                     … or can be read in two ways
    │   ├── NewerVersionError                      … or has what only a newer version knows
    │   └── MissingFileError   FileNotFoundError   … or is not there
    ├── CorruptStoreError      OSError             a checksum or size does not match
    │   └── CorruptRowError                        … of single rows
    ├── LockedError            BlockingIOError     another writer holds the store
    │   └── ConcurrentWriterError                  … and has published a version meanwhile
    ├── StoreFullError         OSError             no space left, or over a quota or file-size limit
    ├── StoreIOError           OSError             any other failure of the file system
    │   └── AccessError        PermissionError     … or access that is refused, here or remotely
    ├── CommitFailedError      OSError             a commit failed; the previous one is intact
    ├── ExistsError            FileExistsError     the target already exists
    ├── RowIndexError          IndexError          row ids outside the table
    ├── InvalidInputError      ValueError          a value that cannot be used
    ├── InvalidTypeError       TypeError           a value of the wrong kind
    ├── UnknownNameError       KeyError            no such table, field, key or payload
    ├── VersionError           LookupError         no such version
    ├── CapacityError          MemoryError         a memory budget that is too small
    ├── ClosedError            ValueError          the store was closed
    ├── ReadOnlyError          PermissionError     the store was opened for reading
    ├── ForkedStoreError       RuntimeError        a store used in a forked process
    ├── DeviceError            RuntimeError        a GPU that is missing, or the wrong one
    │   ├── DeviceLostError                        … or one that failed, losing uncommitted data
    │   └── NotPrefetchedError                     … or rows that a CUDA graph could not reach
    ├── RanksError             RuntimeError        another rank failed, ended or does not answer
    ├── InternalError          RuntimeError        an unexpected failure
    └── MissingExtraError      ImportError         an optional dependency is not installed

    TierStoreWarning           UserWarning
    ├── UncommittedRowsWarning                     a store was closed with uncommitted rows
    ├── UnclosedStoreWarning   ResourceWarning     a store was dropped without being closed
    ├── NotExpiredWarning                          `expire` was called, and its keys never taken
    ├── UpkeepWarning          RuntimeWarning      folding or removing old files was postponed
    ├── OverflowedValuesWarning                    values became infinite in a conversion
    ├── FilledRowsWarning                          rows have no value: of a repair, or a zarr
    ├── DuplicateRowsWarning                       copies of a row were trained as one row
    ├── UnderflowWarning                           an optimizer makes NaN of rows in float16
    ├── LazyUpdatesWarning                         rows stay that a dense optimizer would change
    └── ZeroRowsWarning                            a layer over a table that is all zeros
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

__all__ = [
    "AccessError",
    "AmbiguousFileError",
    "CapacityError",
    "ClosedError",
    "CommitFailedError",
    "ConcurrentWriterError",
    "CorruptRowError",
    "CorruptStoreError",
    "DeviceError",
    "DeviceLostError",
    "DuplicateRowsWarning",
    "ExistsError",
    "FilledRowsWarning",
    "ForkedStoreError",
    "FormatError",
    "InternalError",
    "InvalidInputError",
    "InvalidTypeError",
    "LazyUpdatesWarning",
    "LockedError",
    "MissingExtraError",
    "MissingFileError",
    "NewerVersionError",
    "NotAStoreError",
    "NotExpiredWarning",
    "NotPrefetchedError",
    "OverflowedValuesWarning",
    "RanksError",
    "ReadOnlyError",
    "RowIndexError",
    "StoreFullError",
    "StoreIOError",
    "TierStoreError",
    "TierStoreWarning",
    "UnclosedStoreWarning",
    "UncommittedRowsWarning",
    "UnderflowWarning",
    "UnknownNameError",
    "UpkeepWarning",
    "VersionError",
    "ZeroRowsWarning",
]


ROW_CURE = (
    "write all fields of these rows again and commit, or copy the intact rows with 'tierstore "
    "repair'; 'tierstore verify' lists all damage"
)
"""The next step for damaged rows."""

FOR_RANKS = (
    "for ranks that share the rows, create the store with tierstore.distributed.create(path, "
    "tables), open it on every rank with tierstore.distributed.open(path, 'r+') after "
    "init_process_group, and start the ranks with torchrun"
)
"""The change that turns a script for one process into one for many."""

FILE_CURE = "restore it from a copy, or copy the intact rows with 'tierstore repair'"
"""The next step for a damaged file."""


class TierStoreError(Exception):
    """Base class of every error that this library raises deliberately."""

    def __str__(self) -> str:
        """Return the message alone; builtins such as KeyError would quote it."""
        return str(self.args[0]) if self.args else self.__class__.__name__


class _SystemError(TierStoreError, OSError):
    """Base of the errors that are OSErrors: fills in `errno`, `strerror` and `filename`."""

    _number = errno.EIO

    def __init__(
        self, message: str = "", *, filename: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__(message)
        self.errno: int | None = self._number
        self.strerror: str | None = message
        self.filename: Any = None if filename is None else os.fspath(filename)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"errno": self.errno, "strerror": self.strerror, "filename": self.filename}
        return type(self), self.args, {**self.__dict__, **state}


class NotAStoreError(_SystemError, FileNotFoundError):
    """The path does not hold a tierstore store."""

    _number = errno.ENOENT


class FormatError(TierStoreError, ValueError):
    """A file does not have the format it claims, or was written by a newer version."""


class NewerVersionError(FormatError):
    """An intact file of a store has what this version of the library does not know.

    A newer version wrote it. Nothing is damaged, so the whole store is refused: an older version of
    its rows is no substitute, and this library neither removes nor repairs anything there.
    """

    def __init__(self, message: str = "") -> None:
        """Take what is unknown, and add the next step."""
        cure = "it was written by a newer version; pip install --upgrade tierstore"
        super().__init__(message if message.endswith(cure) else f"{message}: {cure}")


class MissingFileError(_SystemError, FileNotFoundError, FormatError):
    """There is no file of this name to read."""

    _number = errno.ENOENT


class AmbiguousFileError(FormatError):
    """A file can be read in more than one way; the message says how to choose one.

    Attributes:
        ways: for each reading the option that chooses it, as people type it, and its arguments for
            `tierstore.import_table`.
    """

    def __init__(
        self, message: str = "", *, ways: Sequence[tuple[str, Mapping[str, Any]]] = ()
    ) -> None:
        """Take the message and the ways to decide."""
        super().__init__(message)
        self.ways: tuple[tuple[str, Mapping[str, Any]], ...] = tuple(ways)


class CorruptStoreError(_SystemError, OSError):
    """A file of the store is missing, has the wrong size or fails its checksum."""


class CorruptRowError(CorruptStoreError):
    """Rows that do not match their checksums; damaged rows are never returned.

    Attributes:
        rows: the ids of the damaged rows that were found, ascending.
        file: the file that holds them, relative to the store.
        table: the name of the table; empty where it has none.
    """

    def __init__(
        self,
        message: str,
        *,
        rows: Sequence[int] = (),
        file: str = "",
        table: str = "",
        filename: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(message, filename=filename)
        self.rows: list[int] = list(rows)
        self.file = file
        self.table = table


class LockedError(_SystemError, BlockingIOError):
    """Another writer holds the store."""

    _number = errno.EAGAIN


class ConcurrentWriterError(LockedError):
    """Another writer bypassed the lock and published a version in the meantime."""


class StoreFullError(_SystemError, OSError):
    """No space left, or a quota or file-size limit was reached; the last commit is intact."""

    _number = errno.ENOSPC


class StoreIOError(_SystemError, OSError):
    """The file system failed for a reason other than being full."""


class AccessError(StoreIOError, PermissionError):
    """A file, a bucket or another remote place refused access, or no credentials were found."""

    _number = errno.EACCES


class CommitFailedError(_SystemError, OSError):
    """A commit failed and must not be retried; the last version is intact."""


class ExistsError(_SystemError, FileExistsError):
    """The target already exists and was left unchanged."""

    _number = errno.EEXIST


class RowIndexError(TierStoreError, IndexError):
    """Row ids outside 0..rows-1."""


class InvalidInputError(TierStoreError, ValueError):
    """A value, shape or combination that cannot be used."""


class InvalidTypeError(TierStoreError, TypeError):
    """A value of the wrong type."""


class UnknownNameError(TierStoreError, KeyError):
    """No table, field, external key or payload has that name."""


class VersionError(TierStoreError, LookupError):
    """A version that does not exist or is no longer kept."""


class CapacityError(TierStoreError, MemoryError):
    """A memory budget is too small for what it must hold."""


class ClosedError(TierStoreError, ValueError):
    """The store was closed before this call."""


class ReadOnlyError(_SystemError, PermissionError):
    """A write to a store that was opened for reading."""

    _number = errno.EACCES


class ForkedStoreError(TierStoreError, RuntimeError):
    """A store opened before a fork was used in the child process."""


class DeviceError(TierStoreError, RuntimeError):
    """A GPU is missing, or is not the one that holds the data."""


class DeviceLostError(DeviceError):
    """The GPU failed and its uncommitted data is lost; the last commit is intact."""


class NotPrefetchedError(DeviceError):
    """A CUDA graph read rows that were neither on the GPU nor in host memory, as NaN."""


class RanksError(TierStoreError, RuntimeError):
    """Another rank of the process group failed, has ended or does not answer in time."""


class InternalError(TierStoreError, RuntimeError):
    """Python, NumPy or the C library failed unexpectedly; the cause is chained.

    Running out of memory does not always raise a MemoryError there. If the failure interrupted a
    call that changes the store, the store is closed; its last commit is intact.
    """


class MissingExtraError(TierStoreError, ImportError):
    """An optional dependency is missing; the message gives the pip command."""


@contextlib.contextmanager
def needs(package: str, extra: str, what: str) -> Iterator[None]:
    """Turn a missing `package` into MissingExtraError: `what` needs `tierstore[extra]`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError(f"{what}: pip install 'tierstore[{extra}]'") from None


def counted(count: int, one: str, more: str = "") -> str:
    """Return a count with its noun, for messages: `"1 row"`, `"2 rows"`.

    >>> counted(1, "row is", "rows are")
    '1 row is'
    """
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def named(noun: str, names: Collection[str]) -> str:
    """Return names after their noun, of many the first three: `"table 'a'"`, `"tables 'a', 'b'"`.

    >>> named("field", ["a", "b", "c", "d", "e"])
    "fields 'a', 'b', 'c' and 2 more"
    """
    text = ", ".join(repr(name) for name in islice(names, 3))
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{noun}{'s' if len(names) > 1 else ''} {text}{more}"


_BETWEEN = {"tierstore", "torch", "contextlib", "functools", "weakref"}
"""Packages whose lines stand between a user's line and a warning."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's line, however many calls lead from there."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        if frame.f_back is None:  # in a thread of the library, or while Python ends
            break
        frame = frame.f_back
    names = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=names.get("__name__"),
        registry=names.setdefault("__warningregistry__", {}),
    )


class TierStoreWarning(UserWarning):
    """Base class of the warnings, for `warnings.filterwarnings`."""


class UncommittedRowsWarning(TierStoreWarning):
    """A store was closed with uncommitted rows, which were discarded."""


class UnclosedStoreWarning(TierStoreWarning, ResourceWarning):
    """A store was dropped without being closed."""


class NotExpiredWarning(TierStoreWarning):
    """`expire` was called and removed nothing, because no block of its keys was taken."""


class UpkeepWarning(TierStoreWarning, RuntimeWarning):
    """Folding or removing unused files was postponed; committed data is safe."""


class OverflowedValuesWarning(TierStoreWarning):
    """Values overflowed an element type and became infinite."""


class FilledRowsWarning(TierStoreWarning):
    """Rows have no value: a repair made zeros of them, or a zarr array lacks their chunks."""


class DuplicateRowsWarning(TierStoreWarning):
    """Copies of a row in a batch were trained differently than in SpeedTorch."""


class UnderflowWarning(TierStoreWarning):
    """An optimizer makes rows of float16 infinite or NaN, as small squares and eps are 0 there."""


class LazyUpdatesWarning(TierStoreWarning):
    """Rows that are not in a batch stay as they are, where torch's optimizer would change them."""


class ZeroRowsWarning(TierStoreWarning):
    """A layer uses a table whose rows still have their initial value of zero."""
