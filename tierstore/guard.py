"""Who may use an open store, and when: one thread at a time, this process, until it is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    ConcurrentWriterError,
    DeviceLostError,
    ForkedStoreError,
    ReadOnlyError,
    TierStoreError,
)

__all__ = ["Guard", "interrupts_deferred"]


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back a Ctrl-C until the body is done, so that it finds nothing half changed.

    A second Ctrl-C is not held back. Only the main thread receives signals, and a process with a
    handler of its own keeps it: the handler is called late.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    caught: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(caught) == 1:
            handler(signal.SIGINT, caught[0])


class Guard:
    """The state every public call of a store passes through."""

    def __init__(self, path: str, *, writable: bool) -> None:
        """Start open, owned by this process."""
        self.writable = writable
        self._path = path
        self.pid = os.getpid()
        self._lock = threading.RLock()
        self._closed = ""

    @property
    def closed(self) -> bool:
        """Whether the store was closed, or cannot be used any more."""
        return bool(self._closed)

    @contextlib.contextmanager
    def use(self, *, write: bool = False, interruptible: bool = False) -> Iterator[None]:
        """Let one thread into the store; an interrupt waits until the body is done.

        A failed sync, and whatever breaks off the body in the middle, closes the store for good:
        its last commit is intact, its memory may not be. An `interruptible` body changes nothing
        in memory that an interrupt could leave half done, and receives it at once.
        """
        self._check_process()
        with self._lock, contextlib.nullcontext() if interruptible else interrupts_deferred():
            self.check(write=write)
            try:
                yield
            except (CommitFailedError, ConcurrentWriterError, DeviceLostError) as error:
                self.close(str(error))
                raise
            except TierStoreError:
                raise
            except (KeyboardInterrupt, MemoryError):
                if not interruptible:
                    self.close("it was interrupted in the middle of a call")
                raise

    def check(self, *, write: bool = False) -> None:
        """Raise ForkedStoreError, ClosedError, or ReadOnlyError for a `write` by a reader."""
        self._check_process()
        if self._closed:
            raise ClosedError(f"{self._path} cannot be used: {self._closed}; open it again")
        if write and not self.writable:
            raise ReadOnlyError(f"{self._path} was opened for reading; open it with mode='r+'")

    def _check_process(self) -> None:
        if os.getpid() != self.pid:
            raise ForkedStoreError(
                f"{self._path} was opened before this process was forked; open it again here, "
                "for reading: tierstore.open(path)"
            )

    def close(self, reason: str = "it was closed") -> None:
        """Refuse every call from now on."""
        self._closed = self._closed or reason
