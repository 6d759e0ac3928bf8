"""The host tier: a cache of whole records in memory over any other tier.

Over the disk tier it is the host cache; over another host tier it is the stand-in for a GPU tier
that tests use. Where it has a slot for every row, slot = row and nothing is ever evicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._counters import Occupancy, TierStats
from tierstore._tiers import capacity, memory
from tierstore._tiers.base import Bytes, Rows, Streaming, Tier
from tierstore._tiers.memory import ALIGNMENT, Arrays
from tierstore._tiers.slots import CachedSlots, DirectSlots, SlotMap, Slots
from tierstore.errors import CapacityError
from tierstore.policy import Choice, lru

__all__ = ["HostTier", "nothing_to_await"]

_FILL_BYTES = 8 << 20
_SAMPLE = 64
"""One batch in so many has its distinct ids counted, which takes longer than all the rest."""


def nothing_to_await() -> None:
    """Return at once: where no tier above copies beside."""


class HostTier:
    """Records of the rows worth keeping, at most `slots` of them, in one arena.

    Reads and writes admit the rows they miss; those that the policy values least make room, and
    those of them that changed go to the tier below. Rows of a batch that find no room, because all
    others are worth more, or the batch itself or open leases fill the tier, are served by the tier
    below.

    Attributes:
        before_change: called before rows change their places, and before changed records are handed
            down or dropped. A tier above that reads and writes records here behind the caller's
            back waits there until it does so no more.
    """

    def __init__(
        self, below: Tier, *, slots: int, kind: str = "pageable", policy: Choice | None = None
    ) -> None:
        """Reserve the arena.

        Args:
            below: the tier that holds every row.
            slots: most records to hold; a number of at least `below.rows` holds them all.
            kind: kind of memory, as `memory.allocate` knows them.
            policy: which rows to keep; least recently used go first if None.
        """
        policy = policy or lru()
        if slots < 1:
            raise CapacityError(f"a host tier needs at least one slot, not {slots}")
        self.below = below
        self.rows = below.rows
        self.record_bytes = below.record_bytes
        self.slots = min(slots, self.rows)
        self.direct = self.slots == self.rows
        self.stats = TierStats()
        self._batches = 0
        self.nbytes = self.bytes_for(self.rows, self.record_bytes, self.slots, policy)
        arena = capacity.arena_bytes(self.rows, self.record_bytes, self.slots, policy)
        self._arena = Arrays(kind, arena + 16 * ALIGNMENT)
        self.records: Bytes = self._arena.take(
            "records", self.slots * self.record_bytes, np.uint8
        ).reshape(self.slots, self.record_bytes)
        self.map: SlotMap = (
            DirectSlots(self.rows, self._arena.take)
            if self.direct
            else CachedSlots(self.rows, self.slots, policy, self._arena.take)
        )
        self._stage = np.empty(
            (capacity.staging_rows(self.record_bytes), self.record_bytes), np.uint8
        )
        self.before_change: Callable[[], None] = nothing_to_await

    @property
    def arena(self) -> memory.Arena:
        """The memory that records and maps lie in."""
        return self._arena.memory

    bytes_for = staticmethod(capacity.bytes_for)
    slots_for = staticmethod(capacity.slots_for)

    def read(
        self, rows: Rows, out: Bytes, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` `(n, hi - lo)`.

        With `admit=False` rows that are missing are read from below and not kept.
        """
        hi = self.record_bytes if hi is None else hi
        slots = self.map.lookup(rows)
        missing = np.empty(0, np.intp) if slots is rows else np.flatnonzero(slots < 0)
        self._count(rows, slots, missing.size)
        self.stats.bytes_out += rows.size * (hi - lo)
        late = admit and self.map.keeps_batch  # else what is missing may take the place of a hit
        if not late:
            self._copy_found(slots, missing.size, out, lo)
        if admit:
            self.map.use(rows)
            self.map.touch(slots.compress(slots >= 0) if missing.size else slots, done=True)
            if missing.size:
                wanted = rows.take(missing)
                self._promote(self.map.distinct(wanted))
                found = self.map.lookup(wanted)
                if late:
                    slots[missing] = found
                else:
                    here = found >= 0
                    self._copy(found.compress(here), missing.compress(here), out, lo)
                missing = missing.compress(found < 0)
            self.map.next_batch()
        if late:
            self._copy_found(slots, missing.size, out, lo)
        if missing.size:
            self._read_below(rows, missing, out, lo, hi, admit=admit)

    def _count(self, rows: Rows, slots: Slots, missing: int) -> None:
        """Count a batch of ids, whose slots are negative where they are missing."""
        stats = self.stats
        stats.requested += rows.size
        stats.hits += rows.size - missing
        if self._batches % _SAMPLE == 0:
            distinct = _rowcopy.unique(rows).size
            stats.unique += distinct
            stats.unique_of += rows.size
            stats.unique_hits += _rowcopy.unique(rows[slots >= 0]).size if missing else distinct
        self._batches += 1

    def _copy_found(self, slots: Slots, missing: int, out: Bytes, lo: int) -> None:
        """Copy byte ranges of the records in `slots` to `out`, but for so many that have none.

        Those get bytes of any record: that takes less than to leave them out.
        """
        if missing < slots.size:
            _rowcopy.gather(self.records, np.maximum(slots, 0) if missing else slots, out, lo)

    def _copy(self, slots: Slots, which: npt.NDArray[np.intp], out: Bytes, lo: int) -> None:
        """Copy byte ranges of the records in `slots` to the places `which` in `out`."""
        for part in self._parts(which.size):
            block = np.empty((which[part].size, out.shape[1]), np.uint8)
            _rowcopy.gather(self.records, slots[part], block, lo)
            _rowcopy.scatter(out, which[part], block)

    def _read_below(
        self, rows: Rows, which: npt.NDArray[np.intp], out: Bytes, lo: int, hi: int, *, admit: bool
    ) -> None:
        """Copy byte ranges of records that find no room here to the places `which` in `out`."""
        which = which[np.argsort(rows[which], kind="stable")]  # a page is read once, if possible
        with contextlib.closing(self._stream_below(rows[which], admit=admit)) as below:
            for part, records in below:
                out[which[part]] = records[:, lo:hi]

    def _stream_below(self, rows: Rows, *, admit: bool = True) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows` in the tier below part by part; each array is reused."""
        if isinstance(self.below, Streaming):
            yield from self.below.stream(rows)
            return
        for part in self._parts(rows.size):
            records = np.empty((rows[part].size, self.record_bytes), np.uint8)
            self.below.read(rows[part], records, admit=admit)
            yield part, records

    def write(
        self, rows: Rows, records: Bytes, lo: int = 0, hi: int | None = None, *, kept: bool = False
    ) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of records `rows` `(n,)`, distinct.

        `kept` is for tiers that write to files.
        """
        hi = self.record_bytes if hi is None else hi
        records = np.ascontiguousarray(records)
        if (lo, hi) == (0, self.record_bytes):
            absent = np.flatnonzero(self._place(rows, records) < 0)
            if absent.size:
                self.below.write(rows[absent], records[absent], lo, hi)
        else:
            self._write_to(self._locate(rows), rows, records, lo, hi)
        self._count_written(rows.size, hi - lo)

    def _count_written(self, records: int, width: int) -> None:
        self.stats.written += records
        self.stats.bytes_in += records * width

    def _write_to(self, slots: Slots, rows: Rows, records: Bytes, lo: int, hi: int) -> None:
        """Write byte ranges of records to their slots, or below where they have none."""
        absent = np.flatnonzero(slots < 0)
        if not absent.size:
            self._overwrite(slots, records, lo)
            return
        present = slots >= 0
        self._overwrite(slots[present], records[present], lo)
        self.below.write(rows[absent], records[absent], lo, hi)

    def _overwrite(self, slots: Slots, records: Bytes, lo: int) -> None:
        self.map.dirty[slots] = 1
        _rowcopy.scatter(self.records, slots, records, lo)

    def _locate(
        self,
        rows: Rows,
        *,
        ahead: bool = False,
        force: bool = False,
        positions: npt.NDArray[np.intp] | None = None,
    ) -> Slots:
        """Return the slot of each row, admitting those that are missing; -1: there was no room.

        `ahead`: this is not the use of the rows yet. `force`: admit whatever the rows are worth.
        `positions`: which of `rows`, distinct, each id of the batch is.
        """
        slots = self.map.lookup(rows)
        missing = np.empty(0, np.intp) if slots is rows else np.flatnonzero(slots < 0)
        if positions is not None:
            self._count_distinct(slots, missing.size, positions)
        elif not ahead:
            self._count(rows, slots, missing.size)
        if slots is rows:
            return slots
        if not ahead:
            self.map.use(rows)
        self.map.touch(slots if not missing.size else slots.compress(slots >= 0))
        if missing.size:
            if positions is not None and missing.size > self.slots:
                repeats = np.bincount(positions.ravel(), minlength=rows.size)[missing]
                missing = missing[np.argsort(-repeats, kind="stable")]
            wanted = rows[missing]
            self._promote(self.map.distinct(wanted), force=force)
            slots[missing] = self.map.lookup(wanted)
        self.map.next_batch()
        return slots

    def _count_distinct(self, slots: Slots, missing: int, positions: npt.NDArray[np.intp]) -> None:
        """Count a batch whose distinct rows are known: their slots, and which each id is."""
        stats, absent = self.stats, 0
        if missing:
            absent = int(np.count_nonzero(slots[positions] < 0))
        stats.requested += positions.size
        stats.hits += positions.size - absent
        stats.unique += slots.size
        stats.unique_hits += slots.size - missing
        stats.unique_of += positions.size

    def _promote(self, rows: Rows, *, force: bool = False) -> None:
        """Load the best of `rows`, distinct and absent, into the slots that can be had."""
        order = self.map.order(rows)
        if order is not None:
            rows = rows[order]
        slots = self._make_room(rows, force=force)
        rows = rows[: slots.size]
        if (rows[1:] < rows[:-1]).any():
            rows = np.sort(rows)
        done = 0
        try:
            with contextlib.closing(self._stream_below(rows)) as below:
                for part, records in below:
                    _rowcopy.scatter(self.records, slots[part], records)
                    self.map.bind(rows[part], slots[part])
                    done = part.stop
        finally:
            self.map.release(slots[done:])
        self.stats.bytes_promoted += slots.size * self.record_bytes

    def _place(self, rows: Rows, records: Bytes) -> Slots:
        """Write whole records of distinct rows, as far as there is room; return their slots."""
        slots = self.map.lookup(rows)
        missing = np.flatnonzero(slots < 0)
        self._count(rows, slots, missing.size)
        self.map.use(rows)
        if not missing.size:
            self.map.touch(slots)
            self._overwrite(slots, records, 0)
        else:
            present = np.flatnonzero(slots >= 0)
            self.map.touch(slots[present])
            self._overwrite(slots[present], records[present], 0)
            order = self.map.order(rows[missing])
            if order is not None:
                missing = missing[order]
            new = self._make_room(rows[missing])
            missing = missing[: new.size]
            _rowcopy.scatter(self.records, new, records[missing])
            self.map.bind(rows[missing], new)
            self.map.dirty[new] = 1
            slots[missing] = new
        self.map.next_batch()
        return slots

    def _make_room(self, rows: Rows, *, force: bool = False) -> Slots:
        """Take slots for a leading part of `rows`, distinct and absent, evicting what must go."""
        self.before_change()
        slots = self.map.free(rows)
        if slots.size == rows.size:
            return slots
        try:
            victims = self.map.victims(rows[slots.size :], force=force)
            try:
                self._write_back(victims.compress(self.map.dirty.take(victims) != 0))
            except BaseException:
                self.map.touch(victims)
                raise
            self.map.evict(victims)
            self.stats.evictions += victims.size
        except BaseException:
            self.map.release(slots)
            raise
        return np.concatenate([slots, victims])

    def _write_back(self, slots: Slots, *, kept: bool = False) -> None:
        """Hand the records in `slots` to the tier below; afterwards they are clean."""
        for part in self._parts(slots.size):
            block = self._stage[: slots[part].size]
            _rowcopy.gather(self.records, slots[part], block)
            self.below.write(self.map.rows(slots[part]), block, kept=kept)
            self.map.dirty[slots[part]] = 0
        self.stats.write_backs += slots.size
        self.stats.bytes_written_back += slots.size * self.record_bytes

    def _parts(self, count: int) -> list[slice]:
        step = len(self._stage)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def prefetch(self, rows: Rows) -> Callable[[], None] | None:
        """Return what brings missing rows nearer to the tier below, if anything does."""
        return self.below.prefetch(rows[self.map.lookup(rows) < 0])

    def fetch(self, rows: Rows, window: int) -> None:
        """Promote rows and keep them until they are used or `window` newer batches were fetched.

        At most half the slots are kept so; what does not fit is left to be read when it is used.
        """
        if isinstance(self.map, CachedSlots):
            self.map.announce(rows)
            rows = _rowcopy.unique(rows)[: max(0, self.slots // 2 - self.map.pins.ahead)]
            slots = self._locate(rows, ahead=True, force=True)
            self.map.pins.fetched(slots[slots >= 0], window)
        else:
            self._locate(rows)

    def fill(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load every row that is missing, where each has its slot; else do nothing.

        Blocks are read in place, in order. `progress` is called with rows done and in all.
        """
        if not isinstance(self.map, DirectSlots) or self.map.full:
            return
        step = max(1, _FILL_BYTES // self.record_bytes)
        for start in range(0, self.rows, step):
            rows = np.arange(start, min(start + step, self.rows))
            absent = rows[self.map.lookup(rows) < 0]
            if absent.size == rows.size:
                self.below.read(rows, self.records[start : start + step])
                self.map.bind(rows, rows)
                self.stats.bytes_promoted += rows.size * self.record_bytes
            elif absent.size:
                self._promote(absent, force=True)
            if progress is not None:
                progress(int(rows[-1]) + 1, self.rows)

    def warm(self, rows: Rows, progress: Callable[[int, int], None] | None = None) -> int:
        """Load `rows`, the first as many distinct ones as there are slots; return their number.

        They are not counted as requests. `progress` is called with rows done and in all.
        """
        _, first = np.unique(rows, return_index=True)
        rows = np.sort(rows[np.sort(first)[: self.slots]])
        step = max(1, _FILL_BYTES // self.record_bytes)
        for start in range(0, rows.size, step):
            part = rows[start : start + step]
            slots = self.map.lookup(part)
            self.map.touch(slots.compress(slots >= 0))
            self._promote(part.compress(slots < 0), force=True)
            if progress is not None:
                progress(start + part.size, rows.size)
        self.map.next_batch()
        return int((self.map.lookup(rows) >= 0).sum())

    def lease(self, rows: Rows, positions: npt.NDArray[np.intp] | None = None) -> Slots:
        """Promote distinct rows and pin them; return their slots, -1 where there was no room.

        They are admitted whatever they are worth: a step reads and writes them field by field.
        `positions` says which of them each id of the batch is, for the counters.
        """
        slots = self._locate(rows, force=True, positions=positions)
        if isinstance(self.map, CachedSlots):
            self.map.pins.lease(slots[slots >= 0])
        return slots

    def read_held(self, rows: Rows, out: Bytes, lo: int, hi: int) -> None:
        """Copy bytes `lo:hi` of leased rows into `out`; the lease has counted and admitted them."""
        slots = self.map.lookup(rows)
        missing = np.flatnonzero(slots < 0)
        self._copy_found(slots, missing.size, out, lo)
        if missing.size:
            self._read_below(rows, missing, out, lo, hi, admit=False)
        self.stats.bytes_out += rows.size * (hi - lo)

    def write_held(self, rows: Rows, records: Bytes, lo: int, hi: int) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of leased rows, distinct."""
        slots = self.map.lookup(rows)
        self._write_to(slots, rows, np.ascontiguousarray(records), lo, hi)
        self._count_written(rows.size, hi - lo)

    def give_back(self, slots: Slots) -> None:
        """End a lease."""
        if isinstance(self.map, CachedSlots):
            self.map.pins.give_back(slots[slots >= 0])

    def flush(self) -> None:
        """Hand every changed record to the tier below, by ascending row, and flush that."""
        self.before_change()
        dirty = self._changed()
        self._write_back(dirty[np.argsort(self.map.rows(dirty))], kept=True)
        self.below.flush()

    def discard(self, rows: Rows) -> None:
        """Drop every changed record, and `rows` whose bytes below are no longer the same.

        Leases end without being given back.
        """
        self.before_change()
        slots = self.map.lookup(rows)
        self.map.release(np.union1d(self._changed(), slots[slots >= 0]))
        if isinstance(self.map, CachedSlots):
            self.map.pins.clear()

    def occupancy(self) -> Occupancy:
        """Return how full the tier is."""
        return Occupancy(self.slots, self.map.used, self._changed().size)

    def mark_changed(self, rows: Rows) -> Rows:
        """Hand `rows` down with the next flush, changed or not; return those that are here."""
        slots = self.map.lookup(rows)
        here = slots >= 0
        self.map.dirty[slots[here]] = 1
        return rows[here]

    def dirty(self) -> Rows:
        """Return the rows whose records have changed and were not handed down."""
        return self.map.rows(self._changed())

    def _changed(self) -> Slots:
        """Return the slots of records that have changed."""
        return np.flatnonzero(self.map.dirty.view(np.bool_))  # ten times faster than as numbers

    def close(self) -> None:
        """Give the memory back."""
        self.records = np.empty((0, self.record_bytes), np.uint8)
        self._arena.memory.close()
