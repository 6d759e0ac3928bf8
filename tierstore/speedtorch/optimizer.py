"""State of an optimizer for the rows of a batch, in and out: what all optimizer factories do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from tierstore import initializers
from tierstore._dtypes import check_dtype
from tierstore._table.table import Table
from tierstore.errors import InvalidInputError, UnknownNameError
from tierstore.optim.probe import StatePlan, probe
from tierstore.spec import Field
from tierstore.speedtorch.base import (
    Held,
    Where,
    as_numpy,
    check_table,
    flat_ids,
    load_npz,
    save_npz,
)
from tierstore.speedtorch.model import home_of

__all__ = ["OptimizerRows"]


class OptimizerRows(Held):
    """The state that an optimizer keeps of each row of an embedding, for all rows.

    The optimizer holds that of a batch: `beforeForwardPass(ids)` puts it in, and
    `afterOptimizerStep(ids)` takes it back. What all rows share, such as the number of steps, stays
    with the optimizer. Any optimizer that treats each row by itself will do; one that keeps no
    state, such as SGD without momentum, makes these methods do nothing.

    Attributes:
        optVarList: what is kept of each row, as the optimizer names it: ["exp_avg", "exp_avg_sq"].
    """

    _first_calls = "optInit(), or loadCupy(file)"

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: torch.nn.Module,
        variable_name: str,
        dtype: Any,
        where: Where,
    ) -> None:
        self._parameter = _find_parameter(model, variable_name)
        super().__init__(where.near(self._parameter))
        self.given_optimizer = given_optimizer
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.model = model
        self.variable_name = variable_name
        self.dtype: Any = dtype
        self.datatype: Any = dtype
        self._dtype = check_dtype(dtype)
        self._plan = self._probed()
        self.optVarList: list[str] = list(self._plan.rows)

    def _probed(self) -> StatePlan:
        """Return what the optimizer keeps, found by running one of its kind on a few rows."""
        optimizer = self.given_optimizer
        options = _options_for(optimizer, self._parameter, self.variable_name)
        return probe(
            type(optimizer),
            options,
            dim=self.embed_dimension,
            dtype=self._parameter.dtype,
            device=str(home_of(self._parameter, self._where)),
        )

    def optInit(self) -> None:
        """Let the state of all rows be what the optimizer starts from."""
        self._fill(
            {key: initializers.constant(kept.initial) for key, kept in self._plan.rows.items()}
        )

    def _fill(self, by_state: Mapping[str, initializers.Initializer]) -> None:
        if self.optVarList:
            self._make(self._fields(by_state))

    def _fields(self, by_state: Mapping[str, initializers.Initializer]) -> dict[str, Field]:
        rows = self._plan.rows.items()
        return {key: Field(kept.dim, self._dtype, by_state.get(key)) for key, kept in rows}

    def _accept(self, table: Table) -> None:
        check_table(table, self.total_classes, self._fields({}))

    @property
    def _state(self) -> dict[str, Any]:
        """The optimizer's state for the parameter, with what all rows share."""
        state: dict[str, Any] = self.given_optimizer.state[self._parameter]
        for key, value in self._plan.shared.items():
            if key not in state:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        return state

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the state of the rows of a batch into the optimizer; ids as for the model factory."""
        found = {}
        if self.optVarList:  # on their way while the rest is done
            ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
            found = self.table.read(ids, self.optVarList, as_tensor=True)
        state = self._state
        if not found:
            return
        begun = _BEGUN in self.table.scalars
        home = home_of(self._parameter, self._where)
        for key, kept in self._plan.rows.items():
            if begun or not kept.late:
                rows = found[key].to(home, kept.dtype)
                state[key] = rows.reshape(len(rows), *kept.shape)
            else:  # the optimizer makes it of the first gradient
                state.pop(key, None)

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Take the state of the rows of a batch back from the optimizer."""
        state = self._state
        keys = [key for key in self.optVarList if key in state]
        if not keys:
            return
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        dtype = getattr(torch, self._dtype)
        rows = {key: state[key].reshape(-1, self._plan.rows[key].dim).to(dtype) for key in keys}
        self.table.write(ids, rows)
        self.table.scalars[_BEGUN] = True

    # -- files

    def getNumpyVersion(self) -> list[npt.NDArray[Any]]:
        """Return copies of all rows in NumPy, read-only, one array for each of `optVarList`."""
        return [self._array(self._streamed(key)) for key in self.optVarList]

    def saveCupy(self, saveFileName: str) -> None:
        """Write all state to a `.npz` file: an array a state, and what the rows share."""
        arrays = {key: self._streamed(key) for key in self.optVarList}
        save_npz(saveFileName, arrays, self._numbers())

    def loadCupy(self, loadFileName: str) -> None:
        """Take all state from a `.npz` file that `saveCupy` wrote."""
        self._load(load_npz(loadFileName), loadFileName)

    def saveTorch(self, saveFileName: str) -> None:
        """Write all state as a dict of tensors, with torch.save."""
        names = zip(self.optVarList, self.getNumpyVersion(), strict=True)
        tensors = {key: torch.tensor(array) for key, array in names}
        torch.save({**tensors, **self._numbers()}, saveFileName)

    def loadTorch(self, loadFileName: str) -> None:
        """Take all state from a file that `saveTorch` wrote."""
        found = torch.load(loadFileName, map_location="cpu", weights_only=True)
        self._load({key: as_numpy(value) for key, value in found.items()}, loadFileName)

    def _numbers(self) -> dict[str, Any]:
        return _numbers_of(self._state, self._plan)

    def _load(self, found: Mapping[str, Any], file: str) -> None:
        missing = [key for key in self.optVarList if key not in found]
        if missing:
            raise InvalidInputError(
                f"{file} holds {', '.join(found) or 'nothing'}, not {', '.join(missing)}: it is "
                "the state of another optimizer"
            )
        self._fill({key: initializers.from_array(found[key]) for key in self.optVarList})
        self._set_numbers({key: value.item() for key, value in found.items() if not value.ndim})
        if self.optVarList:
            self.table.scalars[_BEGUN] = True

    def _set_numbers(self, numbers: Mapping[str, Any]) -> None:
        state = self._state
        for key, first in self._plan.shared.items():
            if key in numbers:
                value = numbers[key]
                state[key] = torch.full_like(first, value) if isinstance(first, Tensor) else value

    def _before_commit(self) -> Callable[[], None]:
        given = self.given_optimizer, self._parameter
        return functools.partial(_note_numbers, self.table, *given, self._plan)

    def _take(self, owner: Any) -> None:
        super()._take(owner)
        self._set_numbers(self.table.scalars.get(_SHARED, {}))


_BEGUN = "begun"
_SHARED = "shared"


def _numbers_of(state: Mapping[str, Any], plan: StatePlan) -> dict[str, Any]:
    """Return what all rows share as plain numbers."""
    values = {key: state.get(key) for key in plan.shared}
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if value is not None
    }


def _note_numbers(
    table: Table, optimizer: torch.optim.Optimizer, parameter: Tensor, plan: StatePlan
) -> None:
    """Put what all rows share among what is committed with them."""
    table.scalars[_SHARED] = _numbers_of(optimizer.state[parameter], plan)


def _find_parameter(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """Return the parameter of a module's name, such as "u_embeddings", or of its own."""
    found: dict[str, torch.nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for candidate in (f"{name}.weight", name):
        if candidate in found:
            return found[candidate]
    raise UnknownNameError(f"the model has no variable {name!r}; it has {', '.join(found)}")


def _options_for(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> dict[str, Any]:
    """Return the options that an optimizer has for a parameter, as its class takes them."""
    accepted = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            return {
                key: value for key, value in group.items() if key in accepted and key != "params"
            }
    raise InvalidInputError(f"the optimizer does not train {name!r}; give it the parameter first")
