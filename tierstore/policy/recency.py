"""Least recently used, per batch, in time independent of the number of slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from tierstore.policy.base import Barred, DeviceScores, Lookup, Policy, Rows, Slots
from tierstore.policy.ranked import NO_ROWS, Keys, RankedSpec, Ranking

__all__ = ["LRU", "LRUSpec", "Recency", "lru"]


_PACKED = 256
"""Touches of fewer slots share an entry of the log."""

_ENTRY_BYTES = 240
"""Overhead of two arrays, a tuple and a place in the log, without the array contents."""

_Batches = npt.NDArray[np.uint32] | int
"""The ascending batch numbers of the slots of an entry, or one number for all."""


def _packed(slots: int) -> int:
    """Return how many slots of small touches share an entry in a tier with `slots` slots."""
    return min(_PACKED, slots)


class LRU(Policy):
    """Exact least recently used; ties among the slots of a large batch are broken at random.

    A log contains the slots that batches touched, oldest first, in entries of one large touch or of
    many small ones. Only a slot's newest batch, given by its stamp, counts. Older log entries of
    the slot are stale, and are skipped when they reach the front, where victims are taken. Every
    slot is appended and popped once, so the cost is proportional to the batches: victims for 32k
    misses take 0.6 to 0.8 ms with 1 M as well as 16 M slots (benchmarks/bench_bookkeeping.py). A
    log that exceeds its budget is compacted.
    """

    def __init__(self, slots: int) -> None:
        """Start with no slot in use."""
        self._stamp = np.zeros(slots, np.uint32)
        self._packed = _packed(slots)
        self._log: deque[tuple[Slots, _Batches]] = deque()
        self._log_bytes = 0
        self._most_bytes = self._log_bytes_for(slots)
        self._open_slots = np.empty(self._packed, np.int32)
        self._open_batches = np.empty(self._packed, np.uint32)
        self._filled = 0
        self._now = 1
        self._chance = Random(0)

    @staticmethod
    def _log_bytes_for(slots: int) -> int:
        """Memory limit of the log: entries for every slot take at most 10 bytes per slot."""
        return 12 * slots + min(4096, 512 + 16 * slots)

    @classmethod
    def bytes_for(cls, slots: int) -> int:
        """Maximum bytes for a number of slots: stamps, the log, and the entry being filled."""
        return 4 * slots + cls._log_bytes_for(slots) + 8 * _packed(slots)

    @property
    def nbytes(self) -> int:
        return int(self._stamp.nbytes + self._log_bytes + 8 * self._packed)

    def use(self, rows: Rows) -> None:
        pass  # a row is as recent as its slot, which `touch` reports

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        if not slots.size:
            return
        self._stamp.put(slots, self._now, mode="clip")
        self._append(slots, self._now)
        if self._log_bytes > self._most_bytes:
            self._compact()

    def next_batch(self) -> None:
        self._now += 1
        if self._now == 2**32 - 1:
            self._renumber()

    def order(self, rows: Rows) -> None:
        return None

    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        count = rows.size
        taken: list[Slots] = []
        passed: list[tuple[Slots, _Batches]] = []
        while count > 0 and (oldest := self._oldest()) is not None:
            slots, batches = oldest
            if barred is not None:
                held = barred(slots)
                if held.any():
                    passed.append((slots[held], _of(batches, held)))
                    slots, batches = slots[~held], _of(batches, ~held)
            if slots.size > count:
                if isinstance(batches, int):
                    first = self._chance.randrange(slots.size)
                    slots = np.concatenate([slots[first:], slots[:first]])
                self._put_back(slots[count:], _of(batches, slice(count, None)))
                slots = slots[:count]
            slots = slots.compress(self._once(slots))
            self._stamp[slots] = 0
            taken.append(slots)
            count -= slots.size
        if passed:
            numbers = [np.full(slots.size, batches, np.uint32) for slots, batches in passed]
            self._put_back(np.concatenate([slots for slots, _ in passed]), np.concatenate(numbers))
        return np.concatenate(taken) if taken else np.empty(0, np.int32)

    # -- the log

    def _append(self, slots: Slots, batches: _Batches) -> None:
        """Append to the log; a few slots go to the entry that is being filled."""
        if slots.size >= self._packed:
            self._close()
            self._push(slots.astype(np.int32), batches)
            return
        if self._filled + slots.size > self._packed:
            self._close()
        place = slice(self._filled, self._filled + slots.size)
        self._open_slots[place] = slots
        self._open_batches[place] = batches
        self._filled = place.stop

    def _close(self) -> None:
        """Append the filled slots as an entry."""
        if self._filled:
            filled, self._filled = self._filled, 0
            self._push(self._open_slots[:filled].copy(), self._open_batches[:filled].copy())

    def _push(self, slots: Slots, batches: _Batches) -> None:
        self._log.append((slots, batches))
        self._log_bytes += _bytes_of(slots, batches)

    def _put_back(self, slots: Slots, batches: _Batches) -> None:
        """Prepend an entry to the log, as its oldest."""
        self._log.appendleft((slots, batches))
        self._log_bytes += _bytes_of(slots, batches)

    def _pop(self) -> tuple[Slots, _Batches]:
        """Remove the oldest entry from the log; return it without stale slots."""
        slots, batches = self._log.popleft()
        self._log_bytes -= _bytes_of(slots, batches)
        # `compress` takes a third of the time of indexing with a mask.
        live = self._stamp.take(slots, mode="clip") == batches
        return slots.compress(live), batches if isinstance(batches, int) else batches.compress(live)

    def _oldest(self) -> tuple[Slots, _Batches] | None:
        """Remove the oldest slots from the log: a large batch, or an entry of small ones.

        Returns None if the current batch touched all remaining slots.
        """
        while self._log or self._filled:
            if not self._log:
                self._close()
            front = self._log[0][1]
            if isinstance(front, int) and front == self._now:
                return None
            slots, batches = self._pop()
            if isinstance(batches, int):
                parts = [slots]
                while self._log and isinstance(self._log[0][1], int) and self._log[0][1] == batches:
                    parts.append(self._pop()[0])
                slots = np.concatenate(parts) if len(parts) > 1 else slots
            else:
                end = int(np.searchsorted(batches, self._now))
                if end < slots.size:
                    self._put_back(slots[end:], batches[end:])
                    if not end:
                        return None
                    slots, batches = slots[:end], batches[:end]
            if slots.size:
                return slots, batches
        return None

    def _once(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return the position of one occurrence of each of `slots`; stamps must be set again.

        The stamps serve as scratch space: each position writes its number, and the number that is
        read back represents the slot. This needs no sort.
        """
        at = slots.astype(np.intp)
        number = np.arange(at.size, dtype=np.uint32)
        self._stamp[at] = number
        return self._stamp[at] == number  # type: ignore[no-any-return]

    def forget(self, slots: Slots) -> None:
        self._stamp[slots] = 0

    def _compact(self) -> None:
        """Keep each slot once, in the last batch that touched it."""
        self._close()
        kept: list[tuple[Slots, _Batches]] = []
        while self._log:
            slots, batches = self._pop()
            once = self._once(slots)
            self._stamp[slots] = 0  # so that repetitions are stale
            kept.append((slots.compress(once), _of(batches, once)))
        for slots, batches in kept:
            self._stamp[slots] = batches
            self._append(slots, batches)
        self._close()

    def _renumber(self) -> None:
        """Renumber the batches in the same order, before the stamps overflow."""
        self._compact()
        entries, self._log, self._log_bytes = self._log, deque(), 0
        last = new = 0
        for slots, batches in entries:
            numbers = np.full(slots.size, batches, np.uint32)
            renumbered = new + np.cumsum(np.diff(numbers, prepend=np.uint32(last)) != 0)
            last, new = int(numbers[-1]), int(renumbered[-1])
            self._stamp[slots] = renumbered
            self._push(slots, new if isinstance(batches, int) else renumbered.astype(np.uint32))
        self._now = new + 1


def _of(batches: _Batches, which: npt.NDArray[np.bool_] | slice) -> _Batches:
    """Return the batches of some slots of an entry."""
    return batches if isinstance(batches, int) else batches[which]


def _bytes_of(slots: Slots, batches: _Batches) -> int:
    """Bytes of an entry."""
    numbers = 0 if isinstance(batches, int) else batches.nbytes
    return int(_ENTRY_BYTES + slots.nbytes + numbers)


class Recency(Ranking):
    """Ranks rows by the last batch that used them, for policies based on a ranking."""

    def __init__(self, rows: int) -> None:
        """Start without used rows."""
        self._used = np.zeros(rows, np.uint32)
        self._now = 0

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Bytes of one batch number per row."""
        return 4 * rows

    @property
    def nbytes(self) -> int:
        return int(self._used.nbytes)

    def use(self, rows: Rows) -> Rows | None:
        self._now += 1
        self._used[rows] = self._now
        return NO_ROWS

    def grow(self, rows: int) -> None:
        self._used.resize(rows, refcheck=False)

    def keys(self, rows: Rows) -> Keys:
        """Return the numbers of the batches, modulo 2**31."""
        return self._used[rows] & np.uint32(2**31 - 1)


@dataclass(frozen=True)
class LRUSpec(RankedSpec):
    """Evict the least recently used row; see `lru`."""

    name = "lru"

    def bytes_for(self, rows: int, slots: int) -> int:
        return LRU.bytes_for(slots)

    def make(self, rows: int, slots: int, lookup: Lookup, row_of: npt.NDArray[np.int64]) -> Policy:
        return LRU(slots)  # exact, and cheaper than a ranking

    def on_device(self) -> DeviceScores | None:
        return None

    def ranking(self, rows: int, slots: int) -> Ranking:
        return Recency(rows)

    def ranking_bytes(self, rows: int) -> int:
        return Recency.bytes_for(rows)


def lru() -> LRUSpec:
    """Evict the least recently used row: the default, suited to temporal locality."""
    return LRUSpec()
