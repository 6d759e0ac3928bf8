"""Threads that never block others forever, even if one cannot be started or dies.

`threading.Thread.start` waits for a signal of the new thread, which never comes if the thread runs
out of memory first. Here, only consumers of the thread's result wait, and they check whether the
thread is alive.
"""

from __future__ import annotations

import _thread
import math
import os
import threading
import time
import weakref
from collections.abc import Callable

from tierstore.errors import StoreIOError

_POLL_SECONDS = 0.05
"""Seconds between checks whether an awaited thread is still alive."""


class Condition(threading.Condition):
    """A condition that releases its lock even if memory runs out in `__exit__`.

    The inherited `__exit__` allocates a tuple of its arguments first.
    """

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock, unless an interrupted wait failed to take it again."""
        try:
            self.release()
        except RuntimeError:
            if error is None:
                raise


class Event(threading.Event):
    """An event that releases its lock even if memory runs out in `set` or `wait`."""

    def __init__(self) -> None:
        """Start unset."""
        super().__init__()
        self._cond = Condition(threading.Lock())


class _Life:
    """Exists as long as the thread that owns it."""

    __slots__ = ("__weakref__",)


class Worker:
    """A daemon thread that calls a function once."""

    def __init__(self, work: Callable[[], object], purpose: str) -> None:
        """Start the thread; raises StoreIOError with the purpose if that fails."""
        life = _Life()
        self._pid = os.getpid()
        self._life = weakref.ref(life)
        self._over = Event()
        try:
            _thread.start_new_thread(_run, (work, self._over, life))
        except RuntimeError as error:
            raise StoreIOError(
                f"cannot start a thread to {purpose} ({error}); raise the limit (ulimit -u), "
                "or free memory, and try again"
            ) from error

    @property
    def alive(self) -> bool:
        """Whether the thread still exists; always False in a forked child."""
        return self._life() is not None and os.getpid() == self._pid

    @property
    def ended(self) -> bool:
        """Whether the function has returned or raised, or the thread has died."""
        return self._over.is_set() or not self.alive

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for an event set by the thread; return whether it is set.

        Also returns if the thread has died; Ctrl-C interrupts the wait.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not event.wait(min(_POLL_SECONDS, max(0.0, end - time.monotonic()))):
            if not self.alive or time.monotonic() >= end:
                return event.is_set()
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds until the function has returned or the thread has died."""
        self.wait(self._over, timeout)


def _run(work: Callable[[], object], over: threading.Event, life: _Life) -> None:
    try:
        work()
    finally:
        over.set()
