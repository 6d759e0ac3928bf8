"""Replaying a stream through the library's own slots and policies: who would have hit, and when.

A batch uses its distinct rows. Those that are kept are hits; the others go through staging, so a
batch may be larger than the tier. Afterwards the policy decides which rows of the tier and of the
batch stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvalidInputError
from tierstore.policy import Choice
from tierstore.sizing.streams import Batch, Stream
from tierstore.slots import CachedSlots
from tierstore.stats import Hits

__all__ = ["Rates", "Replay", "replay"]


@dataclass
class Rates(Hits):
    """What was counted over the batches that are measured, beside `Hits`.

    Attributes:
        batches: how many.
        evictions: rows that made room for others.
    """

    batches: int = 0
    evictions: int = 0

    @property
    def misses_per_batch(self) -> float:
        """Distinct rows a batch that come from the tier below."""
        return (self.unique - self.unique_hits) / self.batches if self.batches else 0.0

    @property
    def evictions_per_batch(self) -> float:
        """Rows a batch that make room; those that changed go to the tier below."""
        return self.evictions / self.batches if self.batches else 0.0

    def count(self, batch: Batch, hit: npt.NDArray[np.bool_], evictions: int) -> None:
        """Add a batch."""
        self.batches += 1
        self.requested += int(batch.counts.sum())
        self.hits += int(batch.counts[hit].sum())
        self.unique += batch.rows.size
        self.unique_hits += int(hit.sum())
        self.evictions += evictions


class Replay:
    """A tier without records.

    `leases`: batches are leased, as in training, so that every row of a batch is admitted.
    `chance`: where a policy values all rows of a batch alike, chance decides which rows stay of a
    batch that exceeds the tier; the tier itself prefers hits, and rows that repeat.
    """

    def __init__(
        self, rows: int, slots: int, policy: Choice, *, leases: bool = False, chance: bool = False
    ) -> None:
        """Start empty."""
        if slots < 1:
            raise InvalidInputError(f"a tier has at least one slot, not {slots}")
        self._slots = CachedSlots(rows, min(slots, rows), policy, _take)
        self._leases = leases
        alike = self._slots.order(np.arange(1)) is None
        self._chance = np.random.default_rng(0) if chance and alike else None

    def announce(self, batch: Batch) -> None:
        """Say that `batch` comes after those announced before."""
        self._slots.announce(batch.rows)

    def use(self, batch: Batch) -> tuple[npt.NDArray[np.bool_], int]:
        """Run a batch; return which of its rows hit, and how many rows were evicted."""
        slots, rows = self._slots, batch.rows
        slots.use(rows)
        places = slots.lookup(rows)
        hit = places >= 0
        stay, wanted = hit, ~hit
        if self._chance is not None and rows.size > slots.row_of.size:
            chosen = np.zeros(rows.size, np.bool_)
            chosen[self._chance.permutation(rows.size)[: slots.row_of.size]] = True
            slots.release(places[hit & ~chosen])
            stay, wanted = hit & chosen, ~hit & chosen
        slots.touch(places[stay], done=not self._leases)
        evictions = self._admit(rows[wanted], batch.counts[wanted]) if wanted.any() else 0
        slots.next_batch()
        return hit, evictions

    def _admit(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> int:
        """Give slots to those of `rows`, absent, that are worth it; return how many rows went."""
        slots = self._slots
        if rows.size > slots.row_of.size:
            rows = rows[np.argsort(-counts, kind="stable")]
        order = slots.order(rows)
        rows = rows if order is None else rows[order]
        free = slots.free(rows)
        victims = slots.victims(rows[free.size :], force=self._leases)
        slots.evict(victims)
        free = np.concatenate([free, victims])
        slots.bind(rows[: free.size], free)
        return int(victims.size)


def replay(
    stream: Stream,
    policy: Choice,
    slots: int,
    *,
    leases: bool = False,
    chance: bool = False,
    depth: int = 4,
    measured: float = 0.5,
) -> Rates:
    """Replay a stream through a tier; count over the last part `measured` (0..1) of its batches.

    `depth` batches are announced ahead where the policy looks ahead; see Replay for the rest.
    """
    tier = Replay(stream.rows, slots, policy, leases=leases, chance=chance)
    rates, announced = Rates(), 0
    first = first_measured(stream, measured)
    for number, batch in enumerate(stream.batches):
        if policy.name == "lookahead":
            for coming in stream.batches[announced : number + depth + 1]:
                tier.announce(coming)
            announced = max(announced, number + depth + 1)
        hit, evictions = tier.use(batch)
        if number >= first:
            rates.count(batch, hit, evictions)
    return rates


def first_measured(stream: Stream, measured: float) -> int:
    """Return the first batch that counts."""
    if not 0 < measured <= 1:
        raise InvalidInputError(f"the measured part is above 0 and at most 1, not {measured}")
    return min(int(len(stream.batches) * (1 - measured)), len(stream.batches) - 1)


def _take(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
    return np.zeros(size, dtype)
