"""Where the state of an optimizer lies: by row in the records, what rows share with the table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore import initializers
from tierstore._table.table import Table
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

    Attributes:
        table: the table.
        owner: the class of the optimizer.
        step, owned: the scalars that count the steps, and tell whose state this is.
        fields: the field of each state that has values for each row.
        shared: the scalar of each number that all rows share.
        at_random: whether weights round at random.
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
        self._plan = plan
        prefix = "" if field == next(iter(table.fields)) else f"{field}_"
        self.step: str = f"{prefix}step"
        self.owned: str = f"{prefix}optimizer"
        self.owner = owner
        self.fields: dict[str, str] = {key: prefix + key for key in plan.rows}
        self.shared: dict[str, str] = {key: prefix + key for key in plan.shared}
        self.at_random = at_random

    def check_owner(self) -> None:
        """Raise InvalidInputError if the state there is an optimizer's of another class."""
        found = self.table._scalars.get(self.owned)
        if found is not None and found["class"] != self.owner:
            raise InvalidInputError(
                f"table {self.table.name!r} holds the state of {found['class']} after "
                f"{self.steps} steps, which {self.owner} cannot go on from: make the optimizer "
                "with reset=True to drop that state, or go on with the same class"
            )

    def stale(self) -> list[str]:
        """Return the fields of the state there, of any class of optimizer; forget its scalars."""
        scalars = self.table.scalars
        found = scalars.get(self.owned, {"fields": list(self.fields.values()), "scalars": []})
        for name in (self.step, self.owned, *found["scalars"]):
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

    def reset(self) -> None:
        """Write the values that states start from over those of every row, and count anew."""
        for key, kept in self._plan.rows.items():
            for ids in self._blocks():
                values = torch.full((len(ids), kept.dim), kept.initial, dtype=kept.dtype)
                self.table.write(ids, values, self.fields[key])
        for name in (self.step, self.owned, *self.shared.values()):
            self.table.scalars.pop(name, None)

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
        self.table.scalars[self.step] = max(1, self.steps)  # so that late states are read
        for key, name in self.shared.items():
            value = state[key].item() if isinstance(state[key], Tensor) else state[key]
            self.table.scalars[name] = int(value) if key in plan.counts else value

    def _blocks(self) -> Iterator[Tensor]:
        """Yield the ids of all rows, some at a time."""
        for first in range(0, self.table.rows, _BLOCK):
            yield torch.arange(first, min(first + _BLOCK, self.table.rows))

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return int(self.table._scalars.get(self.step, 0))

    def claim(self) -> None:
        """Note whose state this is."""
        self.table.scalars[self.owned] = {
            "class": self.owner,
            "fields": list(self.fields.values()),
            "scalars": list(self.shared.values()),
        }


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
