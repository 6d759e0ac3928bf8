"""Locks of stores, and the note in LOCK that names the process with the store open for writing.

The locks decide who writes; the note serves messages and a check. If a file system does not enforce
locks between two mounts or machines, the second writer overwrites the note of the first, which
detects that.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from tierstore import _io
from tierstore._disk.manifest import MAX_VERSION
from tierstore._store.versions import LOCK, STORE
from tierstore.errors import (
    FOR_RANKS,
    ConcurrentWriterError,
    FormatError,
    LockedError,
    StoreFullError,
    StoreIOError,
)

_NOTE = re.compile(r"pid (\d{1,10}) on (\S{1,255}), boot (\S{1,64}), [0-9a-f]{32}", re.ASCII)


def make_note() -> bytes:
    """Return a unique note that names this process."""
    note = f"pid {os.getpid()} on {socket.gethostname()}, boot {_boot()}, {uuid.uuid4().hex}"
    return note.encode()


def writer_of(path: Path) -> str | None:
    """Describe the process that has the store at a path open for writing, or return None.

    The kernel's list of locks is read, so that no other process finds the lock taken meanwhile. It
    lacks the locks of other machines.
    """
    with (
        contextlib.suppress(OSError, FormatError),
        _io.Directory.open(path) as directory,
        directory.open_file(LOCK) as file,
    ):
        status = file.status()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        locks = Path("/proc/locks").read_text().splitlines()
        if any("FLOCK" in line and place in line.split() for line in locks):
            return describe(file.read(_NOTE_BYTES))
    return None


def describe(note: bytes) -> str:
    """Describe the process that wrote a note, and whether it still runs, if known."""
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
            f"pid {pid} on {host}, which has ended or runs in another container: a forked child "
            "may still hold the lock (/proc/locks names the holder)"
        )
    return f"pid {pid} on {host}"


def _boot() -> str:
    """Return the boot id of the kernel, or "unknown"."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().decode()
    return "unknown"


_WRITER = MAX_VERSION + 1
_NOTE_BYTES = 512
_ATTEMPTS = 8
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02


def require_tested(directory: _io.Directory) -> None:
    """Raise StoreIOError unless a directory is on a tested file system.

    On other file systems, especially remote ones, locks and syncs may not work.
    """
    kind = directory.filesystem
    if kind not in _io.TESTED:
        raise StoreIOError(
            f"{directory.path} is on {kind or 'an unknown file system'}, on which locks and syncs "
            f"were not tested; write on one of {', '.join(sorted(_io.TESTED))}, or "
            "give allow_untested=True"
        )


class WriterLock:
    """The locks that make one session the only writer of a store while it is open."""

    def __init__(self, directory: _io.Directory, *, allow_untested: bool) -> None:
        """Take the lock.

        Raises LockedError, and StoreIOError on an untested file system unless that is allowed.
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
            # The identity of these files does not change, so it is queried once.
            self._store_status, self._lock_status = self._store.status(), self._lock.status()
            unlocking.pop_all()  # unless something failed, both locks are kept

    def within(self, directory: _io.Directory) -> Self:
        """Return it for the same directory opened by another name, after a rename."""
        self._directory = directory
        self._store.path, self._lock.path = directory.join(STORE), directory.join(LOCK)
        return self

    def _take_lock_file(self) -> _io.File:
        """Lock the file LOCK, creating it if missing, and write the note."""
        directory = self._directory
        for _ in range(_ATTEMPTS):
            try:
                file = directory.open_file(LOCK, write=True)
            except FileNotFoundError:
                try:
                    file = directory.create(LOCK)
                except StoreIOError:
                    if directory.exists(LOCK):
                        continue  # created meanwhile
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
            file.close()  # removed meanwhile: that lock excludes no other writer
        raise _replaced(directory, LOCK)

    def _leave_note(self, file: _io.File) -> None:
        self._is_noted = False
        with contextlib.suppress(StoreFullError):  # a missing note must not prevent writing
            file.truncate(0)
            file.write(self._note, 0)
            self._is_noted = True
        file.unsynced = False  # a note may be lost

    def check(self) -> None:
        """Raise ConcurrentWriterError unless this is still the only writer.

        Called before each publication. A removed LOCK file is created again.
        """
        if not self._directory.is_same(STORE, self._store_status):
            raise ConcurrentWriterError(
                f"{self._directory.join(STORE)} was removed or replaced while the store was open "
                "for writing, so another program may be writing to it; nothing was published"
            )
        if not self._directory.is_same(LOCK, self._lock_status):
            try:
                file = self._take_lock_file()
            except LockedError as error:
                raise ConcurrentWriterError(f"{error}; nothing was published") from None
            self._lock.close()
            self._lock = file  # kept even if the next call raises, and closed with the store
            self._lock_status = file.status()
        elif self._is_noted and (note := self._lock.read(_NOTE_BYTES)) != self._note:
            raise ConcurrentWriterError(
                f"{self._directory.path} was opened for writing by {describe(note)} as well: the "
                "locks of this file system do not work; nothing was published"
            )

    def reads_other_than(self, versions: Iterable[int]) -> bool:
        """Return whether any version other than these is being read."""
        ends = [-1, *sorted(versions), _WRITER]
        gaps = [(lo + 1, hi) for lo, hi in pairwise(ends) if hi > lo + 1]
        return any(self._store.lock_within(lo, hi - lo) is not None for lo, hi in gaps)

    def readers(self, below: int) -> list[int]:
        """Return the ascending versions `below` a given one that are being read."""
        versions: list[int] = []
        first = 0
        while (oldest := self._oldest_lock(first, below)) is not None:
            versions.append(max(first, oldest))  # one lock of a reader may cover several versions
            first = versions[-1] + 1
        return versions

    def _oldest_lock(self, first: int, below: int) -> int | None:
        """Return the oldest version from `first` to `below` (exclusive) that a reader holds."""
        oldest, end = None, below
        while end > first and (found := self._store.lock_within(first, end - first)) is not None:
            oldest = end = found
        return oldest

    @contextlib.contextmanager
    def without_readers_before(self, version: int) -> Iterator[bool]:
        """Yield whether no older version is read; if so, prevent opening any within the body."""
        if version <= 0:
            yield True
        elif not self._store.lock_range(0, version, exclusive=True):
            yield False
        else:
            try:
                yield True
            finally:
                self._store.unlock_range(0, version)

    @property
    def locked(self) -> bool:
        """Whether a lock is held that keeps other writers away."""
        return self._lock.locked or self._store.locked

    def close(self) -> None:
        """Release the locks; may be called again."""
        try:
            self._lock.close()
        finally:
            self._store.close()


class ReaderLock:
    """Protects the versions of a reader from folds by a shared lock on an offset per version.

    Attributes:
        held: the protected versions.
    """

    def __init__(self, directory: _io.Directory) -> None:
        """Start without protected versions."""
        self._path = directory.path
        self._store = directory.open_file(STORE)
        self.held: set[int] = set()

    def hold(self, version: int) -> None:
        """Protect a further version from folds.

        A fold may have started before, so check afterwards whether the version can still be opened.
        Waits for a fold that is just starting; raises LockedError if that takes longer than a
        minute.
        """
        patience = time.monotonic() + _PATIENCE_SECONDS
        while not self._store.lock_range(version, 1, exclusive=False):
            if time.monotonic() > patience:
                raise LockedError(f"{self._path} has been folding for a minute; try again later")
            time.sleep(_POLL_SECONDS)
        self.held.add(version)

    def hold_only(self, version: int) -> None:
        """Release all versions except this one."""
        for other in self.held - {version}:
            self._store.unlock_range(other, 1)
        self.held &= {version}

    @property
    def locked(self) -> bool:
        """Whether a version is protected."""
        return bool(self.held)

    def close(self) -> None:
        """Release all versions; may be called again."""
        self._store.close()
        self.held.clear()


@contextlib.contextmanager
def folds_kept_away(directory: _io.Directory) -> Iterator[None]:
    """Prevent folds from starting within the body; without STORE.json there is no writer.

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
    """Lock the writer's offset of STORE.json, and check that the file still has this name."""
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
    return StoreIOError(f"{directory.join(name)} is being replaced repeatedly; try again later")
