"""Which slot of a tier holds which row, and how many slots fit a number of bytes.

`CachedSlots` maps rows to fewer slots and asks a policy which to evict; `DirectSlots` serves a tier
that holds every row: slot = row, and no look-up is needed once all rows are loaded.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _rowmap
from tierstore._core import find_slots, read_slots
from tierstore._rowcopy import unique
from tierstore._rowmap import RowMap, Take
from tierstore.budget import size_of_at_least
from tierstore.errors import CapacityError
from tierstore.policy import PolicySpec, lru

STAGING_BYTES = 2 << 20
"""Records that go to or come from the tier below are moved this many bytes at a time."""


_MOST_MAPPED = 1 << 31
_QUEUE_BYTES = 32 << 20
_QUEUE_SHARE = 16


Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]
Slots = npt.NDArray[np.integer[Any]]


class SlotMap(Protocol):
    """The seam between a tier and the way it places rows."""

    dirty: npt.NDArray[np.uint8]
    notes_apart: bool
    """Whether `read` may note a use without the lock of the tier."""

    @property
    def keeps_batch(self) -> bool:
        """Whether rows that the current batch uses stay until it ends."""

    @property
    def used(self) -> int:
        """Slots that hold a row, or are about to."""

    @property
    def full(self) -> bool:
        """Whether open leases hold every slot."""

    def find(self, rows: Rows) -> tuple[Slots, int]:
        """Return the slot of each row, negative where it has none, and how many have none."""

    def lookup(self, rows: Rows) -> Slots:
        """Return the slot of each row, negative where it has none."""

    def read(
        self,
        records: Bytes,
        ids: Rows,
        rows: tuple[int, int],
        lo: int,
        out: npt.NDArray[Any] | None,
        note: bool,
    ) -> bool:
        """Copy bytes from `lo` on of the records of `ids`, if the rows of all have slots.

        `rows` is the first row and their number, from which ids count. `ids` is contiguous, of any
        shape, and `out` has as many items, or is None. If there is no such row, or one has no slot,
        nothing is done and the result is False. Else, with `note`, this is a batch as in `serve`.
        """

    def use(self, rows: Rows) -> None:
        """Note that a batch begins, which uses `rows`, with or without slots; they may repeat."""

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Note that the current batch uses these slots, which may repeat; `done`: it did so."""

    def next_batch(self) -> None:
        """End the current batch."""

    def serve(self, rows: Rows, slots: Slots, *, done: bool = False) -> None:
        """Note a whole batch of `rows`, which all have slots: `use`, `touch`, `next_batch`."""

    def announce(self, rows: Rows) -> None:
        """Note that a batch to come, after those announced before, will use `rows`."""

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        """Take `counts`, the earlier uses of rows from `start` on, as the uses seen so far."""

    def distinct(self, rows: Rows) -> Rows:
        """Return the distinct ones of `rows`; none of them has a slot."""

    def order(self, rows: Rows) -> npt.NDArray[np.intp] | None:
        """Return the positions of `rows`, distinct, the most valuable first; None: as they are."""

    def free(self, rows: Rows) -> Slots:
        """Take free slots for a leading part of `rows`, which are distinct and have none."""

    def victims(self, rows: Rows, *, force: bool = False) -> Slots:
        """Take slots to evict for a leading part of `rows`, which are in `order` and have none.

        Without `force`, take only slots whose rows score less. Slots keep their rows until `evict`.
        """

    def evict(self, victims: Slots) -> None:
        """Take the rows out of `victims`; `bind` or `release` them next."""

    def rows(self, slots: Slots) -> Rows:
        """Return the row in each slot."""

    def bind(self, rows: Rows, slots: Slots) -> None:
        """Enter each row, loaded or written, in its slot, in the current batch."""

    def release(self, slots: Slots) -> None:
        """Free slots, whether or not they hold rows."""


class DirectSlots:
    """Every row has its own slot; the map records only whether a row has been loaded.

    Attributes:
        missing: rows that have not been loaded.
    """

    keeps_batch = True
    notes_apart = True
    full: bool = False

    def __init__(self, rows: int, take: Take) -> None:
        """Start with no row loaded."""
        self.resident: npt.NDArray[np.uint8] = take("resident", rows, np.uint8)
        self.dirty: npt.NDArray[np.uint8] = take("dirty", rows, np.uint8)
        self.missing: int = rows

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Bytes of the marks of a table."""
        return 2 * rows

    @property
    def used(self) -> int:
        """Slots that hold a row."""
        return self.resident.size - self.missing

    def find(self, rows: Rows) -> tuple[Slots, int]:
        """Return the rows themselves, -1 for those not loaded, and how many these are."""
        if self.missing == 0:
            return rows, 0
        resident = self.resident
        found: npt.NDArray[np.signedinteger[Any]]
        found = np.empty(rows.size, np.int32 if resident.size < 2**31 else np.int64)
        return found, find_slots(resident, resident.size, np.ascontiguousarray(rows), found)

    def lookup(self, rows: Rows) -> Slots:
        """Return the rows themselves, -1 for those not loaded."""
        return self.find(rows)[0]

    def read(
        self,
        records: Bytes,
        ids: Rows,
        rows: tuple[int, int],
        lo: int,
        out: npt.NDArray[Any] | None,
        note: bool,
    ) -> bool:
        """Copy bytes from `lo` on of the records of some of `rows`, if all are loaded."""
        places = self.resident if self.missing else None
        found = read_slots(records, places, ids, *rows, lo, out, None, None, 1, None)
        return found == ids.size

    def use(self, rows: Rows) -> None:
        """Do nothing: no row is ever evicted."""

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Do nothing."""

    def next_batch(self) -> None:
        """Do nothing."""

    def serve(self, rows: Rows, slots: Slots, *, done: bool = False) -> None:
        """Do nothing."""

    def announce(self, rows: Rows) -> None:
        """Do nothing."""

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        """Do nothing."""

    def order(self, rows: Rows) -> None:
        """Return None: there is a slot for each."""

    def distinct(self, rows: Rows) -> Rows:
        """Return each row once, ascending."""
        return unique(rows)

    def free(self, rows: Rows) -> Slots:
        """Return the rows: each has its slot."""
        return rows

    def victims(self, rows: Rows, *, force: bool = False) -> Slots:
        """Return nothing: there is always room."""
        return np.empty(0, np.int64)

    def evict(self, victims: Slots) -> None:
        """Do nothing: there are none."""

    def rows(self, slots: Slots) -> Rows:
        """Return the row in each slot."""
        return slots.astype(np.int64)

    def bind(self, rows: Rows, slots: Slots) -> None:
        """Mark rows as loaded."""
        self.missing -= int(rows.size - np.count_nonzero(self.resident[rows]))
        self.resident[rows] = 1

    def release(self, slots: Slots) -> None:
        """Mark rows as not loaded."""
        self.missing += int(np.count_nonzero(self.resident[slots]))
        self.resident[slots] = 0
        self.dirty[slots] = 0


class CachedSlots:
    """A map from row to slot, and its inverse.

    Fully associative: a table that fits has no misses after one pass, whatever its ids.

    Attributes:
        slot_of: one more than the slot of each row, 0 where it has none.
        row_of: the row in each slot, -1 in free ones; undefined in slots that were never used.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        policy: PolicySpec,
        take: Take,
        *,
        by_row: bool = False,
        grows: bool = False,
    ) -> None:
        """Start with every slot free.

        `by_row`: `slot_of` is an array in any case; `grows`: it is in memory of its own, and can
        grow.
        """
        self.slot_of = RowMap(rows, slots, _rowmap.zeros if grows else take, by_row=by_row)
        self.row_of: npt.NDArray[np.int64] = take("row_of", slots, np.int64)
        self.dirty: npt.NDArray[np.uint8] = take("dirty", slots, np.uint8)
        self.pins = Pins(slots, take)
        self.policy = policy.make(rows, slots, self.lookup, self.row_of)
        self._places = self.slot_of.places
        self.notes_apart = self.policy.stamps is not None
        self._unused = 0
        self._released: list[Slots] = []

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows, the new ones without slots."""
        self.slot_of.grow(rows)
        self._places = self.slot_of.places
        self.policy.grow(rows)

    @property
    def keeps_batch(self) -> bool:
        """Whether rows that the current batch uses stay until it ends."""
        return self.policy.keeps_batch

    @property
    def used(self) -> int:
        """Slots that hold a row, or are about to."""
        return self._unused - sum(slots.size for slots in self._released)

    @property
    def full(self) -> bool:
        """Whether open leases hold every slot."""
        return self.pins.full

    @staticmethod
    def bytes_for(rows: int, slots: int, policy: PolicySpec, *, by_row: bool = False) -> int:
        """Bytes of the maps, the marks and the policy."""
        maps = _rowmap.bytes_for(rows, slots, by_row=by_row) + (9 + Pins.BYTES) * slots
        return maps + policy.bytes_for(rows, slots)

    @property
    def resident(self) -> Rows:
        """The rows that have a slot, in any order."""
        rows = self.row_of[: self._unused]
        return rows[rows >= 0]

    def find(self, rows: Rows) -> tuple[npt.NDArray[np.int32], int]:
        """Return the slot of each row, negative where it has none, and how many have none."""
        found = np.empty(rows.size, np.int32)
        rows = np.ascontiguousarray(rows)
        return found, find_slots(self._places, self.row_of.size, rows, found)

    def lookup(self, rows: Rows) -> npt.NDArray[np.int32]:
        """Return the slot of each row, negative where it has none."""
        found = np.empty(rows.size, np.int32)
        find_slots(self._places, self.row_of.size, np.ascontiguousarray(rows), found)
        return found

    def read(
        self,
        records: Bytes,
        ids: Rows,
        rows: tuple[int, int],
        lo: int,
        out: npt.NDArray[Any] | None,
        note: bool,
    ) -> bool:
        """Copy bytes from `lo` on of the records of some of `rows`, if all have slots."""
        policy, given = self.policy, (records, self._places, ids, *rows, lo, out)
        if not note:
            return read_slots(*given, None, None, 1, None) == ids.size
        stamps = policy.stamps
        slots = np.empty(ids.size, np.int32) if stamps is None else None
        if read_slots(*given, slots, stamps, policy.now, self.pins.ending) < ids.size:
            return False
        if slots is not None:
            policy.use(ids.ravel() + rows[0])
            policy.touch(slots, done=True)
        policy.next_batch()
        return True

    def use(self, rows: Rows) -> None:
        """Note that a batch begins, which uses `rows`, with or without slots; they may repeat."""
        self.policy.use(rows)

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Note that the current batch uses these slots, which may repeat; `done`: it did so."""
        self.policy.touch(slots.astype(np.int32, copy=False), done=done)
        self.pins.used(slots)

    def next_batch(self) -> None:
        """End the current batch."""
        self.policy.next_batch()

    def serve(self, rows: Rows, slots: Slots, *, done: bool = False) -> None:
        """Note a whole batch of `rows`, which all have slots: `use`, `touch`, `next_batch`."""
        self.policy.use(rows)
        self.touch(slots, done=done)
        self.policy.next_batch()

    def announce(self, rows: Rows) -> None:
        """Note that a batch to come, after those announced before, will use `rows`."""
        self.policy.announce(rows)

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        """Take `counts`, the earlier uses of rows from `start` on, as the uses seen so far."""
        self.policy.prime(counts, start)

    def distinct(self, rows: Rows) -> Rows:
        """Return the distinct ones of `rows`; none of them has a slot.

        If they outnumber the slots, the most repeated rows come first: they are most likely to come
        again. Otherwise they ascend.
        """
        first = unique(rows)
        if first.size <= self.row_of.size:
            return first
        if first.size == rows.size:
            return rows
        distinct, counts = np.unique(rows, return_counts=True)
        return distinct[np.argsort(-counts, kind="stable")]

    def order(self, rows: Rows) -> npt.NDArray[np.intp] | None:
        """Return the positions of `rows`, distinct, the most valuable first; None: as they are."""
        return self.policy.order(rows)

    def free(self, rows: Rows) -> Slots:
        """Take free slots for a leading part of `rows`: never used ones first, in order."""
        fresh = min(rows.size, self.row_of.size - self._unused)
        parts: list[Slots] = [np.arange(self._unused, self._unused + fresh, dtype=np.int32)]
        self.row_of[self._unused : self._unused + fresh] = -1
        self._unused += fresh
        wanted = rows.size - fresh
        while wanted and self._released:
            slots = self._released.pop()
            if slots.size > wanted:
                self._released.append(slots[wanted:])
                slots = slots[:wanted]
            parts.append(slots)
            wanted -= slots.size
        return np.concatenate(parts)

    def fits(self, rows: int) -> bool:
        """Whether a batch of so many rows has room beside open leases, if they share no row."""
        return rows + self.pins.leased <= self.row_of.size

    def victims(self, rows: Rows, *, force: bool = False) -> Slots:
        """Take slots to evict for a leading part of `rows`; `evict` empties them."""
        if self.pins.full:
            return np.empty(0, np.int32)
        return self.policy.victims(rows, self.pins.barred, force=force)

    def evict(self, victims: Slots) -> None:
        """Take the rows out of `victims`; `bind` or `release` them next."""
        self.slot_of.set(self.row_of.take(victims, mode="clip"), None)
        self.row_of[victims] = -1

    def rows(self, slots: Slots) -> Rows:
        """Return the row in each slot, -1 for free ones."""
        return self.row_of[slots]

    def bind(self, rows: Rows, slots: Slots) -> None:
        """Enter each row in its slot, in the current batch."""
        self.row_of[slots.astype(np.intp)] = rows
        self.slot_of.set(rows, slots.astype(np.int32) + 1)
        self.touch(slots)

    def release(self, slots: Slots) -> None:
        """Free slots, whether or not they hold rows."""
        if not slots.size:
            return
        numbers: npt.NDArray[np.int32] = slots.astype(np.int32, copy=False)
        at = numbers.astype(np.intp)
        rows = self.row_of[at]
        self.slot_of.set(rows.compress(rows >= 0), None)
        self.row_of[at] = -1
        self.dirty[at] = 0
        self.policy.forget(numbers)
        self._released.append(numbers)


class Pins:
    """Slots that must not be evicted: those of open leases, and of rows fetched ahead.

    A row fetched ahead stays until it is used or `window` newer batches were fetched ahead, so a
    batch that never comes costs its slots only for a while.

    Attributes:
        leased: pins of open leases; a slot in two of them counts twice.
        ending: an item for each slot, in which 0 ends the pin of a row that was fetched ahead; None
            if there is none.
    """

    BYTES = 8

    def __init__(self, slots: int, take: Take) -> None:
        """Start with no pin."""
        self.leases: npt.NDArray[np.int32] = take("leases", slots, np.int32)
        self._ahead: npt.NDArray[np.int32] = take("ahead", slots, np.int32)
        self.ending: npt.NDArray[np.int32] | None = None
        self._tickets: deque[int] = deque()
        self._ticket = 0
        self._floor = 0
        self.leased: int = 0

    @property
    def ahead(self) -> int:
        """Slots that batches within the window were fetched ahead into, used ones included."""
        return sum(self._tickets)

    @property
    def full(self) -> bool:
        """Whether open leases hold every slot."""
        return self.leased >= self.leases.size and bool(self.leases.all())

    def lease(self, slots: Slots) -> None:
        """Pin distinct slots until they are given back."""
        self.leases[slots] += 1
        self.leased += slots.size

    def give_back(self, slots: Slots) -> None:
        """End one lease of distinct slots."""
        self.leases[slots] -= 1
        self.leased -= slots.size

    def fetched(self, slots: Slots, window: int) -> None:
        """Pin slots that were fetched ahead."""
        self._ticket += 1
        self._tickets.append(slots.size)
        while len(self._tickets) > window:
            self._tickets.popleft()
        self._floor = self._ticket - len(self._tickets)
        self._ahead[slots] = self._ticket
        self.ending = self._ahead

    def used(self, slots: Slots) -> None:
        """End the pins of slots that were fetched ahead and are used now."""
        if self.ending is not None:
            self.ending[slots] = 0

    def clear(self) -> None:
        """End every pin, of leases and of what was fetched ahead."""
        if self.leased:
            self.leases.fill(0)
            self.leased = 0
        self._tickets.clear()
        self.ending = None
        self._floor = self._ticket

    def barred(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return which of `slots` must stay."""
        barred = np.zeros(slots.size, np.bool_)
        if self.leased:
            barred |= self.leases[slots] > 0
        if self._tickets:
            barred |= self._ahead[slots] > self._floor
        return barred


def staging_rows(record_bytes: int) -> int:
    """Return the number of records moved at a time."""
    return max(1, STAGING_BYTES // record_bytes)


def queue_bytes(record_bytes: int, slots: int) -> int:
    """Bytes of records, written down, that may wait for a disk."""
    return min(_QUEUE_BYTES, slots * record_bytes // _QUEUE_SHARE)


def bytes_for(
    rows: int,
    record_bytes: int,
    slots: int,
    policy: PolicySpec | None = None,
    *,
    indexed: bool = False,
    mapped: bool = False,
) -> int:
    """Bytes of a tier: its arena, staging, and records written down that wait for a disk.

    A thread that misses during another miss takes as much staging again, and so does a larger
    flush. `indexed`: the tier below has an index, see `index_bytes`; `mapped`: see `arena_bytes`.
    """
    slots = min(slots, rows)
    staging = min(staging_rows(record_bytes), slots) * record_bytes
    arena = arena_bytes(rows, record_bytes, slots, policy, mapped=mapped)
    index = index_bytes(rows, slots) if indexed else 0
    return arena + staging + queue_bytes(record_bytes, slots) + index


def index_bytes(rows: int, slots: int) -> int:
    """Bytes that count for the index of changed rows beside a tier of so many slots."""
    return _rowmap.bytes_for(rows, slots) if slots else 0


def arena_bytes(
    rows: int,
    record_bytes: int,
    slots: int,
    policy: PolicySpec | None = None,
    *,
    mapped: bool = False,
) -> int:
    """Bytes of records, maps, marks and policy; `mapped`: a device reads the map by row."""
    if slots == rows:
        return slots * record_bytes + DirectSlots.bytes_for(rows)
    by_row = mapped and is_mapped(rows)
    maps = CachedSlots.bytes_for(rows, slots, policy or lru(), by_row=by_row)
    return slots * record_bytes + maps


def is_mapped(rows: int) -> bool:
    """Whether a device looks rows up in the map itself, while others are entered there.

    Then each row must have a place of its own. A larger map would pin more than 8 GiB, so that the
    host looks up the rows that a device misses.
    """
    return rows <= _MOST_MAPPED


def slots_for(
    rows: int,
    record_bytes: int,
    nbytes: int,
    policy: PolicySpec | None = None,
    *,
    indexed: bool = False,
    mapped: bool = False,
) -> int:
    """Return the most slots that fit `nbytes`, maps included; 0 for a budget of 0.

    `indexed` and `mapped` are those of `bytes_for`. Raises CapacityError if a budget above 0 has no
    room for a single slot and the maps.
    """
    if nbytes == 0:
        return 0

    def taken(slots: int) -> int:
        return bytes_for(rows, record_bytes, slots, policy, indexed=indexed, mapped=mapped)

    if taken(rows) <= nbytes:
        return rows
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(middle) <= nbytes else (low, middle - 1)
    if low == 0:
        least = min(taken(slots) for slots in (1, rows))
        kept = f", what {policy.name} keeps of its rows" if policy is not None else ""
        raise CapacityError(
            f"a host budget of {nbytes} bytes cannot hold one record of a table of {rows} rows, "
            f"its maps{kept}, and room on the way, which take {size_of_at_least(least)}; give "
            "more, or 0 for no host tier"
        )
    return low
