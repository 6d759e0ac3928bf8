"""Zeros that a step has left where it found sums, for the sums of a later batch."""

from __future__ import annotations

from torch import Tensor


class Zeros:
    """Memory for the sums of one batch, all zeros, on a GPU.

    The kernel of a step, which reads the sums, writes zeros in their place: the next batch needs no
    memory of its own then, and no launch that clears it.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._kept: Tensor | None = None

    def take(self, rows: int) -> Tensor | None:
        """Return float32 zeros for at least so many rows, `(rows or more, dim)`, if there are any.

        They are at most twice as many, and those after the rows stay zeros.
        """
        kept = self._kept
        if kept is None or not rows <= kept.shape[0] <= 2 * rows:
            return None
        self._kept = None
        return kept

    def put(self, cleared: Tensor) -> None:
        """Keep sums that the work launched last has cleared."""
        self._kept = cleared
