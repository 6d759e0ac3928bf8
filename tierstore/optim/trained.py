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
    """

    def __init__(
        self,
        rows: RowsParameter,
        state: StoredState,
        in_place: InPlace | None,
        project: Project | None,
    ) -> None:
        """Bind a parameter to where its state lies."""
        self.rows = rows
        self.state = state
        self._in_place = in_place
        self._project = project

    @property
    def table(self) -> Table:
        """The table."""
        return self.rows.table

    @property
    def name(self) -> str:
        """What the trained rows are called, `table.field`."""
        return f"{self.table.name}.{self.rows.field}"

    def step_in_place(self, gradient: Gradient, options: Mapping[str, Any]) -> bool:
        """Take a step of the optimizer in the slots, if that can be done; see `InPlace.step`."""
        lease = gradient.batch.lease
        if self._in_place is None or lease.device is None:
            return False
        return self._in_place.step(lease, gradient.values, gradient.trained, options)

    def load(self, gradient: Gradient) -> tuple[torch.nn.Parameter, State]:
        """Return a copy of the rows with their gradient, and the optimizer's state for them."""
        gradient.trim()
        weights, state = self.state.load(gradient.batch.lease)
        copy = torch.nn.Parameter(weights)
        copy.grad = gradient.values.to(weights.dtype)
        return copy, state

    def store(self, gradient: Gradient, copy: torch.nn.Parameter, state: State) -> None:
        """Write the copy and its state over the rows, but for those not to be trained."""
        weights = copy.detach()
        if self._project is not None:
            weights = self._project(weights)
        self.state.store(gradient.batch.lease, weights, state, gradient.trained)
