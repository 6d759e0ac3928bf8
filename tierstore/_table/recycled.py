"""Memory for large results, used again once nothing refers to it.

The C library takes blocks of 32 MiB and more from the system each time, and returns them; also
blocks of some MiB, if they are at the end of its heap. Touching their pages for the first time
takes about as long as copying rows there: of 131,072 rows of 256 bytes 3.6 of 9.9 ms, and more
where several threads do it.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

LARGE = 4 << 20
"""Bytes from which the C library may return memory, in effect; it keeps smaller blocks."""
_MOST = 128 << 20
"""Most bytes to hold while nothing else refers to them: no batch needs more."""


class Recycled:
    """The memory of the last result from `LARGE` to 128 MiB; threads may share it."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._lock = threading.Lock()
        self._block = np.empty(0, np.uint8)
        self._references = 0

    def take(self, rows: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory `(rows, nbytes)` that nothing else refers to, of undefined contents.

        Arrays and tensors that share it keep it, as with any other array.
        """
        size = rows * nbytes
        if size > _MOST:
            return np.empty((rows, nbytes), np.uint8)
        with self._lock:
            fits = size <= self._block.nbytes <= 2 * size
            if not fits or sys.getrefcount(self._block) > self._references:
                self._block = np.empty(size, np.uint8)
                self._references = sys.getrefcount(self._block)
            return self._block[:size].reshape(rows, nbytes)
