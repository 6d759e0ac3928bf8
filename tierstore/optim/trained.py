"""A field under training, of a table or of several: how a step reads, updates and writes rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore._table.joint import JointTable
from tierstore._table.values import Columns
from tierstore.distributed import DistributedStore
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Gradient
from tierstore.nn.average import Average
from tierstore.nn.rows import RowsParameter
from tierstore.optim.float8 import Float8
from tierstore.optim.in_place import InPlace
from tierstore.optim.probe import StatePlan
from tierstore.optim.rounding import rounded_at_random
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
        states: for each table, where the optimizer's state for it lies, under the same names.
        group: the number of the group of options, of tables that no other group names.
        groups: that of those that one names, by number of the table.
    """

    def __init__(
        self,
        rows: RowsParameter,
        states: Sequence[StoredState],
        plan: StatePlan,
        in_place: InPlace | None,
        project: Project | None,
        ema: float | None,
    ) -> None:
        """Bind a parameter to where its state lies."""
        self.rows = rows
        self.states: tuple[StoredState, ...] = tuple(states)
        self.group: int | None = None
        self.groups: dict[int, int] = {}
        self._plan = plan
        self._in_place = in_place
        self._project = project
        self._ema = ema
        self._tables = rows.tables
        self._averages = [Average(table, rows.field) for table in self._tables]
        first = states[0]
        counts = {first.step: 0, **{first.shared[key]: plan.shared[key] for key in plan.counts}}
        self._counts = tuple(counts.items())
        told_apart = {first.step, *first.shared.values()}
        if ema is not None:
            told_apart.add(self._averages[0].count_name)
        self._told_apart = tuple(sorted(told_apart))
        self._columns: Columns | None = None
        self._kinds: dict[str, tuple[int, torch.dtype]] = {}

    def covers(self, whole: Sequence[RowsParameter]) -> bool:
        """Whether a group that names some fields whole is for the rest of its tables."""
        return self.group is None and any(each is self.rows for each in whole)

    def check_owner(self) -> None:
        """Raise InvalidInputError if the state of a table is an optimizer's of another class."""
        for state in self.states:
            found = state.table._scalars.get(state.owned)
            if found is not None and found["class"] != state.owner:
                state.check_owner()

    # Nothing below calls a function of this library for each table of a batch.

    def shares(self, gradient: Gradient) -> list[Share]:
        """Return the steps that are to be taken, usually one."""
        tables, names = self._tables, self._told_apart
        found: dict[tuple[Any, ...], list[int]] = {}
        for number in sorted(gradient.touched):
            group = self.groups.get(number, self.group)
            if group is not None:
                key = group, *map(tables[number]._scalars.get, names)
                found.setdefault(key, []).append(number)
        if len(found) == 1:
            ((key, numbers),) = found.items()
            if len(numbers) == len(gradient.touched):
                return [Share(key[0], numbers, gradient.trained)]
        return self._apart(gradient, [(key[0], numbers) for key, numbers in found.items()])

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
        if self._in_place is None:
            return False
        before = None if self._ema is None else self._averages[0].before(lease)
        first, values = self.states[share.tables[0]], gradient.values
        step = int(first.table._scalars.get(first.step, 0)) + 1
        if not self._in_place.step(
            lease, values, share.trained, options, step, lambda: self._own_ids(gradient)
        ):
            return False
        self._finish(gradient, share, before)
        return True

    def load(self, gradient: Gradient, share: Share) -> tuple[torch.nn.Parameter, State]:
        """Return a copy of the rows with their gradient, and the optimizer's state for them.

        A state that the optimizer makes of the first gradient is left out before the first step.
        """
        lease, first = gradient.batch.lease, self.states[share.tables[0]]
        if lease.device is not None:
            gradient.trim()
        if share.trained is not None:
            share.trained = share.trained[: lease.bound]
        values, scalars = lease.read_columns(self._all()), first.table._scalars
        begun, state = scalars.get(first.step, 0) > 0, {}
        for key, initial in self._plan.shared.items():
            value = scalars.get(first.shared[key], initial)
            is_tensor = isinstance(initial, Tensor)
            state[key] = torch.full_like(initial, float(value)) if is_tensor else value
        for key, kept in self._plan.rows.items():
            if begun or not kept.late:
                found, form = values[first.fields[key]], first.float8.get(key)
                found = found.to(kept.dtype) if form is None else form.values(found, kept.dim)
                state[key] = found.reshape(lease.bound, *kept.shape)
        weights = values[self.rows.field]
        copy = torch.nn.Parameter(weights.float() if first.rounding.weights else weights)
        copy.grad = gradient.values.to(copy.dtype)
        return copy, state

    def store(
        self, gradient: Gradient, share: Share, copy: torch.nn.Parameter, state: State
    ) -> None:
        """Write the copy and its state over the rows of a share."""
        lease, weights = gradient.batch.lease, copy.detach()
        first, columns = self.states[share.tables[0]], self._columns or self._all()
        if self._project is not None:
            weights = self._projected(self._project, weights)
        before = None if self._ema is None else self._averages[0].before(lease)
        own = self._own_ids(gradient).to(weights.device) if first.rounding else None

        def rounded(exact: Tensor, column: int, form: Float8 | None = None) -> Tensor:
            step, seed = first.steps + 1, first.rounding.seed
            how = rounded_at_random if form is None else form.rounded
            return how(exact, own, step, seed=seed, column=column)

        values = {self.rows.field: rounded(weights, 0) if first.rounding.weights else weights}
        for key, name in first.fields.items():
            dim, dtype = self._kinds[name]
            kept = state[key].reshape(lease.bound, dim)
            if first.is_narrow(key):
                values[name] = rounded(kept, first.columns[key], first.float8.get(key))
            else:
                values[name] = kept.to(dtype)
        if share.trained is not None:
            old = lease.read_columns(columns)
            values = {name: torch.where(share.trained, values[name], old[name]) for name in values}
        lease.write_columns(columns, values)
        self._finish(gradient, share, before, state)

    def _all(self) -> Columns:
        """Return the weights and every state of a row, as they lie now."""
        layout = self.rows.table.spec.layout
        if self._columns is None or self._columns.layout is not layout:
            names = (self.rows.field, *self.states[0].fields.values())
            self._columns = Columns(layout, names, raw=True)
            self._kinds = {
                name: (item.dim, item.element.torch_dtype())
                for name, item in zip(names, self._columns.items, strict=True)
            }
        return self._columns

    def _finish(
        self,
        gradient: Gradient,
        share: Share,
        before: dict[str, Tensor] | None,
        state: State | None = None,
    ) -> None:
        """Count the step of a share, and average its rows, given what they were before.

        Takes the other numbers that rows share from a `state` after the step; without one they stay
        as they are.
        """
        averaged = {}
        if self._ema is not None and before is not None:
            # A row of padding is averaged like others; one of another table is not.
            trained = share.trained if len(self.states) > 1 else None
            first = self._averages[share.tables[0]]
            averaged = first.update(gradient.batch.lease, before, self._ema, trained)
        numbers = {}
        if state is not None:
            for key in self._plan.shared.keys() - self._plan.counts:
                value = state[key]
                value = value.item() if isinstance(value, Tensor) else value
                numbers[self.states[0].shared[key]] = value
        for number in share.tables:
            kept = self.states[number]
            scalars = kept.table._scalars
            for name, initial in self._counts:
                scalars[name] = int(scalars.get(name, initial)) + 1
            scalars.update(numbers)
            scalars.update(averaged)
            if kept.owned not in scalars:
                kept.claim()
            kept.table._owner.touched.scalars[kept.table.name] = None

    def _own_ids(self, gradient: Gradient) -> Tensor:
        """Return the id of each row of a gradient in its own table."""
        own = gradient.batch.distinct[: gradient.batch.lease.bound]
        if isinstance(self.rows.table, JointTable):
            own = self.rows.table.location.own(own)
        owner = self.rows.table._owner
        if isinstance(owner, DistributedStore) and owner.ranks > 1:
            own = owner.ids_of(own)
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
