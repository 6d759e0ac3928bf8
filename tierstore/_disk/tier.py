"""The lowest tier: base, committed deltas and the live delta, seen as one table of records.

Committed bytes are never written over here. A record that is written goes to the live delta; an
index says for every row which delta position holds its newest image, or that the base does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tierstore._counters import TierStats
from tierstore._disk import readahead
from tierstore._disk.base import Base
from tierstore._disk.delta import Delta
from tierstore._disk.delta_writer import LiveDelta
from tierstore._disk.fold import Merge
from tierstore._disk.readahead import MappedRows, paced
from tierstore._disk.records import BLOCK_BYTES
from tierstore._rowcopy import unique
from tierstore.errors import (
    CapacityError,
    CorruptRowError,
    CorruptStoreError,
    StoreFullError,
    TierStoreError,
)

__all__ = ["DiskTier"]

_MAX_POSITIONS = 2**31 - 2
_ROWS_AHEAD = 2048
"""Rows that are announced, and then copied, at a time: a moment's work for a disk."""
_SAMPLE = 1024
_INDEX_ROWS = 1 << 20
"""Entries of the index that are gone through at a time."""
_IDS = 1 << 20
"""Ids of a delta that are laid at a time."""


class DiskTier:
    """Records by row, each from the file that has its newest image.

    `index[row]` is 0 where the base holds the row, else one more than a position in the deltas laid
    end to end, the live one last. Its pages are taken as rows change, so it costs four bytes for
    each row of a table only where deltas are dense.

    Threads may read, write, stream and stage beside each other: a lock guards the index and the
    live delta, whose records change in place. Base and committed deltas are read without it, since
    the store changes them, and calls everything else here, while no other thread is in a call.

    Attributes:
        queue_bytes: bytes of records that may wait in memory for a thread to write them; at first
            0: a write is done when it returns.
    """

    def __init__(
        self,
        base: Base,
        deltas: Sequence[Delta] = (),
        *,
        new_live: Callable[[], LiveDelta] | None = None,
    ) -> None:
        """Lay committed `deltas`, oldest first, over `base`.

        `new_live` creates the live delta when the first record is written; None is read-only.
        """
        self.rows = base.rows
        self.record_bytes = base.record_bytes
        self.stats = TierStats()
        self.queue_bytes = 0
        self._lock = threading.RLock()
        self._base = base
        self._step = max(1, BLOCK_BYTES // self.record_bytes)
        self._new_live = new_live
        self._live: LiveDelta | None = None
        self._superseded = 0
        self._index = np.zeros(self.rows, np.int32)
        self._replaced = np.empty(0, np.int32)
        self._deltas: list[Delta] = []
        self._delta_bytes = 0
        self._starts = np.zeros(1, np.int64)
        self.follow(deltas)

    @property
    def deltas(self) -> Sequence[Delta]:
        """The committed deltas, oldest first."""
        return self._deltas

    @property
    def live(self) -> LiveDelta | None:
        """The delta of uncommitted records, if there are any."""
        return self._live

    @property
    def index_bytes(self) -> int:
        """Most bytes the index can take."""
        return self._index.nbytes

    @property
    def delta_bytes(self) -> int:
        """Bytes of the files of all committed deltas."""
        return self._delta_bytes

    def follow(self, deltas: Sequence[Delta]) -> None:
        """Replace the committed deltas by `deltas`, oldest first; those that stay keep places.

        Rows of deltas that are gone are found in the others from now on, or in the base. Raises
        CorruptStoreError, and then nothing has changed.
        """
        segments = self._segments(deltas)
        for _, _, coming in segments:
            for delta in coming:
                self._check_rows(delta)
        if not segments:
            return
        live_rows = self._lift_live()
        for begin, end, coming in reversed(segments):
            self._exchange(begin, end, coming)
            if end > begin:
                self._base.forget()
        gaps = int(self._starts[-1]) - sum(delta.info.rows for delta in self._deltas)
        if self._starts[-1] > _MAX_POSITIONS // 2 and gaps > _MAX_POSITIONS // 8:
            self._close_gaps()
        self._lay_live(live_rows)
        self._delta_bytes = sum(delta.info.size for delta in self._deltas)

    def changed(self, deltas: Sequence[Delta], folded: int) -> npt.NDArray[np.int64]:
        """Return the rows whose committed image may be another once it follows `deltas`.

        Those of versions up to `folded` that are gone are in the base, or in others, as they were,
        and so are those that became a single one of the same newest version.
        """
        parts = [np.empty(0, np.int64)]
        for begin, end, coming in self._segments(deltas):
            gone = self._deltas[begin:end]
            if len(coming) == 1 and gone and coming[0].info.version == gone[-1].info.version:
                continue
            gone = [delta for delta in gone if delta.info.version > folded]
            parts += [np.asarray(delta.ids) for delta in [*gone, *coming]]
        return unique(np.concatenate(parts))

    def _segments(self, deltas: Sequence[Delta]) -> list[tuple[int, int, list[Delta]]]:
        """Return which of the committed deltas, from one to before another, give way to which."""
        places = {id(delta): number for number, delta in enumerate(self._deltas)}
        segments: list[tuple[int, int, list[Delta]]] = []
        begin, coming = 0, list[Delta]()
        for delta in [*deltas, None]:
            place = len(self._deltas) if delta is None else places.get(id(delta), -1)
            if delta is not None and place < begin:
                coming.append(delta)
                continue
            if place > begin or coming:
                segments.append((begin, place, coming))
            begin, coming = place + 1, []
        return segments

    def _exchange(self, begin: int, end: int, coming: list[Delta]) -> None:
        """Lay deltas in the place of those from number `begin` to before `end`."""
        gone, is_last = self._deltas[begin:end], end == len(self._deltas)
        first = int(self._starts[begin])
        starts = np.cumsum([first, *(delta.info.rows for delta in coming)])
        last = int(starts[-1] if is_last else self._starts[end])
        if starts[-1] > last:  # they need more room than there is: all behind them move
            self._exchange(begin, len(self._deltas), [*coming, *self._deltas[end:]])
            return
        self._check_positions(last)
        for delta in gone:
            ids = np.asarray(delta.ids)
            places = self._index[ids]
            self._index[ids[(places > first) & (places <= self._starts[end])]] = 0
        for delta, start in zip(coming, starts.tolist(), strict=False):
            for at in range(0, delta.info.rows, _IDS):
                ids = np.asarray(delta.ids[at : at + _IDS])
                first = start + at + 1
                places = np.arange(first, first + ids.size, dtype=np.int32)
                if not is_last:
                    older = self._index[ids] <= last
                    ids, places = ids[older], places[older]
                self._point(ids, places)
        self._starts = np.concatenate(
            [self._starts[:begin], starts[:-1], [last], self._starts[end + 1 :]]
        )
        self._deltas[begin:end] = coming

    def _check_rows(self, delta: Delta) -> None:
        ids = np.asarray(delta.ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.rows:
            raise CorruptStoreError(
                f"{delta.info.name} holds rows outside the table's 0..{self.rows - 1}"
            )

    def _point(self, ids: npt.NDArray[np.int64], places: npt.NDArray[np.int32]) -> None:
        """Point the index entries of `ids` to `places`, ascending and above all they had.

        Of an id that repeats the last one counts, which a plain assignment need not see to.
        """
        np.maximum.at(self._index, ids, places)

    def _lift_live(self) -> npt.NDArray[np.int64]:
        """Point the index to committed records alone; return the ids of the live delta's."""
        ids = np.empty(0, np.int64) if self._live is None else self._live.ids
        self._index[ids] = self._replaced[: ids.size]  # the same for each that repeats
        return ids

    def _lay_live(self, ids: npt.NDArray[np.int64]) -> None:
        """Lay the live delta, whose ids these are, over the committed ones again."""
        if ids.size:
            start = int(self._starts[-1]) + 1
            self._check_positions(start + ids.size)
            self._replaced[: ids.size] = self._index[ids]
            self._point(ids, np.arange(start, start + ids.size, dtype=np.int32))

    def _close_gaps(self) -> None:
        """Give the committed deltas their positions anew, end to end."""
        sizes = [delta.info.rows for delta in self._deltas]
        starts = np.cumsum([0, *sizes])
        shift = (self._starts[:-1] - starts[:-1]).astype(np.int32)
        for at in range(0, self.rows, _INDEX_ROWS):
            entries = self._index[at : at + _INDEX_ROWS]
            held = np.flatnonzero(entries)
            number = np.searchsorted(self._starts, entries[held] - 1, side="right") - 1
            entries[held] -= shift[number]
        self._starts = starts

    @staticmethod
    def _check_positions(count: int) -> None:
        if count > _MAX_POSITIONS:
            raise CapacityError(f"the deltas hold {count} records; fold the store")

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records of `rows` `(n,)`, ascending, into `out`, and check each."""
        self._count(rows.size)
        for _ in self._read_parts(rows, out, cold=self._cold(rows)):
            pass

    def stream(self, rows: npt.NDArray[np.int64]) -> Generator[tuple[slice, npt.NDArray[np.uint8]]]:
        """Yield the records of `rows` part by part; an array is good until the next one.

        Parts that are not in memory are on their way while those before them are used.
        """
        for part, records in self._read_parts(rows, cold=self._cold(rows)):
            self._count(len(records))
            yield part, records

    def _count(self, records: int) -> None:
        with self._lock:
            self.stats.requested += records
            self.stats.bytes_out += records * self.record_bytes

    def _read_parts(
        self,
        rows: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8] | None = None,
        *,
        cold: bool,
    ) -> Generator[tuple[slice, npt.NDArray[np.uint8]]]:
        """Read `rows` part by part, into `out` or else into memory that is used again."""
        step = min(self._step, _ROWS_AHEAD) if cold else self._step
        block = np.empty(
            (0 if out is not None else min(rows.size, step), self.record_bytes), np.uint8
        )
        parts = [slice(at, min(at + step, rows.size)) for at in range(0, rows.size, step)]
        for part in self._announced(rows, parts) if cold else parts:
            records = block[: part.stop - part.start] if out is None else out[part]
            self._read(rows[part], records)
            yield part, records

    def _announced(self, rows: npt.NDArray[np.int64], parts: list[slice]) -> Iterator[slice]:
        """Yield parts of `rows`, each when its pages are on their way."""
        if len(parts) == 1:
            self.stage(rows)()
            yield from parts
            return
        for number in paced(len(parts), lambda number: self.stage(rows[parts[number]])()):
            yield parts[number]

    def _cold(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether a sample of `rows` is not all in memory."""
        sample = rows[:: max(1, rows.size // _SAMPLE)]
        places = self._places(sample)
        return not all(readahead.looks_resident(place.records, place.rows) for place in places)

    def _places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return where the newest images of `rows` are mapped, and their checksums."""
        with self._lock:
            entries = self._index[rows]
            if not entries.any():
                return self._base.places(rows)
            places = self._base.places(rows[entries == 0])
            for source, start, which in self._by_delta(entries):
                places += source.places(entries[which].astype(np.int64) - 1 - start)
            return places

    def _read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy records and check each; only what does not match under the lock either is damage.

        A record that is superseded while it is read without the lock may match nothing.
        """
        try:
            self._copy(rows, out)
        except CorruptRowError:
            with self._lock:
                self._copy(rows, out)

    def _copy(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            places = self._index[rows]
            parts = self._by_delta(places) if places.any() else []
            if parts and isinstance(parts[-1][0], LiveDelta):
                self._copy_part(*parts.pop(), places, out)
        in_base = np.flatnonzero(places == 0)
        if in_base.size == rows.size:
            self._base.read(rows, out)
        elif in_base.size:
            records = np.empty((in_base.size, self.record_bytes), np.uint8)
            self._base.read(rows[in_base], records)
            out[in_base] = records
        for part in parts:
            self._copy_part(*part, places, out)

    def _copy_part(
        self,
        source: Delta | LiveDelta,
        start: int,
        which: npt.NDArray[np.intp],
        places: npt.NDArray[np.int32],
        out: npt.NDArray[np.uint8],
    ) -> None:
        """Copy `which` of the records from the delta whose first position is `start`."""
        records = np.empty((which.size, self.record_bytes), np.uint8)
        source.read(places[which].astype(np.int64) - 1 - start, records)
        out[which] = records

    def _by_delta(
        self, places: npt.NDArray[np.int32]
    ) -> list[tuple[Delta | LiveDelta, int, npt.NDArray[np.intp]]]:
        """Split index entries by delta: the delta, its first position, which entries are in it."""
        number = np.searchsorted(self._starts, places - 1, side="right") - 1
        parts: list[tuple[Delta | LiveDelta, int, npt.NDArray[np.intp]]] = []
        sources: list[Delta | LiveDelta] = [*self._deltas]
        if self._live is not None:
            sources.append(self._live)
        for found in np.unique(number[places > 0]).tolist():
            which = np.flatnonzero((number == found) & (places > 0))
            parts.append((sources[found], int(self._starts[found]), which))
        return parts

    def stage(self, rows: npt.NDArray[np.int64]) -> Callable[[], None]:
        """Return what has the disk read `rows`; call it without a lock: it may wait."""
        places = self._places(rows)

        def announce() -> None:
            for place in places:
                place.announce(self._base.gap)

        return announce

    def write(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        *,
        resident: bool = False,
    ) -> None:
        """Write `records` `(n, record_bytes)` over those of `rows` `(n,)`, distinct.

        A thread may do it behind the caller, but for little that is `resident` above, which a
        caller waits for. On a full disk: StoreFullError, nothing changed.
        """
        if rows.size:
            with self._lock:
                self._write(rows, records, resident=resident)

    def _write(
        self, rows: npt.NDArray[np.int64], records: npt.NDArray[np.uint8], *, resident: bool
    ) -> None:
        live = self._live
        if live is None:
            live = self._live = self._create_live()
            self._superseded = 0
        start, first = int(self._starts[-1]), live.count
        places = self._index[rows]
        known = np.flatnonzero(places > start)  # in the live delta already
        there = places[known].astype(np.int64) - 1 - start
        positions, superseded = np.arange(first, first + rows.size), known.size
        if superseded and not live.scattered(there):
            added, superseded = np.flatnonzero(places <= start), 0
            positions[added], positions[known] = positions[: added.size].copy(), there
        count = first + rows.size - known.size + superseded
        self._check_positions(start + count)
        replaced = _grown(self._replaced, count)
        try:
            live.put(positions, rows, records, resident=resident)
        except StoreFullError:
            if not superseded:
                raise
            live.full = True
            self._write(rows, records, resident=resident)
            return
        places[known] = replaced[there]
        new = slice(None) if count == first + rows.size else positions >= first
        replaced[first:count] = places[new]
        self._replaced = replaced
        self._index[rows[new]] = positions[new] + 1 + start
        self.stats.count(written=rows.size, bytes_in=rows.size * self.record_bytes)
        self._superseded += superseded
        if self._superseded > live.count // 2 and not live.full:
            self._compact(live)

    def _compact(self, live: LiveDelta) -> None:
        """Write the live delta anew without the records that were superseded, by row.

        Where there is no space for that, what is there stays, and is written over from now on.
        """
        rows = unique(live.ids)
        places = self._index[rows].astype(np.int64) - 1 - int(self._starts[-1])
        compact = self._create_live()
        step = max(1, 4 * BLOCK_BYTES // self.record_bytes)
        try:
            live.drain()  # what waits has one queue's room
            for at in range(0, rows.size, step):
                part = rows[at : at + step]
                records = np.empty((part.size, self.record_bytes), np.uint8)
                live.read(places[at : at + step], records)
                compact.put(np.arange(at, at + part.size), part, records)
        except TierStoreError:
            compact.remove()
            live.full = True
            return
        self._replaced = self._replaced[places]
        self._live, self._superseded = compact, 0
        self._index[rows] = np.arange(1, rows.size + 1, dtype=np.int32) + self._starts[-1]
        live.remove()

    def _create_live(self) -> LiveDelta:
        if self._new_live is None:
            raise RuntimeError("a read-only disk tier was written to")
        return self._new_live()

    def flush(self) -> None:
        """Do nothing: what was written is in the live delta already."""

    def adopt(self, delta: Delta) -> None:
        """Take the live delta, now committed as `delta`, among the committed ones."""
        if self._live is not None:
            self._live.close()
        self._live = None
        stop = int(self._starts[-1]) + delta.info.rows
        self._check_positions(stop)
        self._deltas.append(delta)
        self._starts = np.append(self._starts, stop)
        self._delta_bytes += delta.info.size

    def discard(self) -> npt.NDArray[np.int64]:
        """Drop the live delta; return the rows it held, which show committed values again."""
        rows = unique(self._lift_live())
        live, self._live = self._live, None
        if live is not None:
            live.remove()
        return rows

    def touched(self, version: int, rows: int) -> npt.NDArray[np.int64]:
        """Return which blocks of so many rows are touched by deltas up to a version, ascending."""
        blocks = np.zeros(-(-self.rows // rows), np.bool_)
        for delta in self._upto(version):
            blocks[np.asarray(delta.ids) // rows] = True
        return np.flatnonzero(blocks)

    def computed_checksums(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return what the checksums of `rows` of the base are by their records."""
        return self._base.computed_checksums(rows)

    def merge(self, version: int) -> Merge:
        """Return what writes the deltas of versions up to this one into the base.

        Reads, writes and commits may go on meanwhile: they find these rows in the deltas, which
        must not be dropped before the merge has ended.
        """
        return Merge(self._base, self._upto(version))

    def _upto(self, version: int) -> Sequence[Delta]:
        return [delta for delta in self._deltas if delta.info.version <= version]

    def damaged(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those of `rows` whose record in the base does not match its checksum."""
        return self._base.damaged(rows)

    def damaged_files(self) -> list[str]:
        """Return names of base files with damage outside any row."""
        return self._base.damaged_files()

    def close(self) -> None:
        """Close the files; a live delta stays, for the next writer to sweep up."""
        if self._live is not None:
            self._live.close()
        self._live = None
        self._base.close()
        self._deltas = []


def _grown(array: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    if count <= array.size:
        return array
    room = np.zeros(max(count, 2 * array.size, 1024), np.int32)
    room[: array.size] = array
    return room
