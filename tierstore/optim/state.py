"""Where the state of an optimizer lies: by row in the records, what rows share with the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore import initializers
from tierstore._table.host import Lease
from tierstore._table.table import Table
from tierstore._table.values import Columns
from tierstore.errors import InvalidInputError
from tierstore.optim.probe import StatePlan
from tierstore.spec import Field

__all__ = ["State", "StoredState", "rounded_at_random"]

_BLOCK = 65_536
_ALL = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9

State = dict[str, Any]
"""The state of a parameter, as a torch optimizer keeps it."""


class StoredState:
    """The state of an optimizer that trains a field of a table.

    What it keeps of a row lies in the row's record, in fields named as the optimizer names it
    (`exp_avg`); the numbers all rows share (`step`) are scalars of the table, of the same names.
    For another field than the first, that field's name comes before (`bias_exp_avg`).
    """

    def __init__(
        self,
        table: Table,
        field: str,
        plan: StatePlan,
        *,
        owner: str,
        at_random: bool = False,
    ) -> None:
        """Bind what a probe has found to a table, for an optimizer whose class is `owner`.

        With `at_random` the weights, bfloat16, are trained in float32 and rounded at random.
        """
        self.table = table
        self._field = field
        self._plan = plan
        self._prefix = "" if field == next(iter(table.fields)) else f"{field}_"
        self._count = f"{self._prefix}step"
        self._owner = owner
        self._owned = f"{self._prefix}optimizer"
        self.fields: dict[str, str] = {key: self._prefix + key for key in plan.rows}
        """The field of each state that has values for each row."""
        self.at_random = at_random
        counts = {self._count: 0, **{self._prefix + k: plan.shared[k] for k in plan.counts}}
        self._counts = tuple(counts.items())
        shared = {self._count, *(self._prefix + key for key in plan.shared)}
        self._shared_names = tuple(sorted(shared))
        self._columns: Columns | None = None
        self._kinds: dict[str, tuple[int, torch.dtype]] = {}

    def check_owner(self) -> None:
        """Raise InvalidInputError if the state there is an optimizer's of another class."""
        found = self.table._scalars.get(self._owned)
        if found is not None and found["class"] != self._owner:
            raise InvalidInputError(
                f"table {self.table.name!r} holds the state of {found['class']} after "
                f"{self.steps} steps, which {self._owner} cannot go on from: make the optimizer "
                "with reset=True to drop that state, or go on with the same class"
            )

    def stale(self) -> list[str]:
        """Return the fields of the state there, of any class of optimizer; forget its scalars."""
        scalars = self.table.scalars
        found = scalars.get(self._owned, {"fields": list(self.fields.values()), "scalars": []})
        for name in (self._count, self._owned, *found["scalars"]):
            scalars.pop(name, None)
        return [name for name in found["fields"] if name in self.table.fields]

    def missing_fields(self) -> dict[str, Field]:
        """Return the state's fields that the table does not have, with the values they start from.

        Raises InvalidInputError if one that it has cannot hold the state.
        """
        missing = {}
        for key, state in self._plan.rows.items():
            name = self.fields[key]
            found = self.table.fields.get(name)
            if found is None:
                dtype = str(state.dtype).removeprefix("torch.")
                missing[name] = Field(state.dim, dtype, initializers.constant(state.initial))
            elif found.dim != state.dim:
                raise InvalidInputError(
                    f"field {name!r} of table {self.table.name!r} has {found.dim} elements, the "
                    f"optimizer's state of that name {state.dim}; another optimizer made it"
                )
        return missing

    def load(self, lease: Lease) -> tuple[Tensor, State]:
        """Return the weights and the optimizer's state for the rows of a lease.

        A state that the optimizer makes of the first gradient is left out before the first step.
        """
        begun = self.steps > 0
        values = lease.read_columns(self._all())
        state: State = {key: self._shared(key, value) for key, value in self._plan.shared.items()}
        for key, kept in self._plan.rows.items():
            if begun or not kept.late:
                found = values[self.fields[key]].to(kept.dtype)
                state[key] = found.reshape(lease.bound, *kept.shape)
        weights = values[self._field]
        return weights.float() if self.at_random else weights, state

    def _all(self) -> Columns:
        """Return the weights and every state of a row, as they lie now."""
        layout = self.table.spec.layout
        if self._columns is None or self._columns.layout is not layout:
            self._columns = Columns(layout, (self._field, *self.fields.values()))
            self._kinds = {
                name: (item.dim, item.element.torch_dtype())
                for name, item in zip(self._columns.names, self._columns.items, strict=True)
            }
        return self._columns

    def _shared(self, key: str, initial: Any) -> Any:
        value = self.table._scalars.get(self._prefix + key, initial)
        if isinstance(initial, Tensor):
            return torch.full_like(initial, float(value))
        return value

    def store(
        self,
        lease: Lease,
        weights: Tensor,
        state: State,
        trained: Tensor | None,
        ids: Callable[[], Tensor],
    ) -> None:
        """Write weights and state of the rows of a lease, of those `trained` if given.

        `ids` returns what decides how the rows round at random; the step is counted by `count`.
        """
        if self.at_random:
            weights = rounded_at_random(weights, ids().to(weights.device), self.steps + 1)
        columns, values = self._all(), {self._field: weights}
        for key, name in self.fields.items():
            dim, dtype = self._kinds[name]
            values[name] = state[key].reshape(lease.bound, dim).to(dtype)
        if trained is not None:
            before = lease.read_columns(columns)
            values = {name: torch.where(trained, values[name], before[name]) for name in values}
        lease.write_columns(columns, values)

    def reset(self) -> None:
        """Write the values that states start from over those of every row, and count anew."""
        for key, kept in self._plan.rows.items():
            for ids in self._blocks():
                values = torch.full((len(ids), kept.dim), kept.initial, dtype=kept.dtype)
                self.table.write(ids, values, self.fields[key])
        for key in ("step", "optimizer", *self._plan.shared):
            self.table.scalars.pop(self._prefix + key, None)

    def take(self, state: Mapping[str, Any]) -> None:
        """Write a state that an optimizer kept of the whole field, as torch's `state_dict` has it.

        Raises InvalidInputError, having written nothing, for a state of another optimizer or shape.
        """
        plan, rows = self._plan, self.table.rows
        if set(state) != {*plan.rows, *plan.shared}:
            raise InvalidInputError(
                f"this state has {', '.join(state) or 'nothing'}; the optimizer keeps "
                f"{', '.join((*plan.rows, *plan.shared)) or 'nothing'}"
            )
        for key, kept in plan.rows.items():
            wanted = (rows, *kept.shape)
            if tuple(state[key].shape) != wanted:
                raise InvalidInputError(
                    f"{key} is {tuple(state[key].shape)}, and the rows of table "
                    f"{self.table.name!r} need {wanted}"
                )
        for key, kept in plan.rows.items():
            values = state[key].reshape(rows, kept.dim)
            for ids in self._blocks():
                self.table.write(ids, values[ids].cpu(), self.fields[key])
        self.table.scalars[self._count] = max(1, self.steps)  # so that late states are read
        for key in plan.shared:
            value = state[key].item() if isinstance(state[key], Tensor) else state[key]
            counts = key in plan.counts
            self.table.scalars[self._prefix + key] = int(value) if counts else value

    def _blocks(self) -> Iterator[Tensor]:
        """Yield the ids of all rows, some at a time."""
        for first in range(0, self.table.rows, _BLOCK):
            yield torch.arange(first, min(first + _BLOCK, self.table.rows))

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return int(self.table._scalars.get(self._count, 0))

    @property
    def shared(self) -> tuple[Any, ...]:
        """What the next step depends on beside rows and options: equal where one step will do."""
        get = self.table._scalars.get
        return tuple([get(name) for name in self._shared_names])

    def count(self, state: State | None = None) -> None:
        """Note that a step was taken, also in the optimizer's own counts.

        Takes the other numbers that rows share from a `state` after the step; without one they stay
        as they are.
        """
        scalars = self.table.scalars
        for name, initial in self._counts:
            scalars[name] = int(scalars.get(name, initial)) + 1
        if self._owned not in scalars:
            shared = [self._prefix + key for key in self._plan.shared]
            fields = list(self.fields.values())
            scalars[self._owned] = {"class": self._owner, "fields": fields, "scalars": shared}
        if state is not None:
            for key in self._plan.shared.keys() - self._plan.counts:
                value = state[key]
                number = value.item() if isinstance(value, Tensor) else value
                scalars[self._prefix + key] = number


def rounded_at_random(values: Tensor, rows: Tensor, step: int) -> Tensor:
    """Return float32 `values` `(n, dim)` of `rows` `(n,)` as bfloat16, on average the same.

    A number between two of bfloat16 becomes the one farther from zero in as many of all cases as
    it is on the way there: a step smaller than half of what bfloat16 tells apart would be lost
    every time otherwise. Only row, element and step decide, so rows round alike on every device and
    with any budget. Infinities and NaN stay.
    """
    bits = values.contiguous().view(torch.int32)
    up = (bits + _noise(rows.to(torch.int64), values.shape[1], step)) & ~0xFFFF
    return torch.where(values.isnan(), values, up.view(torch.float32)).to(torch.bfloat16)


def _noise(rows: Tensor, dim: int, step: int) -> Tensor:
    """Return 16 random bits for each element, int32 `(n, dim)`; step.cu draws the same."""
    low, high = rows & _ALL, rows >> 32
    key = _mixed((_mixed((low + step * _GOLDEN) & _ALL) + high) & _ALL)
    elements = torch.arange(dim, device=rows.device) * _GOLDEN & _ALL
    return (_mixed(key[:, None] ^ elements) >> 16).to(torch.int32)


def _mixed(x: Tensor) -> Tensor:
    """Return a number of 32 bits, in int64, of which every bit depends on every bit of another.

    Shifts and factors: lowbias32, found by C. Wellons' hash prospector (2018, public domain).
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _ALL
    x = (x ^ x >> 15) * 0x846CA68B & _ALL
    return x ^ x >> 16
