"""Stand-ins for `tierstore._io.system.calls`: the n-th operation fails, or a disk loses bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierstore._io.system import Calls

__all__ = ["FAULTS", "Fault", "Faulty", "ThinDisk"]

_WRITES = {"open", "mkdir", "pwrite", "posix_fallocate", "ftruncate", "link", "rename", "fsync"}
_WRITES |= {"rename_noreplace", "sync_file_range", "close"}
_ALL = {*_WRITES, "pread", "preadv", "unlink", "rmdir", "listdir", "stat", "fstat", "fstatvfs"}
_ALL |= {"flock", "reserve", "map_file", "madvise", "process_madvise"}
_MEMORY = {"reserve", "map_file", "fstat", "flock", "open"}
_ANSWERS = {"open", "listdir", "stat", "fstat", "fstatvfs", "pread", "preadv", "reserve"}
"""Calls that change nothing, or that return what would leak."""


@dataclass(frozen=True)
class Fault:
    """The injected fault: in which operations, once or permanently, before or after the
    operation.
    """

    name: str
    operations: frozenset[str]
    make: Callable[[], BaseException] | None
    for_ever: bool = False
    after: bool = False

    @property
    def is_interrupt(self) -> bool:
        """Whether the program is to stop rather than the disk to fail."""
        return self.make in (KeyboardInterrupt, MemoryError)


def _error(number: int) -> Callable[[], BaseException]:
    return lambda: OSError(number, os.strerror(number))


def _faults() -> list[Fault]:
    writes, everything = frozenset(_WRITES), frozenset(_ALL)
    return [
        Fault("ENOSPC", writes, _error(errno.ENOSPC)),
        Fault("ENOSPC for ever", writes, _error(errno.ENOSPC), for_ever=True),
        Fault("EIO", everything, _error(errno.EIO)),
        Fault("EIO for ever", everything, _error(errno.EIO), for_ever=True),
        Fault("EIO although done", everything, _error(errno.EIO), after=True),
        Fault("EINTR", everything, _error(errno.EINTR)),
        Fault("EDQUOT", writes, _error(errno.EDQUOT)),
        Fault("ENOMEM", frozenset(_MEMORY), _error(errno.ENOMEM)),
        Fault("EMFILE for ever", frozenset({"open"}), _error(errno.EMFILE), for_ever=True),
        Fault("EIO at closing, for ever", frozenset({"close"}), _error(errno.EIO), for_ever=True),
        Fault("short", frozenset({"pwrite", "pread"}), None),
        Fault("short for ever", frozenset({"pwrite", "pread"}), None, for_ever=True),
        Fault("MemoryError", everything, MemoryError),
        Fault("KeyboardInterrupt", everything, KeyboardInterrupt),
        Fault("KeyboardInterrupt although done", everything, KeyboardInterrupt, after=True),
    ]


FAULTS = {fault.name: fault for fault in _faults()}


class Faulty:
    """Does what the system does, but for the n-th of the operations that a fault is about."""

    def __init__(self, fault: Fault, number: int) -> None:
        """Make operation `number`, counted from 1, fail, and all later ones if the fault is
        permanent.
        """
        self._fault = fault
        self._left = number
        self.struck = 0
        """Operations that failed."""

    def __getattr__(self, name: str) -> Any:
        """Return an operation of the system, which fails when its time has come."""
        operation = getattr(Calls, name)
        if name not in self._fault.operations:
            return operation

        def faulty(*args: Any, **options: Any) -> Any:
            takes_space = name != "open" or args[1] & os.O_CREAT
            if not takes_space and self._fault.name.startswith("ENOSPC"):
                return operation(*args, **options)
            self._left -= 1
            if self._left > 0 or (self._left < 0 and not self._fault.for_ever):
                return operation(*args, **options)
            self.struck += 1
            return self._fail(name, operation, args, options)

        return faulty

    def _fail(self, name: str, operation: Any, args: Any, options: Any) -> Any:
        if self._fault.make is None:
            return _shortened(name, operation, args)
        # A descriptor is closed whatever the answer.
        if name == "close" or (self._fault.after and name not in _ANSWERS):
            operation(*args, **options)
        raise self._fault.make()


def _shortened(name: str, operation: Any, args: Any) -> Any:
    """Write or read at most half of what was asked for, but something."""
    fd, what, offset = args
    if name == "pread":
        return operation(fd, max(1, what // 2), offset)
    return operation(fd, what[: max(1, len(what) // 2)], offset)


class ThinDisk:
    """A disk that has no room for what is written to some files, and says so late and once.

    As Linux does it: the write itself succeeds, its bytes are lost, and the first wait by each
    description that was open then fails, once; so does that by a description that was opened before
    the error was reported to any other.
    """

    def __init__(self, name: str, *, silent: bool = False) -> None:
        """Lose all writes to files whose path ends in `name`; with `silent`, tell of none."""
        self._name = name
        self._silent = silent
        self._errors = 0
        self._seen = 0
        self._told: dict[int, int] = {}
        self.lost = 0
        """Writes that were lost."""

    def __getattr__(self, name: str) -> Any:
        """Return an operation of the system."""
        return getattr(Calls, name)

    def open(self, path: Any, *args: Any, **options: Any) -> int:
        fd = Calls.open(path, *args, **options)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(self._name):
            self._told[fd] = self._seen
        return fd

    def close(self, fd: int) -> None:
        self._told.pop(fd, None)
        Calls.close(fd)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd not in self._told:
            return Calls.pwrite(fd, data, offset)
        self.lost += 1
        self._errors += not self._silent
        return memoryview(data).nbytes

    def fsync(self, fd: int) -> None:
        self._wait(fd)
        Calls.fsync(fd)

    def sync_file_range(self, fd: int, offset: int, nbytes: int, flags: int) -> None:
        if flags & 5:
            self._wait(fd)
        Calls.sync_file_range(fd, offset, nbytes, flags)

    def _wait(self, fd: int) -> None:
        if self._told.get(fd, self._errors) < self._errors:
            self._told[fd] = self._seen = self._errors
            raise OSError(errno.EIO, os.strerror(errno.EIO))
