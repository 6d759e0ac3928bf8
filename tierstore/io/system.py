"""The seam to the operating system: how its calls are reached, and what their failures are called.

All system calls of a store go through `calls`, which a test may replace to record, delay or fail
them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tierstore.errors import CommitFailedError, StoreFullError, StoreIOError, TierStoreError

__all__ = ["calls", "explained", "filesystem", "libc", "sync_descriptor"]

calls: Any = os

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LOOKUPS = frozenset({"open", "examine"})


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, for what `os` does not have."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.sync_file_range.argtypes = (ctypes.c_int, *[ctypes.c_int64] * 2, ctypes.c_uint)
    return library


@contextlib.contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into the error a user can act on, keeping its errno.

    Where something is only looked up, that it is missing is an answer: FileNotFoundError passes.
    """
    try:
        yield
    except TierStoreError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and action in _LOOKUPS:
            raise
        if error.errno in _FULL:
            failure: OSError = StoreFullError(
                f"no space to {action} {path} ({error.strerror}); the last commit is intact, "
                "free some space and try again"
            )
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            failure = StoreIOError(
                f"too many open files to {action} {path}; raise the limit (ulimit -n) "
                "or fold the store to have fewer deltas"
            )
        else:
            failure = StoreIOError(f"cannot {action} {path}: {error.strerror or error}")
        failure.errno = error.errno
        raise failure from error


def sync_descriptor(fd: int, path: str) -> None:
    """Sync a descriptor, once.

    A failed sync must never be repeated: the kernel may have dropped the bytes it could not write
    and marked their pages clean, and the next sync then succeeds for nothing (Rebello et al., "Can
    applications recover from fsync failures?", USENIX ATC 2020).
    """
    try:
        calls.fsync(fd)
    except OSError as error:
        failure = CommitFailedError(
            f"cannot sync {path} ({error.strerror}): what was written since the last commit may be "
            "lost, the last commit is intact; check the disk and open the store again"
        )
        failure.errno = error.errno
        raise failure from error


def filesystem(path: str | Path) -> str:
    """Name of the file system that holds `path`, such as "ext4"; "" if it cannot be told."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as table:
        for line in table:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return ""
