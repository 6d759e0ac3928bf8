"""A field under training, of a table or of several: how a step reads, updates and writes rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore._table.joint import JointTable
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Gradient
from tierstore.nn.average import Average
from tierstore.nn.rows import RowsParameter
from tierstore.optim.in_place import InPlace
from tierstore.optim.state import State, StoredState

__all__ = ["Project", "Share", "TrainedField"]

Project = Callable[[Tensor], Tensor]
"""What becomes of the rows of a step, `(distinct rows, dim)`, before they are written."""


@dataclass
class Share:
    """What one step is taken for: tables with the same options, after as many steps.

    Attributes:
        group: the number of the group of options.
        tables: their numbers; the first one stands for all.
        trained: bool `(rows, 1)`, which rows of the gradient are theirs; None for all.
    """

    group: int
    tables: list[int]
    trained: Tensor | None


class TrainedField:
    """A field under training, of a table or of tables that are trained as one.

    Steps are counted by table, and a table whose ids are not in a batch takes no part in its step.
    As long as all that do have taken as many steps, with the same options, one step is for all.

    Attributes:
        rows: the parameter of the layers over it.
        states: for each table, where the optimizer's state for it lies.
        group: the number of the group of options, of tables that no other group names.
        groups: that of those that one names, by number of the table.
    """

    def __init__(
        self,
        rows: RowsParameter,
        states: Sequence[StoredState],
        in_place: InPlace | None,
        project: Project | None,
        ema: float | None,
    ) -> None:
        """Bind a parameter to where its state lies."""
        self.rows = rows
        self.states: tuple[StoredState, ...] = tuple(states)
        self.group: int | None = None
        self.groups: dict[int, int] = {}
        self._in_place = in_place
        self._project = project
        self._ema = ema
        self._averages = [Average(table, rows.field) for table in rows.tables]

    def covers(self, whole: Sequence[RowsParameter]) -> bool:
        """Whether a group that names some fields whole is for the rest of its tables."""
        return self.group is None and any(each is self.rows for each in whole)

    def shares(self, gradient: Gradient) -> list[Share]:
        """Return the steps that are to be taken, usually one."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for number in sorted(gradient.touched):
            group = self.groups.get(number, self.group)
            if group is not None:
                averaged = None if self._ema is None else self._averages[number].steps
                key = group, averaged, self.states[number].shared
                found.setdefault(key, []).append(number)
        if len(found) == 1 and sum(map(len, found.values())) == len(gradient.touched):
            ((key, tables),) = found.items()
            return [Share(key[0], tables, gradient.trained)]
        return self._apart(gradient, [(key[0], tables) for key, tables in found.items()])

    def _apart(self, gradient: Gradient, found: list[tuple[int, list[int]]]) -> list[Share]:
        """Return shares that have their own rows each."""
        rows = gradient.batch.distinct
        tables = self.rows.table.location.tables_of(rows)
        share_of = torch.full((len(self.states),), -1)
        for number, (_, numbers) in enumerate(found):
            share_of[numbers] = number
        shares = share_of.to(rows.device)[tables][:, None]
        made = []
        for number, (group, numbers) in enumerate(found):
            trained = shares == number
            if gradient.trained is not None:
                trained &= gradient.trained
            made.append(Share(group, numbers, trained))
        return made

    def step_in_place(self, gradient: Gradient, share: Share, options: Mapping[str, Any]) -> bool:
        """Take a step of the optimizer in the slots, if that can be done; see `InPlace.step`."""
        lease = gradient.batch.lease
        if self._in_place is None or lease.device is None:
            return False
        before = None if self._ema is None else self._averages[0].before(lease)
        first, values = self.states[share.tables[0]], gradient.values
        step = first.steps + 1
        if not self._in_place.step(
            lease, values, share.trained, options, step, lambda: self._own_ids(gradient)
        ):
            return False
        self._finish(gradient, share, before)
        return True

    def load(self, gradient: Gradient, share: Share) -> tuple[torch.nn.Parameter, State]:
        """Return a copy of the rows with their gradient, and the optimizer's state for them."""
        gradient.trim()
        if share.trained is not None:
            share.trained = share.trained[: gradient.batch.lease.bound]
        weights, state = self.states[share.tables[0]].load(gradient.batch.lease)
        copy = torch.nn.Parameter(weights)
        copy.grad = gradient.values.to(weights.dtype)
        return copy, state

    def store(
        self, gradient: Gradient, share: Share, copy: torch.nn.Parameter, state: State
    ) -> None:
        """Write the copy and its state over the rows of a share."""
        lease, weights = gradient.batch.lease, copy.detach()
        if self._project is not None:
            weights = self._projected(self._project, weights)
        before = None if self._ema is None else self._averages[0].before(lease)
        first = self.states[share.tables[0]]
        first.store(lease, weights, state, share.trained, lambda: self._own_ids(gradient))
        self._finish(gradient, share, before, state)

    def _finish(
        self,
        gradient: Gradient,
        share: Share,
        before: dict[str, Tensor] | None,
        state: State | None = None,
    ) -> None:
        """Count the step of a share, and average its rows, given what they were before."""
        if self._ema is not None and before is not None:
            # A row of padding is averaged like others; one of another table is not.
            trained = share.trained if len(self.states) > 1 else None
            lease, first = gradient.batch.lease, self._averages[share.tables[0]]
            first.update(lease, before, self._ema, trained)
            for number in share.tables:
                self._averages[number].count(self._ema)
        for number in share.tables:
            self.states[number].count(state)

    def _own_ids(self, gradient: Gradient) -> Tensor:
        """Return the id of each row of a gradient in its own table."""
        rows = gradient.batch.distinct[: gradient.batch.lease.bound]
        if not isinstance(self.rows.table, JointTable):
            return rows
        own: Tensor = self.rows.table.location.own(rows)
        return own

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
