"""The machine: what it is like, how fast it is, and where tierstore stands on it."""

from __future__ import annotations

from tierstore.machine.report import (
    Cuda,
    Leftover,
    Machine,
    Storage,
    cuda_advice,
    examine,
    examine_storage,
    leftovers,
)

__all__ = [
    "Cuda",
    "Leftover",
    "Machine",
    "Storage",
    "cuda_advice",
    "examine",
    "examine_storage",
    "leftovers",
]
