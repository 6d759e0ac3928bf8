"""Bringing rows nearer before they are asked for, off the caller's thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

__all__ = ["Prefetcher"]

_MOST_PENDING = 64


class Prefetcher:
    """One thread that works through requests in order; those it cannot keep up with are dropped.

    A dropped request costs speed, never correctness: the rows are read when they are used. For the
    same reason an error is dropped too; the read that needs the row meets it again.
    """

    def __init__(self) -> None:
        """Start nothing: the thread starts with the first request."""
        self._requests: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_PENDING)
        self._thread: threading.Thread | None = None

    def submit(self, request: Callable[[], None]) -> None:
        """Have `request` called soon, or drop it if too many are waiting; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tierstore-prefetch")
            self._thread.daemon = True
            self._thread.start()
        try:
            self._requests.put_nowait(request)
        except queue.Full:
            return

    def wait(self) -> None:
        """Return when every request so far is done; at once in a forked child."""
        if self._thread is not None and self._thread.is_alive():
            self._requests.join()

    def close(self) -> None:
        """Drop what is waiting and end the thread."""
        if self._thread is None:
            return
        while True:
            try:
                self._requests.get_nowait()
                self._requests.task_done()
            except queue.Empty:
                break
        self._requests.put(None)
        self._thread.join()
        self._thread = None

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            with contextlib.suppress(Exception):
                request()
            self._requests.task_done()
        self._requests.task_done()
