"""The scores by which a GPU tier ranks rows where its policy is not recency."""

from __future__ import annotations

from tierstore._tiers.gpu.abi import BatchArgument, BatchArguments
from tierstore._tiers.gpu.launcher import OWN, Launcher
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore.policy.base import DeviceScores

__all__ = ["Scores"]


class Scores:
    """The scores of a GPU tier, driven by its policy: two numbers a batch.

    The device keeps a float a row. A batch adds `on_use` to each row that it uses, and gives a row
    that takes a slot `on_arrival`, if that is not 0; the rows of least score go first.
    """

    def __init__(self, scores: DeviceScores, memory: GpuMemory, launcher: Launcher) -> None:
        """Bring the first scores to the device; raises InvalidInputError for unfit counts."""
        self._scores = scores
        self._memory = memory
        self._launcher = launcher
        self._on_arrival = 0.0
        first = scores.first(memory.argument.rows)
        if first is not None:
            memory.score(first)

    def begin(self, ids: int, batch: BatchArgument, *, uses: bool) -> None:
        """Set what `batch`, of so many ids, does to scores.

        A prefetch does not use its rows: they arrive as those of the last batch did.
        """
        if not uses:
            batch.on_use, batch.on_arrival = 0.0, self._on_arrival
            return
        tier = self._memory.argument
        step = self._scores.step(ids, tier.capacity)
        if step.rescale != 1:
            arguments = BatchArguments(tier, BatchArgument(rescale=step.rescale))
            self._launcher.launch(OWN.RESCALE, arguments, tier.rows, self._launcher.stream)
        batch.on_use = step.on_use
        batch.on_arrival = self._on_arrival = step.on_arrival
