"""The rows of a table that a step updates, from the gradients that backward passes left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tierstore.nn.batch import Abandoned, Gradient, merged
from tierstore.optim.in_slot import InSlot
from tierstore.optim.state import State, StoredState
from tierstore.table import Table

__all__ = ["Compact", "TrainedField"]


class TrainedField:
    """A field of a table under training.

    Attributes:
        table: the table.
        field: the name of the field.
        state: where the optimizer's state for it lies.
        in_slot: takes steps without copying rows, where it can; None where that is not wanted.
        gradients: what backward passes left since the last `gather`, in their order.
        compact: the rows that got a gradient, between a backward pass and a step.
    """

    def __init__(
        self, table: Table, field: str, state: StoredState, in_slot: InSlot | None
    ) -> None:
        """Start without a gradient."""
        self.table = table
        self.field = field
        self.state = state
        self.in_slot = in_slot
        self.gradients: list[Gradient] = []
        self.compact: Compact | None = None
        self._abandoned = Abandoned()

    @property
    def name(self) -> str:
        """What the trained rows are called, `table.field`."""
        return f"{self.table.name}.{self.field}"

    def gather(self) -> bool:
        """Merge the gradients that have come into `compact`; return whether it is another one."""
        if not self.gradients and (self.compact is None or self.compact.usable):
            return False
        before = None if self.compact is None else self.compact.gradient
        parts = [*(() if before is None else (before,)), *self.gradients]
        self.gradients.clear()
        whole = parts[0]
        if len(parts) > 1 or not whole.batch.usable:
            whole = merged(self.table, parts, self._abandoned)
            for part in parts:
                part.batch.release()
        self.compact = Compact(self, whole)
        return True

    def clear(self) -> None:
        """Give up the gradients and let their rows go."""
        for gradient in self.gradients:
            gradient.batch.release()
        self.gradients.clear()
        if self.compact is not None:
            self.compact.release()
        self.compact = None
        self._abandoned.release()


class Compact:
    """Distinct rows with their gradient, as a parameter of their own where somebody wants one."""

    def __init__(self, of: TrainedField, gradient: Gradient) -> None:
        """Take the gradient of a batch; nothing is read yet."""
        self._of = of
        self._gradient = gradient
        self._parameter: torch.nn.Parameter | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The rows, `(distinct rows, dim)`, with their gradient; on a GPU this may wait once."""
        if self._parameter is None:
            self._gradient.trim()
            rows = self._gradient.batch.lease.read(self._of.field)
            self._parameter = self._made(self._of.state.computed(rows))
        return self._parameter

    def _made(self, rows: Tensor) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(rows)
        parameter.grad = self._gradient.values.to(rows.dtype)
        return parameter

    @property
    def gradient(self) -> Gradient | None:
        """The gradient as clipping and the like have left it, None if it was taken away."""
        if self._parameter is None:
            return self._gradient
        grad = self._parameter.grad
        return None if grad is None else replace(self._gradient, values=grad)

    @property
    def usable(self) -> bool:
        """Whether its rows can be read and written, or it has no gradient for them."""
        return self.gradient is None or self._gradient.batch.usable

    def step(self, options: Mapping[str, Any]) -> bool:
        """Take a step of the optimizer in the slots, if that can be done; see `InSlot.step`."""
        gradient, in_slot = self.gradient, self._of.in_slot
        if gradient is None or in_slot is None:
            return False
        return in_slot.step(gradient.batch.lease, gradient.values, gradient.trained, options)

    def load(self) -> State:
        """Let the parameter be what its rows are now; return the optimizer's state for them."""
        self._gradient.trim()
        rows, state = self._of.state.load(self._gradient.batch.lease)
        if self._parameter is None:
            self._parameter = self._made(rows)
        else:
            self._parameter.data = rows
        return state

    def store(self, state: State) -> None:
        """Write the parameter and its state over the rows, but for those not to be trained."""
        lease, weights = self._gradient.batch.lease, self.parameter.detach()
        self._of.state.store(lease, weights, state, self._gradient.trained)

    def release(self) -> None:
        """Let the rows go."""
        self._gradient.batch.release()
