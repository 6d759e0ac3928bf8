"""Which positions of a live delta hold the newest record of a row, and which may be used again.

A row that is written again at another position leaves a dead record behind. Positions are divided
into segments: when dead records outnumber the others, these are moved out of the segment that has
fewest, and all of it is used again. That is how a log-structured file system cleans (Rosenblum and
Ousterhout, "The Design and Implementation of a Log-Structured File System", 1992): each write pays
for a share of the cleaning, and none waits until the whole file is rewritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

_FEW = 1024
"""Positions for which there is room at first."""
_NONE = np.empty(0, np.int64)


class Segments:
    """The positions of a live delta.

    Attributes:
        count: the first position that was never used.
        alive: newest records.
        garbage: dead records in segments that are not free.
        ordered: whether the last record of each row is its newest one.
    """

    def __init__(self, rows: int) -> None:
        """Use no position yet; a segment has so many `rows`."""
        self.count: int = 0
        self.alive: int = 0
        self.garbage: int = 0
        self.ordered: bool = True
        self._rows = rows
        self._dead = np.zeros(_FEW, np.bool_)
        self._dead_of = np.zeros(_FEW // rows + 1, np.int64)  # by segment, 0 in free ones
        self._free: Positions = _NONE

    def newest(self) -> Positions:
        """Return the positions of the newest records, ascending."""
        return np.flatnonzero(~self._dead[: self.count])

    def dead(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Whether the records at used `positions` `(n,)` are dead."""
        return self._dead[positions]

    def has_room(self, rows: int, known: int, most: int) -> bool:
        """Whether so many records may be put at other positions than those of `known` of them.

        Afterwards, at most `most` positions would not hold the newest record of a row, even if a
        segment had to be moved to the end then. Records of other rows do not add to them.
        """
        count = self.count + max(0, rows - self._free.size)
        others = count - (self.alive + rows - known)
        return others + self._rows <= most

    def choose(self, rows: int) -> Positions:
        """Return ascending positions for so many records, free ones if there are; see `use`."""
        again = self._free[:rows]
        more = np.arange(self.count, self.count + rows - again.size)
        return np.concatenate([again, more]) if again.size else more

    def use(self, positions: Positions) -> None:
        """Note that there are records at the positions that `choose` returned."""
        if not positions.size:
            return
        again = int(np.searchsorted(positions, self.count))
        end = int(positions[-1]) + 1
        if end > self._dead.size:
            room = max(end, 2 * self._dead.size)
            self._dead = _grown(self._dead, room)
            self._dead_of = _grown(self._dead_of, room // self._rows + 1)
        self._free = self._free[again:]
        self._dead[positions] = False
        self.alive += positions.size
        self.ordered = self.ordered and not again
        self.count = max(self.count, end)

    def supersede(self, positions: Positions) -> None:
        """Note that the records at distinct `positions` `(n,)` are dead."""
        self._dead[positions] = True
        counts = np.bincount(positions // self._rows)
        self._dead_of[: counts.size] += counts
        self.garbage += positions.size
        self.alive -= positions.size

    def drop(self, positions: Positions) -> None:
        """Note that no row has the records at distinct `positions` `(n,)` after all."""
        if positions.size:
            self.supersede(positions)
            self.ordered = False

    def fullest(self) -> int | None:
        """Return the segment with the most dead records, if any is used up and has some."""
        counts = self._dead_of[: self.count // self._rows].copy()
        counts[np.unique(self._free // self._rows)] = 0  # some of it waits to be used
        if not counts.size or not counts.max():
            return None
        return int(counts.argmax())

    def newest_in(self, segment: int) -> Positions:
        """Return the positions of the newest records in a segment, ascending."""
        first = segment * self._rows
        return first + np.flatnonzero(~self._dead[first : first + self._rows])

    def free(self, segment: int) -> None:
        """Let the positions of a segment be used again, whose records are all dead."""
        first = segment * self._rows
        self.garbage -= int(self._dead_of[segment])
        self._dead_of[segment] = 0
        self._free = np.union1d(self._free, np.arange(first, first + self._rows))


def _grown(array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    room = np.zeros(count, array.dtype)
    room[: array.size] = array
    return room
