"""The host tier: a cache of whole records in memory over any other tier.

With a slot for every row, slot = row and no row is ever evicted. The tier below may be another host
tier.

Threads may read, write and lease concurrently. One lock guards maps, records and counters, and is
not held while the tier below works: a thread plans a miss under the lock (which rows come, which go
down), copies the records without it, and enters them under it again. The lock is not held either
while many resident rows are copied, unless other threads write: see `Changes`. Rows in transit have
no slot; a thread that needs one waits until it has arrived, and has no rows of its own in transit
meanwhile.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._threads import Condition
from tierstore._tiers import memory
from tierstore._tiers.base import (
    Bytes,
    Collecting,
    Delivering,
    DeviceView,
    Held,
    Renewed,
    Rows,
    Tier,
)
from tierstore._tiers.changes import Changes
from tierstore._tiers.memory import ALIGNMENT, Arrays
from tierstore._tiers.sampling import Sampling
from tierstore._tiers.slots import (
    CachedSlots,
    DirectSlots,
    SlotMap,
    Slots,
    arena_bytes,
    bytes_for,
    is_mapped,
    staging_rows,
)
from tierstore._tiers.uncached import read_ranges, write_ranges
from tierstore.errors import CapacityError
from tierstore.policy import PolicySpec, lru
from tierstore.stats import Occupancy, TierStats, tally

Positions = npt.NDArray[np.intp]

_FILL_BYTES = 8 << 20
_SAMPLE = 64
"""Distinct ids are counted in one batch of so many in the end: that takes longer than the rest."""
_SAMPLE_OF_MANY = 512
"""The same where threads read many resident rows at a time, which counting would hold up."""
_ACROSS = (
    "requested",
    "hits",
    "unique",
    "unique_hits",
    "unique_of",
    "written",
    "bytes_in",
    "bytes_out",
    "bytes_promoted",
)
"""Counters of batches that span several ranges; evictions count for the first range."""
APART_BYTES = 128 << 10
"""Bytes from which copying rows takes longer than releasing the lock and taking it again."""
_MANY_BYTES = 2 << 20
"""Bytes from which copying rows that repeat twice takes less time than copying them once."""
_RENEWED_BYTES = 4 << 20
"""Most bytes of changed rows that are read again, in two or three milliseconds."""
_LOOKED_UP = 4096
"""Rows to come of which it is asked first whether any page of those that are missing is cold."""
_PATIENCE = 0.05
"""Seconds after which a thread looks again whether the rows it waits for have arrived."""
Change = Callable[[Bytes, Slots], object]
_NONE = np.empty(0, np.intp)
_NO_ROWS = np.empty(0, np.int64)


def nothing_to_await() -> None:
    """Return at once: no tier above copies concurrently."""


class _Room(NamedTuple):
    """Slots taken for rows to come, and the changed records in them that must go down first.

    `stats` are the counters of the range that the first row to come is in.
    """

    slots: Slots
    victims: int
    down: Slots
    down_rows: Rows
    stats: TierStats


class _Move:
    """Rows in transit, ascending; they have no slot."""

    __slots__ = ("rows",)

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def has_any(self, rows: Rows) -> bool:
        if not self.rows.size:
            return False
        nearest = np.minimum(np.searchsorted(self.rows, rows), self.rows.size - 1)
        return bool((self.rows[nearest] == rows).any())


class HostTier:
    """Records of the rows that the policy keeps, at most `slots` of them, in one arena.

    Reads and writes admit the rows they miss; rows with the lowest scores make room, and changed
    ones go to the tier below. The tier below serves rows of a batch that find no room, because all
    others score more, or because the batch or open leases fill the tier.

    Methods other than `read`, `read_resident`, `read_apart`, `write`, `lease`, `read_held`,
    `write_held`, `give_back`, `fetch` and `stage` require that no other thread is in a call; only
    `read_resident` and `read_apart` may be called meanwhile.

    Attributes:
        before_change: called before rows change their places, and before changed records are
            written down or dropped. A tier above that accesses records here directly waits in it
            until that access ends.
    """

    def __init__(
        self,
        below: Tier,
        *,
        slots: int,
        kind: str = "pageable",
        policy: PolicySpec | None = None,
        starts: Sequence[int] = (0,),
        grows: bool = False,
        mapped: bool = False,
    ) -> None:
        """Reserve the arena.

        Args:
            below: the tier that holds every row.
            slots: most records to hold; a number of at least `below.rows` holds them all.
            kind: kind of memory; see `memory.allocate`.
            policy: which rows to keep; least recently used go first if None.
            starts: the first rows of the ranges that are counted separately, ascending.
            grows: whether `grow` may be called; then slots may be more than rows, and rows are
                never held in place.
            mapped: whether a device looks rows up in the map; see `is_mapped`.
        """
        policy = policy or lru()
        if slots < 1:
            raise CapacityError(f"a host tier needs at least one slot, not {slots}")
        self.below = below
        self._delivering = below if isinstance(below, Delivering) else None
        self._collecting = below if isinstance(below, Collecting) else None
        self.policy: str = policy.name
        self.rows: int = below.rows
        self.record_bytes: int = below.record_bytes
        self.slots: int = slots if grows else min(slots, self.rows)
        self.direct: bool = self.slots == self.rows and not grows
        self.grows: bool = grows
        self._starts = tuple(starts)
        self._counted = [TierStats() for _ in starts]
        self._only = self._counted[0] if len(starts) == 1 else None
        self._edges = np.array([*starts, self.rows], np.int64)
        self._across = {name: np.zeros(len(starts), np.int64) for name in _ACROSS}
        self._batches = itertools.count()
        self._sampling = Sampling(_SAMPLE)
        self._batches_apart = itertools.count()
        self._sampling_apart = Sampling(_SAMPLE_OF_MANY)
        rows = max(self.rows, self.slots + 1) if grows else self.rows
        self.nbytes: int = bytes_for(rows, self.record_bytes, self.slots, policy, mapped=mapped)
        arena = arena_bytes(rows, self.record_bytes, self.slots, policy, mapped=mapped)
        self._arena = Arrays(kind, arena + 16 * ALIGNMENT)
        self.records: Bytes = self._arena.take(
            "records", self.slots * self.record_bytes, np.uint8
        ).reshape(self.slots, self.record_bytes)
        self.map: SlotMap = (
            DirectSlots(self.rows, self._arena.take)
            if self.direct
            else CachedSlots(
                self.rows,
                self.slots,
                policy,
                self._arena.take,
                by_row=mapped and is_mapped(rows),
                grows=grows,
            )
        )
        self._direct = self.map if isinstance(self.map, DirectSlots) else None
        self._readable: SlotMap | None = self.map
        self._part = staging_rows(self.record_bytes)
        self._lock = threading.RLock()
        self._arrived = Condition(self._lock)
        self._moves: list[_Move] = []
        self._changes = Changes()
        self.before_change: Callable[[], None] = nothing_to_await

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows; the tier below already has the new ones."""
        with self._lock:
            if not (self.grows and isinstance(self.map, CachedSlots)):
                raise RuntimeError("a host tier whose maps are in its arena cannot grow")
            self._await_copies()  # the map moves
            try:
                self.map.grow(rows)
            finally:
                self._readable = self.map
            self.rows = rows
            self._edges[-1] = rows

    def _await_copies(self) -> None:
        """Let no thread begin to read without the lock, and wait for those that do."""
        self._readable = None
        while self._changes.copies:
            self._arrived.wait(_PATIENCE)

    def view(self) -> DeviceView:
        """Return the memory that a tier above may access directly; see `before_change`."""
        slot_of = self.map.slot_of.array if isinstance(self.map, CachedSlots) else None
        return DeviceView(self.records, self.map.dirty, slot_of)

    @property
    def still(self) -> AbstractContextManager[object]:
        """The lock for a tier above while a device looks up places here: rows keep their places."""
        return self._lock

    @property
    def arena(self) -> memory.Arena:
        """The memory that holds records and maps."""
        return self._arena.memory

    # -- reads, writes and leases

    def read(
        self, rows: Rows, out: Bytes, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` `(n, hi - lo)`.

        With `admit=False` rows that are missing are read from below and not kept.
        """
        with self._lock:
            slots, missing = self._find(rows)
            copied = False
            if out.nbytes >= APART_BYTES and not missing.size and self._changes.rest():
                copied = self._copy_apart(slots, out, lo)
                if not copied:  # others may have made room of any meanwhile
                    slots, missing = self._find(rows)
            self._count(rows, slots, missing.size, bytes_out=out.shape[1])
            if missing.size:
                self._read_missing(rows, slots, missing, out, lo, admit=admit)
                return
            if not copied:
                _rowcopy.gather(self.records, slots, out, lo)
            if admit:
                self.map.serve(rows, slots, done=True)

    def read_resident(
        self,
        ids: Rows,
        rows: tuple[int, int],
        lo: int,
        out: npt.NDArray[Any],
        nbytes: int,
        stats: TierStats,
        admit: bool,
    ) -> bool:
        """Read as `read` does if every row is resident; else do nothing and return False.

        Such a read awaits nothing, and excludes no other use of the store.

        Args:
            ids: at least one, int64, contiguous, of any shape; they count from the first row.
            rows: the first row of a table and their number. Any other id is not resident.
            lo: the first byte of each record to copy.
            out: an array of as many items, contiguous; it has the bytes of each.
            nbytes: those of `out`.
            stats: the counters of that range.
            admit: whether the rows count as used.
        """
        with self._lock:
            readable = self._readable
            if readable is None or not readable.read(self.records, ids, rows, lo, out, admit):
                return False
            stats.requested += ids.size
            stats.hits += ids.size
            stats.bytes_out += nbytes
            if next(self._batches) >= self._sampling.at:
                self._count_distinct_of(ids, stats, self._sampling.take())
            return True

    def read_apart(
        self,
        ids: Rows,
        rows: tuple[int, int],
        lo: int,
        out: npt.NDArray[Any],
        nbytes: int,
        stats: TierStats,
        admit: bool,
    ) -> bool:
        """Do what `read_resident` does, without the lock; call it with interrupts deferred.

        Threads that hold the lock and wait for the interpreter's, or the other way round, take
        longer than their copies. Returns False also if rows change meanwhile, or did since the last
        `read` of many; `out` is undefined then.
        """
        changes = self._changes
        changes.copies.append(None)  # first: `close` waits for it, or has left no `_readable`
        try:
            readable, before = self._readable, changes.number
            if readable is None or before != changes.rested:
                return False
            note = admit and readable.notes_apart
            if not readable.read(self.records, ids, rows, lo, out, note):
                return False
        finally:
            changes.copies.pop()
        if changes.number != before:
            return False
        if admit and not note:
            with self._lock:  # rows that have gone are not noted
                if self._readable is not None:
                    readable.read(self.records, ids, rows, lo, None, True)
        sampling = self._sampling_apart
        number = next(self._batches_apart)
        changes.read.append((stats, ids.size, nbytes))
        if number >= sampling.at or len(changes.read) >= _SAMPLE:
            with self._lock:
                self._count_apart()
                if number >= sampling.at:  # not, if another thread's batch stands for the span
                    self._count_distinct_of(ids, stats, sampling.take())
        return True

    def _count_apart(self) -> None:
        """Count the batches that were read without the lock, which is held now."""
        read = self._changes.read
        while read:
            stats, count, nbytes = read.popleft()
            stats.requested += count
            stats.hits += count
            stats.bytes_out += nbytes

    @staticmethod
    def _count_distinct_of(rows: Rows, stats: TierStats, weight: int) -> None:
        """Count the distinct ones of a batch of rows that are all resident, for so many batches."""
        distinct = weight * _rowcopy.unique(rows.ravel()).size
        stats.unique += distinct
        stats.unique_hits += distinct
        stats.unique_of += rows.size

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows` part by part; an array is good until the next one."""
        block = np.empty((min(rows.size, self._part), self.record_bytes), np.uint8)
        for part in self._parts(rows.size):
            records = block[: part.stop - part.start]
            self.read(rows[part], records)
            yield part, records

    def write(
        self,
        rows: Rows,
        records: Bytes,
        lo: int = 0,
        hi: int | None = None,
        *,
        resident: bool = False,
    ) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of records `rows` `(n,)`, distinct.

        `resident` is for tiers that write to files.
        """
        records = np.ascontiguousarray(records)
        with self._lock:
            if records.shape[1] == self.record_bytes:
                absent = self._place(rows, records)
            else:
                absent = self._overwrite(self._locate(rows)[0], records, lo)
            if absent.size:
                self._write_below(rows[absent], records[absent], lo)
            self._add(rows, written=1, bytes_in=records.shape[1])

    def lease(
        self, batch: _rowcopy.Groups, ids: Rows | None = None, out: Bytes | None = None, lo: int = 0
    ) -> Held:
        """Promote the rows of a batch and pin them; return where they are, to be given back.

        If they fit beside open leases they are admitted regardless of their scores, because a step
        reads and writes them field by field; otherwise by scores, so that the best stay. With `out`
        `(n, width)`, also read each of the `ids` `(n,)` as `read_held` does.
        """
        rows = batch.rows
        with self._lock:
            cached = self.map if isinstance(self.map, CachedSlots) else None
            fits = cached is None or cached.fits(rows.size)
            slots, missing = self._locate(rows, force=fits, batch=batch)
            held = Held(slots.compress(slots >= 0) if missing else slots, not missing)
            if cached is not None:
                cached.pins.lease(held.slots)
            if out is None:
                return held
            try:
                self._copy_held(batch, slots, missing, out, lo, ids)
            except BaseException:
                self.give_back(held)
                raise
            self._add(rows, ascend=True, bytes_out=out.shape[1])
        return held

    def read_held(self, batch: _rowcopy.Groups, out: Bytes, lo: int, *, each: bool = False) -> None:
        """Copy bytes `lo …` of leased rows into `out`; the lease has counted and admitted them.

        `out` has one item for each distinct row, or with `each` one for each id.
        """
        rows = batch.rows
        with self._lock:
            slots, missing = self.map.find(rows)
            if each:
                self._copy_held(batch, slots, missing, out, lo)
            else:
                self._copy_found(slots, missing, out, lo)
                if missing:
                    self._read_below(rows, (slots < 0).nonzero()[0], out, lo)
            self._add(rows, ascend=True, bytes_out=out.shape[1])

    def write_held(self, rows: Rows, records: Bytes, lo: int, hi: int) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of leased rows, distinct."""
        records = np.ascontiguousarray(records)
        with self._lock:
            self._write_below(rows, records, lo)
            self._add(rows, ascend=True, written=1, bytes_in=records.shape[1])

    def update_held(self, rows: Rows, held: Held, lo: int, hi: int, change: Change) -> None:
        """Change bytes `lo:hi` of leased rows, distinct, which are all here.

        `change` is called with all records of the tier and the slots of the rows. No other call
        sees a part of the change, or changes the rows meanwhile.
        """
        with self._lock:
            self._changes.number += 1
            self.map.dirty[held.slots] = 1
            change(self.records, held.slots)
            self._add(rows, ascend=True, written=1, bytes_in=hi - lo, bytes_out=hi - lo)

    def give_back(self, held: Held) -> None:
        """End a lease, given what `lease` returned."""
        if isinstance(self.map, CachedSlots):
            with self._lock:
                self.map.pins.give_back(held.slots)

    def unpin(self) -> None:
        """End every lease; none of them is given back afterwards."""
        if isinstance(self.map, CachedSlots):
            with self._lock:
                self.map.pins.clear()

    # -- rows that have a slot; the lock is held

    def _find(self, rows: Rows) -> tuple[Slots, Positions]:
        """Return the slot of each row, and which rows have none; wait for rows in transit."""
        while True:
            slots, count = self.map.find(rows)
            missing = (slots < 0).nonzero()[0] if count else _NONE
            if not (missing.size and self._moves and self._are_moving(rows.take(missing))):
                return slots, missing
            self._arrived.wait(_PATIENCE)

    def _copy_apart(self, slots: Slots, out: Bytes, lo: int) -> bool:
        """Copy without the lock; return whether no record changed meanwhile."""
        changes = self._changes
        before = changes.number
        changes.copies.append(None)
        self._lock.release()
        try:
            _rowcopy.gather(self.records, slots, out, lo)
        finally:
            try:
                self._lock_again()
            finally:
                changes.copies.pop()
        return changes.number == before

    def _copy_held(
        self,
        batch: _rowcopy.Groups,
        slots: Slots,
        missing: int,
        out: Bytes,
        lo: int,
        ids: Rows | None = None,
    ) -> None:
        """Copy byte ranges of leased rows for each id; `slots` are those of the distinct rows.

        `missing` of them have no slot. The `ids` are those of the batch, where they are known.

        For a large batch that repeats its rows, gather the distinct rows first: copying them to
        each id from there takes less time.
        """
        width = out.shape[1]
        if missing:
            block = np.empty((slots.size, width), np.uint8)
            self._copy_found(slots, missing, block, lo)
            self._read_below(batch.rows, (slots < 0).nonzero()[0], block, lo)
        elif out.nbytes >= _MANY_BYTES and 2 * slots.size <= len(out):
            block = np.empty((slots.size, width), np.uint8)
            _rowcopy.gather(self.records, slots, block, lo)
        else:
            if ids is None:
                _rowcopy.gather(self.records, slots.take(batch.positions), out, lo)
            else:
                self.map.read(self.records, ids, (0, self.rows), lo, out, False)
            return
        _rowcopy.gather(block, batch.positions, out)

    def _copy_found(self, slots: Slots, missing: int, out: Bytes, lo: int) -> None:
        """Copy byte ranges of the records in `slots` to `out`; `missing` of them have no slot.

        Those get bytes of an arbitrary record, which takes less time than leaving them out.
        """
        if missing < slots.size:
            _rowcopy.gather(self.records, np.maximum(slots, 0) if missing else slots, out, lo)

    def _copy(self, slots: Slots, which: Positions, out: Bytes, lo: int) -> Positions:
        """Copy records of rows that have one of `slots` to `out[which]`; return the others."""
        here = slots >= 0
        slots, there = slots.compress(here), which.compress(here)
        for part in self._parts(there.size):
            block = np.empty((there[part].size, out.shape[1]), np.uint8)
            _rowcopy.gather(self.records, slots[part], block, lo)
            _rowcopy.scatter(out, there[part], block)
        return which.compress(~here)

    def _overwrite(self, slots: Slots, records: Bytes, lo: int) -> Positions:
        """Write byte ranges of records to their slots; return which of them have none."""
        absent = np.flatnonzero(slots < 0)
        if absent.size:
            present = slots >= 0
            slots, records = slots[present], records[present]
        self._changes.number += 1
        self.map.dirty[slots] = 1
        _rowcopy.scatter(self.records, slots, records, lo)
        return absent

    # -- rows that arrive; the lock is held, and released while the tier below works

    def _read_missing(
        self, rows: Rows, slots: Slots, missing: Positions, out: Bytes, lo: int, *, admit: bool
    ) -> None:
        """Finish a `read` in which rows at the positions `missing` have no slot."""
        if not admit:
            self._copy_found(slots, missing.size, out, lo)
            self._read_below(rows, missing, out, lo)
            return
        whole = self.map.keeps_batch  # then no row of the batch makes room for another
        if not whole:
            self._copy_found(slots, missing.size, out, lo)
        self.map.use(rows)
        self.map.touch(slots.compress(slots >= 0), done=True)
        self._promote(self.map.distinct(rows.take(missing)))
        if whole:
            slots, count = self.map.find(rows)
            missing = (slots < 0).nonzero()[0]
            self._copy_found(slots, count, out, lo)
        else:
            missing = self._copy(self.map.lookup(rows.take(missing)), missing, out, lo)
        self.map.next_batch()
        if missing.size:
            self._read_below(rows, missing, out, lo)

    def _locate(
        self,
        rows: Rows,
        *,
        force: bool = False,
        batch: _rowcopy.Groups | None = None,
    ) -> tuple[Slots, int]:
        """Return the slot of each row, -1 where there was no room, and for how many there was none.

        Rows that are missing are admitted.

        `force`: admit the rows regardless of their scores. `batch`: the batch whose distinct rows
        these are.
        """
        slots, missing = self._find(rows)
        if batch is not None:
            self._count_distinct(batch, slots, missing)
        else:
            self._count(rows, slots, missing.size)
        if not missing.size:
            if self._direct is None:
                self.map.serve(rows, slots)
            return slots, 0
        self.map.use(rows)
        self.map.touch(slots.compress(slots >= 0))
        left = missing.size
        if not self.map.full:
            if batch is not None and missing.size > self.slots:
                missing = missing[np.argsort(-batch.repeats[missing], kind="stable")]
            absent = rows.take(missing)
            self._promote(self.map.distinct(absent) if batch is None else absent, force=force)
            slots, left = self.map.find(rows)  # all: others may have made room of any meanwhile
        self.map.next_batch()
        return slots, left

    def _promote(self, rows: Rows, *, force: bool = False) -> Slots:
        """Load the best of `rows`, absent and at rest, into the available slots; return these.

        The rows are distinct, and ascend unless they outnumber the slots.
        """
        order = self.map.order(rows)
        ascend = order is None and rows.size <= self.slots
        if order is not None:
            rows = rows[order]
        room = self._make_room(rows, force=force)
        if not room.slots.size:
            return room.slots
        rows = rows[: room.slots.size]
        if not ascend:
            rows = np.sort(rows)
        come, sent = rows[:0], False
        try:
            with self._apart(rows, room.down_rows):
                self._write_back(room.down, room.down_rows)
                sent = True
                self._bring(rows, room.slots)
                come = rows
        finally:
            self._bind(room, come, sent=sent)
        self._add(rows, ascend=True, bytes_promoted=self.record_bytes)
        return room.slots

    def _bring(self, rows: Rows, slots: Slots) -> None:
        """Copy the records of ascending `rows` from the tier below into `slots`."""
        target = _rowcopy.Target(self.records, slots)
        if self._delivering is not None:
            self._delivering.deliver(rows, target)
            return
        with contextlib.closing(self.below.stream(rows)) as below:
            for part, records in below:
                target.of(part).put(records)

    def _place(self, rows: Rows, records: Bytes) -> Positions:
        """Write whole records of distinct rows as far as there is room; return the others."""
        slots, missing = self._find(rows)
        self._count(rows, slots, missing.size)
        self.map.use(rows)
        self.map.touch(slots if not missing.size else slots[slots >= 0])
        self._overwrite(slots, records, 0)
        if missing.size:
            order = self.map.order(rows[missing])
            if order is not None:
                missing = missing[order]
            room = self._make_room(rows[missing])
            coming, come, sent = missing[: room.slots.size], _NO_ROWS, False
            try:
                if room.down.size:
                    with self._apart(rows[coming], room.down_rows):
                        self._write_back(room.down, room.down_rows)
                sent = True  # from here on the slots may hold other records
                _rowcopy.scatter(self.records, room.slots, records[coming])
                come = rows[coming]
            finally:
                self._bind(room, come, sent=sent, dirty=True)
            missing = np.sort(missing[room.slots.size :])
        self.map.next_batch()
        return missing

    def _make_room(self, rows: Rows, *, force: bool = False) -> _Room:
        """Take slots for a leading part of `rows`, distinct and absent, out of the maps."""
        self.before_change()
        self._changes.number += 1
        slots = self.map.free(rows)
        if slots.size == rows.size:
            return _Room(slots, 0, slots[:0], _NO_ROWS, self._only or self._stats_of(rows))
        victims = self.map.victims(rows[slots.size :], force=force)
        down = victims.compress(self.map.dirty.take(victims) != 0)
        down_rows = self.map.rows(down)
        self.map.evict(victims)
        slots = np.concatenate([slots, victims])
        return _Room(slots, victims.size, down, down_rows, self._only or self._stats_of(rows))

    @contextlib.contextmanager
    def _apart(self, *rows: Rows) -> Iterator[None]:
        """Release the lock while `rows`, which have no slot, are in transit."""
        move = _Move(np.sort(np.concatenate(rows)) if rows else _NO_ROWS)
        self._moves.append(move)
        self._lock.release()
        try:
            yield
        finally:
            try:
                self._lock_again()
            finally:
                self._moves.remove(move)  # takes no memory: a move that stays would stop others
            self._arrived.notify_all()

    def _lock_again(self) -> None:
        """Take the lock, however often Ctrl-C is pressed meanwhile."""
        try:
            self._lock.acquire()
        except BaseException:
            self._lock_again()
            raise

    def _are_moving(self, rows: Rows) -> bool:
        """Whether any of `rows` is in transit."""
        return any(move.has_any(rows) for move in self._moves)

    def _bind(self, room: _Room, rows: Rows, *, sent: bool, dirty: bool = False) -> None:
        """Enter rows that have arrived in the slots taken for them; free the other slots.

        If writing down failed, the changed records stay in their slots.
        """
        self._changes.number += 1  # entries of the map move
        if sent:
            self.map.bind(rows, room.slots[: rows.size])
            self.map.dirty[room.slots[: rows.size]] = dirty
            self.map.release(room.slots[rows.size :])
            room.stats.evictions += room.victims
            room.stats.write_backs += room.down.size
            room.stats.bytes_written_back += room.down.size * self.record_bytes
        else:
            self.map.bind(room.down_rows, room.down)
            self.map.release(np.setdiff1d(room.slots, room.down))

    # -- the tier below, without the lock

    def _write_back(self, slots: Slots, rows: Rows, *, resident: bool = False) -> None:
        """Write the records in `slots`, those of `rows`, to the tier below and mark them clean.

        Either nothing else refers to the slots, or no other thread is in a call.
        """
        if self._collecting is not None:
            self._collecting.collect(
                rows,
                lambda which, out: _rowcopy.gather(self.records, slots[which], out),
                resident=resident,
            )
            self.map.dirty[slots] = 0
            return
        block = np.empty((min(self._part, slots.size), self.record_bytes), np.uint8)
        for part in self._parts(slots.size):
            here = slots[part]
            _rowcopy.gather(self.records, here, block[: here.size])
            self.below.write(rows[part], block[: here.size], resident=resident)
            self.map.dirty[here] = 0

    def _read_below(self, rows: Rows, which: Positions, out: Bytes, lo: int) -> None:
        """Copy byte ranges of records that find no room here to the places `which` in `out`.

        Rows may come and go meanwhile: the tier below has their state at the start, or a newer one.
        """
        slots, missing = self._find(rows.take(which))
        if missing.size < which.size:
            which = self._copy(slots, which, out, lo)
        if which.size:
            every = which.size == rows.size
            with self._apart():
                absent = rows if every else rows.take(which)
                read_ranges(self.below, absent, out, lo, at=None if every else which)

    def _write_below(self, rows: Rows, records: Bytes, lo: int) -> None:
        """Write byte ranges of records to where they are: here, or below for want of room.

        Those count as in transit meanwhile: otherwise a thread could bring an old record here.
        """
        slots, absent = self._find(rows)
        if absent.size < rows.size:
            self._overwrite(slots, records, lo)
            rows, records = rows[absent], records[absent]
        if absent.size:
            with self._apart(rows):
                write_ranges(self.below, rows, records, lo)

    def _parts(self, count: int) -> list[slice]:
        step = self._part
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    # -- rows that are not used yet

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return a call that brings missing ones of `rows` nearer to the tier below, or None.

        None also where a sample of them needs none.
        """
        sample = rows[:: max(1, rows.size // _LOOKED_UP)]
        advice = self._staged(sample)
        return self._staged(rows) if advice is not None and sample.size < rows.size else advice

    def _staged(self, rows: Rows) -> Callable[[], None] | None:
        with self._lock:
            rows = rows[self.map.lookup(rows) < 0]
        return self.below.stage(_rowcopy.unique(rows))

    def fetch(self, rows: Rows, window: int) -> None:
        """Promote rows and keep them until they are used or `window` newer batches were fetched.

        At most half the slots are kept this way; other rows are read when they are used.
        """
        rows = _rowcopy.unique(rows)
        with self._lock:
            cached = self.map if isinstance(self.map, CachedSlots) else None
            if cached is not None:
                cached.announce(rows)
                rows = rows[: max(0, self.slots // 2 - cached.pins.ahead)]
            slots, missing = self._find(rows)
            slots = slots.compress(slots >= 0)
            self.map.touch(slots)
            if missing.size and not self.map.full:
                come = self._promote(rows.take(missing), force=True)
                slots = np.concatenate([slots, come])
            self.map.next_batch()
            if cached is not None:
                cached.pins.fetched(slots, window)

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load every missing row if each row has its own slot; otherwise do nothing.

        Blocks are read in place, in order. `progress` is called with rows done and in all.
        """
        if not isinstance(self.map, DirectSlots) or not self.map.missing:
            return
        step = max(1, _FILL_BYTES // self.record_bytes)
        for start in range(0, self.rows, step):
            rows = np.arange(start, min(start + step, self.rows))
            with self._lock:
                absent = rows[self.map.lookup(rows) < 0]
                if absent.size == rows.size:
                    self.below.read(rows, self.records[start : start + step])
                    self.map.bind(rows, rows)
                    self._add(rows, bytes_promoted=self.record_bytes)
                elif absent.size:
                    self._promote(absent, force=True)
            if progress is not None:
                progress(int(rows[-1]) + 1, self.rows)

    def warm(self, rows: Rows, progress: Callable[[int, int], None] | None = None) -> int:
        """Load the first distinct `rows`, as many as there are slots; return their number.

        They are not counted as requests. `progress` is called with rows done and in all.
        """
        _, first = np.unique(rows, return_index=True)
        rows = np.sort(rows[np.sort(first)[: self.slots]])
        step = max(1, _FILL_BYTES // self.record_bytes)
        for start in range(0, rows.size, step):
            part = rows[start : start + step]
            with self._lock:
                slots, _ = self._find(part)
                self.map.touch(slots.compress(slots >= 0))
                self._promote(part.compress(slots < 0), force=True)
            if progress is not None:
                progress(start + part.size, rows.size)
        self.map.next_batch()
        return int((self.map.lookup(rows) >= 0).sum())

    # -- what changed

    def flush(self) -> None:
        """Write every changed record to the tier below, by ascending row, and flush that tier."""
        self.before_change()
        dirty = self._changed()
        rows = self.map.rows(dirty) if self._direct is None else dirty.astype(np.int64, copy=False)
        order = _rowcopy.Groups(rows).order
        self._write_back(dirty[order], rows[order], resident=True)
        counts = np.diff(np.searchsorted(rows[order], self._edges))
        for number in np.flatnonzero(counts).tolist():
            stats, count = self._counted[number], int(counts[number])
            stats.write_backs += count
            stats.bytes_written_back += count * self.record_bytes
        self.below.flush()

    def discard(self, rows: Rows) -> None:
        """Drop every changed record, and `rows` whose bytes below are no longer the same.

        Leases end without being given back.
        """
        self.before_change()
        with self._lock:
            slots, changed = self.map.lookup(rows), self._changed()
            slots = slots.compress(slots >= 0)
            self._changes.number += 1
            self.map.release(_rowcopy.unique(np.concatenate([changed, slots])))
        if isinstance(self.map, CachedSlots):
            self.map.pins.clear()

    def renewable(self, rows: Rows) -> Rows:
        """Return the resident ones of `rows`, the first 4 MiB of them, for `renew`.

        If they were dropped, a reader would miss them one by one.
        """
        with self._lock:
            here = rows.compress(self.map.lookup(rows) >= 0)
        return here[: max(1, _RENEWED_BYTES // self.record_bytes)]

    def renew(self, renewed: Renewed) -> None:
        """Replace resident records of rows whose bytes below have changed.

        Drop those of which none is given: their next use reads them. Leases end without being given
        back.
        """
        self.before_change()
        known = np.searchsorted(renewed.changed, renewed.rows)
        with self._lock:
            slots = self.map.lookup(renewed.changed)
            new = slots[known]
            here = new >= 0
            self._changes.number += 1
            _rowcopy.scatter(self.records, new[here], renewed.records[here])
            stale = slots >= 0
            stale[known] = False
            self.map.release(slots[stale])
        self.unpin()

    def occupancy(self) -> Occupancy:
        """Return how full the tier is."""
        with self._lock:
            return Occupancy(self.slots, self.map.used, self._changed().size)

    def mark_changed(self, rows: Rows) -> Rows:
        """Write `rows` down with the next flush, changed or not; return those that are here."""
        slots = self.map.lookup(rows)
        here = slots >= 0
        self.map.dirty[slots[here]] = 1
        return rows[here]

    def dirty(self) -> Rows:
        """Return the rows whose records have changed and were not written down."""
        return self.map.rows(self._changed())

    def _changed(self) -> Slots:
        """Return the slots of records that have changed."""
        return np.flatnonzero(self.map.dirty.view(np.bool_))  # ten times faster than as numbers

    def close(self) -> None:
        """Free the memory once no thread copies from it any more."""
        with self._lock:
            self._await_copies()
            self.records = np.empty((0, self.record_bytes), np.uint8)
            self._arena.memory.close()

    # -- counters

    @property
    def stats(self) -> TierStats:
        """The counters of all batches together."""
        total = TierStats()
        for start in self._starts:
            tally(total, **vars(self.stats_from(start)))
        return total

    def counters_from(self, start: int) -> TierStats:
        """Return the counters for reads of resident rows of the range that begins at `start`."""
        return self._counted[self._starts.index(start)]

    def stats_from(self, start: int) -> TierStats:
        """Return the counters of the range that begins at `start`."""
        number = self._starts.index(start)
        with self._lock:
            self._count_apart()
        stats = dataclasses.replace(self._counted[number])
        tally(stats, **{name: int(counts[number]) for name, counts in self._across.items()})
        return stats

    def _stats_of(self, rows: Rows) -> TierStats:
        """Return the counters of the range that a batch begins in."""
        if not rows.size:
            return self._counted[0]
        return self._counted[bisect.bisect_right(self._starts, rows[0]) - 1]

    def _add(self, rows: Rows, *, ascend: bool = False, **each: int) -> None:
        """Add amounts for each row of a batch to the counters of the range of the row."""
        if self._only is None and self._is_across(rows, ascend=ascend):
            if (rows[1:] < rows[:-1]).any():
                ranges = np.searchsorted(self._edges, rows, "right") - 1
                counts = np.bincount(ranges, minlength=len(self._starts))
            else:
                counts = np.diff(np.searchsorted(rows, self._edges))
            for name, amount in each.items():
                self._across[name] += amount * counts
            return
        stats = self._only or self._stats_of(rows)
        for name, amount in each.items():
            setattr(stats, name, getattr(stats, name) + amount * rows.size)

    def _is_across(self, rows: Rows, *, ascend: bool) -> bool:
        """Whether a batch spans several ranges; it is read to the end unless it ascends."""
        if not rows.size:
            return False
        behind = bisect.bisect_right(self._starts, rows[0])
        end = self._starts[behind] if behind < len(self._starts) else self.rows
        least, most = rows[0], rows[-1]
        if not ascend:
            least, most = np.minimum.reduce(rows), np.maximum.reduce(rows)
        return bool(least < self._starts[behind - 1] or most >= end)

    def _count(self, rows: Rows, slots: Slots, missing: int, **each: int) -> None:
        """Count a batch of ids; a negative slot means a missing row; see `_add`."""
        found = rows[slots >= 0] if missing else rows
        if not missing:
            self._add(rows, ascend=False, requested=1, hits=1, **each)
        else:
            self._add(rows, ascend=False, requested=1, **each)
            self._add(found, hits=1)
        if next(self._batches) >= self._sampling.at:
            weight, distinct = self._sampling.take(), _rowcopy.unique(rows)
            self._add(distinct, unique=weight)
            self._add(rows, unique_of=1)
            self._add(_rowcopy.unique(found) if missing else distinct, unique_hits=weight)

    def _count_distinct(self, batch: _rowcopy.Groups, slots: Slots, missing: Positions) -> None:
        """Count a batch, given the slots of its distinct rows, and which have none."""
        rows, ids = batch.rows, batch.order.size
        if self._only is None and self._is_across(rows, ascend=True):
            edges, across = np.searchsorted(rows, self._edges), self._across
            requested, unique = np.diff(batch.starts[edges]), np.diff(edges)
            hits, unique_hits = requested, unique
            if missing.size:
                gone = np.searchsorted(missing, edges)
                unique_hits = unique - np.diff(gone)
                of_gone = np.append(0, batch.repeats[missing].cumsum())
                hits = requested - np.diff(of_gone[gone])
            across["requested"] += requested
            across["unique_of"] += requested
            across["hits"] += hits
            across["unique"] += unique
            across["unique_hits"] += unique_hits
            return
        stats, absent = self._only or self._stats_of(rows), 0
        if missing.size:
            absent = int(batch.repeats[missing].sum())
        stats.requested += ids
        stats.hits += ids - absent
        stats.unique += rows.size
        stats.unique_hits += rows.size - missing.size
        stats.unique_of += ids
