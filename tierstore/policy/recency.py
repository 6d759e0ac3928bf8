"""Least recently used, per batch: a stamp for each slot, and candidates to go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore._core import oldest_slots
from tierstore._rowcopy import Groups
from tierstore.policy.base import Barred, DeviceScores, Lookup, Policy, Rows, Slots
from tierstore.policy.ranked import NO_ROWS, Keys, RankedSpec, Ranking

_NONE = np.empty(0, np.int32), np.empty(0, np.uint32)
_SHARE = 8
"""One in so many slots is a candidate: fewer are found more often, more take more memory."""


class LRU(Policy):
    """Exact least recently used: the victims of a batch were used by the earliest batches.

    To use a slot is to stamp it with the number of the batch, and nothing else. For victims, the
    slots with the lowest stamps are found by going over all stamps, an eighth of the slots at a
    time. They are candidates, oldest first, until they are taken or used: a slot that is used gets
    a higher stamp than any candidate. Of the slots that one batch used last, the first go first.

    Threads may set stamps at any time: of slots that are being taken or have lost their rows, and
    to the number of an earlier batch. So a stamp alone makes no slot a victim: it must have a row,
    and is taken once in a call. At worst a row goes sooner or later than it should.
    """

    def __init__(self, slots: int, row_of: npt.NDArray[np.int64]) -> None:
        """Start with no slot in use; `row_of` `(slots,)` is -1 where a slot has no row."""
        self._row_of = row_of
        self.stamps: npt.NDArray[np.uint32] = np.zeros(slots, np.uint32)
        self.now: int = 1
        self._found = np.empty(_candidates(slots), np.int32)
        self._candidates: tuple[Slots, npt.NDArray[np.uint32]] = _NONE

    @classmethod
    def bytes_for(cls, slots: int) -> int:
        """Maximum bytes for a number of slots: stamps, and candidates with theirs.

        Candidates that a lease bars come on top, eight bytes each.
        """
        return 4 * slots + 12 * _candidates(slots)

    @property
    def nbytes(self) -> int:
        held = self.stamps, self._found, *self._candidates
        return sum(array.nbytes for array in held)

    def use(self, rows: Rows) -> None:
        pass  # a row is as recent as its slot, which `touch` reports

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        if slots.size:
            self.stamps.put(slots, self.now, mode="clip")

    def next_batch(self) -> None:
        self.now += 1
        if self.now == 2**32 - 1:
            self._renumber()

    def order(self, rows: Rows) -> None:
        return None

    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        count = rows.size
        taken: list[Slots] = [_NONE[0]]
        passed: list[tuple[Slots, npt.NDArray[np.uint32]]] = []
        seen: list[Slots] = []
        while count and (self._candidates[0].size or self._find(seen)):
            found, ages = self._candidates
            slots, stamps = found[:count], ages[:count]
            self._candidates = found[count:], ages[count:]
            same = (self.stamps.take(slots) == stamps) & (self._row_of.take(slots) >= 0)
            slots, stamps = slots.compress(same), stamps.compress(same)
            self.stamps[slots] = 0
            seen.append(slots)
            if barred is not None and (held := barred(slots)).any():
                passed.append((slots.compress(held), stamps.compress(held)))
                slots = slots.compress(~held)
            taken.append(slots)
            count -= slots.size
        if passed:  # they are older than all other candidates
            slots, stamps = (np.concatenate(each) for each in zip(*passed, strict=True))
            self.stamps[slots] = stamps
            found, ages = self._candidates
            self._candidates = np.concatenate([slots, found]), np.concatenate([stamps, ages])
        return np.concatenate(taken)

    def forget(self, slots: Slots) -> None:
        self.stamps[slots] = 0

    def _find(self, seen: list[Slots]) -> bool:
        """Find new candidates that have not been seen in this call; return whether there are any.

        Others have their stamps from threads that looked them up before.
        """
        while (found := oldest_slots(self.stamps, self.now, self._found)) > 0:
            slots = self._found[:found]
            stray = self._row_of.take(slots) < 0
            if seen:
                stray |= np.isin(slots, np.concatenate(seen))
            self.stamps[slots.compress(stray)] = 0
            slots = slots.compress(~stray)
            if slots.size:
                by_age = slots.take(Groups(self.stamps.take(slots).astype(np.int64)).order)
                self._candidates = by_age, self.stamps.take(by_age)
                return True
        return False

    def _renumber(self) -> None:
        """Renumber the batches in the same order, before the stamps overflow."""
        used = self.stamps > 0
        numbers = np.unique(self.stamps[used])
        self.stamps[used] = np.searchsorted(numbers, self.stamps[used]) + 1
        self._candidates = _NONE
        self.now = numbers.size + 1


def _candidates(slots: int) -> int:
    """Return how many slots are candidates at a time."""
    return -(-slots // _SHARE)


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
        return LRU(slots, row_of)  # exact, and cheaper than a ranking

    def on_device(self) -> DeviceScores | None:
        return None

    def ranking(self, rows: int, slots: int) -> Ranking:
        return Recency(rows)

    def ranking_bytes(self, rows: int) -> int:
        return Recency.bytes_for(rows)


def lru() -> LRUSpec:
    """Evict the least recently used row: the default, suited to temporal locality."""
    return LRUSpec()
