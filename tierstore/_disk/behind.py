"""The thread that writes behind the callers of a store, for all its tables in turn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], object]


class Behind:
    """A thread that does jobs in the order in which they are asked for.

    It starts with the first and lives until it is closed, or until nothing refers to it: the
    thread itself does not. A job notes its own errors. A forked child has no such thread.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        # Its `put` may be called in a finalizer that interrupts another call of it.
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether there is a thread, which does what it was asked for."""
        return self._thread is not None and self._thread.is_alive()

    def ask(self, job: Job) -> bool:
        """Have a job done soon; return False if no thread can do it."""
        with self._starting:
            if self._closed or not (self.alive or self._start()):
                return False
            self._jobs.put(job)
            return True

    def _start(self) -> bool:
        thread = threading.Thread(
            target=_work, args=(self._jobs,), name="tierstore-write", daemon=True
        )
        self._thread = thread
        try:
            thread.start()
        except RuntimeError:
            self._thread = None
        return self._thread is not None

    def close(self) -> None:
        """Do what was asked for, and end the thread; no other starts.

        It takes no lock, which a forked child might find locked for ever.
        """
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None and self.alive:
            self._thread.join()

    def __del__(self) -> None:
        """End the thread of an object that was not closed."""
        with contextlib.suppress(AttributeError):  # of one that could not be made
            self._jobs.put(None)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # which holds a file
    jobs.put(None)  # for another thread, if starting this one was interrupted
