"""Least recently used, by batch, in time that does not grow with the slots."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import numpy.typing as npt

from tierstore.policy.base import Barred, Rows, Slots
from tierstore.policy.ranked import Keys

__all__ = ["LRU", "Recency"]

_NO_ROWS = np.empty(0, np.int64)


class LRU:
    """Least recently used, exactly; among the slots of one batch chance decides.

    A log holds, batch by batch, the slots each batch touched. A slot's newest batch counts (its
    stamp says which); entries of older ones are stale, and skipped when they come to the front,
    where the victims are. Every entry is appended once and popped once, so the cost is that of the
    batches: victims for 32k misses take 0.6 to 0.8 ms at 1 M and at 16 M slots alike
    (benchmarks/bench_bookkeeping.py).
    """

    keeps_batch = True

    def __init__(self, slots: int) -> None:
        """Start with no slot in use."""
        self._stamp = np.zeros(slots, np.uint32)
        self._log: deque[tuple[Slots, int]] = deque()
        self._entries = 0
        self._now = 1
        self._chance = Random(0)

    @classmethod
    def bytes_for(cls, slots: int) -> int:
        """Most bytes for a number of slots: stamps, and a log of twice as many entries."""
        return 12 * slots

    @property
    def nbytes(self) -> int:
        """Bytes taken now."""
        return int(self._stamp.nbytes + 4 * self._entries)

    def use(self, rows: Rows) -> None:
        """Do nothing: only rows that have a slot count."""

    def announce(self, rows: Rows) -> None:
        """Do nothing."""

    def prime(self, counts: npt.NDArray[np.float32]) -> None:
        """Do nothing: counts say nothing of when."""

    def order(self, rows: Rows) -> None:
        """Return None: all rows of a batch are used at the same time."""

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Note that the current batch uses `slots`, which may repeat."""
        if not slots.size:
            return
        self._stamp.put(slots, self._now, mode="clip")
        self._log.append((slots.astype(np.int32), self._now))
        self._entries += slots.size
        if self._entries > 2 * self._stamp.size:
            self._compact()

    def next_batch(self) -> None:
        """End the current batch."""
        self._now += 1
        if self._now == 2**32 - 1:
            self._renumber()

    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        """Take distinct slots to give up for a leading part of `rows`, longest unused first."""
        count = rows.size
        taken: list[Slots] = []
        passed: list[tuple[Slots, int]] = []
        while count > 0 and self._log and self._log[0][1] != self._now:
            slots, batch = self._oldest()
            if barred is not None:
                held = barred(slots)
                if held.any():
                    passed.append((slots[held], batch))
                    slots = slots[~held]
            if slots.size > count:
                first = self._chance.randrange(slots.size)
                slots = np.concatenate([slots[first:], slots[:first]])
                self._put_back(slots[count:], batch)
                slots = slots[:count]
            slots = self._once(slots)
            self._stamp[slots] = 0
            taken.append(slots)
            count -= slots.size
        for entry in reversed(passed):
            self._put_back(*entry)
        return np.concatenate(taken) if taken else np.empty(0, np.int32)

    def _oldest(self) -> tuple[Slots, int]:
        """Take the oldest batch out of the log; return what it was the last to touch, and when."""
        slots, batch = self._log.popleft()
        parts = [slots]
        while self._log and self._log[0][1] == batch:
            parts.append(self._log.popleft()[0])
        slots = np.concatenate(parts) if len(parts) > 1 else slots
        self._entries -= slots.size
        # `compress` takes a third of the time of indexing with a mask.
        return slots.compress(self._stamp.take(slots, mode="clip") == batch), batch

    def _put_back(self, slots: Slots, batch: int) -> None:
        """Let `slots` be the oldest entry of the log."""
        self._log.appendleft((slots, batch))
        self._entries += slots.size

    def _once(self, slots: Slots) -> Slots:
        """Return each of `slots` once; their stamps are to be set again.

        The stamps serve as scratch: each entry writes its own number, and the one that is read back
        is the one that stands for the slot. No sort is needed.
        """
        at = slots.astype(np.intp)
        number = np.arange(at.size, dtype=np.uint32)
        self._stamp[at] = number
        return slots.compress(self._stamp[at] == number)

    def forget(self, slots: Slots) -> None:
        """Note that `slots` are free."""
        self._stamp[slots] = 0

    def _compact(self) -> None:
        """Drop the stale entries; where more than one a slot are left, drop the repeated ones."""
        log: deque[tuple[Slots, int]] = deque()
        while self._log:
            slots, batch = self._oldest()
            if slots.size:
                log.append((slots, batch))
        if sum(slots.size for slots, _ in log) > self._stamp.size:
            for number, (slots, batch) in enumerate(log):
                once = self._once(slots)
                self._stamp[once] = batch
                log[number] = once, batch
        self._log, self._entries = log, sum(slots.size for slots, _ in log)

    def _renumber(self) -> None:
        """Start counting batches anew, in the same order, before the stamps run out."""
        self._compact()
        self._log = deque((slots, new) for new, (slots, _) in enumerate(self._log, start=1))
        for slots, new in self._log:
            self._stamp[slots] = new
        self._now = len(self._log) + 1


class Recency:
    """The ranking of rows by the batch that used them last, for policies built on a ranking."""

    keeps_batch = True

    def __init__(self, rows: int) -> None:
        """Start with no row used."""
        self._used = np.zeros(rows, np.uint32)
        self._now = 0

    @staticmethod
    def bytes_for(rows: int) -> int:
        """Bytes of a batch number a row."""
        return 4 * rows

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return int(self._used.nbytes)

    def use(self, rows: Rows) -> Rows | None:
        """Note that a batch uses `rows`."""
        self._now += 1
        self._used[rows] = self._now
        return _NO_ROWS

    def keys(self, rows: Rows) -> Keys:
        """Return the numbers of the batches, modulo 2**31."""
        return self._used[rows] & np.uint32(2**31 - 1)

    def bids(self, rows: Rows) -> Keys:
        """Return the keys."""
        return self.keys(rows)

    def announce(self, rows: Rows) -> Rows:
        """Do nothing."""
        return _NO_ROWS

    def prime(self, counts: npt.NDArray[np.float32]) -> None:
        """Do nothing: counts say nothing of when."""
