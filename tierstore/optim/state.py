"""Where the state of an optimizer is: by row in records, and what rows share with the table."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore import initializers
from tierstore._table.table import Naming, Table, scalar
from tierstore._tiers.base import ROLLED_BACK
from tierstore.errors import InvalidInputError, counted
from tierstore.optim.float8 import SIGNED, SIZES, Float8
from tierstore.optim.probe import RowState, StatePlan
from tierstore.optim.rounding import Rounding
from tierstore.spec import Field

__all__ = ["State", "StoredState"]

_BLOCK = 65_536

State = dict[str, Any]
"""The state of a parameter, as a torch optimizer keeps it."""

_holders: weakref.WeakKeyDictionary[Table, dict[str, object]] = weakref.WeakKeyDictionary()
"""Who trains each table in this process, by the scalar of steps of the field: one optimizer, or
several that share its state."""


class Handovers:
    """How often the state of a field went from one optimizer of this process to another."""

    count = 0


class StoredState:
    """The state of an optimizer that trains a field of a table.

    What it keeps of a row is in the row's record, in fields with the optimizer's names (`exp_avg`);
    the numbers all rows share (`step`) are scalars of the table, of the same names. For another
    field than the first, that field's name comes before (`bias_exp_avg`).

    Attributes:
        table: the table.
        owner: the class of the optimizer.
        step, owned: the scalars that count the steps, and tell whose state this is.
        fields: the field of each state that has values for each row.
        shared: the scalar of each number that all rows share.
        rounding: what rounds at random: weights, and the state of rows.
        float8: the types of states that are kept in float8; a single number of a row never is.
        columns: the first column of each state of a row, for its random bits.
        anew: whether to start with none, as in torch, if what is there is of another optimizer of
            this process; see `begin`.
    """

    def __init__(
        self,
        table: Table,
        field: str,
        plan: StatePlan,
        *,
        owner: str,
        rounding: Rounding,
    ) -> None:
        """Bind what a probe has found to a table, for an optimizer whose class is `owner`."""
        self.table = table
        self._plan = plan
        prefix = "" if field == next(iter(table.fields)) else f"{field}_"
        self.step: str = f"{prefix}step"
        self.owned: str = f"{prefix}optimizer"
        self.owner = owner
        self.fields: dict[str, str] = {key: prefix + key for key in plan.rows}
        self.shared: dict[str, str] = {key: prefix + key for key in plan.shared}
        self.rounding = rounding
        self.columns: dict[str, int] = rounding.columns(list(plan.rows))
        self.float8: dict[str, Float8] = {
            key: SIGNED if state.signed else SIZES
            for key, state in plan.rows.items()
            if rounding.states == "float8" and self.is_narrow(key) and state.dim > 1
        }
        self.anew: bool = bool(plan.rows or plan.shared)
        self._has_state = self.anew
        self._begun_at: tuple[Any, Naming] | None = None
        self._token: object = object()

    def begin(self) -> int:
        """Note that an optimizer trains the field; drop the state of another one, if `anew`.

        Returns the steps of what is dropped. The next commit drops it for good; a rollback before
        brings it back, so call this at each step while `anew` is true.
        """
        holders = _holders.setdefault(self.table, {})
        if not self.anew:
            self._token = holders.setdefault(self.step, self._token)  # the state is shared
            return 0
        if self._begun_at is not None:
            self.check_holder()
        elif holders.get(self.step, self._token) is self._token:
            self.anew = False  # what is there is of no other optimizer of this process
        self.hold()
        if not self.anew:
            return 0
        store, steps = self.table.store, 0
        before, self._begun_at = self._begun_at, (store and store.version, Naming(self.table))
        if before is None:
            steps = self.steps
            if steps:
                self.reset()
        elif before[0] != self._begun_at[0]:
            self.anew = False
        elif before[1].lost() == ROLLED_BACK:
            self.reset()
        return steps

    def hold(self) -> None:
        """Note that the state there is this optimizer's, and no other's of this process."""
        holders = _holders.setdefault(self.table, {})
        if holders.get(self.step) is not self._token:
            holders[self.step] = self._token
            Handovers.count += 1

    def check_holder(self) -> None:
        """Raise InvalidInputError if another optimizer has put its state in place of this one's."""
        found = _holders.get(self.table, {}).get(self.step, self._token)
        if self._has_state and found is not self._token:
            raise InvalidInputError(
                f"the state that this {self.owner} kept in table {self.table.name!r} is gone: "
                "another optimizer of this process has trained these rows since, and rows keep the "
                "state of one. Train a layer by one optimizer, with groups for other rates; or "
                "call reset_state() to go on without state, or load_state_dict(); or make both "
                "with state='continue' to share the state"
            )

    def check_owner(self) -> None:
        """Raise InvalidInputError if the state there is of another class or another type."""
        found = scalar(self.table, self.owned)
        if found is not None and found["class"] != self.owner:
            raise InvalidInputError(
                f"table {self.table.name!r} holds the state of {found['class']} after "
                f"{counted(self.steps, 'step')}, which {self.owner} cannot go on from: make the "
                "optimizer with reset=True to drop that state, or go on with the same class"
            )
        if found is not None and found.get("state_dtype") != self.state_dtype:
            raise InvalidInputError(
                f"table {self.table.name!r} holds state that was trained with state_dtype="
                f"{found.get('state_dtype')!r}, which state_dtype={self.state_dtype!r} cannot go "
                "on from: make the optimizer with reset=True to drop that state, or go on with the "
                "same type"
            )

    @property
    def state_dtype(self) -> str | None:
        """The type that the state of rows is rounded to at random, if it is."""
        return self.rounding.states

    def is_narrow(self, key: str) -> bool:
        """Whether a state of rows is rounded at random."""
        return self.rounding.states is not None and self._plan.rows[key].dtype == torch.float32

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
            name, wanted = self.fields[key], self._field(key, state)
            found = self.table.fields.get(name)
            if found is None:
                missing[name] = wanted
            elif found.dim != state.dim:
                raise InvalidInputError(
                    f"field {name!r} of table {self.table.name!r} has {found.dim} elements, the "
                    f"optimizer's state of that name {state.dim}; another optimizer made it"
                )
            elif (self.is_narrow(key) or found.scaled) and found.form != wanted.form:
                raise InvalidInputError(
                    f"field {name!r} of table {self.table.name!r} is {found.form}, and state_dtype="
                    f"{self.state_dtype!r} asks for {wanted.form}: make the optimizer with "
                    "reset=True to drop that state, or with the state_dtype that it has"
                )
        return missing

    def _field(self, key: str, state: RowState) -> Field:
        """Return the field that is made for a state."""
        if key in self.float8:
            return self.float8[key].field(state.dim, state.initial)
        dtype = "bfloat16" if self.is_narrow(key) else str(state.dtype).removeprefix("torch.")
        return Field(state.dim, dtype, initializers.constant(state.initial))

    def _written(self, key: str, values: Tensor) -> Tensor:
        """Return values of a state in a type that its field takes, rounded to the nearest."""
        if key in self.float8:
            return values.float()
        return values.to(torch.bfloat16 if self.is_narrow(key) else self._plan.rows[key].dtype)

    def reset(self) -> None:
        """Write the values that states start from over those of every row, and count anew."""
        for key, kept in self._plan.rows.items():
            for ids in self._blocks():
                values = torch.full((len(ids), kept.dim), kept.initial)
                self.table.write(ids, self._written(key, values), self.fields[key])
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
                block = self._written(key, values[ids].cpu())
                self.table.write(ids, block, self.fields[key])
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
        return int(scalar(self.table, self.step, 0))

    def claim(self) -> None:
        """Record whose state this is."""
        self.table.scalars[self.owned] = {
            "class": self.owner,
            "fields": list(self.fields.values()),
            "scalars": list(self.shared.values()),
        } | ({} if self.state_dtype is None else {"state_dtype": self.state_dtype})
