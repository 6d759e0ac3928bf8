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
from tierstore.machine.speeds import Speeds, known_speeds

__all__ = [
    "Cuda",
    "Leftover",
    "Machine",
    "Speeds",
    "Storage",
    "cuda_advice",
    "examine",
    "examine_storage",
    "known_speeds",
    "leftovers",
]
