"""What the system gave to hold a file or directory by."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self

from tierstore.io import system

__all__ = ["Descriptor"]


class Descriptor:
    """An open file or directory, closed with the `with` that it is used in.

    Attributes:
        fd: its number; -1 once it is closed.
        path: what messages call it.
    """

    def __init__(self, fd: int, path: str) -> None:
        """Take over the descriptor `fd`; `path` is for messages."""
        self.fd = fd
        self.path = path

    def close(self) -> None:
        """Close the descriptor; harmless when done twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            system.calls.close(fd)

    def __del__(self) -> None:
        """Close what an error left open."""
        with contextlib.suppress(OSError):
            self.close()

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
