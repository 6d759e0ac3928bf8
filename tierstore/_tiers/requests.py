"""What a cache is asked for, counted batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._counters import TierStats
from tierstore._tiers.base import Rows
from tierstore._unique import unique

__all__ = ["Requests"]

_SAMPLE = 64
"""Of so many batches one has its distinct ids counted, which takes longer than all the rest."""


class Requests:
    """Counts ids and hits of every batch into the statistics of a tier, distinct ids of some."""

    def __init__(self, stats: TierStats) -> None:
        """Begin with a batch whose distinct ids are counted."""
        self._stats = stats
        self._batches = 0

    def count(self, rows: Rows, hits: int, slots: npt.NDArray[np.integer[Any]] | None) -> None:
        """Count a batch of ids; `slots` are theirs, negative for a miss, None if all are hits."""
        self._stats.count(requested=rows.size, hits=hits)
        if self._batches % _SAMPLE == 0:
            distinct = unique(rows).size
            found = distinct if slots is None else unique(rows[slots >= 0]).size
            self._stats.count(unique=distinct, unique_hits=found, unique_of=rows.size)
        self._batches += 1

    def count_distinct(
        self,
        slots: npt.NDArray[np.integer[Any]],
        missing: int,
        positions: npt.NDArray[np.intp],
    ) -> None:
        """Count a batch whose distinct rows are known: their slots, and which each id is."""
        hits = positions.size - int(np.count_nonzero(slots[positions] < 0))
        self._stats.count(requested=positions.size, hits=hits, unique_of=positions.size)
        self._stats.count(unique=slots.size, unique_hits=slots.size - missing)
