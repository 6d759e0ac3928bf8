"""Who may write, and who keeps a fold away: advisory locks that the kernel drops by itself."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from types import TracebackType

from tierstore import io
from tierstore.errors import LockedError, StoreFullError, StoreIOError
from tierstore.store.history import FOLD, LOCK

__all__ = ["Unread", "become_writer", "keep_folds_away", "require_tested"]

_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02


def require_tested(directory: io.Directory) -> None:
    """Raise StoreIOError unless a directory lies on a file system that was tested.

    On others, above all those of other machines, locks and syncs may not hold.
    """
    kind = directory.filesystem
    if kind not in io.TESTED:
        raise StoreIOError(
            f"{directory.path} lies on {kind or 'an unknown file system'}, where it is not known "
            f"whether locks and syncs hold; write on one of {', '.join(sorted(io.TESTED))}, or "
            "give allow_untested=True"
        )


def become_writer(directory: io.Directory, *, allow_untested: bool) -> io.File:
    """Take the writer's lock and return the file that holds it.

    The lock decides; what the file says of its holder is for messages. Raises LockedError, and
    StoreIOError on a file system that was not tested, unless that is allowed.
    """
    if not allow_untested:
        require_tested(directory)
    try:
        file = directory.open_file(LOCK, write=True)
    except FileNotFoundError:
        file = directory.create(LOCK)
    try:
        if not file.lock(exclusive=True):
            holder = file.read(256).decode("utf-8", "replace").strip() or "another process"
            raise LockedError(
                f"{directory.path} is open for writing by {holder!r}; wait for it, or open for "
                "reading"
            )
        with contextlib.suppress(StoreFullError):  # a note that is missing must not keep one out
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BaseException:
        file.discard()
        raise
    file.unsynced = False  # a note may be lost
    return file


def keep_folds_away(directory: io.Directory) -> io.File | None:
    """Share the lock that a fold needs alone; None where the store has no such file to lock.

    Waits for a fold under way, and raises LockedError if it takes longer than a minute.
    """
    try:
        file = directory.open_file(FOLD)
    except FileNotFoundError:
        return None
    patience = time.monotonic() + _PATIENCE_SECONDS
    while not file.lock(exclusive=False):
        if time.monotonic() > patience:
            file.close()
            raise LockedError(f"{directory.path} has been folding for a minute; try again later")
        time.sleep(_POLL_SECONDS)
    return file


class Unread:
    """Answers, for as long as it is entered, whether nobody has the store open for reading.

    The question is asked only where something would be removed that a reader still opens by name.
    Where the answer is yes, readers that come wait until the body is done.
    """

    def __init__(self, directory: io.Directory, *, held: bool) -> None:
        """Ask about the store in `directory`; with `held` the caller has the lock, so it is so."""
        self._directory = directory
        self._answer = True if held else None
        self._file: io.File | None = None

    def __call__(self) -> bool:
        """Return the answer, which stays the same."""
        if self._answer is None:
            try:
                self._file = self._directory.open_file(FOLD, write=True)
                self._answer = self._file.lock(exclusive=True)
            except FileNotFoundError:
                self._answer = True
        return self._answer

    def __enter__(self) -> Unread:
        """Return the question."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let readers in."""
        if self._file is not None:
            self._file.close()
