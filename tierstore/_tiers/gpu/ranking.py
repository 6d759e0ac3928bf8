"""What rows are worth to a GPU tier whose policy is not recency.

The device keeps a float a row. A batch adds the same gain to each row that it uses, and the rows of
least worth go first. Gains that grow by a constant factor from batch to batch are aged frequency;
without gains, the counts that were given stay.
"""

from __future__ import annotations

from tierstore._tiers.gpu.abi import Arguments, BatchArgument
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.gpu.order import Order
from tierstore.policy import Choice
from tierstore.policy.frequency import count_keys

__all__ = ["Worth", "goes_by_worth"]


_TURNOVERS = 4
_LARGEST = 2.0**64


def goes_by_worth(policy: Choice | None) -> bool:
    """Whether a policy needs a float a row and one a slot; recency does not."""
    return policy is not None and _below(policy).name != "lru"


def _below(policy: Choice) -> Choice:
    """Return what ranks rows that no prefetch announced; announced ones are pinned."""
    return policy if policy.on is None else policy.on


class Worth:
    """How worth grows; the policies are "lfu" and "static", or lookahead on these."""

    def __init__(self, policy: Choice, memory: GpuMemory, order: Order) -> None:
        """Check the counts of a static policy, and bring them to the device."""
        below = _below(policy)
        self._memory = memory
        self._order = order
        self._half_life = below.half_life
        self._weight = 1.0
        self._grows = below.name != "static"
        if not self._grows:
            memory.value(count_keys(below.counts, memory.argument.rows))

    def gain(self, ids: int) -> float:
        """Return what a use by the batch that begins, of so many ids, is worth."""
        if not self._grows:
            return 0.0
        if self._weight > _LARGEST:
            self._rescale()
        gain = self._weight
        slots = self._memory.argument.capacity
        half_life = self._half_life or max(_TURNOVERS * slots / max(ids, 1), 1 / 16)
        self._weight *= 2 ** (1 / half_life)
        return gain

    def _rescale(self) -> None:
        """Let all worth be what it would be if the next gain were 1."""
        tier = self._memory.argument
        arguments = Arguments(tier, BatchArgument(gain=1 / self._weight))
        self._order.launch("rescale", arguments, tier.rows, self._order.stream)
        self._weight = 1.0
