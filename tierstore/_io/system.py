"""The seam to the operating system: how its calls are reached, and what their failures are called.

All system calls of a store go through `calls`, which a test may replace to record, delay or fail
them.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from tierstore._io.syscalls import Calls
from tierstore.errors import CommitFailedError, StoreFullError, StoreIOError, TierStoreError

__all__ = [
    "calls",
    "explained",
    "raise_explained",
    "send_range",
    "sync_descriptor",
    "wait_for_range",
]

calls: Any = Calls()

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOOKUPS = frozenset({"open", "examine"})
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ESPIPE, errno.EPERM})
_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WAIT = 7
"""Wait for what is being written, write the rest, and wait for that."""
_NEARLY_ALL = 0.9


@contextlib.contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    """Raise any OSError of the body as `raise_explained` does."""
    try:
        yield
    except OSError as error:
        raise_explained(error, action, path)


def raise_explained(error: OSError, action: str, path: str) -> NoReturn:
    """Raise, from an OSError, the error a user can act on, keeping its errno.

    A lookup that finds nothing is an answer: FileNotFoundError and NotADirectoryError pass. So
    does an error that was explained before.
    """
    is_answer = isinstance(error, FileNotFoundError | NotADirectoryError) and action in _LOOKUPS
    if is_answer or isinstance(error, TierStoreError):
        raise error
    failure = _explanation(action, path, error)
    failure.errno = error.errno
    raise failure from error


def _explanation(action: str, path: str, error: OSError) -> OSError:
    if error.errno in FULL:
        return StoreFullError(
            f"no space to {action} {path} ({error.strerror}); the last commit is intact, "
            "free some space and try again"
        )
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StoreIOError(
            f"too many open files to {action} {path}: this process may have {limit} (ulimit -n), "
            "of which a store needs up to three a table; raise the limit, or close other files"
        )
    if error.errno == errno.ENFILE:
        return StoreIOError(
            f"too many open files on this machine to {action} {path}; have other programs close "
            "theirs, or raise fs.file-max"
        )
    if error.errno == errno.ENOMEM and action == "map" and (mappings := _too_many_mappings()):
        return StoreIOError(
            f"too many mappings to map {path}: {mappings}; close readers and fold the store to "
            "have fewer deltas, or raise the limit"
        )
    return StoreIOError(f"cannot {action} {path}: {error.strerror or error}")


def _too_many_mappings() -> str:
    """Return how many mappings there are and may be, or "" where these are not what is short."""
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with open("/proc/self/maps", "rb") as table:
            count = sum(1 for _ in table)
        if count > _NEARLY_ALL * limit:
            return f"this process has {count} of at most {limit} (vm.max_map_count)"
    return ""


def sync_descriptor(fd: int, path: str) -> None:
    """Sync a descriptor, once; raises CommitFailedError, which is final.

    A failed sync must never be repeated: the kernel may have dropped the bytes it could not write
    and marked their pages clean, and the next sync then succeeds for nothing (Rebello et al., "Can
    applications recover from fsync failures?", USENIX ATC 2020).
    """
    try:
        calls.fsync(fd)
    except OSError as error:
        raise _sync_failed(path, error) from error


def send_range(fd: int, path: str, offset: int, nbytes: int) -> None:
    """Have a range written to the disk from now on, without waiting; as final as a sync."""
    _sync_range(fd, path, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def wait_for_range(fd: int, path: str, offset: int, nbytes: int) -> None:
    """Wait until a range was written to the disk; as final as a sync.

    The kernel reports an error of writing once to each open description. So the one to wait by must
    not be the one that is synced later.
    """
    _sync_range(fd, path, offset, nbytes, _SYNC_FILE_RANGE_WAIT)


def _sync_range(fd: int, path: str, offset: int, nbytes: int, flags: int) -> None:
    try:
        calls.sync_file_range(fd, offset, nbytes, flags)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise _sync_failed(path, error) from error


def _sync_failed(path: str, error: OSError) -> CommitFailedError:
    failure = CommitFailedError(
        f"cannot sync {path} ({error.strerror}): what was written since the last commit may be "
        "lost, the last commit is intact; check the disk and open the store again"
    )
    failure.errno = error.errno
    return failure
