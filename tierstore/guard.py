"""Who may use an open store, and when: one thread at a time, this process, until it is closed."""

from __future__ import annotations

import os
import threading

# What the module signal wraps, which makes enums of handlers and takes ten times as long for it.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from contextlib import AbstractContextManager
from signal import SIGINT
from types import FrameType, TracebackType
from typing import ClassVar

from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    ConcurrentWriterError,
    DeviceLostError,
    ForkedStoreError,
    ReadOnlyError,
    TierStoreError,
)

__all__ = ["Guard", "Use", "interrupts_deferred"]

_Handler = Callable[[int, FrameType | None], object]


class interrupts_deferred:  # noqa: N801 - used like a function
    """Hold back a Ctrl-C until the body is done, so that it finds nothing half changed.

    A second Ctrl-C is not held back. Only the main thread receives signals, and a process with a
    handler of its own keeps it: the handler is called late. Within another, this does nothing.
    """

    __slots__ = ("_caught", "_handler")
    _caught: list[FrameType | None]
    _handler: _Handler | None
    _deferring: ClassVar[bool] = False  # in the main thread

    def __enter__(self) -> None:
        """Take the handler's place, where there is one and this thread may."""
        self._handler = None
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not interrupts_deferred._deferring:
            handler = getsignal(SIGINT)
            if callable(handler):
                self._caught = []
                self._handler = handler
                signal(SIGINT, self._note)
                interrupts_deferred._deferring = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(frame)
        if len(self._caught) > 1 and self._handler is not None:
            self._handler(number, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Put the handler back, and tell it what came meanwhile."""
        if self._handler is not None:
            interrupts_deferred._deferring = False
            signal(SIGINT, self._handler)
            if len(self._caught) == 1:
                self._handler(SIGINT, self._caught[0])


class Use(interrupts_deferred):
    """One use of a store by one thread; see `Guard.use`."""

    __slots__ = ("_guard", "_interruptible", "_write")

    def __init__(self, guard: Guard, *, write: bool, interruptible: bool = False) -> None:
        """Prepare to enter; nothing is held yet."""
        self._guard = guard
        self._write = write
        self._interruptible = interruptible
        self._handler = None

    def __enter__(self) -> None:
        """Wait for the other threads, hold interrupts back, and check that all is as it must be."""
        guard = self._guard
        guard.check_process()
        guard.lock.acquire()
        try:
            if not self._interruptible:
                super().__enter__()
            guard.check_open(write=self._write)
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Let the next thread in, unless what happened must close the store."""
        if error is not None:
            self._judge(error)
        self._leave()

    def _judge(self, error: BaseException) -> None:
        """Close the store after an error that its memory may not be whole after."""
        if isinstance(error, CommitFailedError | ConcurrentWriterError | DeviceLostError):
            self._guard.close(str(error))
        elif (
            isinstance(error, KeyboardInterrupt | MemoryError)
            and not isinstance(error, TierStoreError)  # CapacityError was seen coming
            and not self._interruptible
        ):
            self._guard.close("it was interrupted in the middle of a call")

    def _leave(self) -> None:
        try:
            super().__exit__()
        finally:
            self._guard.lock.release()


class Guard:
    """The state every public call of a store passes through."""

    def __init__(self, path: str, *, writable: bool) -> None:
        """Start open, owned by this process."""
        self.writable = writable
        self._path = path
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self._closed = ""

    @property
    def closed(self) -> bool:
        """Whether the store was closed, or cannot be used any more."""
        return bool(self._closed)

    @property
    def held(self) -> bool:
        """Whether the calling thread is using the store."""
        # What threading.Condition asks of a lock.
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def use(
        self, *, write: bool = False, interruptible: bool = False
    ) -> AbstractContextManager[None]:
        """Let one thread into the store; an interrupt waits until the body is done.

        A failed sync, and whatever breaks off the body in the middle, closes the store for good:
        its last commit is intact, its memory may not be. An `interruptible` body changes nothing
        in memory that an interrupt could leave half done, and receives it at once.
        """
        return Use(self, write=write, interruptible=interruptible)

    def check(self, *, write: bool = False) -> None:
        """Raise ForkedStoreError, ClosedError, or ReadOnlyError for a `write` by a reader."""
        self.check_process()
        self.check_open(write=write)

    def check_open(self, *, write: bool) -> None:
        """Raise as `check` does, in the process the store was opened in."""
        if self._closed:
            raise ClosedError(f"{self._path} cannot be used: {self._closed}; open it again")
        if write and not self.writable:
            raise ReadOnlyError(f"{self._path} was opened for reading; open it with mode='r+'")

    def check_process(self) -> None:
        """Raise ForkedStoreError in a process that was forked after the store was opened."""
        if os.getpid() != self.pid:
            raise ForkedStoreError(
                f"{self._path} was opened before this process was forked; open it again here, "
                "for reading: tierstore.open(path)"
            )

    def close(self, reason: str = "it was closed") -> None:
        """Refuse every call from now on."""
        self._closed = self._closed or reason
