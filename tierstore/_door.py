"""Access control of an open store: shared or exclusive, until it is closed."""

from __future__ import annotations

import os
import threading

# The C module under `signal`, whose conversion of handlers to enums takes ten times as long.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable
from contextlib import AbstractContextManager
from ctypes import ArgumentError
from signal import SIGINT
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar, Self, TypeVar

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

_POLL_SECONDS = 0.05
"""Seconds between checks for an interrupt while a thread waits for the store."""

# Preallocated tuples: after a MemoryError, the decision about closing must not allocate.
_FINAL = (CommitFailedError, ConcurrentWriterError, DeviceLostError)
_SAFE_ERRORS = (TierStoreError, Warning)
INTERNAL = (SystemError, ArgumentError)
"""Errors that only the internals of Python, NumPy and ctypes raise; see `internal_error`."""
_EXPECTED_ERRORS = (MemoryError, TimeoutError)
_CLOSED = "it was closed"
_INTERRUPTED = "a call was interrupted in the middle"
_FOR_READING = "was opened for reading; open it with mode='r+'"

_Handler = Callable[[int, FrameType | None], object]
_Kind = TypeVar("_Kind", bound=type)
_undisturbed: set[CodeType] = set()
_main_thread = threading.main_thread().ident  # asking takes two calls, in every use of a store


def _ask_anew() -> None:
    """Take the thread that forked, of which the child is made, for its main one."""
    global _main_thread
    _main_thread = threading.main_thread().ident


os.register_at_fork(after_in_child=_ask_anew)


def may_be_interrupted() -> bool:
    """Whether signals come to this thread."""
    return threading.get_ident() == _main_thread


def undisturbed(kind: _Kind) -> _Kind:
    """Mark a class whose methods enter or leave a store: no interrupt is raised within them.

    A second Ctrl-C that came there would leave the store locked for good.
    """
    methods = (each for each in vars(kind).values() if isinstance(each, FunctionType))
    _undisturbed.update(each.__code__ for each in methods if each.__name__ != "__init__")
    return kind


class internal_errors:  # noqa: N801 - used like a function
    """Raise InternalError for errors that only the internals of Python, NumPy or ctypes raise.

    For calls that use no store, or run code of the caller, whose own errors are not changed.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Raise InternalError from an internal error."""
        if error is not None and _is_internal(error):
            raise internal_error(error) from error


def _is_internal(error: BaseException) -> bool:
    """Whether the error cannot have been raised deliberately by the caller's code."""
    return isinstance(error, INTERNAL) or (
        type(error) is RuntimeError and str(error).startswith("can't ")  # … allocate lock
    )


def internal_error(error: BaseException, outcome: str = "nothing was changed") -> InternalError:
    """Return the InternalError for an unexpected error."""
    return InternalError(
        f"unexpected {type(error).__name__}: {error}; memory may have run out; {outcome}"
    )


@undisturbed
class interrupts_deferred:  # noqa: N801 - used like a function
    """Defer a Ctrl-C until the body is done, so that it cannot interrupt a change halfway.

    A second Ctrl-C is not deferred, but where a store is entered or left. Only the main thread
    receives signals. A custom handler of the process remains in place and is called late. Nested
    uses do nothing.
    """

    __slots__ = ("_caught", "_handler", "_raised", "_through")
    _raised: bool
    _caught: list[int]
    _handler: _Handler | None
    _through: bool
    _deferring: ClassVar[bool] = False  # in the main thread

    def __enter__(self) -> Self:
        """Replace the handler, if there is one and this thread may do so."""
        self._handler = None
        if interrupts_deferred._deferring:  # the cheaper check first: uses within a step are nested
            return self
        if threading.get_ident() == _main_thread:
            handler = getsignal(SIGINT)
            if callable(handler):
                self._caught = []
                self._through = self._raised = False
                self._handler = handler
                signal(SIGINT, self._note)
                interrupts_deferred._deferring = True
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A frame kept until it is told would keep memory in use that its function used.
        self._caught.append(number)
        if frame is not None and frame.f_code in _undisturbed:
            return  # told afterwards, when it may be raised
        if self._handler is not None and (self._through or len(self._caught) > 1):
            self._raised = True
            self._handler(number, frame)
            self._raised = False
            self._caught.clear()  # it raised nothing, so nothing was lost

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Restore the handler, and call it for a signal that came meanwhile."""
        if self._handler is not None:
            interrupts_deferred._deferring = False
            signal(SIGINT, self._handler)
            if self._caught and not self._raised:
                self._handler(self._caught[0], None)


@undisturbed
class _LetThrough:
    """A part of a use in which a Ctrl-C is not deferred; see `Use.interruptible`."""

    __slots__ = ("_use",)

    def __init__(self, use: Use) -> None:
        self._use = use

    def __enter__(self) -> None:
        """Deliver an earlier interrupt, and all later ones immediately."""
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
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Defer again; an interrupt that was raised but lost is still to be delivered."""
        use = self._use
        try:
            if error is not None:
                use._harmless = error
            if use._handler is not None:
                use._through = False
                interrupts_deferred._deferring = True
                use._raised = False
                del use._caught[0 if error is not None else 1 :]
        except BaseException as late:
            use._harmless = late
            raise


@undisturbed
class Call(interrupts_deferred):
    """One call of a store by one thread, beside those of other threads.

        with Call(door, write=True): ...

    For operations that change state only through tiers, which lock themselves. Interrupts are
    deferred from before anything is entered until all is left: an interrupt in between would leave
    the store locked. Errors have the same effect as in a `Use`; if a concurrent call fails and
    closes the store, this call raises ClosedError instead of returning.
    """

    __slots__ = ("_door", "_harmless", "_thread", "_write")

    def __init__(self, door: Door, *, write: bool = False) -> None:
        """Prepare to enter; no lock is held yet."""
        self._door = door
        self._write = write
        self._harmless: BaseException | None = None
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        """Defer interrupts, wait for a use to end, check that the store is usable."""
        door, thread = self._door, self._thread
        if os.getpid() != door.pid:
            door.check_process()
        self._handler = None
        if not interrupts_deferred._deferring:
            interrupts_deferred.__enter__(self)
        try:
            nested = thread in door.calls
            if not nested and not door.lock.acquire(blocking=False):
                self._wait()
            try:  # a call holds the lock only while it increments its count
                if door.reason or (self._write and not door.writable):
                    door.check_open(write=self._write)
                door.calls[thread] = door.calls[thread] + 1 if nested else 1
            finally:
                if not nested:
                    door.lock.release()
        except BaseException:
            interrupts_deferred.__exit__(self)
            raise
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Leave; close the store after an error that requires it."""
        # Nothing here allocates memory, as super() would: otherwise Ctrl-C might be deferred
        # forever.
        door = self._door
        try:
            if error is not None:
                self._judge(error)
            elif door.reason:
                door.check_open(write=False)  # a concurrent call of another thread failed
        finally:
            try:
                if door.calls[self._thread] > 1:
                    door.calls[self._thread] -= 1
                else:
                    del door.calls[self._thread]
                    if door.fenced:
                        door.ended.set()
                if door.then is not None:
                    door.finish()
            finally:
                if self._handler is not None:
                    interrupts_deferred.__exit__(self)

    def _wait(self) -> None:
        """Wait for the lock; an interrupt is raised at once."""
        while not self._door.lock.acquire(timeout=_POLL_SECONDS):
            self._tell()

    def _tell(self) -> None:
        """Deliver a deferred interrupt."""
        if self._handler is not None and self._caught:
            self._handler(self._caught.pop(), None)

    def _judge(self, error: BaseException) -> None:
        """Close the store after an error that may leave its memory inconsistent.

        Errors of this library are raised before anything has changed, or in a consistent state. Any
        other error may have occurred anywhere. It becomes an InternalError unless it is a
        MemoryError, an interrupt, or an exception of the caller.
        """
        door = self._door
        if isinstance(error, _FINAL) or (isinstance(error, NotAStoreError) and door.writable):
            door.close(error.args[0] if error.args else _INTERRUPTED)
        elif error is self._harmless:
            if _is_internal(error):
                raise internal_error(error, "the store stays open and is unchanged") from error
        elif not isinstance(error, _SAFE_ERRORS):
            door.close(_INTERRUPTED)
            if (
                isinstance(error, Exception)
                and not isinstance(error, _EXPECTED_ERRORS)
                and type(error).__module__ in ("builtins", "ctypes")
            ):
                raise internal_error(
                    error, "the store is closed, its last commit is intact"
                ) from error


@undisturbed
class Errand(Call):
    """A call that prefetches or promotes rows, one at a time, beside uses on a device.

    It waits for other uses, and they for it; see `Use.beside`.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        """Defer interrupts, wait for a use to end, check that the store is usable."""
        door = self._door
        if os.getpid() != door.pid:
            door.check_process()
        self._handler = None
        if not interrupts_deferred._deferring:
            interrupts_deferred.__enter__(self)
        try:
            while not door.errands.acquire(timeout=_POLL_SECONDS):
                self._tell()
            try:
                door.check_open(write=False)
            except BaseException:
                door.errands.release()
                raise
        except BaseException:
            interrupts_deferred.__exit__(self)
            raise
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Leave; close the store after an error that requires it."""
        door = self._door
        try:
            if error is not None:
                self._judge(error)
        finally:
            try:
                door.errands.release()
                if door.then is not None:
                    door.finish()
            finally:
                if self._handler is not None:
                    interrupts_deferred.__exit__(self)


@undisturbed
class Use(Call):
    """One use of a store by one thread, while no other is inside; see `Door.use`.

    Attributes:
        beside: whether errands may run meanwhile.
    """

    __slots__ = ()
    beside: ClassVar[bool] = False

    def __enter__(self) -> Self:
        """Defer interrupts, wait for other threads, check that the store is usable."""
        door = self._door
        if os.getpid() != door.pid:
            door.check_process()
        self._handler = None
        if not interrupts_deferred._deferring:
            interrupts_deferred.__enter__(self)
        try:
            if not door.lock.acquire(blocking=False):
                self._wait()
        except BaseException:
            interrupts_deferred.__exit__(self)
            raise
        alone = False
        try:
            if not self.beside:
                while not door.errands.acquire(timeout=_POLL_SECONDS):
                    self._tell()
                alone = True
            if door.calls:
                self._wait_for_calls()
            if door.reason or (self._write and not door.writable):
                door.check_open(write=self._write)
        except BaseException:
            self._leave(alone=alone)
            raise
        return self

    def _wait_for_calls(self) -> None:
        """Wait until no other thread is in a call; no new call starts meanwhile."""
        door = self._door
        door.fenced = True
        while door.busy(self._thread):
            door.ended.wait(_POLL_SECONDS)
            door.ended.clear()
            self._tell()
        door.fenced = False

    def interruptible(self) -> AbstractContextManager[None]:
        """Deliver interrupts in a part of this use, and keep the store open after any error.

        For parts that take long or run code of the caller, and that leave no state in memory half
        changed. An interrupt that Python drops there, as in a destructor, is raised at the end.
        """
        return _LetThrough(self)

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Release the lock; close the store after an error that requires it."""
        try:
            if error is not None:
                self._judge(error)
        finally:
            self._harmless = None  # its traceback refers to this object
            self._leave()

    def _leave(self, *, alone: bool = True) -> None:
        door = self._door  # nothing here allocates memory either
        try:
            if alone and not self.beside:
                door.errands.release()
            door.lock.release()
            if door.then is not None:
                door.finish()
        finally:
            if self._handler is not None:
                interrupts_deferred.__exit__(self)


@undisturbed
class Door:
    """Guards every public call of a store: checks that it is open in this process, and locks.

    Calls (`Call`) run concurrently; the tiers' own locks protect shared state. A use (`use`) is
    exclusive: it waits until no call is in progress, and no call starts before it ends. Commit,
    rollback, refresh, growth, folds and closing rely on this single fence, so that no version
    contains half a call. The thread that holds the fence may make calls itself.

    Attributes:
        reason: why the store can no longer be used; empty while it is open.
        calls: nesting depth of the calls of each thread.
        errands: held by an errand, and by uses that are not beside one.
        fenced: whether a use waits for calls to end; each signals `ended`.
    """

    def __init__(self, path: str, *, writable: bool, refusal: str = _FOR_READING) -> None:
        """Start open, owned by this process; `refusal` is the error for writes of a reader."""
        self.writable = writable
        self._refusal = refusal
        self._path = path
        self.pid: int = os.getpid()
        self.lock: threading.RLock = threading.RLock()
        self.reason: str = ""
        self.then: Callable[[], object] | None = None
        self.calls: dict[int, int] = {}
        self.errands: threading.RLock = threading.RLock()
        self.fenced = False
        self.ended: Event = Event()

    @property
    def closed(self) -> bool:
        """Whether the store was closed or can no longer be used."""
        return bool(self.reason)

    @property
    def held(self) -> bool:
        """Whether the calling thread is inside, in a use or a call."""
        return _is_mine(self.lock) or threading.get_ident() in self.calls or _is_mine(self.errands)

    def busy(self, thread: int) -> bool:
        """Whether a thread other than this one is in a call."""
        return len(self.calls) > (thread in self.calls)

    def use(self, *, write: bool = False) -> Use:
        """Enter exclusively, once all calls of other threads have ended; interrupts are deferred.

        A failed sync, or any error that interrupts the body, closes the store permanently: its last
        commit is intact, its memory may not be. Arguments must therefore be checked before, or
        raise an error of this library. `Use.interruptible` marks parts that may be interrupted.
        """
        return Use(self, write=write)

    def check(self, *, write: bool = False) -> None:
        """Raise ForkedStoreError, ClosedError, or for a `write` by a reader ReadOnlyError."""
        self.check_process()
        self.check_open(write=write)

    def check_open(self, *, write: bool) -> None:
        """Raise the errors of `check` within the process that opened the store."""
        if self.reason:
            way = "open it again" if self.reason == _CLOSED else "close it and open it again"
            raise ClosedError(f"{self._path} cannot be used: {self.reason}; {way}")
        if write and not self.writable:
            raise ReadOnlyError(f"{self._path} {self._refusal}", filename=self._path)

    def check_process(self) -> None:
        """Raise ForkedStoreError in a process that was forked after the store was opened."""
        if os.getpid() != self.pid:
            raise ForkedStoreError(
                f"{self._path} was opened before this process was forked; open it again here, "
                "for reading: tierstore.open(path)"
            )

    def close(self, reason: str = _CLOSED, *, then: Callable[[], object] | None = None) -> None:
        """Reject all further calls; call `then` when the calling thread's uses have ended.

        Only the first `then` is called; a later error does not change that.
        """
        self.reason = self.reason or reason
        self.then = self.then or then

    def finish(self) -> None:
        """Call what `close` postponed, once the calling thread is no longer inside."""
        if not self.held:
            then, self.then = self.then, None
            if then is not None:  # otherwise another leaving thread has taken it
                then()


def _is_mine(lock: Any) -> bool:
    """Whether the calling thread has a lock; threading.Condition asks its lock the same."""
    mine: bool = lock._is_owned()
    return mine
