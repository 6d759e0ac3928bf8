"""The rows of a table that a step updates, from the gradients that backward passes left."""

from __future__ import annotations

from collections import deque

import torch

from tierstore.nn.batch import Gradient, merged
from tierstore.optim.state import State, StoredState
from tierstore.table import Table
from tierstore.table.access import Lease

__all__ = ["Compact", "TrainedField"]


class TrainedField:
    """A field of a table under training.

    Attributes:
        table: the table.
        field: the name of the field.
        state: where the optimizer's state for it lies.
        gradients: what backward passes left since the last `gather`, in their order.
        compact: the rows that got a gradient, between a backward pass and a step.
    """

    def __init__(self, table: Table, field: str, state: StoredState) -> None:
        """Start without a gradient."""
        self.table = table
        self.field = field
        self.state = state
        self.gradients: list[Gradient] = []
        self.compact: Compact | None = None
        self._abandoned: deque[Lease] = deque()

    @property
    def name(self) -> str:
        """What the trained rows are called, `table.field`."""
        return f"{self.table.name}.{self.field}"

    def gather(self) -> bool:
        """Merge the gradients that have come into `compact`; return whether it is another one."""
        if not self.gradients and (self.compact is None or self.compact.usable):
            return False
        parts = [*(self.compact.gradients() if self.compact else ()), *self.gradients]
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
        while self._abandoned:
            self._abandoned.popleft().release()


class Compact:
    """Distinct rows as a parameter of their own, `(bound, dim)`, with their gradient."""

    def __init__(self, of: TrainedField, gradient: Gradient) -> None:
        """Make the parameter; its values are undefined before `refresh` or `load`."""
        self._of = of
        self._batch = gradient.batch
        self._trained = gradient.trained
        self.parameter = torch.nn.Parameter(torch.empty_like(gradient.values))
        self.parameter.grad = gradient.values

    @property
    def usable(self) -> bool:
        """Whether its rows can be read and written, or it has no gradient for them."""
        return self.parameter.grad is None or self._batch.usable

    def gradients(self) -> list[Gradient]:
        """Return the gradient as clipping and the like have left it, none if it was taken away."""
        grad = self.parameter.grad
        return [] if grad is None else [Gradient(self._batch, grad, self._trained)]

    def refresh(self) -> None:
        """Let the parameter have the values that its rows have now."""
        self.parameter.data = self._batch.lease.read(self._of.field)

    def load(self) -> State:
        """Refresh, and return the optimizer's state for these rows."""
        self.refresh()
        return self._of.state.load(self._batch.lease)

    def store(self, state: State) -> None:
        """Write the parameter and its state over the rows, but for those not to be trained."""
        lease, weights = self._batch.lease, self.parameter.detach()
        if self._trained is not None:
            weights = torch.where(self._trained, weights, lease.read(self._of.field))
        self._of.state.store(lease, state, self._trained)
        lease.write(self._of.field, weights)

    def release(self) -> None:
        """Let the rows go."""
        self._batch.release()
