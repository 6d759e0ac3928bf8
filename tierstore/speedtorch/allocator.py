"""SpeedTorch's way to pinned memory, which is not gone into again.

It made CuPy arrays of pinned memory by replacing CuPy's allocator for the whole process while they
were made, and what it put back was not the memory pool: from then on every temporary array was
allocated and freed by the driver, which waits for the GPU.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tierstore.errors import TierStoreError

__all__ = ["PMemory", "PMemoryMM", "ReplacedError", "my_pinned_allocator", "my_pinned_allocatorMM"]


class ReplacedError(TierStoreError, NotImplementedError):
    """A name of SpeedTorch's that says what has replaced it."""


def _replaced(name: str) -> NoReturn:
    raise ReplacedError(
        f"{name} replaced CuPy's allocator for the whole process; nothing here does. "
        'tierstore.memory.allocate(nbytes, "pinned") is memory that the GPU reads, and '
        "CPUPinn=True a table in such memory"
    )


class PMemory:
    """Was pinned memory that CuPy took for its own; raises ReplacedError."""

    def __init__(self, size: int) -> None:
        _replaced("PMemory")


class PMemoryMM:
    """Was PMemory once more; raises ReplacedError."""

    def __init__(self, size: int) -> None:
        _replaced("PMemoryMM")


def my_pinned_allocator(bsize: int) -> Any:
    """Raise ReplacedError; it was an allocator for CuPy."""
    _replaced("my_pinned_allocator")


def my_pinned_allocatorMM(bsize: int) -> Any:
    """Raise ReplacedError; it was `my_pinned_allocator` once more."""
    _replaced("my_pinned_allocatorMM")
