"""When a disk is asked for what: ahead of what is copied, and, for what can wait, with rests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from tierstore.errors import StoreIOError
from tierstore.threads import Worker

__all__ = ["at_leisure", "paced"]

_LEAD = 3
_PATIENCE = 0.05
"""Seconds after which what waits for the thread that runs ahead looks whether it is alive."""
_REST = 2


def paced(count: int, announce: Callable[[int], None]) -> Iterator[int]:
    """Yield 0 … count - 1, each when `announce` was called with it, in a thread that runs ahead.

    The thread is at most three parts ahead of what the caller has taken, so that pages are not lost
    again before they are copied. Announcing waits for the disk wherever its queue is full; that is
    what sets the pace.
    """
    announced = threading.Semaphore(0)
    room = threading.Semaphore(_LEAD)
    over = threading.Event()

    def run_ahead() -> None:
        for number in range(count):
            room.acquire()
            if over.is_set():
                return
            with contextlib.suppress(Exception):  # it is advice: a read finds the page anyway
                announce(number)
            announced.release()

    try:
        worker = Worker(run_ahead, "read ahead")
    except (StoreIOError, MemoryError):  # all is found without advice, but later
        yield from range(count)
        return
    try:
        for number in range(count):
            while worker.alive and not announced.acquire(timeout=_PATIENCE):
                pass
            yield number
            room.release()
    finally:
        over.set()
        room.release()
        worker.join()


def at_leisure(steps: Iterator[None], hurry: threading.Event) -> Iterator[None]:
    """Pass on steps of work, with rests in between until `hurry` is set.

    A rest takes twice as long as the step before it, so that others have most of the disk.
    """
    begin = time.perf_counter()
    for _ in steps:
        yield
        hurry.wait(_REST * (time.perf_counter() - begin))
        begin = time.perf_counter()
