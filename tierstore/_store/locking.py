"""The note in LOCK: which process has a store open for writing. It is for messages and for a check.

The locks decide who writes. Where a file system does not hold them between two mounts or machines,
the note of the second writer takes the place of the first one's, which sees that.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tierstore import _io
from tierstore._disk.manifest import MAX_VERSION
from tierstore._store.versions import FOLD, LOCK, STORE
from tierstore.errors import (
    FOR_RANKS,
    ConcurrentWriterError,
    LockedError,
    StoreFullError,
    StoreIOError,
)

__all__ = ["ReaderLock", "WriterLock", "describe", "folds_kept_away", "make_note", "require_tested"]


_NOTE = re.compile(r"pid (\d{1,10}) on (\S{1,255}), boot (\S{1,64}), [0-9a-f]{32}", re.ASCII)


def make_note() -> bytes:
    """Return a note that names this process, and that no other writer leaves."""
    note = f"pid {os.getpid()} on {socket.gethostname()}, boot {_boot()}, {uuid.uuid4().hex}"
    return note.encode()


def describe(note: bytes) -> str:
    """Say who left a note, and whether that process still runs, as far as it can be told."""
    text = note.decode("utf-8", "replace").strip()
    found = _NOTE.fullmatch(text)
    if found is None:
        return repr(text) if text else "another process"
    pid, host, boot = int(found[1]), found[2], found[3]
    if (host, boot) != (socket.gethostname(), _boot()):
        return f"pid {pid} on {host}"
    if pid == os.getpid():
        return f"this very process, pid {pid}"
    if not Path(f"/proc/{pid}").exists():
        return (
            f"pid {pid} on {host}, which has ended or runs in another container: a child that it "
            "forked may hold the lock still (/proc/locks names the holder)"
        )
    return f"pid {pid} on {host}"


def _boot() -> str:
    """Return what the kernel calls the time since it started; "unknown" if it does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().decode()
    return "unknown"


_WRITER = MAX_VERSION + 1
_NOTE_BYTES = 512
_ATTEMPTS = 8
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02


def require_tested(directory: _io.Directory) -> None:
    """Raise StoreIOError unless a directory lies on a file system that was tested.

    On others, above all those of other machines, locks and syncs may not hold.
    """
    kind = directory.filesystem
    if kind not in _io.TESTED:
        raise StoreIOError(
            f"{directory.path} lies on {kind or 'an unknown file system'}, where it is not known "
            f"whether locks and syncs hold; write on one of {', '.join(sorted(_io.TESTED))}, or "
            "give allow_untested=True"
        )


class WriterLock:
    """What makes one session the only writer of a store, for as long as it is open."""

    def __init__(self, directory: _io.Directory, *, allow_untested: bool) -> None:
        """Take the lock.

        Raises LockedError, and StoreIOError on a file system that was not tested, unless that is
        allowed.
        """
        if not allow_untested:
            require_tested(directory)
        self._directory = directory
        self._note = make_note()
        self._is_noted = False
        self._store = _lock_store(directory)
        with contextlib.ExitStack() as unlocking:
            unlocking.callback(self._store.close)
            self._lock = self._take_lock_file()
            unlocking.callback(self._lock.close)
            # Which files these are does not change, so it is asked for once.
            self._store_status, self._lock_status = self._store.status(), self._lock.status()
            unlocking.pop_all()  # unless something failed, both locks stay

    def _take_lock_file(self) -> _io.File:
        """Lock the file LOCK, which is made where it is missing, and leave the note in it."""
        directory = self._directory
        for _ in range(_ATTEMPTS):
            try:
                file = directory.open_file(LOCK, write=True)
            except FileNotFoundError:
                try:
                    file = directory.create(LOCK)
                except StoreIOError:
                    if directory.exists(LOCK):
                        continue  # made in between
                    raise
            try:
                if not file.lock(exclusive=True):
                    raise _locked(directory)
                if directory.names_file(LOCK, file):
                    self._leave_note(file)
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # removed in between: that lock excludes no one
        raise _replaced(directory, LOCK)

    def _leave_note(self, file: _io.File) -> None:
        self._is_noted = False
        with contextlib.suppress(StoreFullError):  # a note that is missing must not keep one out
            file.truncate(0)
            file.write(self._note, 0)
            self._is_noted = True
        file.unsynced = False  # a note may be lost

    def check(self) -> None:
        """Raise ConcurrentWriterError unless this is the only writer still.

        To be called before each publication. A file LOCK that was removed is made anew.
        """
        if not self._directory.is_same(STORE, self._store_status):
            raise ConcurrentWriterError(
                f"{self._directory.join(STORE)} was removed or replaced while the store was open "
                "for writing, so another program may write it by now; nothing was published"
            )
        if not self._directory.is_same(LOCK, self._lock_status):
            try:
                file = self._take_lock_file()
            except LockedError as error:
                raise ConcurrentWriterError(f"{error}; nothing was published") from None
            self._lock.close()
            self._lock = file  # kept whatever the next call raises, to be closed with the store
            self._lock_status = file.status()
        elif self._is_noted and (note := self._lock.read(_NOTE_BYTES)) != self._note:
            raise ConcurrentWriterError(
                f"{self._directory.path} was opened for writing by {describe(note)} as well: the "
                "locks of this file system do not hold; nothing was published"
            )

    def reads_other_than(self, versions: Iterable[int]) -> bool:
        """Return whether any version is being read but these."""
        ends = [-1, *sorted(versions), _WRITER]
        gaps = [(lo + 1, hi) for lo, hi in pairwise(ends) if hi > lo + 1]
        for lo, hi in gaps:
            if self._store.lock_within(lo, hi - lo) is not None:
                return True
        with self._without_old_programs() as is_free:
            return not is_free

    def readers(self, below: int) -> list[int]:
        """Return the versions `below` one that are being read, ascending.

        A program that does not say which version it reads counts as a reader of version 0.
        """
        found: list[int] = []
        first = 0
        while (oldest := self._oldest_lock(first, below)) is not None:
            found.append(max(first, oldest))  # one lock of a reader may hold several versions
            first = found[-1] + 1
        with self._without_old_programs() as is_free:
            return found if is_free else [0, *found]

    def _oldest_lock(self, first: int, below: int) -> int | None:
        """Return the oldest version from `first` on and `below` another that a reader shares."""
        oldest, end = None, below
        while end > first and (found := self._store.lock_within(first, end - first)) is not None:
            oldest = end = found
        return oldest

    @contextlib.contextmanager
    def without_readers_before(self, version: int) -> Iterator[bool]:
        """Yield whether no older version is read; if so, none can be opened within the body."""
        with self._without_old_programs() as is_free:
            if version <= 0:
                yield is_free
            elif not is_free or not self._store.lock_range(0, version, exclusive=True):
                yield False
            else:
                try:
                    yield True
                finally:
                    self._store.unlock_range(0, version)

    @contextlib.contextmanager
    def _without_old_programs(self) -> Iterator[bool]:
        """Yield whether no program reads that shares FOLD, and keep those out in the body."""
        try:
            file = self._directory.open_file(FOLD, write=True)
        except FileNotFoundError:
            yield True
            return
        with file:
            yield file.lock(exclusive=True)

    def close(self) -> None:
        """Let the next writer in; harmless when done twice."""
        try:
            self._lock.close()
        finally:
            self._store.close()


class ReaderLock:
    """What keeps folds from what a reader sees: it shares an offset for each version it needs.

    Attributes:
        held: the versions.
    """

    def __init__(self, directory: _io.Directory) -> None:
        """Hold no version yet."""
        self._directory = directory
        self._store = directory.open_file(STORE)
        self._fold: _io.File | None = None
        self.held: set[int] = set()

    def hold(self, version: int, *, keeps_old_programs_away: bool = False) -> None:
        """Keep folds from a version, beside those that are held.

        A fold may have begun before, so look afterwards whether the version can still be opened.
        `keeps_old_programs_away` is for a store that a program may be writing which knows no
        versions: FOLD is shared too, which keeps every fold away.

        Waits for a fold that is beginning; raises LockedError if that takes longer than a minute.
        """
        if keeps_old_programs_away and self._fold is None:
            with contextlib.suppress(FileNotFoundError):
                self._fold = self._directory.open_file(FOLD)
                fold = self._fold
                self._wait_for(lambda: fold.lock(exclusive=False))
        self._wait_for(lambda: self._store.lock_range(version, 1, exclusive=False))
        self.held.add(version)

    def _wait_for(self, lock: Callable[[], bool]) -> None:
        patience = time.monotonic() + _PATIENCE_SECONDS
        while not lock():
            if time.monotonic() > patience:
                path = self._directory.path
                raise LockedError(f"{path} has been folding for a minute; try again later")
            time.sleep(_POLL_SECONDS)

    def hold_only(self, version: int, *, keeps_old_programs_away: bool = False) -> None:
        """Let go of all versions but this one."""
        for other in self.held - {version}:
            self._store.unlock_range(other, 1)
        self.held &= {version}
        if not keeps_old_programs_away:
            self._close_fold()

    def _close_fold(self) -> None:
        if self._fold is not None:
            self._fold.close()
        self._fold = None

    def close(self) -> None:
        """Let go of every version; harmless when done twice."""
        try:
            self._close_fold()
        finally:
            self._store.close()


@contextlib.contextmanager
def folds_kept_away(directory: _io.Directory) -> Iterator[None]:
    """Let no fold begin in the body; where STORE.json is missing there is no writer to begin one.

    Raises LockedError as `ReaderLock.hold` does.
    """
    try:
        lock = ReaderLock(directory)
    except FileNotFoundError:
        yield
        return
    with contextlib.closing(lock):
        lock.hold(0)  # older than every version
        yield


def _lock_store(directory: _io.Directory) -> _io.File:
    """Lock the writer's offset of STORE.json, the one that bears this name."""
    for _ in range(_ATTEMPTS):
        file = directory.open_file(STORE, write=True)
        try:
            if not file.lock_range(_WRITER, 1, exclusive=True):
                raise _locked(directory)
            if directory.names_file(STORE, file):
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise _replaced(directory, STORE)


def _locked(directory: _io.Directory) -> LockedError:
    try:
        with directory.open_file(LOCK) as file:
            holder = describe(file.read(_NOTE_BYTES))
    except FileNotFoundError:
        holder = "another process"
    advice = "wait for it, or open for reading"
    if holder.startswith("this very process"):
        advice = "use the Store that was opened before, or close it"
    elif _is_one_of_many():
        advice = f"one process writes a store without partitions; {FOR_RANKS}"
    return LockedError(
        f"{directory.path} is open for writing by {holder}; {advice}", filename=directory.path
    )


def _is_one_of_many() -> bool:
    """Whether this process is a rank of a process group of several."""
    dist: Any = sys.modules.get("torch.distributed")
    ready = dist is not None and dist.is_available() and dist.is_initialized()
    return bool(ready and dist.get_world_size() > 1)


def _replaced(directory: _io.Directory, name: str) -> StoreIOError:
    return StoreIOError(f"{directory.join(name)} is replaced again and again; try again later")
