"""A field under training, of a table or of several: how a step reads, updates and writes rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierstore._table.table import Scalars
from tierstore._table.values import Columns
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Gradient
from tierstore.nn.average import Average
from tierstore.nn.rows import RowsParameter, own_ids
from tierstore.optim.float8 import Float8
from tierstore.optim.in_place import InPlace
from tierstore.optim.probe import StatePlan
from tierstore.optim.rounding import rounded_at_random
from tierstore.optim.state import Handovers, State, StoredState

__all__ = ["Project", "Share", "TrainedField"]

Project = Callable[[Tensor], Tensor]
"""What becomes of the rows of a step, `(distinct rows, dim)`, before they are written."""


class _Alike(NamedTuple):
    """Tables with the same options, after as many steps.

    Attributes:
        group: the number of the group of options.
        tables: their numbers; the first one stands for all.
        scalars: of all of them.
    """

    group: int
    tables: list[int]
    scalars: Scalars


@dataclass
class Share:
    """What one step is taken for.

    Attributes:
        of: the tables.
        trained: bool `(rows, 1)`, which rows of the gradient are theirs; None for all.
    """

    of: _Alike
    trained: Tensor | None


class TrainedField:
    """A field under training, of a table or of tables that are trained as one.

    Steps are counted by table, and a table whose ids are not in a batch takes no part in its step.
    As long as all that do have taken as many steps, with the same options, one step is for all.

    Attributes:
        rows: the parameter of the layers over it.
        states: for each table, where the optimizer's state for it is, under the same names.
        group: the number of the group of options, of tables that no other group names.
        groups: the group of each table that a group names, by number of the table.
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
        """Bind a parameter to the place of its state."""
        self.rows = rows
        self.states: tuple[StoredState, ...] = tuple(states)
        self.group: int | None = None
        self.groups: dict[int, int] = {}
        self._scalars = Scalars([state.table for state in states])
        self._owners = self._scalars.of_each(states[0].owned)
        self._parted: tuple[frozenset[int], list[_Alike], list[Scalars]] | None = None
        self._owned: list[Any] | None = None
        """The owners of the tables' state when `check_owner` found no fault, if all are known."""
        self.held: int | None = None
        """How often states had changed hands when `check_holder` found no fault: `Handovers`."""
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

    def assign(self, group: int, number: int | None = None) -> None:
        """Train a table with a group of options; None stands for all that no other group names."""
        if number is None:
            self.group = group
        else:
            self.groups[number] = group
        self._parted = None

    def check_owner(self) -> None:
        """Raise InvalidInputError if the state of a table is of another class or another type."""
        first = self.states[0]
        try:
            owned: list[Any] | None = list(self._owners())
        except KeyError:
            owned = None
        if owned is not None and owned == self._owned:
            return
        own = first.owner, first.rounding.states
        for number, state in enumerate(self.states):
            (found,) = self._scalars.of_table(number, [first.owned])
            if found is not None and (found["class"], found.get("state_dtype")) != own:
                state.check_owner()
        self._owned = owned

    def check_holder(self) -> None:
        """Raise InvalidInputError if another optimizer of this process replaced the state."""
        for state in self.states:
            state.check_holder()
        self.held = Handovers.count

    # Nothing below calls a function of this library for each table of a batch, and C code does what
    # is done for each: otherwise it would be a large part of a small step over many tables.

    def shares(self, gradient: Gradient) -> list[Share]:
        """Return the steps that are to be taken, usually one."""
        parted, names = self._parted, self._told_apart
        if (
            parted is None
            or (parted[0] is not gradient.touched and parted[0] != gradient.touched)
            or not all(map(Scalars.agree, parted[2], repeat(names)))
        ):
            found = self._part(gradient.touched)
            several = [alike.scalars for alike in found if len(alike.tables) > 1]
            parted = self._parted = gradient.touched, found, several
        found = parted[1]
        if len(found) == 1 and len(found[0].tables) == len(gradient.touched):
            return [Share(found[0], gradient.trained)]
        return self._apart(gradient, found)

    def _part(self, touched: frozenset[int]) -> list[_Alike]:
        """Return the trained tables of a batch, those that are alike together."""
        names, found = self._told_apart, dict[tuple[Any, ...], list[int]]()
        for number in sorted(touched):
            group = self.groups.get(number, self.group)
            if group is not None:
                key = group, *self._scalars.of_table(number, names)
                found.setdefault(key, []).append(number)
        return [
            _Alike(key[0], numbers, self._scalars.of(numbers)) for key, numbers in found.items()
        ]

    def _apart(self, gradient: Gradient, found: list[_Alike]) -> list[Share]:
        """Return shares that have their own rows each."""
        rows = gradient.batch.distinct
        tables = self.rows.table.location.tables_of(rows)
        share_of = torch.full((len(self.states),), -1)
        for number, alike in enumerate(found):
            share_of[alike.tables] = number
        shares = share_of.to(rows.device)[tables][:, None]
        made = []
        for number, alike in enumerate(found):
            trained = shares == number
            if gradient.trained is not None:
                trained &= gradient.trained[: len(rows)]  # the lease may have been trimmed since
            made.append(Share(alike, trained))
        return made

    def step_in_place(
        self, gradient: Gradient, share: Share, options: Mapping[str, Any], *, last: bool
    ) -> bool:
        """Take a step of the optimizer in the slots, if that can be done; see `InPlace.step`.

        `last`: nothing but this step needs the lease any more.
        """
        lease = gradient.batch.lease
        if self._in_place is None:
            return False
        before = None if self._ema is None else self._averages[0].before(lease)
        first, values = self.states[share.of.tables[0]], gradient.values
        step = int(share.of.scalars.get(first.step, 0)) + 1
        if not self._in_place.step(
            lease,
            values,
            share.trained,
            options,
            step,
            lambda: self._own_ids(gradient),
            ends=last and before is None,
            zeros=gradient.zeros if last else None,
        ):
            return False
        self._finish(gradient, share, before)
        return True

    def load(self, gradient: Gradient, share: Share) -> tuple[torch.nn.Parameter, State]:
        """Return a copy of the rows with their gradient, and the optimizer's state for them.

        A state that the optimizer makes of the first gradient is left out before the first step.
        """
        lease, first = gradient.batch.lease, self.states[share.of.tables[0]]
        if lease.device is not None:
            gradient.trim()
        if share.trained is not None:
            share.trained = share.trained[: lease.bound]
        values, scalars = lease.read_columns(self._all()), share.of.scalars
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
        first, columns = self.states[share.of.tables[0]], self._columns or self._all()
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
        """Return the weights and every state of a row, where they are now."""
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
        averaged: dict[str, Any] = {}
        if self._ema is not None and before is not None:
            # A row of padding is averaged like others; one of another table is not.
            trained = share.trained if len(self.states) > 1 else None
            first = self._averages[share.of.tables[0]]
            averaged = first.update(gradient.batch.lease, before, self._ema, trained)
        alike, kept = share.of, self.states[share.of.tables[0]]
        earlier = alike.scalars
        numbers: dict[str, Any] = {}
        for name, initial in self._counts:
            numbers[name] = int(earlier.get(name, initial)) + 1
        if state is not None:
            for key in self._plan.shared.keys() - self._plan.counts:
                value = state[key]
                numbers[kept.shared[key]] = value.item() if isinstance(value, Tensor) else value
        numbers |= averaged
        alike.scalars.update(numbers)
        if self._owned is None:
            for number in alike.tables:
                if self._scalars.of_table(number, [kept.owned]) == (None,):
                    self.states[number].claim()

    def _own_ids(self, gradient: Gradient) -> Tensor:
        """Return the id of each row of a gradient in its own table."""
        return own_ids(self.rows, gradient.batch.distinct[: gradient.batch.lease.bound])

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
