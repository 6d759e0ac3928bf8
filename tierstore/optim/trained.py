"""A field of a table under training: how a step reads, updates and writes its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore._table.table import Table
from tierstore.nn.autograd import Gradient
from tierstore.nn.rows import RowsParameter
from tierstore.optim.in_place import InPlace
from tierstore.optim.state import State, StoredState

__all__ = ["Project", "TrainedField"]

Project = Callable[[Tensor], Tensor]
"""What becomes of the rows of a step, `(distinct rows, dim)`, before they are written."""


class TrainedField:
    """A field of a table under training.

    Attributes:
        rows: the parameter of the layers over it.
        state: where the optimizer's state for it lies.
        gradient: of the rows that the step under way updates.
        copy: an ordinary parameter of these rows for the torch optimizer.
    """

    def __init__(
        self,
        rows: RowsParameter,
        state: StoredState,
        in_place: InPlace | None,
        project: Project | None,
    ) -> None:
        """Start without a step under way."""
        self.rows = rows
        self.state = state
        self._in_place = in_place
        self._project = project
        self.gradient: Gradient
        self.copy: torch.nn.Parameter

    @property
    def table(self) -> Table:
        """The table."""
        return self.rows.table

    @property
    def name(self) -> str:
        """What the trained rows are called, `table.field`."""
        return f"{self.table.name}.{self.rows.field}"

    def begin(self, gradient: Gradient | None) -> bool:
        """Take what the next step is to use; return whether there is any."""
        if gradient is None:
            return False
        self.gradient = gradient
        return True

    def step_in_place(self, options: Mapping[str, Any]) -> bool:
        """Take a step of the optimizer in the slots, if that can be done; see `InPlace.step`."""
        gradient = self.gradient
        lease = gradient.batch.lease
        if self._in_place is None or lease.device is None:
            return False
        return self._in_place.step(lease, gradient.values, gradient.trained, options)

    def load(self) -> State:
        """Copy the rows into `copy`, with their gradient; return the optimizer's state for them."""
        self.gradient.trim()
        weights, state = self.state.load(self.gradient.batch.lease)
        self.copy = torch.nn.Parameter(weights)
        self.copy.grad = self.gradient.values.to(weights.dtype)
        return state

    def store(self, state: State) -> None:
        """Write the copy and its state over the rows, but for those not to be trained."""
        weights = self.copy.detach()
        if self._project is not None:
            weights = self._project(weights)
        self.state.store(self.gradient.batch.lease, weights, state, self.gradient.trained)

    def end(self) -> None:
        """Drop what the step needed."""
        self.__dict__.pop("gradient", None)
        self.__dict__.pop("copy", None)
