"""Replays the row ids of a stream through tiers of any size, and compares with the optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _html
from tierstore._html import brief
from tierstore._progress import Overall, Shown, shown
from tierstore._tiers.slots import CachedSlots
from tierstore.errors import InvalidInputError
from tierstore.policy import PolicyLike, PolicySpec, choose
from tierstore.sizing.streams import DistinctRows, Stream
from tierstore.stats import Hits, tally

NEVER = np.iinfo(np.int32).max


def next_uses(stream: Stream) -> list[npt.NDArray[np.int32]]:
    """Return, for each row of each batch, the number of the next batch that uses it, or NEVER."""
    due = np.full(stream.rows, NEVER, np.int32)
    found: list[npt.NDArray[np.int32]] = []
    for number in range(len(stream.batches) - 1, -1, -1):
        rows = stream.batches[number].rows
        found.append(due[rows])
        due[rows] = number
    return found[::-1]


def optimum(
    stream: Stream,
    slots: int,
    uses: list[npt.NDArray[np.int32]] | None = None,
    *,
    measured: float = 0.5,
    progress: Shown = None,
) -> Rates:
    """Replay a stream with the optimal policy; pass `uses` to reuse it for many sizes.

    `progress` is called with the number of batches replayed and the total.
    """
    progress = shown(progress)
    uses = next_uses(stream) if uses is None else uses
    due = np.full(stream.rows, NEVER, np.int32)
    kept = np.zeros(stream.rows, np.bool_)
    held = np.empty(0, np.int64)
    rates, first = Rates(), first_measured(stream, measured)
    for number, batch in enumerate(stream.batches):
        hit = kept[batch.rows]
        due[batch.rows] = uses[number]
        candidates = np.concatenate([held, batch.rows[~hit]])
        candidates = candidates[due[candidates] != NEVER]
        if candidates.size > slots:
            candidates = candidates[np.argpartition(due[candidates], slots - 1)[:slots]]
        kept[held] = False
        kept[candidates] = True
        evictions = int(np.count_nonzero(~kept[held]))
        held = candidates
        if number >= first:
            rates.count(batch, hit, evictions)
        if progress is not None:
            progress(number + 1, len(stream.batches))
    return rates


@dataclass
class Rates(Hits):
    """Counters of the measured batches, in addition to `Hits`.

    Attributes:
        batches: number of measured batches.
        evictions: rows evicted to make room for others.
    """

    batches: int = 0
    evictions: int = 0

    @property
    def misses_per_batch(self) -> float:
        """Distinct rows per batch that are loaded from the tier below."""
        return (self.unique - self.unique_hits) / self.batches if self.batches else 0.0

    @property
    def evictions_per_batch(self) -> float:
        """Rows evicted per batch; changed ones are written to the tier below."""
        return self.evictions / self.batches if self.batches else 0.0

    def count(self, batch: DistinctRows, hit: npt.NDArray[np.bool_], evictions: int) -> None:
        """Add a batch."""
        tally(
            self,
            batches=1,
            requested=int(batch.counts.sum()),
            hits=int(batch.counts[hit].sum()),
            unique=batch.rows.size,
            unique_hits=int(hit.sum()),
            evictions=evictions,
        )


class Replay:
    """A tier without records.

    `leases`: batches are leased, as in training, so every row of a batch that fits is admitted.
    `chance`: if a policy ranks all rows of a batch equally and the batch exceeds the tier, the rows
    that stay are chosen at random; a real tier prefers hits and repeated rows.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        policy: PolicySpec,
        *,
        leases: bool = False,
        chance: bool = False,
    ) -> None:
        """Start empty."""
        if slots < 1:
            raise InvalidInputError(f"a tier needs at least one slot, not {slots}")
        self._slots = CachedSlots(rows, min(slots, rows), policy, _take)
        self._leases = leases
        alike = self._slots.order(np.arange(1)) is None
        self._chance = np.random.default_rng(0) if chance and alike else None

    def announce(self, batch: DistinctRows) -> None:
        """Announce `batch` as the next one after those already announced."""
        self._slots.announce(batch.rows)

    def use(self, batch: DistinctRows) -> tuple[npt.NDArray[np.bool_], int]:
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
        evictions = 0
        if wanted.any():
            force = self._leases and slots.fits(rows.size)
            evictions = self._admit(rows[wanted], batch.counts[wanted], force=force)
        slots.next_batch()
        return hit, evictions

    def _admit(
        self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], *, force: bool
    ) -> int:
        """Give slots to absent `rows` that outrank their victims; return how many were evicted."""
        slots = self._slots
        if rows.size > slots.row_of.size:
            rows = rows[np.argsort(-counts, kind="stable")]
        order = slots.order(rows)
        rows = rows if order is None else rows[order]
        free = slots.free(rows)
        victims = slots.victims(rows[free.size :], force=force)
        slots.evict(victims)
        free = np.concatenate([free, victims])
        slots.bind(rows[: free.size], free)
        return int(victims.size)


def replay(
    stream: Stream,
    policy: PolicySpec,
    slots: int,
    *,
    leases: bool = False,
    chance: bool = False,
    depth: int = 4,
    measured: float = 0.5,
    progress: Shown = None,
) -> Rates:
    """Replay a stream through a tier; count the last fraction `measured` (0..1) of its batches.

    `depth` batches are announced ahead if the policy looks ahead; see Replay for the other
    arguments. `progress` is called with the number of batches replayed and the total.
    """
    progress = shown(progress)
    tier = Replay(stream.rows, slots, policy, leases=leases, chance=chance)
    rates, announced = Rates(), 0
    first = first_measured(stream, measured)
    for number, batch in enumerate(stream.batches):
        if policy.looks_ahead:
            for coming in stream.batches[announced : number + depth + 1]:
                tier.announce(coming)
            announced = max(announced, number + depth + 1)
        hit, evictions = tier.use(batch)
        if number >= first:
            rates.count(batch, hit, evictions)
        if progress is not None:
            progress(number + 1, len(stream.batches))
    return rates


def first_touches(stream: Stream, measured: float) -> float:
    """Return the distinct rows per measured batch that no earlier batch used."""
    seen, first = np.zeros(stream.rows, np.bool_), first_measured(stream, measured)
    count = 0
    for number, batch in enumerate(stream.batches):
        if number >= first:
            count += int(np.count_nonzero(~seen[batch.rows]))
        seen[batch.rows] = True
    return count / max(1, len(stream.batches) - first)


def first_measured(stream: Stream, measured: float) -> int:
    """Return the number of the first counted batch."""
    if not 0 < measured <= 1:
        raise InvalidInputError(f"measured must be above 0 and at most 1, not {measured}")
    return min(int(len(stream.batches) * (1 - measured)), len(stream.batches) - 1)


def _take(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
    return np.zeros(size, dtype)


OPTIMUM = "optimum"
POLICIES = ("lru", "lfu")
"""Policies to compare by default."""

SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Default sizes, as fractions of the table's rows."""


LOAD = {"rows in memory": "slots", "of all": "share", "hit rate": "hit_rate"}
LOAD |= {"of distinct": "unique_hit_rate", "misses a batch": "misses_per_batch"}
"""What notebooks show of a size and of a tier: headings and attributes."""


@dataclass(frozen=True)
class Point:
    """One policy at one size; rates are 0..1, other values are rows per batch."""

    policy: str
    slots: int
    share: float
    hit_rate: float
    unique_hit_rate: float
    misses_per_batch: float
    evictions_per_batch: float


@dataclass(frozen=True)
class Simulation:
    """The curves of a stream.

    Attributes:
        rows: number of rows of the table.
        batches, measured_batches: number of replayed and of counted batches.
        ids_per_batch, unique_per_batch: mean number of ids and of distinct rows per batch.
        first_touch_rate: fraction of the distinct rows of the counted batches that no earlier batch
            asked for: a tier of any size misses those.
        points: results ordered by policy, then size.
    """

    __repr__ = brief

    rows: int
    batches: int
    measured_batches: int
    ids_per_batch: float
    unique_per_batch: float
    first_touch_rate: float
    points: tuple[Point, ...]

    @property
    def policies(self) -> list[str]:
        """The policies in the order requested, the optimum last."""
        return list(dict.fromkeys(point.policy for point in self.points))

    def curve(self, policy: str) -> list[Point]:
        """Return the points of one policy, by size."""
        return sorted((p for p in self.points if p.policy == policy), key=lambda p: p.slots)

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks."""
        caption = (
            f"{self.measured_batches:,} of {self.batches:,} batches, each of "
            f"{self.ids_per_batch:,.0f} ids and {self.unique_per_batch:,.0f} distinct rows, "
            f"{self.first_touch_rate:.1%} of which come for the first time"
        )
        return _html.table_of(caption, {"policy": "policy", **LOAD}, self.points)

    def to_dict(self) -> dict[str, Any]:
        """Return what `tierstore simulate --json` prints."""
        data = asdict(self)
        data["points"] = list(data["points"])
        return data


def simulate(
    stream: Stream,
    *,
    policies: Sequence[PolicyLike] | Mapping[str, PolicyLike] = POLICIES,
    sizes: Sequence[float | int] = SIZES,
    with_optimum: bool = True,
    leases: bool = False,
    chance: bool = False,
    depth: int = 4,
    measured: float = 0.5,
    progress: Shown = None,
) -> Simulation:
    """Replay a stream through policies and sizes.

    Args:
        stream: from `load_stream` or `stream_of`.
        policies: names or values, as for `tierstore.open`, or a dict from custom names to these.
        sizes: slots (int), or fractions of the rows (float in 0..1].
        with_optimum: add the optimal policy (Belady, with bypass).
        leases: lease batches, as in training, rather than read them.
        chance: choose at random which rows stay of a batch that exceeds the tier.
        depth: number of batches announced ahead, for policies that look ahead.
        measured: the fraction of batches, at the end, that is counted; earlier batches warm up the
            tier.
        progress: called with the number of batches replayed and the total, of all replays.
    """
    named = policies if isinstance(policies, Mapping) else {choose(p).name: p for p in policies}
    counts = {_slots(size, stream.rows): None for size in sizes}
    if not counts:
        raise InvalidInputError("give at least one size")
    replays = len(counts) * (len(named) + with_optimum)
    report = Overall(shown(progress), replays * len(stream.batches))
    points: list[Point] = []

    def add(policy: str, slots: int, rates: Rates) -> None:
        points.append(_point(policy, slots, stream.rows, rates))
        report.passed(len(stream.batches))

    rates = Rates()
    for name, policy in named.items():
        for slots in counts:
            rates = replay(
                stream, choose(policy), slots,
                leases=leases, chance=chance, depth=depth, measured=measured, progress=report,
            )  # fmt: skip
            add(name, slots, rates)
    uses = next_uses(stream) if with_optimum else []
    for slots in counts if with_optimum else ():
        rates = optimum(stream, slots, uses, measured=measured, progress=report)
        add(OPTIMUM, slots, rates)
    report.finish()
    return Simulation(
        rows=stream.rows,
        batches=len(stream.batches),
        measured_batches=rates.batches,
        ids_per_batch=stream.ids / len(stream.batches),
        unique_per_batch=stream.unique,
        first_touch_rate=first_touches(stream, measured) * rates.batches / max(1, rates.unique),
        points=tuple(points),
    )


def _slots(size: float | int, rows: int) -> int:
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise InvalidInputError(f"a fraction of rows must be above 0 and at most 1, not {size}")
        return max(1, int(rows * size))
    if size < 1:
        raise InvalidInputError(f"a tier needs at least one slot, not {size}")
    return min(size, rows)


def _point(policy: str, slots: int, rows: int, rates: Rates) -> Point:
    return Point(
        policy=policy,
        slots=slots,
        share=slots / rows,
        hit_rate=rates.hit_rate,
        unique_hit_rate=rates.unique_hit_rate,
        misses_per_batch=rates.misses_per_batch,
        evictions_per_batch=rates.evictions_per_batch,
    )
