"""Moves the rows of a batch to and from a module's weight, and their state to an optimizer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore import initializers
from tierstore._dtypes import check_dtype
from tierstore._table.table import Table
from tierstore.errors import DuplicateRowsWarning, InvalidInputError, UnknownNameError, warn
from tierstore.nn.autograd import sum_by_row
from tierstore.optim.probe import StatePlan, probe
from tierstore.spec import Field
from tierstore.speedtorch.base import (
    TableRows,
    Where,
    as_numpy,
    check_table,
    flat_ids,
    load_npz,
    save_npy,
    save_npz,
    to_tensor,
)

Duplicates: TypeAlias = Literal["sum", "mean", "last"]
POLICIES: tuple[Duplicates, ...] = get_args(Duplicates)


def check_policy(duplicates: Duplicates) -> Duplicates:
    """Return one of the policies, or raise InvalidInputError."""
    if duplicates not in POLICIES:
        raise InvalidInputError(f"duplicates must be 'sum', 'mean' or 'last', not {duplicates!r}")
    return duplicates


class Copies:
    """A hook on the parameter of a batch that gives every copy of a row the same gradient."""

    def __init__(self, table: Table, ids: Tensor, policy: Duplicates) -> None:
        """Store the ids of the batch; `policy` is "sum" or "mean"."""
        self._table = table
        # The caller may reuse its ids for the next batch. Torch would use all its threads to copy.
        self._ids = ids.clone() if ids.is_cuda else torch.from_numpy(ids.numpy().copy())
        self._mean = policy == "mean"

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the gradient, summed or averaged over the copies of each row."""
        with self._table.lease(self._ids) as lease:
            bound = lease.bound
            owners = torch.as_tensor(lease.positions).to(gradient.device, torch.int64)
        if not gradient.is_sparse:
            total = self._total(gradient, owners, bound)
            return torch.nn.functional.embedding(owners.clamp(min=0), total)
        gradient = gradient.coalesce()
        touched_by = owners[gradient.indices()[0]]
        total = self._total(gradient.values(), touched_by, bound)
        touched = torch.zeros(bound, dtype=torch.bool, device=gradient.device)
        touched[touched_by] = True
        copies = touched[owners].nonzero()[:, 0]
        values = total[owners[copies]]
        return torch.sparse_coo_tensor(
            copies[None], values, gradient.shape, is_coalesced=True, check_invariants=False
        )

    def _total(self, values: Tensor, owners: Tensor, bound: int) -> Tensor:
        total = sum_by_row(values, owners, bound)
        if self._mean:
            total /= sum_by_row(values.new_ones(len(values), 1), owners, bound).clamp(min=1)
        return total


def warn_of_copies(ids: Tensor, policy: Duplicates) -> None:
    """Warn about the copies in a batch, and explain how their updates are handled."""
    share = 1 - torch.unique(ids).numel() / max(1, ids.numel())
    if not share:
        return
    if policy == "last":
        message = "the update of the last copy is kept and the others are lost"
        advice = "duplicates='sum' keeps them all"
    else:
        message = f"every copy is updated with the {policy} of the row's gradients"
        advice = "SpeedTorch kept only the update of the last copy, like duplicates='last'"
    warn(
        f"{share:.1%} of the {ids.numel()} rows of this batch are copies of others: "
        f"{message}; {advice}",
        DuplicateRowsWarning,
    )


WEIGHT = "weight"


class ModelRows(TableRows):
    """All rows of an embedding; a module's `weight` holds those of a batch.

    `beforeForwardPass(ids)` copies row k of the batch to row k of the weight, which gets as many
    rows as there are ids; the inputs of the model are the numbers 0, 1, 2, … of
    `variableTransformer`. `afterOptimizerStep(ids)` copies the rows back.
    """

    def __init__(
        self,
        model_variable: torch.nn.Module,
        total_classes: int,
        embed_dimension: int,
        dtype: Any,
        where: Where,
        duplicates: Duplicates,
    ) -> None:
        super().__init__(where.near(model_variable.weight))
        self.model_variable = model_variable
        self.total_classes = total_classes
        self.embed_dimension = embed_dimension
        self.dtype: Any = dtype
        self.datatype: Any = dtype
        self.duplicates: Duplicates = check_policy(duplicates)
        self._field = Field(embed_dimension, check_dtype(dtype))
        self._hook: Any = None
        self._told = False

    # -- first values

    def _fill(self, initializer: initializers.Initializer) -> None:
        self._make({WEIGHT: Field(self._field.dim, self._field.dtype, initializer)})

    def _accept(self, table: Table) -> None:
        check_table(table, self.total_classes, {WEIGHT: self._field})

    def zerosInit(self) -> None:
        """Set all rows to zero."""
        self._fill(initializers.zeros())

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Draw all rows uniformly from [low, high); torch.manual_seed decides which."""
        self._fill(initializers.uniform(float(low), float(high), seed=_seed()))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Draw all rows from a normal distribution; torch.manual_seed decides which."""
        self._fill(initializers.normal(mean=float(mean), std=float(stdDev), seed=_seed()))

    def customInit(self, initFunction: Callable[..., Any], *args: Any) -> None:
        """Fill a tensor of all rows by `initFunction(tensor, *args)`, as of torch.nn.init.

        The tensor is in host memory until the table is made.
        """
        shape = self.total_classes, self.embed_dimension
        whole = torch.empty(shape, dtype=self._field.element.torch_dtype())
        initFunction(whole, *args)
        self._fill(initializers.from_array(as_numpy(whole)))

    # -- a batch

    def variableTransformer(
        self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None
    ) -> npt.NDArray[np.int64] | tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the inputs of the model: the numbers of the batch's rows, as int64 arrays.

        The shape is `(batchSize, posPerBatch)`; with `negPerBatch`, a second array `(batchSize,
        negPerBatch)` continues the numbers.
        """
        positives = batchSize * posPerBatch
        dummies = np.arange(positives).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return dummies
        stop = positives + batchSize * negPerBatch
        return dummies, np.arange(positives, stop).reshape(batchSize, negPerBatch)

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of a batch, positive then negative samples, to the module's weight.

        Ids are arrays, tensors or lists of any shape. Raises RowIndexError, InvalidTypeError.
        """
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        rows = self.table.read(ids, as_tensor=True)
        self._release()
        parameter = self.model_variable.weight
        _put(parameter, rows.to(home_of(parameter, self._where)))
        if self.duplicates != "last" and parameter.requires_grad:
            copies = Copies(self.table, to_tensor(ids), self.duplicates)
            self._hook = parameter.register_hook(copies)

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the rows of a batch back from the module's weight; pass the same ids."""
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes)
        if not self._told:
            self._told = True
            warn_of_copies(to_tensor(ids), self.duplicates)
        rows = self.model_variable.weight.detach()
        self.table.write(ids, rows.to(self._field.element.torch_dtype()))

    def _release(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = None

    def close(self) -> None:
        """Free the memory; the module keeps the rows of its last batch."""
        self._release()
        super().close()

    # -- files

    def getNumpyVersion(self) -> npt.NDArray[Any]:
        """Return a copy of all rows in NumPy, `(total_classes, embed_dimension)`, read-only."""
        return self._array(self._streamed(WEIGHT))

    def saveCupy(self, saveFileName: str) -> None:
        """Write all rows to a `.npy` file, block by block."""
        save_npy(saveFileName, self._streamed(WEIGHT))

    def loadCupy(self, loadFileName: str) -> None:
        """Load all rows from a `.npy` file `(total_classes, embed_dimension)`."""
        self._fill(initializers.from_file(loadFileName))

    def saveTorch(self, saveFileName: str) -> None:
        """Write all rows as a tensor, with torch.save."""
        torch.save(torch.tensor(self.getNumpyVersion()), saveFileName)

    def loadTorch(self, loadFileName: str) -> None:
        """Load all rows from a tensor written by `saveTorch` or torch.save."""
        tensor = torch.load(loadFileName, map_location="cpu", weights_only=True)
        self._fill(initializers.from_array(as_numpy(tensor)))


def home_of(parameter: Tensor, where: Where) -> torch.device:
    """Return the device for a parameter: its current one, or the GPU of its table."""
    device: torch.device = parameter.device
    return where.torch_device if device.type == "cpu" else device


def _put(parameter: torch.nn.Parameter, rows: Tensor) -> None:
    """Replace the values of a parameter.

    If the shape changes, an old loss may still refer to the gradient accumulator with the old
    shape. The parameter therefore remains the same object, in its module and its optimizer, but
    gets a new tensor inside, on which its hooks must be registered again.
    """
    same = parameter.shape == rows.shape and parameter.dtype == rows.dtype
    if same and parameter.device == rows.device:
        parameter.data = rows
        return
    fresh = torch.nn.Parameter(rows, requires_grad=parameter.requires_grad)
    hooks, parameter._backward_hooks = parameter._backward_hooks, None
    torch.utils.swap_tensors(parameter, fresh)
    parameter._backward_hooks = hooks


def _seed() -> int:
    return int(torch.randint(2**62, ()))


class OptimizerRows(TableRows):
    """The optimizer state of all rows of an embedding.

    The optimizer holds the state of one batch: `beforeForwardPass(ids)` copies it in, and
    `afterOptimizerStep(ids)` copies it back. State common to all rows, such as the number of steps,
    stays in the optimizer. Any optimizer that treats rows independently is supported; without
    state, as in SGD without momentum, these methods do nothing.

    Attributes:
        optVarList: the optimizer's names of the state per row: ["exp_avg", "exp_avg_sq"].
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
        """Return the optimizer's state names, found by running an instance on a few rows."""
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
        """Initialize the state of all rows to the optimizer's initial state."""
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
        """The optimizer's state for the parameter, including the common state."""
        state: dict[str, Any] = self.given_optimizer.state[self._parameter]
        for key, value in self._plan.shared.items():
            if key not in state:
                state[key] = value.clone() if isinstance(value, Tensor) else value
        return state

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the state of a batch to the optimizer; ids as in the model factory."""
        found = {}
        if self.optVarList:  # copied while the rest is done
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
            else:  # the optimizer creates it from the first gradient
                state.pop(key, None)

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Copy the state of a batch back from the optimizer."""
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
        """Write all state to a `.npz` file: one array per state, and the common state."""
        arrays = {key: self._streamed(key) for key in self.optVarList}
        save_npz(saveFileName, arrays, self._numbers())

    def loadCupy(self, loadFileName: str) -> None:
        """Load all state from a `.npz` file written by `saveCupy`."""
        self._load(load_npz(loadFileName), loadFileName)

    def saveTorch(self, saveFileName: str) -> None:
        """Write all state as a dict of tensors, with torch.save."""
        names = zip(self.optVarList, self.getNumpyVersion(), strict=True)
        tensors = {key: torch.tensor(array) for key, array in names}
        torch.save({**tensors, **self._numbers()}, saveFileName)

    def loadTorch(self, loadFileName: str) -> None:
        """Load all state from a file written by `saveTorch`."""
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
    """Return the common state as plain numbers."""
    values = {key: state.get(key) for key in plan.shared}
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if value is not None
    }


def _note_numbers(
    table: Table, optimizer: torch.optim.Optimizer, parameter: Tensor, plan: StatePlan
) -> None:
    """Add the common state to the values that are committed with the rows."""
    table.scalars[_SHARED] = _numbers_of(optimizer.state[parameter], plan)


def _find_parameter(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    """Return the parameter of a submodule's name, such as "u_embeddings", or with its own name."""
    found: dict[str, torch.nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for candidate in (f"{name}.weight", name):
        if candidate in found:
            return found[candidate]
    raise UnknownNameError(f"the model has no variable {name!r}; it has {', '.join(found)}")


def _options_for(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> dict[str, Any]:
    """Return an optimizer's options for a parameter, as arguments of its class."""
    accepted = inspect.signature(type(optimizer)).parameters
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            return {
                key: value for key, value in group.items() if key in accepted and key != "params"
            }
    raise InvalidInputError(f"the optimizer does not train {name!r}; give it the parameter first")
