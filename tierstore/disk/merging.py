"""Merging: the newest image of each row that some deltas hold is written over the base.

Nothing else is written, and whoever reads the table finds these rows in the deltas, so nobody has
to wait for a merge. Each record it writes is a whole image that stays in its delta until the base
is synced, and read back from the disk: a merge that is cut short is simply done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tierstore.disk.base import Base
from tierstore.disk.delta import Delta
from tierstore.disk.records import BLOCK_BYTES
from tierstore.errors import CommitFailedError

__all__ = ["Merge"]

_STEP_BYTES = BLOCK_BYTES
_WINDOW_ROWS = 1 << 20
"""Rows of a table whose newest images are looked up at a time, for four bytes each; at least."""
_MOST_WINDOWS = 256
"""How often the ids of all deltas are gone through at most."""
_IDS = 1 << 20


class Merge:
    """Deltas, oldest first, on their way into the base they lie over."""

    def __init__(self, base: Base, deltas: Sequence[Delta]) -> None:
        """Take note of what is to be merged; nothing is read yet."""
        self._base = base
        self._deltas = tuple(deltas)
        self._starts = np.cumsum([0, *(delta.info.rows for delta in deltas)]).tolist()

    def steps(self) -> Iterator[None]:
        """Write the images, some at each step, make the base durable, and prove that it is.

        To stop in between does no harm. Raises CommitFailedError if the disk did not take
        what was written, whatever its syncs said: the deltas are still needed.
        """
        if not self._deltas:
            return
        for rows, places in self._parts():
            self._write(rows, places)
            yield
        self._base.sync()
        for rows, places in self._parts():
            self._prove(rows, places)
            yield

    def _parts(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield what `_newest` does, as much as is done in a step."""
        step = max(1, _STEP_BYTES // self._base.record_bytes)
        for rows, places in self._newest():
            for start in range(0, rows.size, step):
                yield rows[start : start + step], places[start : start + step]

    def _newest(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield the rows in the deltas, ascending, and the position of the newest image of each."""
        rows_in_all = self._base.rows
        window = max(_WINDOW_ROWS, -(-rows_in_all // _MOST_WINDOWS))
        for first in range(0, rows_in_all, window):
            newest = np.zeros(min(window, rows_in_all - first), np.int32)
            for delta, start in zip(self._deltas, self._starts, strict=False):
                for at in range(0, delta.info.rows, _IDS):
                    rows = delta.ids[at : at + _IDS] - first
                    here = np.flatnonzero((rows >= 0) & (rows < newest.size))
                    places = (here + (start + at + 1)).astype(np.int32)
                    np.maximum.at(newest, rows[here], places)  # of a row that repeats, the last
            rows = np.flatnonzero(newest)
            yield rows + first, newest[rows].astype(np.int64) - 1

    def _write(self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> None:
        """Write the images at positions `places` of the deltas, laid end to end, over `rows`."""
        records = np.empty((rows.size, self._base.record_bytes), np.uint8)
        sums = np.empty(rows.size, np.uint32)
        for delta, which, at in self._found(places):
            for place in delta.places(at):
                place.announce(self._base.gap)
            images = np.empty((which.size, self._base.record_bytes), np.uint8)
            delta.read(at, images)
            records[which] = images
            sums[which] = delta.sums[at]
        self._base.write(rows, records, sums)

    def _prove(self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> None:
        """Compare what the disk has of `rows` with the checksums at `places` of the deltas."""
        sums = np.empty(rows.size, np.uint32)
        for delta, which, at in self._found(places):
            sums[which] = delta.sums[at]
        wrong = self._base.unproven(rows, sums)
        if wrong.size:
            raise CommitFailedError(
                f"{wrong.size} rows, the first of them row {wrong[0]}, are not on the disk as a "
                "fold wrote them, although it was synced; the last commit is intact: check the "
                "disk and open the store again"
            )

    def _found(
        self, places: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Delta, npt.NDArray[np.intp], npt.NDArray[np.int64]]]:
        """Yield each delta with which of `places` lie in it, and where in it."""
        for delta, (first, stop) in zip(self._deltas, pairwise(self._starts), strict=True):
            which = np.flatnonzero((places >= first) & (places < stop))
            if which.size:
                yield delta, which, places[which] - first
