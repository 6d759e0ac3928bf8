"""Work of Python in parts on several threads, of which the caller is one.

The core has threads of its own (`_core/pool.c`), which never wait for the interpreter.

Every thread that is free takes the next part, so that none waits for a busy one, or for one that
the system has not woken yet. `concurrent.futures` wakes one of its threads for several calls that
are submitted in a row: four parts took as long on four cores as one after another.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache

from tierstore import _cgroups, _core
from tierstore.errors import InvalidInputError

THREADS_VARIABLE = "TIERSTORE_THREADS"
_MOST_THREADS = 8
"""More would wait for their turns at the interpreter: on 16 cores beside an H100 a step in three
tiers takes 6.7 ms with 6 to 10 threads, 7 to 9 ms with 16 (benchmarks/bench_three_tiers.py)."""
_PATIENCE = 0.05
"""Seconds after which a caller looks again whether all parts have ended."""
_here = threading.local()
"""Has `in_part` set in a thread that does a part of work."""

Work = Callable[[slice], object]


@cache
def threads_of_core() -> int:
    """Return how many threads of the core work on a call at most, the caller included.

    As many as the cores that the process may use, as its cgroup and those around it may use in a
    period, and as the environment variable TIERSTORE_THREADS says. Raises InvalidInputError where
    that is no number from 1 on.
    """
    limits = [len(os.sched_getaffinity(0)), *_cgroups.cores()]
    if given := os.environ.get(THREADS_VARIABLE, ""):
        if not given.isdecimal() or int(given) < 1:
            raise InvalidInputError(
                f"{THREADS_VARIABLE} is {given!r}, but should be a number of threads from 1 on"
            )
        limits.append(int(given))
    return max(1, min(limits))


_core.set_threads(threads_of_core(), 0)


def most_threads() -> int:
    """Return how many threads work on parts in Python at most, the caller included."""
    return min(threads_of_core(), _MOST_THREADS)


def threads_here() -> int:
    """Return how many threads work on the parts of a call from here at most."""
    return 1 if getattr(_here, "in_part", False) else most_threads()


def in_parts(work: Work, rows: int, nbytes: int, *, least: int) -> None:
    """Call `work` on disjoint parts of the rows, in threads if that is faster.

    Args:
        work: takes a part; calls of it may run at the same time.
        rows: how many rows there are.
        nbytes: what all of them come to.
        least: the fewest bytes for which a thread pays off.

    Returns when all parts have ended, and raises the error of the first that failed. The caller
    does what no thread begins, and a part that calls this itself does its work alone.
    """
    threads = threads_here()
    parts = min(threads, nbytes // least)
    if parts < 2:
        work(slice(0, rows))
        return
    edges = [rows * part // parts for part in range(parts + 1)]
    _crew(os.getpid()).do(_Job(work, map(slice, edges[:-1], edges[1:])))


def beside(here: Callable[[], object], there: Callable[[], object]) -> None:
    """Call two functions, the second in another thread if one is free, else after the first.

    Returns when both have ended, and raises the error of the first, or else that of the second.
    """
    if threads_here() < 2:
        here()
        there()
        return
    _crew(os.getpid()).do(_Job(lambda part: there(), [slice(1)]), here)


class _Job:
    """Parts that are not begun, and the outcome of the others.

    Attributes:
        rest: the parts, numbered.
        errors: why each part is not done, None for those that are. Nothing is put there for which
            memory might lack: an error that goes unnoted would leave a part undone unseen.
        over: released when the threads of the crew have ended their parts.
    """

    def __init__(self, work: Work, parts: Iterable[slice]) -> None:
        self.rest = deque(enumerate(parts))
        unknown = MemoryError("memory ran out in a part of some work")
        self.errors: list[BaseException | None] = [unknown] * len(self.rest)
        self.over = threading.Lock()
        self.over.acquire()
        self._work = work
        self._running: list[None] = []

    def do(self) -> None:
        """Do a part in the caller's thread, if one is left; an interrupt ends it at once."""
        try:
            number, part = self.rest.popleft()
        except IndexError:
            return
        try:
            self._work(part)
            self.errors[number] = None
        except Exception as error:
            self.errors[number] = error

    def help(self) -> None:
        """Do parts in a thread of the crew until none is left."""
        while self.rest:
            self._running.append(None)  # first: what is running is never less than it seems
            try:
                number, part = self.rest.popleft()
                try:
                    self._work(part)
                    self.errors[number] = None
                except BaseException as error:
                    self.errors[number] = error
            except IndexError:  # another thread was faster
                return
            finally:
                self._running.pop()
                if not (self._running or self.rest):
                    with contextlib.suppress(RuntimeError):  # released before
                        self.over.release()

    def end(self) -> None:
        """Drop what is not begun and wait for the rest, however often Ctrl-C is pressed meanwhile.

        A part still running would write to memory that is in use again.
        """
        try:
            self.rest.clear()
            while self._running:
                self.over.acquire(timeout=_PATIENCE)
        except BaseException:
            self.end()
            raise


class _Crew:
    """The threads of a process that help callers with their parts.

    They are started when they are needed, and wait for more work as long as the process lives. Of
    what they share with callers every access is one step of the interpreter, without a lock that an
    interrupted caller could leave locked.
    """

    def __init__(self) -> None:
        """Start no thread yet."""
        self._jobs: list[_Job] = []
        self._asleep: list[threading.Lock] = []
        self._started = 0

    def do(self, job: _Job, here: Callable[[], object] | None = None) -> None:
        """Do all parts, the caller's own first if there is one; see `in_parts` and `beside`."""
        _here.in_part = True
        try:
            self._call_for(job, len(job.rest) - (here is None))
            if here is not None:
                here()
            while job.rest:
                job.do()
        finally:
            try:
                job.end()
            finally:
                _here.in_part = False
                with contextlib.suppress(ValueError):  # there was no memory to call for help
                    self._jobs.remove(job)
        for error in job.errors:
            if error is not None:
                raise error

    def _call_for(self, job: _Job, threads: int) -> None:
        """Ask up to so many threads, which are free or can be started, to help."""
        self._jobs.append(job)
        for _ in range(threads):
            try:
                self._asleep.pop().release()
            except IndexError:
                if self._started >= most_threads() - 1:
                    return
                try:
                    _thread.start_new_thread(self._help, ())
                except (RuntimeError, MemoryError):
                    return
                self._started += 1

    def _help(self) -> None:
        """Help with each job until the process ends."""
        try:
            _here.in_part = True
            bell = threading.Lock()
            bell.acquire()
            while True:
                self._help_with_all()
                self._asleep.append(bell)
                if self._has_work():  # which came before the bell could be rung for it
                    with contextlib.suppress(ValueError):
                        self._asleep.remove(bell)
                        continue
                bell.acquire()
        finally:
            self._started -= 1  # memory ran out: another thread is to take this one's place

    def _help_with_all(self) -> None:
        for job in tuple(self._jobs):
            job.help()

    def _has_work(self) -> bool:
        return any(job.rest for job in tuple(self._jobs))


@cache
def _crew(pid: int) -> _Crew:
    """Return the crew of this process; a forked child has its own."""
    return _Crew()
