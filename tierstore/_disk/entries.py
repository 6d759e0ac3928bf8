"""Where the newest image of each row of a table is: the entries of its index.

An entry is one more than a position among the records of all deltas, or 0 if the newest image is in
the base. Where new rows arrive, many consecutive rows have consecutive positions. Such a run is
kept as its bounds, so that a table of any number of them is opened at once and takes no memory for
them; the entry of a row is the larger one of what its runs and the array say, as later images have
later positions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore import _rowmap
from tierstore._rowmap import RowMap, SparseMap, numbers_of, resize, row_map

__all__ = ["Entries", "Places"]

Rows = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]

_FEW = 1024
"""Rows up to which threads do not look them up in less time."""
_LONG = 1 << 16
"""Rows from which on a run is kept as such."""
_MOST_RUNS = 8
"""Runs that every look-up may ask; if there are more, the array takes all of them."""
_RENUMBERED = 1 << 20
"""Entries that get other positions at a time."""


class _Run(NamedTuple):
    """The entries of rows `start:stop`: the row plus `ahead`."""

    start: int
    stop: int
    ahead: int

    def within(self, first: int, last: int) -> _Run:
        """Return the part whose entries are `first` to `last`; it may be empty."""
        return _Run(
            max(self.start, first - self.ahead), min(self.stop, last + 1 - self.ahead), self.ahead
        )


class Entries:
    """The entry of each row, `(rows,)` int32."""

    def __init__(self, rows: int) -> None:
        """Start with every row in the base."""
        self._numbers: RowMap = row_map(rows)
        self._runs: list[_Run] = []

    @property
    def nbytes(self) -> int:
        """The most bytes that the entries take."""
        return self._numbers.nbytes

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Return `nbytes` of the entries of so many rows."""
        return _rowmap.bytes_for(rows)

    def grow(self, rows: int) -> None:
        """Have more rows, in the base; no other thread may look rows up meanwhile."""
        resize(self._numbers, rows)

    def take(self, rows: Rows) -> Places:
        """Return the entries of valid `rows` `(n,)` as a new array."""
        numbers = self._numbers
        found = numbers.take(rows) if rows.size <= _FEW else numbers_of(rows, numbers)
        for run in self._runs:
            inside = (rows >= run.start) & (rows < run.stop)
            if inside.any():
                places = ((rows + run.ahead) * inside).astype(np.int32)
                np.maximum(found, places, out=found)
        return found

    def __setitem__(self, rows: Rows, places: Places | int) -> None:
        """Set the entries of distinct `rows` `(n,)`, which are in no run, or are the run's too."""
        self._numbers[rows] = places

    def point(self, ids: Rows, places: Places) -> None:
        """Raise the entries of `ids` to `places`, where these are larger; ids may repeat."""
        numbers = self._numbers
        if ids.size and int(ids[-1] - ids[0]) == ids.size - 1 and (ids[1:] - ids[:-1] == 1).all():
            self._point_run(int(ids[0]), places)
        elif isinstance(numbers, SparseMap):
            np.maximum.at(numbers.numbers, numbers.reserve(ids), places)
        else:
            np.maximum.at(numbers, ids, places)

    def _point_run(self, start: int, places: Places) -> None:
        """Raise the entries of rows from `start` on, as keys that arrive bring them."""
        numbers, stop = self._numbers, start + places.size
        if isinstance(numbers, SparseMap):
            at = numbers.reserve_run(start, stop)
            numbers.numbers[at] = np.maximum(numbers.numbers[at], places)
        else:
            np.maximum(numbers[start:stop], places, out=numbers[start:stop])

    def point_run(self, start: int, stop: int, first: int) -> None:
        """Raise the entries of rows `start:stop` to `first` and those after it."""
        run = _Run(start, stop, first - start)
        if stop - start < _LONG:
            self._fill(run)
            return
        last = self._runs[-1] if self._runs else None
        if last is not None and (last.stop, last.ahead) == (start, run.ahead):
            self._runs[-1] = last._replace(stop=stop)
            return
        self._runs.append(run)
        if len(self._runs) > _MOST_RUNS:
            runs, self._runs = self._runs, []
            for each in runs:
                self._fill(each)

    def _fill(self, run: _Run) -> None:
        for at in range(run.start, run.stop, _RENUMBERED):
            stop = min(at + _RENUMBERED, run.stop)
            self._point_run(at, np.arange(at + run.ahead, stop + run.ahead, dtype=np.int32))

    def clear(self, ids: Rows, first: int, last: int) -> None:
        """Set to 0 what the array says of those `ids` of which it says `first` to `last`."""
        places = numbers_of(ids, self._numbers)  # a later run may hide it
        self._numbers[ids[(places >= first) & (places <= last)]] = 0

    def cut(self, first: int, last: int) -> None:
        """Have no run with the entries `first` to `last`."""
        parts = [
            part
            for run in self._runs
            for part in (run.within(0, first - 1), run.within(last + 1, run.stop + run.ahead))
        ]
        self._runs = [part for part in parts if part.start < part.stop]

    def renumber(self, starts: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]) -> None:
        """Reduce the entries of positions from each of the ascending `starts` on by a `shift`."""
        numbers = self._numbers.numbers if isinstance(self._numbers, SparseMap) else self._numbers
        for at in range(0, self._numbers.size, _RENUMBERED):
            entries = numbers[at : at + _RENUMBERED]
            held = np.flatnonzero(entries)
            number = np.searchsorted(starts, entries[held] - 1, side="right") - 1
            entries[held] -= shift[number].astype(np.int32)
        for at, run in enumerate(self._runs):
            delta = int(np.searchsorted(starts, run.start + run.ahead - 1, side="right")) - 1
            self._runs[at] = run._replace(ahead=run.ahead - int(shift[delta]))
