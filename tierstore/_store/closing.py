"""The end of a store: it is closed, dropped without being closed, forked, or the program ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tierstore._store.commit import put_off
from tierstore._store.compaction import Folder
from tierstore._store.state import State
from tierstore.errors import (
    ClosedError,
    TierStoreError,
    UnclosedStoreWarning,
    UncommittedRowsWarning,
)

__all__ = ["close", "leave_to_owner", "watch"]


def close(state: State, folder: Folder, *, at_once: bool = False) -> None:
    """Drop what was not committed, with a warning that counts the rows, and release all.

    Where it waits for a fold under way, an interrupt, or `at_once`, ends the wait. Within a use of
    the store, by a callback, it happens when that use ends.
    """
    door = state.door
    if os.getpid() != door.pid:
        return
    state.prefetcher.close()
    if door.held:
        door.close("it was closed from within this call", then=partial(close, state, folder))
        return
    lost = 0
    try:
        if door.writable:
            with contextlib.suppress(ClosedError):
                _end_fold(state, folder, at_once=at_once)
        with contextlib.suppress(ClosedError), door.use():
            lost = _wind_up(state, folder)
    finally:
        try:
            folder.stop()
        finally:
            state.release()
    if lost:
        warnings.warn(
            f"{state.directory.path} was closed with {lost} uncommitted rows, which were dropped; "
            "call commit() to keep them",
            UncommittedRowsWarning,
            stacklevel=4,
        )


def _end_fold(state: State, folder: Folder, *, at_once: bool) -> None:
    with state.door.use(write=True) as use, use.interruptible(), put_off(state):
        if at_once:
            folder.stop()
        else:
            folder.leave()


def _wind_up(state: State, folder: Folder) -> int:
    """Drop what was not committed, refuse every call from now on; return the rows dropped."""
    try:
        if not state.door.writable:
            return 0
        lost = state.uncommitted_rows()
        state.discard()
        with put_off(state):
            folder.fold_if_quick()
        return lost
    finally:
        state.door.close()


class Lock(Protocol):
    """A lock of an open store."""

    def close(self) -> None:
        """Close its files."""


class Closable(Protocol):
    """An open store."""

    def close(self) -> None:
        """Close it."""

    def _open_again(self) -> None:
        """Open it again in a forked child."""


_opened: weakref.WeakKeyDictionary[Closable, Sequence[Lock]] = weakref.WeakKeyDictionary()


def watch(opened: Closable, path: str, locks: Sequence[Lock]) -> Callable[[], object]:
    """Look after an open store until the function that is returned is called.

    At exit it is closed; dropped without being closed, it gives an UnclosedStoreWarning, and its
    locks go.
    """
    finalizer = weakref.finalize(opened, _abandoned, path, locks)
    finalizer.atexit = False
    _opened[opened] = locks
    return finalizer.detach


def leave_to_owner(opened: Closable) -> None:
    """Leave the care for an open store to another one that owns it, and is watched itself."""
    _opened.pop(opened, None)


def _abandoned(path: str, locks: Sequence[Lock]) -> None:
    for lock in locks:
        lock.close()
    warnings.warn(f"{path} was not closed", UnclosedStoreWarning, stacklevel=2)


def _close_all() -> None:
    for opened in list(_opened):
        with contextlib.suppress(TierStoreError):  # of a commit in the background
            opened.close()


def _after_fork() -> None:
    """In a forked child: close, without unlocking, the locks that are the parent's.

    Readers are opened again, as far as they can be; every use of the others says what to do.
    """
    for opened, locks in list(_opened.items()):
        for lock in locks:
            lock.close()
        with contextlib.suppress(TierStoreError, OSError, MemoryError):
            opened._open_again()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
