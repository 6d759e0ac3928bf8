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
from typing import ClassVar, Self

from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    ConcurrentWriterError,
    DeviceLostError,
    ForkedStoreError,
    NotAStoreError,
    ReadOnlyError,
    TierStoreError,
)

__all__ = ["Guard", "Use", "interrupts_deferred"]

_PATIENCE = 0.05
"""Seconds after which a thread that waits for the store looks whether it was interrupted."""

_Handler = Callable[[int, FrameType | None], object]


class interrupts_deferred:  # noqa: N801 - used like a function
    """Hold back a Ctrl-C until the body is done, so that it finds nothing half changed.

    A second Ctrl-C is not held back. Only the main thread receives signals, and a process with a
    handler of its own keeps it: the handler is called late. Within another, this does nothing.
    """

    __slots__ = ("_caught", "_handler", "_through")
    _caught: list[FrameType | None]
    _handler: _Handler | None
    _through: bool
    _deferring: ClassVar[bool] = False  # in the main thread

    def __enter__(self) -> Self:
        """Take the handler's place, where there is one and this thread may."""
        self._handler = None
        if threading.get_ident() != threading.main_thread().ident:
            return self
        if not interrupts_deferred._deferring:
            handler = getsignal(SIGINT)
            if callable(handler):
                self._caught = []
                self._through = False
                self._handler = handler
                signal(SIGINT, self._note)
                interrupts_deferred._deferring = True
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(frame)
        if self._handler is not None and (self._through or len(self._caught) > 1):
            self._handler(number, frame)
            self._caught.clear()  # it raised nothing, so nothing can have been lost

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


class _LetThrough:
    """A part of a use in which a Ctrl-C is not held back; see `Use.interruptible`."""

    __slots__ = ("_use",)

    def __init__(self, use: Use) -> None:
        self._use = use

    def __enter__(self) -> None:
        """Let through what came before, and from now on."""
        use = self._use
        if use._handler is not None:
            use._tell()
            interrupts_deferred._deferring = False
            use._through = True

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Hold back again; what was raised and has not come here was lost, and is still to tell."""
        use = self._use
        if use._handler is not None:
            use._through = False
            interrupts_deferred._deferring = True
            del use._caught[0 if error is not None else 1 :]


class Use(interrupts_deferred):
    """One use of a store by one thread; see `Guard.use`.

    Interrupts are held back before the lock is taken and until it is free again: one that is raised
    in between might find it taken with nobody to give it back.
    """

    __slots__ = ("_guard", "_interruptible", "_write")

    def __init__(self, guard: Guard, *, write: bool) -> None:
        """Prepare to enter; nothing is held yet."""
        self._guard = guard
        self._write = write
        self._interruptible = False

    def __enter__(self) -> Self:
        """Wait for the other threads, hold interrupts back, and check that all is as it must be."""
        guard = self._guard
        guard.check_process()
        super().__enter__()
        try:
            if not guard.lock.acquire(blocking=False):
                self._wait()
        except BaseException:
            super().__exit__()
            raise
        try:
            guard.check_open(write=self._write)
        except BaseException:
            self._leave()
            raise
        return self

    def _wait(self) -> None:
        """Wait for the other threads; an interrupt need not."""
        while not self._guard.lock.acquire(timeout=_PATIENCE):
            self._tell()

    def _tell(self) -> None:
        """Let the handler know of an interrupt that was held back."""
        if self._handler is not None and self._caught:
            self._handler(SIGINT, self._caught.pop())

    def interruptible(self) -> AbstractContextManager[None]:
        """Let interrupts through in a part of this use.

        For what takes long and changes nothing in memory that an interrupt could leave half done:
        it leaves the store open. An interrupt that Python drops there, as it does where one comes
        in a destructor, is raised at the end.
        """
        self._interruptible = True
        return _LetThrough(self)

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Let the next thread in, unless what happened must close the store."""
        try:
            if error is not None:
                self._judge(error)
        finally:
            self._leave()

    def _judge(self, error: BaseException) -> None:
        """Close the store after an error that its memory may not be whole after."""
        if isinstance(error, CommitFailedError | ConcurrentWriterError | DeviceLostError) or (
            isinstance(error, NotAStoreError) and self._guard.writable
        ):
            self._guard.close(str(error))
        elif (
            isinstance(error, KeyboardInterrupt | MemoryError)
            and not isinstance(error, TierStoreError)  # CapacityError was seen coming
            and not self._interruptible
        ):
            self._guard.close("it was interrupted in the middle of a call")

    def _leave(self) -> None:
        try:
            self._guard.lock.release()
        finally:
            super().__exit__()


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

    def use(self, *, write: bool = False) -> Use:
        """Let one thread into the store; an interrupt waits until the body is done.

        A failed sync, and whatever breaks off the body in the middle, closes the store for good:
        its last commit is intact, its memory may not be. `Use.interruptible` is for parts that an
        interrupt may break off.
        """
        return Use(self, write=write)

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
