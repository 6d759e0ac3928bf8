"""The door of an open store: who may enter, beside others or alone, until it is closed."""

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

from tierstore._threads import Event
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
        if interrupts_deferred._deferring:  # the cheaper question first: uses within a step nest
            return self
        if threading.get_ident() == threading.main_thread().ident:
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
        """Deliver an interrupt that came before, and those that come from now on."""
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
    """One use of a store by one thread; see `Door.call` and `Door.use`.

    Interrupts are deferred before anything is taken and until all of it is given back: one raised
    in between would leave the store taken.
    """

    __slots__ = ("_alone", "_door", "_harmless", "_thread", "_write")

    def __init__(self, door: Door, *, write: bool, alone: bool = True) -> None:
        """Prepare to enter; nothing is held yet."""
        self._door = door
        self._write = write
        self._alone = alone
        self._harmless: BaseException | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Defer interrupts, wait for the other threads as far as needed, check that all is well."""
        door = self._door
        if os.getpid() != door.pid:
            door.check_process()
        self._handler = None
        if not interrupts_deferred._deferring:
            interrupts_deferred.__enter__(self)
        try:
            if not self._alone and self._thread in door.calls:
                door.calls[self._thread] += 1
            else:
                if not door.lock.acquire(blocking=False):
                    self._wait()
                if not self._alone:  # a call has the lock only while it counts itself
                    try:
                        door.calls[self._thread] = 1
                    finally:
                        door.lock.release()
        except BaseException:
            interrupts_deferred.__exit__(self)
            raise
        try:
            if self._alone and door.calls:
                self._wait_for_calls()
            if door.reason or (self._write and not door.writable):
                door.check_open(write=self._write)
        except BaseException:
            self._leave()
            raise
        return self

    def _wait(self) -> None:
        """Wait for the lock; an interrupt is raised at once."""
        while not self._door.lock.acquire(timeout=_PATIENCE):
            self._tell()

    def _wait_for_calls(self) -> None:
        """Wait until no other thread is in a call; none begins meanwhile."""
        door = self._door
        door.fenced = True
        while door.busy(self._thread):
            door.ended.wait(_PATIENCE)
            door.ended.clear()
            self._tell()
        door.fenced = False

    def _tell(self) -> None:
        """Deliver an interrupt that was held back."""
        if self._handler is not None and self._caught:
            self._handler(SIGINT, self._caught.pop())

    def interruptible(self) -> AbstractContextManager[None]:
        """Deliver interrupts in a part of this use, and leave the store open after any error.

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
        """Give back what was taken; close the store after an error that demands it."""
        try:
            if error is not None:
                self._judge(error)
            elif self._door.reason and not self._alone:
                self._door.check_open(write=False)  # another thread's call broke off beside this
        finally:
            self._harmless = None  # its traceback holds this
            self._leave()

    def _judge(self, error: BaseException) -> None:
        """Close the store after an error that its memory may not be whole after.

        Errors of this library are raised before anything has changed, or where all is whole. What
        else comes from here may have come from anywhere, and is an InternalError if it is not
        MemoryError, an interrupt, or an exception of the caller's.
        """
        door = self._door
        if isinstance(error, _FINAL) or (isinstance(error, NotAStoreError) and door.writable):
            door.close(error.args[0] if error.args else _BROKEN_OFF)
        elif error is self._harmless:
            if _is_internal(error):
                raise internal_error(error, "the store stays open, with all that it had") from error
        elif not isinstance(error, _HARMLESS):
            door.close(_BROKEN_OFF)
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
        door = self._door
        try:
            if self._alone:
                door.lock.release()
            elif door.calls[self._thread] > 1:
                door.calls[self._thread] -= 1
            else:
                del door.calls[self._thread]
                if door.fenced:
                    door.ended.set()
            if door.then is not None and not door.held:
                then, door.then = door.then, None
                if then is not None:  # else another thread that is leaving has taken it
                    then()
        finally:
            if self._handler is not None:
                interrupts_deferred.__exit__(self)


class Door:
    """What every public call of a store passes through: open or closed, this process, whose turn.

    Calls (`call`) run beside each other: what they share is guarded by the tiers' own locks. A use
    (`use`) is alone: it waits until no call is under way, and none begins before it ends. This one
    fence is what commit, rollback, refresh, growth, folds and closing stand on: no version holds
    half a call. The thread that has the fence may make calls of its own.

    Attributes:
        reason: why the store can no longer be used, empty while it is open.
        calls: how many calls deep each thread is inside.
        fenced: whether a use waits for calls to end, and `ended` tells it of each.
    """

    def __init__(self, path: str, *, writable: bool) -> None:
        """Start open, owned by this process."""
        self.writable = writable
        self._path = path
        self.pid: int = os.getpid()
        self.lock: threading.RLock = threading.RLock()
        self.reason: str = ""
        self.then: Callable[[], object] | None = None
        self.calls: dict[int, int] = {}
        self.fenced = False
        self.ended: Event = Event()

    @property
    def closed(self) -> bool:
        """Whether the store was closed, or cannot be used any more."""
        return bool(self.reason)

    @property
    def held(self) -> bool:
        """Whether the calling thread is inside, alone or beside others."""
        # `_is_owned` is what threading.Condition asks of a lock.
        alone: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return alone or threading.get_ident() in self.calls

    def busy(self, thread: int) -> bool:
        """Whether a thread other than this one is in a call."""
        return len(self.calls) > (thread in self.calls)

    def call(self, *, write: bool = False) -> Use:
        """Enter beside the calls of other threads; an interrupt waits until the body is done.

        For what changes nothing but through tiers that guard themselves. Errors count as in `use`;
        a call beside which another broke off raises ClosedError instead of returning.
        """
        return Use(self, write=write, alone=False)

    def use(self, *, write: bool = False) -> Use:
        """Enter alone, once every call of other threads has ended; interrupts wait as in `call`.

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
        if self.reason:
            raise ClosedError(f"{self._path} cannot be used: {self.reason}; open it again")
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
        """Refuse every call from now on; call `then` when the calling thread's uses have ended.

        The first `then` counts: an error afterwards does not take it back.
        """
        self.reason = self.reason or reason
        self.then = self.then or then
