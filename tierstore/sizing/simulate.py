"""Miss-ratio curves: what every policy would have hit at every size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tierstore.errors import InvalidInputError
from tierstore.policy import PolicyLike, choose
from tierstore.sizing.optimum import next_uses, optimum
from tierstore.sizing.replay import Rates, replay
from tierstore.sizing.streams import Stream

__all__ = ["OPTIMUM", "SIZES", "Point", "Simulation", "simulate"]

OPTIMUM = "optimum"
SIZES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Parts of the table's rows that are tried where no sizes are given."""


@dataclass(frozen=True)
class Point:
    """One policy at one size; rates are 0..1, the others rows a batch."""

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
        rows: of the table.
        batches, measured_batches: how many were replayed, and counted.
        ids_per_batch, unique_per_batch: mean ids of a batch, and distinct rows.
        points: policy by policy, size by size.
    """

    rows: int
    batches: int
    measured_batches: int
    ids_per_batch: float
    unique_per_batch: float
    points: tuple[Point, ...]

    @property
    def policies(self) -> list[str]:
        """The policies, in the order they were asked for, the optimum last."""
        return list(dict.fromkeys(point.policy for point in self.points))

    def curve(self, policy: str) -> list[Point]:
        """Return the points of one policy, by size."""
        return [point for point in self.points if point.policy == policy]

    def to_dict(self) -> dict[str, Any]:
        """Return what `tierstore simulate --json` prints."""
        data = asdict(self)
        data["points"] = list(data["points"])
        return data


def simulate(
    stream: Stream,
    *,
    policies: Sequence[PolicyLike] | Mapping[str, PolicyLike] = ("lru", "lfu"),
    sizes: Sequence[float | int] = SIZES,
    with_optimum: bool = True,
    leases: bool = False,
    chance: bool = False,
    depth: int = 4,
    measured: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> Simulation:
    """Replay a stream through policies and sizes.

    Args:
        stream: from `load_stream` or `stream_of`.
        policies: names or values, as for `tierstore.open`; or a dict from a name of your own.
        sizes: slots (int), or parts of the rows (float in 0..1].
        with_optimum: add what nothing can beat (Belady, with bypass).
        leases: batches are leased, as in training, rather than read.
        chance: which rows of a batch stay that alone exceeds the tier is left to chance.
        depth: batches announced ahead, for policies that look ahead.
        measured: the last part of the batches that counts; the rest fills the tier.
        progress: called with replays done and in all.
    """
    named = policies if isinstance(policies, Mapping) else {choose(p).name: p for p in policies}
    counts = {_slots(size, stream.rows): None for size in sizes}
    if not counts:
        raise InvalidInputError("give at least one size")
    total = len(counts) * (len(named) + with_optimum)
    points: list[Point] = []

    def add(policy: str, slots: int, rates: Rates) -> None:
        points.append(_point(policy, slots, stream.rows, rates))
        if progress is not None:
            progress(len(points), total)

    rates = Rates()
    for name, policy in named.items():
        for slots in counts:
            rates = replay(
                stream, choose(policy), slots,
                leases=leases, chance=chance, depth=depth, measured=measured,
            )  # fmt: skip
            add(name, slots, rates)
    uses = next_uses(stream) if with_optimum else []
    for slots in counts if with_optimum else ():
        rates = optimum(stream, slots, uses, measured=measured)
        add(OPTIMUM, slots, rates)
    return Simulation(
        rows=stream.rows,
        batches=len(stream.batches),
        measured_batches=rates.batches,
        ids_per_batch=stream.ids / len(stream.batches),
        unique_per_batch=stream.unique,
        points=tuple(points),
    )


def _slots(size: float | int, rows: int) -> int:
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise InvalidInputError(f"a part of the rows is above 0 and at most 1, not {size}")
        return max(1, int(rows * size))
    if size < 1:
        raise InvalidInputError(f"a tier has at least one slot, not {size}")
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
