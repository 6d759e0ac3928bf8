"""Keys that are used but have no row yet, and the numbers of their uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore._keys.hashmap import Codes, HashMap

_MOST = 1 << 22
"""Keys that are counted at a time, some 100 MB; beyond that, keys that were used once are
forgotten."""


class Candidates:
    """Counts uses of keys by their codes, in memory alone."""

    def __init__(self, most: int = _MOST) -> None:
        """Start without keys."""
        self._most = most
        self._map = HashMap()
        self._uses = np.zeros(0, np.uint32)

    def use(self, codes: Codes) -> npt.NDArray[np.uint32]:
        """Count one use of each key of a batch, which may repeat; return how many it has now."""
        if len(self._map) + codes.size > self._most:
            self._shrink()
        at = self._map.add(codes)
        if len(self._map) > self._uses.size:
            self._uses.resize(len(self._map) + len(self._map) // 4, refcheck=False)
        self._uses[np.unique(at)] += 1
        return self._uses[at]

    def forget(self, codes: Codes) -> None:
        """Count the next use of these keys, which have a row now, as their first."""
        at = self._map.find(codes)
        self._uses[at[at >= 0]] = 0

    def _shrink(self) -> None:
        """Drop keys that were used once, or all if too many are left."""
        uses = self._uses[: len(self._map)]
        kept = np.flatnonzero(uses > 1)
        kept = kept if kept.size < self._most // 2 else kept[:0]
        self._map.keep(kept)
        self._uses = uses[kept]
