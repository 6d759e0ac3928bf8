"""What the system gave to hold a file or directory by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from tierstore._io import system
from tierstore._io.system import explained

__all__ = ["Descriptor"]


class Descriptor:
    """An open file or directory, closed with the `with` that it is used in.

    Attributes:
        fd: its number; -1 once it is closed.
        path: what messages call it.
        unsynced: whether something was written by it that no sync has made durable yet.
    """

    fd: int = -1  # of the class too, for one that could not be initialized
    unsynced: bool = False

    def __init__(self, fd: int, path: str) -> None:
        """Take over the descriptor `fd`; `path` is for messages."""
        self.fd = fd
        self.path = path

    @contextlib.contextmanager
    def use(self) -> Iterator[Self]:
        """Yield it: it is open already, which one that is held need not be."""
        yield self

    @property
    def identity(self) -> tuple[int, int]:
        """The numbers of device and inode, which tell it from others while it is open."""
        with explained("examine", self.path):
            status = system.calls.fstat(self.fd)
        return int(status.st_dev), int(status.st_ino)

    def close(self) -> None:
        """Close the descriptor; harmless when done twice.

        The system closes it whatever it answers. Only where something was written and not synced is
        a failure one: raises StoreIOError or StoreFullError.
        """
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        with explained("write", self.path) if self.unsynced else contextlib.suppress(OSError):
            system.calls.close(fd)

    def discard(self) -> None:
        """Close the descriptor, whatever becomes of what was written by it."""
        self.unsynced = False
        self.close()

    def __del__(self) -> None:
        """Close what an error left open."""
        self.discard()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; an error that is on its way already counts more than one of closing."""
        self.close() if error is None else self.discard()
