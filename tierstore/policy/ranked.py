"""Frees the slots with the lowest scores, for any ranking of rows.

A ranking assigns a monotone 32-bit key to each row. Each slot has a copy of its row's key, so
victims are found in one pass over an array. The pass collects the victims of several batches at
once; slots whose keys change meanwhile are removed or added.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from tierstore.policy.base import Barred, Lookup, Policy, PolicySpec, Rows, Slots

Keys = npt.NDArray[np.uint32]

NO_ROWS = np.empty(0, np.int64)

_FREE = np.uint32(2**32 - 1)
_HELD = np.uint32(2**32 - 2)
_SAMPLE = 1 << 16
_NONE = np.empty(0, np.int32)
_AT_ONCE = 8
_SHARE = 64


class Ranking(ABC):
    """The scores of rows: keys, higher for rows that are more likely to be used.

    Keys are below 2**31, so that another ranking may use higher ones, and always below 2**32 - 2.
    """

    keeps_batch = True
    """Whether rows that the current batch uses stay regardless of their scores."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes taken."""

    @abstractmethod
    def use(self, rows: Rows) -> Rows | None:
        """Record that a batch uses `rows`; return other rows with changed keys, None for all."""

    @abstractmethod
    def keys(self, rows: Rows) -> Keys:
        """Return the keys of `rows`."""

    def admission_keys(self, rows: Rows) -> Keys:
        """Return the keys by which `rows` of the current batch compete for a slot."""
        return self.keys(rows)

    def grow(self, rows: int) -> None:
        """Have `rows` rows instead of fewer, the new ones not used yet."""

    def announce(self, rows: Rows) -> Rows:
        """Announce that a future batch will use `rows`; return the rows with changed keys."""
        return NO_ROWS

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        """Replace the history of rows from `start` on by `counts` of uses; all keys may change."""


class RankedSpec(PolicySpec, ABC):
    """A policy based on a ranking of rows, which lookahead can use for unannounced rows."""

    @abstractmethod
    def ranking(self, rows: int, slots: int) -> Ranking:
        """Return a new ranking for a tier."""

    @abstractmethod
    def ranking_bytes(self, rows: int) -> int:
        """Bytes of the ranking."""

    def bytes_for(self, rows: int, slots: int) -> int:
        return Ranked.bytes_for(slots) + self.ranking_bytes(rows)

    def make(self, rows: int, slots: int, lookup: Lookup, row_of: npt.NDArray[np.int64]) -> Policy:
        return Ranked(self.ranking(rows, slots), lookup, row_of)


class Ranked(Policy):
    """A policy based on a ranking of rows; `lookup` and `row_of` are those of the tier."""

    def __init__(self, ranking: Ranking, lookup: Lookup, row_of: npt.NDArray[np.int64]) -> None:
        """Start with no slot in use."""
        self.ranking = ranking
        self.keeps_batch: bool = ranking.keeps_batch
        self._lookup = lookup
        self._row_of = row_of
        self._keys = np.full(row_of.size, _FREE)
        self._held: list[Slots] = []
        self._pool = _NONE
        self._joined: list[Slots] = []
        self._bound = np.uint32(0)

    @staticmethod
    def bytes_for(slots: int) -> int:
        """Bytes in addition to the ranking: one key per slot."""
        return 4 * slots

    @property
    def nbytes(self) -> int:
        return int(self._keys.nbytes) + self.ranking.nbytes

    def use(self, rows: Rows) -> None:
        changed = self.ranking.use(rows)
        if changed is None:
            self._revalue_all()
        else:
            self._revalue(changed)

    def grow(self, rows: int) -> None:
        self.ranking.grow(rows)

    def announce(self, rows: Rows) -> None:
        self._revalue(self.ranking.announce(rows))

    def prime(self, counts: npt.NDArray[np.float32], start: int = 0) -> None:
        self.ranking.prime(counts, start)
        self._revalue_all()

    def _revalue_all(self) -> None:
        used = np.flatnonzero(self._keys < _HELD)
        self._keys[used] = self.ranking.keys(self._row_of[used])
        self._pool = _NONE
        self._joined.clear()
        self._bound = np.uint32(0)

    def _revalue(self, rows: Rows) -> None:
        """Update the keys of the slots of `rows`."""
        slots = self._lookup(rows)
        slots = slots[slots >= 0]
        self._assign(slots[self._keys[slots] < _HELD])

    def _assign(self, slots: Slots) -> None:
        """Set the keys of slots to those of their rows."""
        keys = self.ranking.keys(self._row_of[slots])
        self._keys[slots] = keys
        low = slots[keys <= self._bound]
        if low.size:
            self._joined.append(low)

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Hold `slots` until the batch ends, and then set their keys."""
        if done and not self.keeps_batch:
            self._assign(slots)
            return
        self._keys[slots] = _HELD
        self._held.append(slots)

    def next_batch(self) -> None:
        for slots in self._held:
            self._assign(slots[self._keys[slots] == _HELD])
        self._held.clear()

    def forget(self, slots: Slots) -> None:
        self._keys[slots] = _FREE

    def order(self, rows: Rows) -> npt.NDArray[np.intp]:
        return np.argsort(~self.ranking.keys(rows), kind="stable")

    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        slots = self._least(rows.size, barred)
        if not force:
            scores = self.ranking.admission_keys(rows[: slots.size])
            slots = slots[: np.argmin(np.append(scores > self._keys[slots], False))]
        self._keys[slots] = _FREE
        return slots

    def _least(self, count: int, barred: Barred | None) -> Slots:
        """Return up to `count` evictable slots with the lowest keys, in ascending order of keys."""
        if self._joined:
            pool = np.sort(np.concatenate([self._pool, *self._joined]))
            self._pool = pool[np.diff(pool, prepend=-1) > 0]
            self._joined.clear()
        self._pool = self._pool[self._keys[self._pool] <= self._bound]
        may_go = _allowed(self._pool, barred)
        wanted = max(_AT_ONCE * count, self._keys.size // _SHARE)
        while may_go.size < count:
            self._pool = self._smallest(wanted)
            self._bound = self._keys[self._pool].max(initial=0)
            may_go = _allowed(self._pool, barred)
            if self._pool.size < wanted:
                break
            wanted *= 2
        keys = self._keys[may_go]
        if may_go.size > count:
            least = np.argpartition(keys, count)[:count]
            may_go, keys = may_go[least], keys[least]
        return may_go[np.argsort(keys, kind="stable")]

    def _smallest(self, count: int) -> Slots:
        """Return the `count` slots with the lowest keys, or all used slots if fewer, unordered.

        A sample of the keys gives a bound with slightly more than `count` keys below it; one pass
        finds these.
        """
        if count <= 0:
            return _NONE
        sample = self._keys[:: -(-self._keys.size // _SAMPLE)]
        share = count / self._keys.size
        while True:
            place = int(sample.size * share * 1.1) + 8
            bound = _HELD if place >= sample.size else np.partition(sample, place)[place]
            below = np.flatnonzero(self._keys < bound)
            if below.size > count:
                least = np.argpartition(self._keys[below], count)[:count]
                return below[least].astype(np.int32)
            if bound >= _HELD:
                return below.astype(np.int32)
            equal = np.flatnonzero(self._keys == bound)
            if below.size + equal.size >= count:
                return np.concatenate([below, equal[: count - below.size]]).astype(np.int32)
            share = min(1.0, 2 * share + 64 / sample.size)


def _allowed(slots: Slots, barred: Barred | None) -> Slots:
    return slots if barred is None else slots[~barred(slots)]
