"""Rows of a batch in and out of a module's weight: what all model factories do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore import initializers
from tierstore._dtypes import check_dtype
from tierstore._table.table import Table
from tierstore.errors import DuplicateRowsWarning, InvalidInputError
from tierstore.nn.autograd import sum_by_row
from tierstore.spec import Field
from tierstore.speedtorch.base import (
    Held,
    Where,
    as_numpy,
    check_table,
    flat_ids,
    save_npy,
    to_tensor,
)

__all__ = [
    "POLICIES",
    "Copies",
    "Duplicates",
    "ModelRows",
    "check_policy",
    "home_of",
    "warn_of_copies",
]


Duplicates: TypeAlias = Literal["sum", "mean", "last"]
POLICIES: tuple[Duplicates, ...] = get_args(Duplicates)


def check_policy(duplicates: Duplicates) -> Duplicates:
    """Return one of the policies, or raise InvalidInputError."""
    if duplicates not in POLICIES:
        raise InvalidInputError(f"duplicates is 'sum', 'mean' or 'last', not {duplicates!r}")
    return duplicates


class Copies:
    """A hook on the parameter of a batch, which gives every copy of a row the row's gradient."""

    def __init__(self, table: Table, ids: Tensor, policy: Duplicates) -> None:
        """Remember whose rows they are; `policy` is "sum" or "mean"."""
        self._table = table
        # The caller may reuse its ids for the next batch. Torch would wake all its threads to copy.
        self._ids = ids.clone() if ids.is_cuda else torch.from_numpy(ids.numpy().copy())
        self._mean = policy == "mean"

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the gradient with that of each row summed, or averaged, over its copies."""
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
    """Say how many rows of a batch are copies, and what becomes of their updates."""
    share = 1 - torch.unique(ids).numel() / max(1, ids.numel())
    if not share:
        return
    if policy == "last":
        message = "the update of the last copy stays and those of the others are lost"
        advice = "duplicates='sum' keeps them all"
    else:
        message = f"every copy takes the step of the row's {policy} of gradients"
        advice = "SpeedTorch kept the last copy's update alone, as duplicates='last' does"
    warnings.warn(
        f"{share:.1%} of the {ids.numel()} rows of this batch are copies of others: "
        f"{message}; {advice}",
        DuplicateRowsWarning,
        stacklevel=4,
    )


WEIGHT = "weight"


class ModelRows(Held):
    """All rows of an embedding; a module's `weight` holds those of a batch.

    `beforeForwardPass(ids)` puts row k of the batch into row k of the weight, which takes as many
    rows as there are ids; the model is fed the numbers 0, 1, 2, … of `variableTransformer`.
    `afterOptimizerStep(ids)` takes the rows back.
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
        """Make all rows zero."""
        self._fill(initializers.zeros())

    def uniformDistributionInit(self, low: float, high: float) -> None:
        """Draw all rows uniformly from [low, high); torch.manual_seed decides which."""
        self._fill(initializers.uniform(float(low), float(high), seed=_seed()))

    def normalDistributionInit(self, mean: float, stdDev: float) -> None:
        """Draw all rows from a normal distribution; torch.manual_seed decides which."""
        self._fill(initializers.normal(mean=float(mean), std=float(stdDev), seed=_seed()))

    def customInit(self, initFunction: Callable[..., Any], *args: Any) -> None:
        """Let `initFunction(tensor, *args)`, as of torch.nn.init, fill a tensor of all rows.

        The tensor lies in host memory until the table is made.
        """
        shape = self.total_classes, self.embed_dimension
        whole = torch.empty(shape, dtype=self._field.element.torch_dtype())
        initFunction(whole, *args)
        self._fill(initializers.from_array(as_numpy(whole)))

    # -- a batch

    def variableTransformer(
        self, batchSize: int, posPerBatch: int, negPerBatch: int | None = None
    ) -> npt.NDArray[np.int64] | tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return what to feed the model: the numbers of the batch's rows, as int64 arrays.

        `(batchSize, posPerBatch)`, and with `negPerBatch` a second array `(batchSize, negPerBatch)`
        that counts on.
        """
        positives = batchSize * posPerBatch
        dummies = np.arange(positives).reshape(batchSize, posPerBatch)
        if negPerBatch is None:
            return dummies
        stop = positives + batchSize * negPerBatch
        return dummies, np.arange(positives, stop).reshape(batchSize, negPerBatch)

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Put the rows of a batch, positive samples then negative ones, into the module's weight.

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
        """Take the rows of a batch back from the module's weight; the ids are those it got."""
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
        """Give the memory back; the module keeps the rows of its last batch."""
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
        """Make all rows those of a `.npy` file `(total_classes, embed_dimension)`."""
        self._fill(initializers.from_file(loadFileName))

    def saveTorch(self, saveFileName: str) -> None:
        """Write all rows as a tensor, with torch.save."""
        torch.save(torch.tensor(self.getNumpyVersion()), saveFileName)

    def loadTorch(self, loadFileName: str) -> None:
        """Make all rows those of a tensor that `saveTorch` or torch.save wrote."""
        tensor = torch.load(loadFileName, map_location="cpu", weights_only=True)
        self._fill(initializers.from_array(as_numpy(tensor)))


def home_of(parameter: Tensor, where: Where) -> torch.device:
    """Return where a parameter belongs: where it is, or to the GPU of its table."""
    device: torch.device = parameter.device
    return where.torch_device if device.type == "cpu" else device


def _put(parameter: torch.nn.Parameter, rows: Tensor) -> None:
    """Give a parameter other values.

    Where the shape changes, an old loss may still hold what collects the parameter's gradient, in
    the old shape. So the parameter stays the same object, in its module and its optimizer, and gets
    another tensor inside, to which its hooks must be tied again.
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
