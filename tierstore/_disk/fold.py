"""Merging: the newest image of each row that some deltas hold, and writing that over the base.

Nothing else is written, and readers of the table find these rows in the deltas, so none has to wait
for a merge. Each record it writes is a whole image that stays in its delta until the base is
synced, and read back from the disk: a merge that is cut short is simply done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore._disk.base import Base
from tierstore._disk.delta import Delta
from tierstore._disk.readahead import USUAL_GAP
from tierstore._disk.records import BLOCK_BYTES
from tierstore.errors import CommitFailedError

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
        most = min(max(1, _STEP_BYTES // width), self._starts[-1])
        block = np.empty((2, most, width), np.uint8)
        for rows, places in self._parts(width):
            records, sums = block[0, : rows.size], np.empty(rows.size, np.uint32)
            for delta, which, at in self._found(places):
                for place in delta.places(at):
                    place.announce(self._gap)
                images = block[1, : which.size]
                delta.read(at, images)
                records[which] = images
                sums[which] = delta.sums[at]
            yield rows, records, sums

    def checksums(self, record_bytes: int) -> Iterator[tuple[Rows, npt.NDArray[np.uint32]]]:
        """Yield the same rows and checksums in the same parts, without the records."""
        for rows, places in self._parts(record_bytes):
            sums = np.empty(rows.size, np.uint32)
            for delta, which, at in self._found(places):
                sums[which] = delta.sums[at]
            yield rows, sums

    def _parts(self, record_bytes: int) -> Iterator[tuple[Rows, Rows]]:
        """Yield what `places` does, as much as is done in a step."""
        step = max(1, _STEP_BYTES // record_bytes)
        for rows, places in self.places():
            for start in range(0, rows.size, step):
                yield rows[start : start + step], places[start : start + step]

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

    def _found(self, places: Rows) -> Iterator[tuple[Delta, npt.NDArray[np.intp], Rows]]:
        """Yield each delta with which of `places` lie in it, and where in it."""
        for delta, (first, stop) in zip(self._deltas, pairwise(self._starts), strict=True):
            which = np.flatnonzero((places >= first) & (places < stop))
            if which.size:
                yield delta, which, places[which] - first


class Merge:
    """Deltas, oldest first, on their way into the base they lie over."""

    def __init__(self, base: Base, deltas: Sequence[Delta]) -> None:
        """Take note of what is to be merged; nothing is read yet."""
        self._base = base
        self._deltas = tuple(deltas)

    def steps(self) -> Iterator[None]:
        """Write the images, some at each step, make the base durable, and prove that it is.

        Stopping in between does no harm. Raises CommitFailedError if the disk did not take
        what was written, whatever its syncs said: the deltas are still needed.
        """
        if not self._deltas:
            return
        newest = Newest(self._deltas, self._base.rows, self._base.gap)
        for rows, records, sums in newest.images():
            self._base.write(rows, records, sums)
            yield
        self._base.sync()
        for rows, sums in newest.checksums(self._base.record_bytes):
            self._prove(rows, sums)
            yield

    def _prove(self, rows: Rows, sums: npt.NDArray[np.uint32]) -> None:
        """Compare what the disk has of `rows` with the checksums of what was written."""
        wrong = self._base.unproven(rows, sums)
        if wrong.size:
            raise CommitFailedError(
                f"{wrong.size} rows, the first of them row {wrong[0]}, are not on the disk as a "
                "fold wrote them, although it was synced; the last commit is intact: check the "
                "disk and open the store again"
            )
