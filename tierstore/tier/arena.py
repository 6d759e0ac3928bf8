"""Named arrays laid one after another into one block of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import memory

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 256
"""Each array starts at a multiple of this many bytes."""


class Arena:
    """A block of memory of one kind, handed out from its start."""

    def __init__(self, kind: str, nbytes: int) -> None:
        """Reserve the block; see `memory.allocate` for the kinds."""
        self.memory = memory.allocate(nbytes, kind)
        self._used = 0

    def take(self, name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
        """Hand out the next array."""
        nbytes = size * np.dtype(dtype).itemsize
        start = self._used
        self._used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return self.memory.array[start : start + nbytes].view(dtype)
