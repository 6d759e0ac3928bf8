"""What becomes of a store that nobody closes: at exit, in a forked child, when dropped."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from tierstore.errors import UnclosedStoreWarning

__all__ = ["watch"]


class Lock(Protocol):
    """A lock that closing lets go of, but for the process that was forked."""

    def close(self) -> None:
        """Close its files."""


class Closable(Protocol):
    """Something open, with locks that the kernel would keep for a child."""

    @property
    def locks(self) -> Sequence[Lock]:
        """Return them."""

    def close(self) -> None:
        """Close it."""


_opened: weakref.WeakSet[Closable] = weakref.WeakSet()


def watch(opened: Closable, path: str, locks: Sequence[Lock]) -> Callable[[], object]:
    """Look after something open until the function that is returned is called.

    At exit it is closed; dropped without being closed, it gives a ResourceWarning and its locks go.
    """
    finalizer = weakref.finalize(opened, _abandoned, path, locks)
    finalizer.atexit = False
    _opened.add(opened)
    return finalizer.detach


def _abandoned(path: str, locks: Sequence[Lock]) -> None:
    for lock in locks:
        lock.close()
    warnings.warn(f"{path} was not closed", UnclosedStoreWarning, stacklevel=2)


def _close_all() -> None:
    for opened in list(_opened):
        opened.close()


def _after_fork() -> None:
    """In a forked child: close, without unlocking, the locks that are the parent's."""
    for opened in list(_opened):
        for lock in opened.locks:
            lock.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)
