"""The machine: what it is like, how fast it is, and where tierstore stands on it."""

from __future__ import annotations

from tierstore.machine.report import Cuda, Machine, Storage, cuda_advice, examine, examine_storage
from tierstore.machine.speeds import Speeds, known_speeds

__all__ = [
    "Cuda",
    "Machine",
    "Speeds",
    "Storage",
    "cuda_advice",
    "examine",
    "examine_storage",
    "known_speeds",
]
