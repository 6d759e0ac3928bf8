"""Which batches of a tier are counted in full: one of each span, which stands for all of it."""

from __future__ import annotations

_STEP = 0x9E3779B97F4A7C15
"""2⁶⁴ over the golden ratio: its multiples are spread evenly, whatever pattern the batches have."""


class Sampling:
    """Chooses one batch of each span of batches, at a place in it that is like a random one.

        if next(numbers) >= sampling.at:  # of an itertools.count
            weight = sampling.take()

    Spans are as long as all those before them, up to a period: 1, 1, 2, 4, 8 … batches. So the
    first batches, in which a cold cache fills, are counted closely, and each counts as many times
    as its span has batches: whatever is added up so is right on average after any number of them.
    The same batches are chosen in each run. With threads, a later batch may stand for a span.

    Attributes:
        at: the number of the batch to count next.
    """

    __slots__ = ("_begin", "_end", "_period", "at")

    def __init__(self, period: int) -> None:
        """Count one batch of `period` in the end."""
        self.at = self._begin = 0
        self._end = 1
        self._period = period

    def take(self) -> int:
        """Go on to the next span; return how many batches the one that is counted stands for."""
        taken = self._end - self._begin
        self._begin = self._end
        length = min(self._begin, self._period)
        self._end += length
        fraction = self._begin * _STEP & (1 << 64) - 1
        self.at = self._begin + (fraction * length >> 64)
        return taken
