"""A field of a table under training: how a step reads, updates and writes its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore._table.table import Table
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Gradient
from tierstore.nn.average import Average
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
        ema: float | None,
    ) -> None:
        """Bind a parameter to where its state lies."""
        self.rows = rows
        self.state = state
        self._in_place = in_place
        self._project = project
        self._ema = ema
        self._average = Average(rows.table, rows.field)

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
        before = None if self._ema is None else self._average.before(lease)
        if not self._in_place.step(lease, gradient.values, gradient.trained, options):
            return False
        if self._ema is not None and before is not None:
            self._average.update(lease, before, self._ema)
        return True

    def load(self, gradient: Gradient) -> tuple[torch.nn.Parameter, State]:
        """Return a copy of the rows with their gradient, and the optimizer's state for them."""
        gradient.trim()
        weights, state = self.state.load(gradient.batch.lease)
        copy = torch.nn.Parameter(weights)
        copy.grad = gradient.values.to(weights.dtype)
        return copy, state

    def store(self, gradient: Gradient, copy: torch.nn.Parameter, state: State) -> None:
        """Write the copy and its state over the rows, but for those not to be trained."""
        lease, weights = gradient.batch.lease, copy.detach()
        if self._project is not None:
            weights = self._projected(self._project, weights)
        before = None if self._ema is None else self._average.before(lease)
        self.state.store(lease, weights, state, gradient.trained)
        if self._ema is not None and before is not None:
            self._average.update(lease, before, self._ema)

    def _projected(self, project: Project, weights: Tensor) -> Tensor:
        """Return what is to be written; raises InvalidInputError for another shape."""
        found = project(weights)
        if not isinstance(found, Tensor) or found.shape != weights.shape:
            given = tuple(found.shape) if isinstance(found, Tensor) else found
            raise InvalidInputError(
                f"project takes and returns the rows of a step, {tuple(weights.shape)}; it "
                f"returned {given}"
            )
        return found.to(weights.dtype)
