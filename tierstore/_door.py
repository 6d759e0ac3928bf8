"""Who may use an open store, and when: one thread at a time, this process, until it is closed."""

from __future__ import annotations

import os
import threading

# What the module signal wraps, which makes enums of handlers and takes ten times as long for it.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from contextlib import AbstractContextManager
from ctypes import ArgumentError
from signal import SIGINT
from types import FrameType, TracebackType
from typing import ClassVar, Self

from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    ConcurrentWriterError,
    DeviceLostError,
    ForkedStoreError,
    InternalError,
    NotAStoreError,
    ReadOnlyError,
    TierStoreError,
)

__all__ = ["INTERNAL", "Door", "Use", "internal_error", "internal_errors", "interrupts_deferred"]

_PATIENCE = 0.05
"""Seconds after which a thread that waits for the store looks whether it was interrupted."""

# Tuples that exist already: after a MemoryError, what decides about closing allocates nothing.
_FINAL = (CommitFailedError, ConcurrentWriterError, DeviceLostError)
_HARMLESS = (TierStoreError, Warning)
INTERNAL = (SystemError, ArgumentError)
"""What only the interior of Python, NumPy and ctypes raises; see `internal_error`."""
_PASSING = (MemoryError, TimeoutError)
_BROKEN_OFF = "a call was broken off in the middle"

_Handler = Callable[[int, FrameType | None], object]


class internal_errors:  # noqa: N801 - used like a function
    """Raise InternalError for what only the interior of Python, NumPy or ctypes raises.

    For calls that use no store, or run code of the caller's, whose own errors pass.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Raise InternalError from such an error."""
        if error is not None and _is_internal(error):
            raise internal_error(error) from error


def _is_internal(error: BaseException) -> bool:
    """Whether no code of the caller's can have meant to raise this."""
    return isinstance(error, INTERNAL) or (
        type(error) is RuntimeError and str(error).startswith("can't ")  # … allocate lock
    )


def internal_error(error: BaseException, outcome: str = "nothing was changed") -> InternalError:
    """Return the InternalError that such an error, which no caller can expect, becomes."""
    return InternalError(
        f"{type(error).__name__}: {error}, which this call does not expect; memory may have run "
        f"out; {outcome}"
    )


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
        try:
            if use._handler is not None:
                use._tell()
                interrupts_deferred._deferring = False
                use._through = True
        except BaseException as error:
            use._harmless = error
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        """Hold back again; what was raised and has not come here was lost, and is still to tell."""
        use = self._use
        try:
            if error is not None:
                use._harmless = error
            if use._handler is not None:
                use._through = False
                interrupts_deferred._deferring = True
                del use._caught[0 if error is not None else 1 :]
        except BaseException as late:
            use._harmless = late
            raise


class Use(interrupts_deferred):
    """One use of a store by one thread; see `Door.use`.

    Interrupts are held back before the lock is taken and until it is free again: one that is raised
    in between might find it taken with nobody to give it back.
    """

    __slots__ = ("_guard", "_harmless", "_write")

    def __init__(self, guard: Door, *, write: bool) -> None:
        """Prepare to enter; nothing is held yet."""
        self._guard = guard
        self._write = write
        self._harmless: BaseException | None = None

    def __enter__(self) -> Self:
        """Wait for the other threads, hold interrupts back, and check that all is as it must be."""
        guard = self._guard
        guard.check_process()
        interrupts_deferred.__enter__(self)
        try:
            if not guard.lock.acquire(blocking=False):
                self._wait()
        except BaseException:
            interrupts_deferred.__exit__(self)
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
        """Let interrupts through in a part of this use, and leave the store open after any error.

        For what takes long, or runs code of the caller's, and changes nothing in memory that could
        be left half done. An interrupt that Python drops there, as it does where one comes in a
        destructor, is raised at the end.
        """
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
            self._harmless = None  # its traceback holds this
            self._leave()

    def _judge(self, error: BaseException) -> None:
        """Close the store after an error that its memory may not be whole after.

        Errors of this library are raised before anything has changed, or where all is whole. What
        else comes from here may have come from anywhere, and is an InternalError if it is not
        MemoryError, an interrupt, or an exception of the caller's.
        """
        guard = self._guard
        if isinstance(error, _FINAL) or (isinstance(error, NotAStoreError) and guard.writable):
            guard.close(error.args[0] if error.args else _BROKEN_OFF)
        elif error is self._harmless:
            if _is_internal(error):
                raise internal_error(error, "the store stays open, with all that it had") from error
        elif not isinstance(error, _HARMLESS):
            guard.close(_BROKEN_OFF)
            if (
                isinstance(error, Exception)
                and not isinstance(error, _PASSING)
                and type(error).__module__ in ("builtins", "ctypes")
            ):
                raise internal_error(
                    error, "the store is closed, its last commit is intact"
                ) from error

    def _leave(self) -> None:
        # Nothing here takes memory, as super() would: else Ctrl-C might be held back for ever.
        guard = self._guard
        try:
            guard.lock.release()
            if guard.then is not None and not guard.held:
                then, guard.then = guard.then, None
                then()
        finally:
            interrupts_deferred.__exit__(self)


class Door:
    """The state every public call of a store passes through."""

    def __init__(self, path: str, *, writable: bool) -> None:
        """Start open, owned by this process."""
        self.writable = writable
        self._path = path
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self._closed = ""
        self.then: Callable[[], object] | None = None

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
        its last commit is intact, its memory may not be. So arguments are checked before, or raise
        an error of this library. `Use.interruptible` is for parts that may be broken off.
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
            raise ReadOnlyError(
                f"{self._path} was opened for reading; open it with mode='r+'", filename=self._path
            )

    def check_process(self) -> None:
        """Raise ForkedStoreError in a process that was forked after the store was opened."""
        if os.getpid() != self.pid:
            raise ForkedStoreError(
                f"{self._path} was opened before this process was forked; open it again here, "
                "for reading: tierstore.open(path)"
            )

    def close(
        self, reason: str = "it was closed", *, then: Callable[[], object] | None = None
    ) -> None:
        """Refuse every call from now on; call `then` when the calling thread's uses have ended."""
        self._closed = self._closed or reason
        self.then = then
