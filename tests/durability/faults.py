"""A stand-in for `os` in `tierstore.io.system.calls` whose n-th operation fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["FAULTS", "Fault", "Faulty"]

_WRITES = {"open", "mkdir", "pwrite", "posix_fallocate", "ftruncate", "link", "rename", "fsync"}
_ALL = {*_WRITES, "pread", "unlink", "rmdir", "listdir", "stat"}


@dataclass(frozen=True)
class Fault:
    """What goes wrong: in which operations, once or for ever, before the operation or after it."""

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
        Fault("short", frozenset({"pwrite", "pread"}), None),
        Fault("short for ever", frozenset({"pwrite", "pread"}), None, for_ever=True),
        Fault("MemoryError", everything, MemoryError),
        Fault("KeyboardInterrupt", everything, KeyboardInterrupt),
        Fault("KeyboardInterrupt although done", everything, KeyboardInterrupt, after=True),
    ]


FAULTS = {fault.name: fault for fault in _faults()}


class Faulty:
    """Does what `os` does, but for the n-th of the operations that a fault is about."""

    def __init__(self, fault: Fault, number: int) -> None:
        """Let operation `number`, counted from 1, fail, and with a lasting fault all after it."""
        self._fault = fault
        self._left = number
        self.struck = 0
        """Operations that failed."""

    def __getattr__(self, name: str) -> Any:
        """Return an operation of `os`, which fails when its time has come."""
        operation = getattr(os, name)
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
        if self._fault.after and name not in ("open", "listdir", "stat", "pread"):
            operation(*args, **options)
        raise self._fault.make()


def _shortened(name: str, operation: Any, args: Any) -> Any:
    """Write or read at most half of what was asked for, but something."""
    fd, what, offset = args
    if name == "pread":
        return operation(fd, max(1, what // 2), offset)
    return operation(fd, what[: max(1, len(what) // 2)], offset)
