"""What the tiers of a table did over the steps of a run: its counters, sampled now and then."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from tierstore._counters import Occupancy, TierStats
from tierstore.errors import InvalidInputError

__all__ = ["History", "Sample"]


class Measured(Protocol):
    """A table, or whatever counts like one."""

    def stats(self) -> dict[str, TierStats]:
        """Return copies of the counters of each tier."""

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how full each tier is."""


@dataclass(frozen=True)
class Sample:
    """The counters of each tier, and how full they were, after a step."""

    step: int
    stats: dict[str, TierStats]
    occupancy: dict[str, Occupancy]


class History:
    """Samples of a table, in order; `tierstore.plot` draws them.

    >>> history = History(table)
    >>> for step, batch in enumerate(loader):
    ...     train(batch)
    ...     if step % 100 == 0:
    ...         history.sample(step)
    """

    def __init__(self, table: Measured) -> None:
        """Take a first sample, as of step 0."""
        self._table = table
        self.samples: list[Sample] = []
        self.sample(0)

    def sample(self, step: int) -> None:
        """Take a sample after a step. Waits for the GPU, if there is one.

        Raises InvalidInputError for a step before the last one.
        """
        if self.samples and step < self.samples[-1].step:
            raise InvalidInputError(
                f"step {step} comes before step {self.samples[-1].step}, which was sampled last"
            )
        self.samples.append(Sample(step, self._table.stats(), self._table.occupancy()))

    @property
    def tiers(self) -> list[str]:
        """The tiers with a hit rate, nearest first: all but the disk."""
        return [tier for tier in self.samples[0].stats if tier != "disk"]

    def hit_rates(self, tier: str) -> list[tuple[int, float]]:
        """Return the hit rate between samples, with the step it was reached at.

        Over requested ids; samples between which nothing was requested are left out.
        """
        found = []
        for before, after in pairwise(self.samples):
            requested = after.stats[tier].requested - before.stats[tier].requested
            hits = after.stats[tier].hits - before.stats[tier].hits
            if requested:
                found.append((after.step, hits / requested))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return every sample as plain numbers."""
        return {
            "samples": [
                {
                    "step": each.step,
                    "stats": {tier: stats.to_dict() for tier, stats in each.stats.items()},
                    "occupancy": {
                        tier: {"slots": full.slots, "used": full.used, "dirty": full.dirty}
                        for tier, full in each.occupancy.items()
                    },
                }
                for each in self.samples
            ]
        }
