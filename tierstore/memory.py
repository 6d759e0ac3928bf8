"""Arenas: the one block of memory that a tier keeps its records, maps and marks in."""

from __future__ import annotations

import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.errors import CapacityError, InvalidInputError

__all__ = ["Arena", "allocate"]


class Arena(Protocol):
    """A block of zeroed memory with one owner, who closes it."""

    kind: str
    array: npt.NDArray[np.uint8]
    device_pointer: int | None

    def close(self) -> None:
        """Give the memory back; views of `array` must not be used any more. Harmless when repeated."""


class PageableArena:
    """Ordinary memory, which the system backs with huge pages where it can."""

    kind = "pageable"
    device_pointer = None

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`; pages are taken as they are first touched."""
        try:
            region = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"cannot reserve {nbytes} bytes of memory: {error}") from None
        if nbytes >= 2 << 20:
            region.madvise(mmap.MADV_HUGEPAGE)
        self.array = np.frombuffer(region, np.uint8, nbytes)

    def close(self) -> None:
        """Drop the block; its pages go back once no view of it is left."""
        self.array = np.empty(0, np.uint8)


def allocate(nbytes: int, kind: str = "pageable") -> Arena:
    """Reserve a zeroed arena of `nbytes` bytes of the given kind."""
    if kind != "pageable":
        raise InvalidInputError(f"not a kind of memory: {kind!r}")
    return PageableArena(nbytes)
