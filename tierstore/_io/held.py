"""A pool of long-lived files and directories, of which a limited number is open at a time.

A store holds a directory for each of its tables, and a file for each that is being written. If
there are many, those not used recently are closed, and reopened by name at their next use. The
limit applies to the whole process with all its stores.

The kernel reports a write error once to each open description. A descriptor with unsynced writes is
therefore synced before it is closed, and a failed sync raises at the next use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tierstore._io.directory import Directory
from tierstore._io.file import File
from tierstore._io.system import LASTING_INODES, filesystem_of
from tierstore.errors import CommitFailedError, ConcurrentWriterError, StoreIOError

D = TypeVar("D", bound=File | Directory)

_MOST = 512
_FEWEST = 8
_SHARE = 5
"""Of the descriptors that a process may have, one in so many is held."""
_AT_ONCE = 16
"""How many that need a sync are chosen at once, to be closed one by one."""


class Held(Generic[D]):
    """A long-lived file or directory, open or closed; thread-safe.

    Attributes:
        path: its name in messages.
        used: the time of its last use, as a count of all uses.
    """

    def __init__(self, opened: D, reopen: Callable[[], D]) -> None:
        """Take ownership of an entry; `reopen` opens it by name or raises FileNotFoundError."""
        self.path: str = opened.path
        self.used: int = next(_uses)
        self._opened = opened
        self._reopen = reopen
        self._identity = (0, 0)
        self._users = 0
        self._resting = self._closed = False
        self._failure: CommitFailedError | None = None
        _pool.admit(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[D]:
        """Yield the open file or directory, which stays open until the body ends.

        Raises CommitFailedError if an earlier sync before closing failed, ConcurrentWriterError if
        another program removed or replaced the file while it was closed.
        """
        opened, is_new = self._take()
        try:
            if is_new:
                _pool.admit(self)
            yield opened
        finally:
            with _lock:
                self._users -= 1

    def _take(self) -> tuple[D, bool]:
        with _lock:
            if self._failure is not None:
                raise self._failure
            is_new = self._resting and not self._closed
            if is_new:
                self._opened = self._open_again()
                self._resting = False
            self.used = next(_uses)
            self._users += 1
            return self._opened, is_new

    def _open_again(self) -> D:
        try:
            fresh = self._reopen()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _replaced(self.path) from error
        if fresh.identity != self._identity and filesystem_of(fresh.fd) in LASTING_INODES:
            fresh.close()
            raise _replaced(self.path)
        return fresh

    def sync(self) -> None:
        """Make the writes durable, if closing has not already done so."""
        with _lock:
            if self._resting and self._failure is None:
                return
        with self.use() as opened:
            opened.sync()

    @property
    def idle(self) -> bool:
        """Whether it is open and not in use."""
        return not (self._users or self._resting or self._closed)

    @property
    def unsynced(self) -> bool:
        """Whether it needs a sync before it can be closed."""
        return self._opened.unsynced

    def rest(self) -> None:
        """Close it until its next use, unless it is in use."""
        with _lock:
            if self.idle:
                self._close_for_now()

    def _close_for_now(self) -> None:
        try:
            self._identity = self._opened.identity
            if self._opened.unsynced:
                self._opened.sync()
        except CommitFailedError as error:
            self._failure = error
        except StoreIOError:
            return  # it cannot be identified after reopening, so it stays open
        self._resting = True
        self._opened.discard()
        _pool.forget(self)

    def close(self) -> None:
        """Close it permanently and ignore errors of unsynced data."""
        with _lock:
            self._closed = True
            self._opened.discard()
        _pool.forget(self)


Holder = Directory | Held[Directory]
"""An open or held directory; operations in it take place within `use`."""


class _Pool:
    """All held entries of the process that are open."""

    def __init__(self) -> None:
        # Single dict operations are atomic; a lock could deadlock in a finalizer.
        self._open: dict[int, weakref.ref[Held[Any]]] = {}
        self._chosen: list[tuple[int, weakref.ref[Held[Any]]]] = []

    def admit(self, held: Held[Any]) -> None:
        """Register an opened entry; above the limit, close the least recently used ones.

        Entries that need no sync are closed first.
        """
        if held._opened.fd < 0:
            return  # an object has no descriptor
        key = id(held)
        self._open[key] = weakref.ref(held, lambda _: self._open.pop(key, None))
        for _ in range(len(self._open) - _budget()):
            if (one := self._next(held)) is None:
                return
            one.rest()

    def _next(self, but: Held[Any]) -> Held[Any] | None:
        """Return the entry to close next, except a given one; None if there is none."""
        for _ in range(2):
            with contextlib.suppress(IndexError):  # of a list that is empty
                while True:
                    used, known = self._chosen.pop()
                    one = known()
                    if one is not None and one is not but and one.used == used and one.idle:
                        return one
            self._chosen = self._choose()
        return None

    def _choose(self) -> list[tuple[int, weakref.ref[Held[Any]]]]:
        """Return entries that may be closed, with their last use; the first to close comes last.

        Choosing goes through all that is open, so it is done once for many that are admitted.
        """
        every = [(one, known) for known in self._open.copy().values() if (one := known())]
        idle = [(one.unsynced, one.used, known) for one, known in every if one.idle]
        idle.sort(key=lambda each: each[:2], reverse=True)
        free = [(used, known) for unsynced, used, known in idle if not unsynced]
        return free or [(used, known) for _, used, known in idle[-_AT_ONCE:]]

    def forget(self, held: Held[Any]) -> None:
        """Unregister a closed entry."""
        self._open.pop(id(held), None)

    def forget_all(self) -> None:
        """Forget all entries, which belong to the parent process."""
        self._open.clear()
        self._chosen.clear()


def _budget() -> int:
    """Return how many descriptors may be held: a fifth of what the process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if limit < 0 else max(_FEWEST, min(_MOST, limit // _SHARE))


def hold_directory(directory: Directory) -> Held[Directory]:
    """Hold a directory; the root through which it was reached must stay open."""
    return Held(directory, directory.reached_again)


def hold_file(directory: Holder, name: str, *, create: bool = False) -> Held[File]:
    """Open a file, or create one to be written, and hold it."""

    def reopen() -> File:
        with directory.use() as place:
            return place.open_file(name, write=create)

    with directory.use() as place:
        return Held(place.create(name) if create else place.open_file(name), reopen)


def _replaced(path: str) -> ConcurrentWriterError:
    return ConcurrentWriterError(
        f"{path} was removed or replaced by another program while the store was open; "
        "open the store again, and verify it"
    )


def _after_fork() -> None:
    """Reset the pool in a forked child, where operations of the parent's threads never end."""
    global _lock
    _lock = threading.RLock()
    _pool.forget_all()


_uses = itertools.count()
_pool = _Pool()
# One lock for all: reopening a file uses its directory and may close other entries.
_lock = threading.RLock()
os.register_at_fork(after_in_child=_after_fork)
