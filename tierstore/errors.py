"""Every error this library raises, in one tree, and every warning.

Each class is also the builtin a caller would catch anyway, and each message says what happened, the
numbers involved and the next step. Those that are OSErrors have an `errno`, and `filename` where
one file or store is at fault.

    TierStoreError
    ├── NotAStoreError         FileNotFoundError   the path holds no store
    ├── FormatError            ValueError          a file that is not what it claims to be
    ├── CorruptStoreError      OSError             a checksum or size does not match
    │   └── CorruptRowError                        … of single rows
    ├── LockedError            BlockingIOError     another writer has the store
    │   └── ConcurrentWriterError                  … and has published in between
    ├── StoreFullError         OSError             no space, quota or file-size limit
    ├── StoreIOError           OSError             any other failure of the file system
    ├── CommitFailedError      OSError             a commit failed; the last one is intact
    ├── ExistsError            FileExistsError     the target exists already
    ├── RowIndexError          IndexError          row ids outside the table
    ├── InvalidInputError      ValueError          a value that cannot be used
    ├── InvalidTypeError       TypeError           a value of the wrong kind
    ├── UnknownNameError       KeyError            no such table, field, key or payload
    ├── VersionError           LookupError         no such version
    ├── CapacityError          MemoryError         a budget too small for what it must hold
    ├── ClosedError            ValueError          the store was closed
    ├── ReadOnlyError          PermissionError     the store was opened for reading
    ├── ForkedStoreError       RuntimeError        a store used in a forked child
    ├── DeviceError            RuntimeError        a GPU that is absent, or the wrong one
    │   └── DeviceLostError                        … or has failed, with what was only there
    ├── RanksError             RuntimeError        another rank failed, is gone or does not answer
    ├── InternalError          RuntimeError        an error that nothing here foresees
    └── MissingExtraError      ImportError         an optional dependency is not installed

    TierStoreWarning           UserWarning
    ├── UncommittedRowsWarning                     a store was closed with rows not committed
    ├── UnclosedStoreWarning   ResourceWarning     a store was dropped without being closed
    ├── UpkeepWarning          RuntimeWarning      folding or removing old files was put off
    ├── OverflowedValuesWarning                    values became infinite in a conversion
    ├── DuplicateRowsWarning                       copies of a row were trained as one
    └── ZeroRowsWarning                            a layer over a table that is all zeros
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
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
    "ForkedStoreError",
    "FormatError",
    "InternalError",
    "InvalidInputError",
    "InvalidTypeError",
    "LockedError",
    "MissingExtraError",
    "NotAStoreError",
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
    "UnknownNameError",
    "UpkeepWarning",
    "VersionError",
    "ZeroRowsWarning",
]


ROW_CURE = (
    "write them again, all fields, and commit, or make a copy of what is whole with 'tierstore "
    "repair'; 'tierstore verify' lists all damage"
)
"""What helps where rows are damaged."""

FOR_RANKS = (
    "for ranks that share the rows, make the store with tierstore.distributed.create(path, "
    "tables), open it on every rank with tierstore.distributed.open(path, 'r+') after "
    "init_process_group, and start the ranks with torchrun"
)
"""What makes a script for one process one for many."""

FILE_CURE = "restore it from a copy, or make one of what is whole with 'tierstore repair'"
"""What helps where a file is damaged."""


class TierStoreError(Exception):
    """Root of the tree: catches everything this library raises on purpose."""

    def __str__(self) -> str:
        """Return the message alone; builtins such as KeyError would quote it."""
        return str(self.args[0]) if self.args else self.__class__.__name__


class _SystemError(TierStoreError, OSError):
    """What the errors share that are OSErrors: `errno`, `strerror` and `filename` are filled in."""

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
    """A file is not what it claims to be, or was written by a newer version."""


class CorruptStoreError(_SystemError, OSError):
    """A file of the store is missing, has the wrong size or fails its checksum."""


class CorruptRowError(CorruptStoreError):
    """Rows whose bytes do not match their checksum; they are never returned.

    Attributes:
        rows: the ids of the damaged rows that were found, ascending.
        file: the file that holds them, relative to the store.
    """

    def __init__(
        self,
        message: str,
        *,
        rows: Sequence[int] = (),
        file: str = "",
        filename: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(message, filename=filename)
        self.rows: list[int] = list(rows)
        self.file = file


class LockedError(_SystemError, BlockingIOError):
    """Another writer holds the store."""

    _number = errno.EAGAIN


class ConcurrentWriterError(LockedError):
    """Another writer, one that got past the lock, published a version in between."""


class StoreFullError(_SystemError, OSError):
    """No space left, or a quota or file-size limit was reached; the last commit is intact."""

    _number = errno.ENOSPC


class StoreIOError(_SystemError, OSError):
    """The file system failed in another way than being full."""


class CommitFailedError(_SystemError, OSError):
    """A commit failed in a way that must not be retried; the last version is intact."""


class ExistsError(_SystemError, FileExistsError):
    """The target exists already and was left as it is."""

    _number = errno.EEXIST


class RowIndexError(TierStoreError, IndexError):
    """Row ids outside 0..rows-1."""


class InvalidInputError(TierStoreError, ValueError):
    """A value, shape or combination that cannot be used."""


class InvalidTypeError(TierStoreError, TypeError):
    """A value of a kind that cannot be used."""


class UnknownNameError(TierStoreError, KeyError):
    """No table, field, external key or payload of that name."""


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
    """A store that was opened before a fork is used in the child."""


class DeviceError(TierStoreError, RuntimeError):
    """A GPU that is missing, or not the one the data is on."""


class DeviceLostError(DeviceError):
    """The GPU failed, and what was written only there is lost; the last commit is intact."""


class RanksError(TierStoreError, RuntimeError):
    """Another rank of the process group failed, has ended or does not answer in time."""


class InternalError(TierStoreError, RuntimeError):
    """Python, NumPy or the C library failed in a way that nothing foresees; the cause is chained.

    Where memory runs out, what they raise is not always a MemoryError. If it happened in the middle
    of a call that changes the store, the store is closed; its last commit is intact.
    """


class MissingExtraError(TierStoreError, ImportError):
    """An optional dependency is missing; the message holds the pip line."""


@contextlib.contextmanager
def needs(package: str, extra: str, what: str) -> Iterator[None]:
    """Import `package`, or what imports it: if it is missing, `what` needs `tierstore[extra]`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError(f"{what}: pip install 'tierstore[{extra}]'") from None


class TierStoreWarning(UserWarning):
    """Root of the warnings, for `warnings.filterwarnings`."""


class UncommittedRowsWarning(TierStoreWarning):
    """A store was closed with rows that were not committed; they were dropped."""


class UnclosedStoreWarning(TierStoreWarning, ResourceWarning):
    """A store was dropped without being closed."""


class UpkeepWarning(TierStoreWarning, RuntimeWarning):
    """Folding, or removing what is no longer needed, was put off; what is committed is safe."""


class OverflowedValuesWarning(TierStoreWarning):
    """Values were too large for an element type and became infinite."""


class DuplicateRowsWarning(TierStoreWarning):
    """Copies of a row in a batch were trained in another way than SpeedTorch's."""


class ZeroRowsWarning(TierStoreWarning):
    """A layer is over a table whose rows are all zeros, as they were made."""
