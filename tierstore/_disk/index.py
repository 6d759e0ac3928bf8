"""The index of a table: maps each row to the delta position of its newest image, or the base.

Positions number the records of all deltas consecutively, the live delta last. An entry is one more
than a position, or 0 if the newest image is in the base. Memory is taken as rows change, so the
index takes four bytes per row of the table only if deltas are dense. If new rows arrive, many
consecutive rows have consecutive positions: such a run is stored as its bounds, so that a table
with any number of them opens at once and takes no memory for them. The entry of a row is the
largest one in its runs and the array, because later images have later positions.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore._disk.delta import Delta, LiveDelta
from tierstore._rowcopy import unique
from tierstore._rowmap import RowMap
from tierstore.errors import CapacityError, CorruptStoreError

Rows = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]

_MAX_POSITIONS = 2**31 - 2
_IDS = 1 << 20
"""Ids of a delta processed at a time."""
_LONG = 1 << 16
"""Rows from which on a run is stored as its bounds."""
_MOST_RUNS = 8
"""Most runs that a look-up searches; if there are more, the array takes all of them."""
_RENUMBERED = 1 << 20
"""Entries that are renumbered at a time."""


def check_positions(count: int) -> None:
    """Raise CapacityError if the deltas hold more records than an entry can number."""
    if count > _MAX_POSITIONS:
        raise CapacityError(f"the deltas hold {count} records, too many to index; fold the store")


class _Stretch(NamedTuple):
    """The entries of rows `start:stop`: the row plus `ahead`."""

    start: int
    stop: int
    ahead: int

    def within(self, first: int, last: int) -> _Stretch:
        """Return the part whose entries are `first` to `last`; it may be empty."""
        return _Stretch(
            max(self.start, first - self.ahead), min(self.stop, last + 1 - self.ahead), self.ahead
        )


class Entries:
    """The entry of each row, `(rows,)` int32."""

    def __init__(self, rows: int) -> None:
        """Start with every row in the base."""
        self._numbers = RowMap(rows)
        self._runs: list[_Stretch] = []

    @property
    def nbytes(self) -> int:
        """The bytes that the entries take."""
        return self._numbers.nbytes

    def grow(self, rows: int) -> None:
        """Add rows, in the base; no other thread may look rows up meanwhile."""
        self._numbers.grow(rows)

    def take(self, rows: Rows) -> Places:
        """Return the entries of valid `rows` `(n,)` as a new array."""
        entries = self._numbers.find(rows)
        entries += 1
        for run in self._runs:
            inside = (rows >= run.start) & (rows < run.stop)
            if inside.any():
                places = ((rows + run.ahead) * inside).astype(np.int32)
                np.maximum(entries, places, out=entries)
        return entries

    def __setitem__(self, rows: Rows, places: Places) -> None:
        """Set the entries of distinct `rows` `(n,)`, which are in no run or agree with it."""
        self._numbers.set(rows, places)

    def point(self, ids: Rows, places: Places) -> None:
        """Raise the entries of `ids` to `places`, where these are larger; ids may repeat."""
        self._numbers.set(ids, places, raises=True)

    def point_run(self, start: int, stop: int, first: int) -> None:
        """Raise the entries of rows `start:stop` to `first` and those after it."""
        run = _Stretch(start, stop, first - start)
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

    def _fill(self, run: _Stretch) -> None:
        for at in range(run.start, run.stop, _RENUMBERED):
            rows = np.arange(at, min(at + _RENUMBERED, run.stop))
            self.point(rows, (rows + run.ahead).astype(np.int32))

    def clear(self, ids: Rows, first: int, last: int) -> None:
        """Set array entries of `ids` to 0 if they are from `first` to `last`."""
        places = self._numbers.find(ids)  # a later run may hide it
        self._numbers.set(ids[(places >= first - 1) & (places < last)], None)

    def cut(self, first: int, last: int) -> None:
        """Remove the entries `first` to `last` from the runs."""
        parts = [
            part
            for run in self._runs
            for part in (run.within(0, first - 1), run.within(last + 1, run.stop + run.ahead))
        ]
        self._runs = [part for part in parts if part.start < part.stop]

    def renumber(self, starts: npt.NDArray[np.int64], shift: npt.NDArray[np.int64]) -> None:
        """Reduce the entries of positions from each of the ascending `starts` on by a `shift`."""
        numbers = self._numbers.numbers
        for at in range(0, numbers.size, _RENUMBERED):
            entries = numbers[at : at + _RENUMBERED]
            held = np.flatnonzero(entries)
            number = np.searchsorted(starts, entries[held] - 1, side="right") - 1
            entries[held] -= shift[number].astype(np.int32)
        for at, run in enumerate(self._runs):
            delta = int(np.searchsorted(starts, run.start + run.ahead - 1, side="right")) - 1
            self._runs[at] = run._replace(ahead=run.ahead - int(shift[delta]))


class DeltaIndex:
    """Maps rows to the positions of their newest images in the deltas of a table.

    Attributes:
        deltas: the committed deltas, oldest first.
        entries: for each row, one more than the position of its newest image, or 0 for the base.
        replaced: for each position in the live delta, the previous entry of its row.
    """

    def __init__(self, rows: int) -> None:
        """Start with every row in the base."""
        self.rows = rows
        self.deltas: list[Delta] = []
        self.entries: Entries = Entries(rows)
        self.replaced: Places = np.empty(0, np.int32)
        self.starts = np.zeros(1, np.int64)

    def grow(self, rows: int) -> None:
        """Add rows, in the base; no other thread may look rows up meanwhile."""
        self.entries.grow(rows)
        self.rows = rows

    @property
    def stop(self) -> int:
        """The first position after the committed deltas, where the live delta starts."""
        return int(self.starts[-1])

    def append(self, delta: Delta) -> None:
        """Append the live delta, now committed as `delta`, to the committed ones."""
        self.deltas.append(delta)
        self.starts = np.append(self.starts, self.starts[-1] + delta.info.rows)

    def follow(self, deltas: Sequence[Delta], live: LiveDelta | None) -> bool:
        """Replace the committed deltas by `deltas`, oldest first; remaining ones do not move.

        `live` is the live delta, if any. Returns whether any delta was removed, so that
        rows may now be in the base. Raises CorruptStoreError without changing anything.
        """
        segments = self._segments(deltas)
        for _, _, coming in segments:
            check_rows(coming, self.rows)
        if not segments:
            return False
        if live is not None:
            self.lift(live)
        for begin, end, coming in reversed(segments):
            self._exchange(begin, end, coming)
        if self.stop > _MAX_POSITIONS // 2:
            gaps = self.stop - sum(delta.info.rows for delta in self.deltas)
            if gaps > _MAX_POSITIONS // 8:
                self._close_gaps()
        if live is not None:
            self._lay(live)
        return any(end > begin for begin, end, _ in segments)

    def changed(self, deltas: Sequence[Delta], folded: int, rows: int) -> Rows:
        """Return the rows whose committed image may change when the index switches to `deltas`.

        Rows of removed deltas of versions up to `folded` have the same image in the base or in
        another delta; so do rows of deltas that were compacted into one of the same newest version.
        Raises CorruptStoreError if new deltas do not fit a table of so many `rows`.
        """
        parts = [np.empty(0, np.int64)]
        for begin, end, coming in self._segments(deltas):
            gone = self.deltas[begin:end]
            check_rows(coming, rows)
            if len(coming) == 1 and gone and coming[0].info.version == gone[-1].info.version:
                continue
            gone = [delta for delta in gone if delta.info.version > folded]
            parts += [np.asarray(delta.ids) for delta in [*gone, *coming]]
        return unique(np.concatenate(parts))

    def latest(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Return those of `deltas` after the last that is among the committed ones, newest first.

        The newest images of their rows are in them.
        """
        if self._lead(deltas):
            return [*reversed(deltas[len(self.deltas) :])]
        known = {id(delta) for delta in self.deltas}
        return [*itertools.takewhile(lambda delta: id(delta) not in known, reversed(deltas))]

    def _lead(self, deltas: Sequence[Delta]) -> bool:
        """Whether the committed deltas are the first of `deltas`, as after commits alone."""
        here = self.deltas
        return len(here) <= len(deltas) and all(map(operator.is_, here, deltas))

    def _segments(self, deltas: Sequence[Delta]) -> list[tuple[int, int, list[Delta]]]:
        """Return the range of committed deltas to replace, and their replacements."""
        if self._lead(deltas):
            stop = len(self.deltas)
            return [(stop, stop, [*deltas[stop:]])] if len(deltas) > stop else []
        places = {id(delta): number for number, delta in enumerate(self.deltas)}
        segments: list[tuple[int, int, list[Delta]]] = []
        begin, coming = 0, list[Delta]()
        for delta in [*deltas, None]:
            place = len(self.deltas) if delta is None else places.get(id(delta), -1)
            if delta is not None and place < begin:
                coming.append(delta)
                continue
            if place > begin or coming:
                segments.append((begin, place, coming))
            begin, coming = place + 1, []
        return segments

    def _exchange(self, begin: int, end: int, coming: list[Delta]) -> None:
        """Replace the deltas with numbers `begin:end`."""
        gone, is_last = self.deltas[begin:end], end == len(self.deltas)
        first = int(self.starts[begin])
        starts = np.cumsum([first, *(delta.info.rows for delta in coming)])
        last = int(starts[-1] if is_last else self.starts[end])
        if starts[-1] > last:  # they need more positions than are free: all later deltas move
            self._exchange(begin, len(self.deltas), [*coming, *self.deltas[end:]])
            return
        check_positions(last)
        if gone:
            self.entries.cut(first + 1, int(self.starts[end]))
        for delta in gone:
            self.entries.clear(np.asarray(delta.ids), first + 1, int(self.starts[end]))
        for delta, start in zip(coming, starts.tolist(), strict=False):
            if delta.first is not None:
                self.entries.point_run(delta.first, delta.first + delta.info.rows, start + 1)
                continue
            for at in range(0, delta.info.rows, _IDS):
                ids = np.asarray(delta.ids[at : at + _IDS])
                self.entries.point(ids, _numbered(start + at, ids.size))
        self._uncover(gone, begin)
        self.starts = np.concatenate(
            [self.starts[:begin], starts[:-1], [last], self.starts[end + 1 :]]
        )
        self.deltas[begin:end] = coming

    def _uncover(self, gone: Sequence[Delta], begin: int) -> None:
        """Point rows of removed deltas (`gone`) to the deltas before number `begin`.

        Such rows exist if a writer went back to an older version.
        """
        if not begin:
            return
        bare = [
            ids[self.entries.take(ids) == 0] for ids in (np.asarray(delta.ids) for delta in gone)
        ]
        rows = unique(np.concatenate([np.empty(0, np.int64), *bare]))
        for number in range(begin if rows.size else 0):
            ids = np.asarray(self.deltas[number].ids)
            at = np.flatnonzero(np.isin(ids, rows))
            self.entries.point(ids[at], (self.starts[number] + 1 + at).astype(np.int32))

    def lift(self, live: LiveDelta) -> Rows:
        """Point all entries to committed records; return the rows in the live delta, distinct."""
        positions = live.segments.newest()
        rows = live.rows_at(positions)
        self.entries[rows] = self.replaced[positions]
        return rows

    def _lay(self, live: LiveDelta) -> None:
        """Add the live delta on top of the committed ones again."""
        positions = live.segments.newest()
        rows = live.rows_at(positions)
        check_positions(self.stop + 1 + live.count)
        self.replaced[positions] = self.entries.take(rows)
        self.entries.point(rows, (self.stop + 1 + positions).astype(np.int32))

    def _close_gaps(self) -> None:
        """Renumber the positions of the committed deltas without gaps."""
        sizes = [delta.info.rows for delta in self.deltas]
        starts = np.cumsum([0, *sizes])
        self.entries.renumber(self.starts, self.starts[:-1] - starts[:-1])
        self.starts = starts

    def by_delta(
        self, places: Places, live: LiveDelta | None
    ) -> list[tuple[Delta | LiveDelta, int, npt.NDArray[np.intp]]]:
        """Split entries by delta; return delta, first position, entry indices."""
        number = np.searchsorted(self.starts, places - 1, side="right") - 1
        parts: list[tuple[Delta | LiveDelta, int, npt.NDArray[np.intp]]] = []
        sources: list[Delta | LiveDelta] = [*self.deltas]
        if live is not None:
            sources.append(live)
        held = places > 0
        for found in np.flatnonzero(np.bincount(number[held])).tolist():
            which = np.flatnonzero((number == found) & held)
            parts.append((sources[found], int(self.starts[found]), which))
        return parts


def _numbered(position: int, count: int) -> Places:
    """Return the entries of so many records from a position on."""
    return np.arange(position + 1, position + 1 + count, dtype=np.int32)


def check_rows(deltas: Sequence[Delta], rows: int) -> None:
    """Raise CorruptStoreError if deltas have rows that a table of so many rows lacks."""
    for delta in deltas:
        first, last = delta.span
        if first < 0 or last >= rows:
            raise CorruptStoreError(
                f"{delta.info.name} contains rows outside the table's 0..{rows - 1}"
            )
