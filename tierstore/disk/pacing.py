"""Asking the disk for what comes next while what has come is copied."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

__all__ = ["paced"]

_LEAD = 8


def paced(count: int, announce: Callable[[int], None]) -> Iterator[int]:
    """Yield 0 … count - 1, each when `announce` was called with it, in a thread that runs ahead.

    The thread is at most eight parts ahead of what the caller has taken, so that pages are not lost
    again before they are copied. Announcing waits for the disk wherever its queue is full; that is
    what sets the pace.
    """
    announced: queue.SimpleQueue[int] = queue.SimpleQueue()
    room = threading.Semaphore(_LEAD)
    over = threading.Event()

    def run_ahead() -> None:
        for number in range(count):
            room.acquire()
            if over.is_set():
                return
            with contextlib.suppress(Exception):  # it is advice: a read finds the page anyway
                announce(number)
            announced.put(number)

    thread = threading.Thread(target=run_ahead, name="tierstore-announce", daemon=True)
    thread.start()
    try:
        for _ in range(count):
            yield announced.get()
            room.release()
    finally:
        over.set()
        room.release()
        thread.join()
