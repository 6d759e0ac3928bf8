"""Threads that leave nothing waiting for ever: one that cannot be started, or dies, is noticed.

`threading.Thread.start` waits until the new thread says that it has begun; where memory runs out
before it can, that is never. Here only those wait that need what the thread does, and they look
whether it is alive.
"""

from __future__ import annotations

import _thread
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType

from tierstore.errors import StoreIOError

__all__ = ["Condition", "Event", "Worker"]

_PATIENCE = 0.05
"""Seconds after which what waits for a thread looks whether it is alive."""


class Condition(threading.Condition):
    """A condition whose lock is free again even where memory runs out as it is left.

    The inherited `__exit__` makes a tuple of its arguments first.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock, unless a wait that broke off could not take it again."""
        try:
            self.release()
        except RuntimeError:
            if error is None:
                raise


class Event(threading.Event):
    """An event whose lock is free again even where memory runs out in `set` or `wait`."""

    def __init__(self) -> None:
        """Start unset."""
        super().__init__()
        self._cond = Condition(threading.Lock())


class _Life:
    """Exists as long as the thread that it was handed to."""

    __slots__ = ("__weakref__",)


class Worker:
    """A thread that calls a function once. The end of the program does not wait for it."""

    def __init__(self, work: Callable[[], object], purpose: str) -> None:
        """Start it; raises StoreIOError, naming the purpose, where no thread can be had."""
        life = _Life()
        self._pid = os.getpid()
        self._life = weakref.ref(life)
        self._over = Event()
        try:
            _thread.start_new_thread(_run, (work, self._over, life))
        except RuntimeError as error:
            raise StoreIOError(
                f"no thread can be started to {purpose} ({error}); raise the limit (ulimit -u), "
                "or free memory, and try again"
            ) from error

    @property
    def alive(self) -> bool:
        """Whether the thread is still there; never in a forked child."""
        return self._life() is not None and os.getpid() == self._pid

    @property
    def ended(self) -> bool:
        """Whether the function has returned or raised, or the thread is gone."""
        return self._over.is_set() or not self.alive

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        """Wait for an event that the thread sets, at most `timeout` seconds; return whether it is.

        Ends, too, where the thread is gone, and by Ctrl-C.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not event.wait(min(_PATIENCE, max(0.0, end - time.monotonic()))):
            if not self.alive or time.monotonic() >= end:
                return event.is_set()
        return True

    def join(self, timeout: float | None = None) -> None:
        """Wait until the function has returned or the thread is gone, at most `timeout` seconds."""
        self.wait(self._over, timeout)


def _run(work: Callable[[], object], over: threading.Event, life: _Life) -> None:
    try:
        work()
    finally:
        over.set()
