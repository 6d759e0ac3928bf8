"""Merging: the newest image of each row that some deltas hold, and writing that over the base.

Nothing else is written, and readers of the table find these rows in the deltas, so none has to wait
for a merge. Each record it writes is a whole image that stays in its delta until the base
is synced: a merge that is cut short is simply done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore.disk.base import Base
from tierstore.disk.delta import Delta
from tierstore.disk.paging import USUAL_GAP
from tierstore.disk.records import BLOCK_BYTES

__all__ = ["Merge", "Newest"]

Rows = npt.NDArray[np.int64]

_STEP_BYTES = BLOCK_BYTES
_WINDOW_ROWS = 1 << 20
"""Rows of a table whose newest images are looked up at a time, for four bytes each; at least."""
_MOST_WINDOWS = 256
"""How often the ids of all deltas are gone through at most."""
_IDS = 1 << 20


class Newest:
    """The newest image of each row that some deltas, oldest first, hold."""

    def __init__(self, deltas: Sequence[Delta], rows: int, gap: int = USUAL_GAP) -> None:
        """Take note of deltas of a table of so many `rows`; nothing is read yet.

        Pages at most `gap` bytes apart are fetched in one piece.
        """
        self._deltas = tuple(deltas)
        self._rows = rows
        self._gap = gap
        self._starts = np.cumsum([0, *(delta.info.rows for delta in deltas)]).tolist()

    def images(self) -> Iterator[tuple[Rows, npt.NDArray[np.uint8], npt.NDArray[np.uint32]]]:
        """Yield rows, ascending, their records and checksums, all good until the next ones.

        Each record is checked.
        """
        if not self._deltas:
            return
        width = self._deltas[0].record_bytes
        step = max(1, _STEP_BYTES // width)
        step = min(step, self._starts[-1])
        block = np.empty((2, step, width), np.uint8)
        for rows, places in self.places():
            for start in range(0, rows.size, step):
                part = rows[start : start + step]
                records, sums = block[0, : part.size], np.empty(part.size, np.uint32)
                self._collect(places[start : start + step], records, sums, block[1])
                yield part, records, sums

    def places(self) -> Iterator[tuple[Rows, Rows]]:
        """Yield rows, ascending, and where the newest image of each is in the deltas end to end."""
        if self._starts[-1] <= _WINDOW_ROWS:
            ids = np.concatenate([np.empty(0, np.int64), *(delta.ids for delta in self._deltas)])
            rows, behind = np.unique(ids[::-1], return_index=True)
            yield rows, ids.size - 1 - behind
            return
        window = max(_WINDOW_ROWS, -(-self._rows // _MOST_WINDOWS))
        for first in range(0, self._rows, window):
            newest = np.zeros(min(window, self._rows - first), np.int32)
            for delta, start in zip(self._deltas, self._starts, strict=False):
                for at in range(0, delta.info.rows, _IDS):
                    rows = delta.ids[at : at + _IDS] - first
                    here = np.flatnonzero((rows >= 0) & (rows < newest.size))
                    places = (here + (start + at + 1)).astype(np.int32)
                    np.maximum.at(newest, rows[here], places)  # of a row that repeats, the last
            rows = np.flatnonzero(newest)
            yield rows + first, newest[rows].astype(np.int64) - 1

    def _collect(
        self,
        places: Rows,
        records: npt.NDArray[np.uint8],
        sums: npt.NDArray[np.uint32],
        staging: npt.NDArray[np.uint8],
    ) -> None:
        """Copy what is at `places` of the deltas, laid end to end, and its checksums."""
        for delta, (first, stop) in zip(self._deltas, pairwise(self._starts), strict=True):
            which = np.flatnonzero((places >= first) & (places < stop))
            if which.size:
                at = places[which] - first
                for place in delta.places(at):
                    place.announce(self._gap)
                images = staging[: which.size]
                delta.read(at, images)
                records[which] = images
                sums[which] = delta.sums[at]


class Merge:
    """Deltas, oldest first, on their way into the base they lie over."""

    def __init__(self, base: Base, deltas: Sequence[Delta]) -> None:
        """Take note of what is to be merged; nothing is read yet."""
        self._base = base
        self._deltas = tuple(deltas)

    def steps(self) -> Iterator[None]:
        """Write the images, some at each step, and with the last step make the base durable.

        Stopping in between does no harm.
        """
        if not self._deltas:
            return
        for rows, records, sums in Newest(self._deltas, self._base.rows, self._base.gap).images():
            self._base.write(rows, records, sums)
            yield
        self._base.sync()
