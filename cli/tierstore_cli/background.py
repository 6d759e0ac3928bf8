"""Work at low priority, next to a training process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_NICENESS = 10
_T = TypeVar("_T")


def in_background(
    work: Callable[[Callable[[int, int], None]], _T], progress: Callable[[int, int], None]
) -> _T:
    """Run `work(progress)` in a thread of low priority and return its result.

    The other threads of the process keep their priority. Ctrl-C ends the work at its next report of
    progress.
    """
    stopped = threading.Event()

    def report(done: int, total: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        progress(done, total)

    with ThreadPoolExecutor(1, initializer=_lower_priority) as threads:
        try:
            return threads.submit(work, report).result()
        except BaseException:
            stopped.set()
            raise


def _lower_priority() -> None:
    """Lower the priority of this thread; on Linux each thread has its own."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        niceness = max(os.getpriority(os.PRIO_PROCESS, thread), _NICENESS)
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
