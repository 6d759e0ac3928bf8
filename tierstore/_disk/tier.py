"""The lowest tier: presents base, committed deltas and live delta as one table of records.

This tier never overwrites committed bytes. New records go to the live delta; the index gives the
location of every row's newest image.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._closing import call_each
from tierstore._disk import readahead
from tierstore._disk.base import Base
from tierstore._disk.delta import Delta, Get, LiveDelta
from tierstore._disk.index import DeltaIndex, check_positions, check_rows
from tierstore._disk.manifest import MAX_DELTA_IMAGES
from tierstore._disk.merging import Merge
from tierstore._disk.readahead import MappedRows, paced
from tierstore._disk.records import BLOCK_BYTES, block_rows
from tierstore._rowcopy import Target, call_at, copy
from tierstore.errors import (
    CorruptRowError,
    StoreFullError,
    TierStoreError,
)
from tierstore.stats import TierStats

_COLLECTED_BYTES = 4 << 20
"""Bytes of records to write for which readers of others wait at a time, as many as a queue takes at
once."""
_ROWS_AHEAD = 2048
"""Rows that are prefetched and then copied at a time, enough to keep a disk busy."""
_SAMPLE = 1024
"""Rows of which some are looked for in memory, at first."""
_FEWER = 4
"""How often that number is halved, once for every batch that was in memory."""
_NO_ROWS = np.empty(0, np.int64)


_Read = Callable[[npt.NDArray[np.int64], npt.NDArray[np.uint8]], None]


def _read_at(
    live: LiveDelta,
    places: npt.NDArray[np.int64],
    which: Any,
    out: npt.NDArray[np.uint8],
) -> None:
    """Copy the records at some of `places` in a live delta."""
    live.read(places[which], out)


class DiskTier:
    """Records by row, each read from the file with its newest image.

    Threads may read, write, stream and stage concurrently: a lock guards the index and the live
    delta, whose records change in place. Base and committed deltas are read without the lock,
    because the store changes them, and calls all other methods, only while no other thread is in a
    call.

    Attributes:
        queue_bytes: bytes of records that may be queued for a writer thread; initially 0, so a
            write is complete when it returns.
        table: what errors call the table.
        deltas: the committed deltas, oldest first.
        delta_bytes: bytes of their files.
        live: the delta of uncommitted records, if any.
    """

    def __init__(
        self,
        base: Base,
        deltas: Sequence[Delta] = (),
        *,
        new_live: Callable[[], LiveDelta] | None = None,
        table: str = "",
    ) -> None:
        """Combine `base` with committed `deltas`, oldest first.

        `new_live` creates the live delta when the first record is written; None is read-only.
        `table` is what errors call the table.
        """
        self.table = table
        self.rows: int = base.rows
        self.record_bytes: int = base.record_bytes
        self.stats: TierStats = TierStats()
        self.queue_bytes = 0
        self._lock = threading.RLock()
        self._base = base
        self._step = max(1, BLOCK_BYTES // self.record_bytes)
        self._new_live = new_live
        self.live: LiveDelta | None = None
        self._warm = 0
        self._made: DeltaIndex | None = None
        self.deltas: list[Delta] = []
        self.delta_bytes: int = 0
        self.follow(deltas)

    def _make_index(self) -> DeltaIndex:
        """Make the index, at its first use: of a thousand tables, few may be read."""
        with self._lock:
            if self._made is None:  # otherwise another thread was faster
                index = DeltaIndex(self.rows)
                index.follow(self.deltas, None)
                self._made, self.deltas = index, index.deltas
            return self._made

    @property
    def index_bytes(self) -> int:
        """The memory that the index takes."""
        return 0 if self._made is None else self._made.entries.nbytes

    def examine(self) -> None:
        """Examine the files of the base, if that was left for later; raises CorruptStoreError."""
        self._base.examine()

    def grow(self, rows: int) -> None:
        """Add rows, which read as zeros; a writer extends the files."""
        with self._lock:
            self._base.grow(rows, extend=self._new_live is not None)
            if self._made is not None:
                self._made.grow(rows)
            self.rows = rows

    def follow(self, deltas: Sequence[Delta]) -> None:
        """Replace the committed deltas by `deltas`, oldest first.

        Rows of removed deltas are then found in the other deltas or in the base. Raises
        CorruptStoreError without changing anything.
        """
        if self._made is None:
            check_rows(deltas, self.rows)
            check_positions(sum(delta.info.rows for delta in deltas))
            self.deltas, before = [*deltas], self.deltas
            has_gone = not {*map(id, before)} <= {*map(id, deltas)}
        else:
            has_gone = self._made.follow(deltas, self.live)
        if has_gone:
            self._base.forget()
        self.delta_bytes = sum(map(attrgetter("info.size"), self.deltas))

    def changed(self, deltas: Sequence[Delta], folded: int, rows: int) -> npt.NDArray[np.int64]:
        """Return the rows whose committed image may change when the tier switches to `deltas`.

        See `DeltaIndex.changed`.
        """
        index = self._made or self._make_index()
        return index.changed(deltas, folded, rows)

    def read_ahead(
        self, deltas: Sequence[Delta], rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        """Copy records of ascending `rows` `(n,)` as they will be after `follow(deltas)`.

        Only of rows whose records come with these deltas. Returns which those are; of the others
        `out` `(n, record_bytes)` is not changed.
        """
        known = np.zeros(rows.size, np.bool_)
        index = self._made or self._make_index()
        for delta in index.latest(deltas):
            left = np.flatnonzero(~known)
            found, positions = delta.find(rows[left])
            readahead.prefetch(delta.records, positions)
            delta.deliver(positions, Target(out, left[found]))
            self._count(found.size)
            known[left[found]] = True
        return known

    def read(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Copy the records of ascending `rows` `(n,)` into `out` and verify them."""
        self.deliver(rows, Target(out))

    def stream(self, rows: npt.NDArray[np.int64]) -> Generator[tuple[slice, npt.NDArray[np.uint8]]]:
        """Yield the records of `rows` part by part; each array is valid until the next.

        Later parts that are not in memory are prefetched while earlier parts are used.
        """
        cold = self._cold(rows)
        step = min(self._step, _ROWS_AHEAD) if cold else block_rows(self.record_bytes)
        block = np.empty((min(rows.size, step), self.record_bytes), np.uint8)
        parts = _parts_of(rows.size, step)
        for part in self._prefetched(rows, parts) if cold else parts:
            records = block[: part.stop - part.start]
            self._carry(rows[part], Target(records))
            self._count(len(records))
            yield part, records

    def deliver(self, rows: npt.NDArray[np.int64], target: Target) -> None:
        """Copy the records of ascending `rows` `(n,)` to a target, all verified when this returns.

        After an error, what is there is undefined.
        """
        if self._cold(rows):
            parts = _parts_of(rows.size, min(self._step, _ROWS_AHEAD))
            with contextlib.closing(self._prefetched(rows, parts)) as come:
                for part in come:
                    self._count(part.stop - part.start)
                    self._carry(rows[part], target.of(part))
        else:
            self._count(rows.size)
            self._carry(rows, target)

    def _count(self, records: int) -> None:
        with self._lock:
            self.stats.requested += records
            self.stats.bytes_out += records * self.record_bytes

    def _prefetched(self, rows: npt.NDArray[np.int64], parts: list[slice]) -> Generator[slice]:
        """Yield parts of `rows`, each after its pages were requested."""
        if len(parts) == 1:
            self._prefetch(rows)
            yield from parts
            return
        for number in paced(len(parts), lambda number: self._prefetch(rows[parts[number]])):
            yield parts[number]

    def _cold(self, rows: npt.NDArray[np.int64]) -> bool:
        """Whether a sample of `rows` is not entirely in memory, where prefetching would pay."""
        if rows.size <= readahead.FEW:
            return False
        sample = rows[:: max(1, rows.size // (_SAMPLE >> self._warm))]
        cold = any(
            place.rows.size > readahead.FEW
            and not readahead.looks_resident(place.records, place.rows)
            for place in self._places(sample)
        )
        self._warm = 0 if cold else min(self._warm + 1, _FEWER)
        return cold

    def _places(self, rows: npt.NDArray[np.int64]) -> list[MappedRows]:
        """Return the mapped memory of the newest images of `rows`, and of their checksums."""
        with self._lock:
            index = self._made or self._make_index()
            known = index.entries
            entries = known.take(rows)
            if not entries.any():
                return self._base.places(rows)
            places = self._base.places(rows[entries == 0])
            for source, start, which in index.by_delta(entries, self.live):
                places += source.places(entries[which].astype(np.int64) - 1 - start)
            return places

    def _carry(self, rows: npt.NDArray[np.int64], target: Target) -> None:
        """Copy records and verify them; only a mismatch under the lock means damage.

        A record that is superseded while it is read without the lock may not match.
        """
        try:
            for copy in self._copies(rows, target):
                copy()
        except CorruptRowError:
            try:
                with self._lock:
                    for copy in self._copies(rows, target):
                        copy()
            except CorruptRowError as error:
                raise CorruptRowError(
                    f"table {self.table!r}: {error}",
                    rows=error.rows,
                    file=error.file,
                    table=self.table,
                ) from None

    def _copies(self, rows: npt.NDArray[np.int64], target: Target) -> list[Callable[[], None]]:
        """Copy queued records; return functions that copy the others, from the files."""
        with self._lock:
            index = self._made or self._make_index()
            known = index.entries
            entries = known.take(rows)
            if not entries.any():
                return [partial(self._base.deliver, rows, target)]
            copies: list[Callable[[], None]] = []
            for source, start, which in index.by_delta(entries, self.live):
                positions = entries[which].astype(np.int64) - 1 - start
                if isinstance(source, LiveDelta):
                    copies.append(source.begin(positions, rows[which], target.of(which)))
                else:
                    copies.append(partial(source.deliver, positions, target.of(which)))
        in_base = np.flatnonzero(entries == 0)
        if in_base.size:
            copies.append(partial(self._base.deliver, rows[in_base], target.of(in_base)))
        return copies

    def let_go(self, rows: npt.NDArray[np.int64]) -> None:
        """Drop the mapped pages from the first to the last of ascending `rows` from memory."""
        for place in self._places(rows):
            place.let_go()

    def stage(self, rows: npt.NDArray[np.int64]) -> Callable[[], None] | None:
        """Return a function that prefetches `rows`; it may block, so call it without a lock.

        None if a sample of them is in memory.
        """
        if not self._cold(rows):
            return None
        places = self._places(rows)
        return lambda: self._prefetch_places(places)

    def _prefetch(self, rows: npt.NDArray[np.int64]) -> None:
        self._prefetch_places(self._places(rows))

    def _prefetch_places(self, places: list[MappedRows]) -> None:
        for place in places:
            place.prefetch(self._base.gap)

    def write(
        self,
        rows: npt.NDArray[np.int64],
        records: npt.NDArray[np.uint8],
        *,
        resident: bool = False,
    ) -> None:
        """Overwrite the records of distinct `rows` `(n,)` with `records` `(n, record_bytes)`.

        See `collect`.
        """
        self.collect(rows, partial(copy, np.ascontiguousarray(records)), resident=resident)

    def collect(self, rows: npt.NDArray[np.int64], get: Get, *, resident: bool = False) -> None:
        """Overwrite the records of distinct `rows` `(n,)` with those that `get` copies.

        `get` is called for parts of them, with a slice of `rows` or positions there, and the memory
        for them. A thread may write them in the background, except for small amounts that stay
        `resident` above, for which a caller waits. A full disk raises StoreFullError; nothing has
        changed then, or only whole records of the first rows have.
        """
        step, some = max(1, _COLLECTED_BYTES // self.record_bytes), get
        for at in range(0, rows.size, step):
            part = rows[at : at + step]
            if part.size < rows.size:
                some = partial(call_at, get, np.arange(at, at + part.size))
            if self.live is not None and not resident:
                self.live.await_room()  # without the lock, for which readers wait
            with self._lock:
                self._collect(part, some, resident=resident)

    def _collect(
        self, rows: npt.NDArray[np.int64], get: Get, *, resident: bool, moves: bool = False
    ) -> None:
        """Do what `collect` does, with the lock; `moves`: the records stay what they are."""
        live = self.live
        if live is None:
            live = self.live = self._create_live()
        index = self._made or self._make_index()
        start = index.stop
        places = index.entries.take(rows)
        known = np.flatnonzero(places > start)  # already in the live delta
        there = places[known].astype(np.int64) - 1 - start
        fresh, positions = np.arange(rows.size), np.empty(rows.size, np.int64)
        apart = moves or (known.size > 0 and self._goes_apart(live, rows, there))
        if not apart and known.size:
            fresh = np.flatnonzero(places <= start)
            positions[known] = there
        chosen = live.segments.choose(fresh.size)
        positions[fresh] = chosen
        count = live.segments.count
        if chosen.size:
            count = max(count, int(chosen[-1]) + 1)
        check_positions(start + count)
        replaced = index.replaced
        if count > replaced.size:
            replaced = _grown(replaced, count)
        places[known] = replaced[there]
        # Before `put`: they are read of newest records alone, and these must have theirs.
        replaced[chosen], index.replaced = places[fresh], replaced
        numbers = (chosen + 1 + start).astype(np.int32)
        try:
            live.put(positions, rows, get, resident=resident)
        except StoreFullError:
            if moves or not (apart and known.size):
                raise
            live.full = True
            self._collect(rows, get, resident=resident)
            return
        try:
            index.entries[rows[fresh]] = numbers
        except MemoryError:
            live.segments.drop(chosen)
            raise
        if apart and known.size:
            live.segments.supersede(there)
        if moves:
            return
        self.stats.written += rows.size
        self.stats.bytes_in += rows.size * self.record_bytes
        if apart and known.size:
            self._clean(live)

    def _goes_apart(
        self, live: LiveDelta, rows: npt.NDArray[np.int64], there: npt.NDArray[np.int64]
    ) -> bool:
        """Whether to put `rows` at other positions than those `there`, which hold some of them."""
        most = (MAX_DELTA_IMAGES - 1) * self.rows
        return live.scattered(there) and live.segments.has_room(rows.size, there.size, most)

    def _clean(self, live: LiveDelta) -> None:
        """Move newest records out of segments until dead ones are no more than these.

        If the disk or memory has no space for that, rows are overwritten in place from now on.
        """
        segments = live.segments
        while segments.garbage > segments.alive and not live.full:
            segment = segments.fullest()
            if segment is None:
                return
            places = segments.newest_in(segment)
            try:
                if places.size:
                    get = partial(_read_at, live, places)
                    self._collect(live.rows_at(places), get, resident=False, moves=True)
            except (TierStoreError, MemoryError):
                live.full = True
                return
            segments.free(segment)

    def _create_live(self) -> LiveDelta:
        if self._new_live is None:
            raise RuntimeError("attempt to write to a read-only disk tier")
        return self._new_live()

    def flush(self) -> None:
        """Do nothing: all records are already in the live delta."""

    def adopt(self, delta: Delta) -> None:
        """Append the live delta, now committed as `delta`, to the committed ones."""
        if self.live is not None:
            self.live.close()
        self.live = None
        index = self._made or self._make_index()
        index.append(delta)
        self.delta_bytes += delta.info.size

    def discard(self) -> npt.NDArray[np.int64]:
        """Drop the live delta; return its rows, which revert to their committed values."""
        live, self.live = self.live, None
        if live is None:
            return _NO_ROWS
        index = self._made or self._make_index()
        rows = np.sort(index.lift(live))
        live.remove()
        return rows

    def touched(self, version: int, rows: int) -> npt.NDArray[np.int64]:
        """Return the ascending block numbers touched by deltas up to a version."""
        merged = self._upto(version)
        if not merged:
            return _NO_ROWS
        blocks = np.zeros(-(-self.rows // rows), np.bool_)
        for delta in merged:
            blocks[delta.blocks(rows)] = True
        return np.flatnonzero(blocks)

    def computed_checksums(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Compute the checksums of `rows` of the base from their records."""
        return self._base.computed_checksums(rows)

    def linked_bytes(self, version: int) -> int:
        """Return how much a merge up to a version copies first, at least; see `Base.own`."""
        return max((self._base.linked_bytes(each.ids) for each in self._upto(version)), default=0)

    def is_named(self) -> bool:
        """Whether the files of the base that are mapped still have their names."""
        return self._base.is_named()

    def merge(self, version: int) -> Merge:
        """Return the merge of the deltas of versions up to this one into the base.

        Reads, writes and commits may continue meanwhile: they find these rows in the deltas, which
        must not be dropped before the merge ends.
        """
        return Merge(self._base, self._upto(version))

    def _upto(self, version: int) -> Sequence[Delta]:
        return [delta for delta in self.deltas if delta.info.version <= version]

    def damaged(self, rows: npt.NDArray[np.int64]) -> list[int]:
        """Return those of `rows` whose records in the base do not match their checksums."""
        return self._base.damaged(rows)

    def damaged_files(self) -> list[str]:
        """Return the names of base files with damage outside the rows."""
        return self._base.damaged_files()

    def close(self) -> None:
        """Close the files; a live delta remains and is removed by the next writer."""
        live, self.live = self.live, None
        call_each(*([] if live is None else [live.close]), self._base.close, self.deltas.clear)


def _parts_of(rows: int, step: int) -> list[slice]:
    """Return parts of so many rows, each of `step` or fewer."""
    return [slice(at, min(at + step, rows)) for at in range(0, rows, step)]


def _grown(array: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
    room = np.zeros(max(count, 2 * array.size, 1024), np.int32)
    room[: array.size] = array
    return room
