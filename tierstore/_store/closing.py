"""The end of a store: close, garbage collection without close, fork, or program exit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tierstore._door import interrupts_deferred
from tierstore._store.commit import put_off
from tierstore._store.compaction import Folder
from tierstore._store.state import State
from tierstore.errors import (
    ClosedError,
    TierStoreError,
    UnclosedStoreWarning,
    UncommittedRowsWarning,
    counted,
    warn,
)

_LOG = logging.getLogger("tierstore")


def close(state: State, folder: Folder, *, at_once: bool = False, kept: bool = True) -> None:
    """Drop what is not committed with a warning that names it, and release all resources.

    An interrupt or `at_once` ends a wait for a running fold. If called by a callback within a use
    of the store, the store closes when that use ends. Without `kept` its files go as well: no
    commit would have saved anything, so there is no warning.
    """
    door = state.door
    if os.getpid() != door.pid:
        return
    state.prefetcher.close()
    if door.held:
        door.close(
            "it was closed from within this call", then=partial(close, state, folder, kept=kept)
        )
        return
    lost = ""
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
            with interrupts_deferred():
                state.release()
    _LOG.info("%s: closed", state.directory.path)
    if lost and kept:
        warn(
            f"{state.directory.path} was closed with {lost}, now dropped; call commit() to keep "
            "what was written",
            UncommittedRowsWarning,
        )


def _end_fold(state: State, folder: Folder, *, at_once: bool) -> None:
    with state.door.use(write=True) as use, use.interruptible(), put_off(state):
        if at_once:
            folder.stop()
        else:
            folder.leave()


def _wind_up(state: State, folder: Folder) -> str:
    """Drop uncommitted changes and reject further calls; describe the changes, "" if none."""
    try:
        if not state.door.writable:
            return ""
        rows = state.uncommitted_rows()
        dropped = [counted(rows, "uncommitted row") + state.whose] if rows else []
        dropped += [f"uncommitted keys of table {name!r}" for name in state.touched.keys]
        lost = " and ".join(dropped)
        state.let_go()
        with put_off(state):
            folder.fold_if_quick()
        return lost
    finally:
        state.door.close()


class Lock(Protocol):
    """A lock of an open store."""

    @property
    def locked(self) -> bool:
        """Whether it is held."""

    def close(self) -> None:
        """Close its files."""


class Closable(Protocol):
    """An open store."""

    def close(self) -> None:
        """Close it."""

    def _open_again(self) -> None:
        """Open it again in a forked child."""


Locks = Sequence[Lock]

_opened: weakref.WeakKeyDictionary[Closable, tuple[Locks, weakref.finalize[..., Closable]]] = (
    weakref.WeakKeyDictionary()
)


def watch(store: Closable, path: str, locks: Locks) -> None:
    """Supervise an open store.

    It is closed at exit. If it is garbage-collected while it holds locks, an UnclosedStoreWarning
    is issued and they are released.
    """
    finalizer = weakref.finalize(store, _abandoned, path, locks, os.getpid())
    finalizer.atexit = False
    _opened[store] = locks, finalizer


_removals: weakref.WeakKeyDictionary[Closable, list[Callable[[], object]]] = (
    weakref.WeakKeyDictionary()
)


def remove_when_closed(store: Closable, remove: Callable[[], object]) -> None:
    """Call a function that removes the files once a store is closed or garbage-collected."""
    _removals.setdefault(store, []).append(weakref.finalize(store, remove))


def removals_of(store: Closable) -> Sequence[Callable[[], object]]:
    """Return what removes the files of a store once it is closed; nothing for most."""
    return _removals.get(store, ())


def opened() -> list[Closable]:
    """Return the supervised stores, closed ones and those of a parent process among them."""
    return list(_opened)


def _abandoned(path: str, locks: Locks, pid: int) -> None:
    held = [lock for lock in locks if lock.locked]
    for lock in held:
        lock.close()
    if held and os.getpid() == pid:
        warn(f"{path} was not closed", UnclosedStoreWarning)


def _close_all() -> None:
    for store in opened():
        with contextlib.suppress(TierStoreError):  # of a commit in the background
            store.close()


def _after_fork() -> None:
    """In a forked child: close the parent's locks, all of them first, without unlocking them.

    Readers are reopened if possible; every use of another store raises an error with the remedy.
    """
    every = list(_opened.items())
    for _, (locks, _) in every:
        for lock in locks:
            lock.close()
    for store, _ in every:
        with contextlib.suppress(TierStoreError, OSError, MemoryError):
            store._open_again()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
