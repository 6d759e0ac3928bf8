"""Tensors that have a row for each of a batch, which do not mix with those of another batch.

What a parameter of rows gives between a backward pass and its step is in the order of that batch.
A program that keeps it, as an average or a momentum by hand does, would add the row of one id to
that of another wherever two batches have as many rows; with a weight of torch it would not.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from tierstore.errors import InvalidInputError
from tierstore.nn.values import OfRows

BY_PLACE = frozenset(
    ("__getitem__", "flip", "gather", "index", "index_select", "roll", "sort", "take")
)
"""Functions whose result may have rows at other places."""
_FLAT = frozenset(("flatten", "ravel", "reshape", "view"))
_APART = frozenset(
    (
        "__matmul__",
        "__rmatmul__",
        "addmm",
        "allclose",
        "cdist",
        "equal",
        "linear",
        "matmul",
        "mm",
        "tensordot",
    )
)
"""Functions of two tensors that do not go row by row."""


class PlacedRows(torch.Tensor):
    """Rows or gradients in the order of a batch, and what was computed of them row by row.

    It is an ordinary tensor, but that a function of this and of one of another batch, of as many
    rows and of other ids, raises InvalidInputError before anything is written. Lists are taken
    apart by `torch._foreach_…` alone, so `cat` and `stack` join rows of batches. Rows that were
    indexed or sorted, and those joined to others, are ordinary tensors: what goes by ids is free.
    """

    _ids: Tensor
    _of: weakref.ref[Any]

    @classmethod
    def of(cls, rows: Tensor, ids: Tensor, parameter: Any) -> Self:
        """Have the rows of a batch of a parameter, in the order of `ids`; memory is shared."""
        made: Any = torch.Tensor._make_subclass(cls, rows)
        made._ids, made._of = ids, weakref.ref(parameter)
        found: Self = made
        return found

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, once what it takes is found to be of one batch."""
        given, name = kwargs or {}, getattr(function, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name.startswith("_foreach_"):
                lists = [each for each in args if isinstance(each, list | tuple)]
                for each in zip(*lists, strict=False):
                    one_batch(each)
            elif name not in _APART:
                one_batch((*args, *given.values()))
            result = function(*args, **given)
            if type(result) is Tensor and not result.requires_grad and name not in BY_PLACE:
                for each in (*args, *given.values()):
                    if type(each) is cls and (
                        each.shape == result.shape
                        or (name in _FLAT and each.numel() == result.numel())
                    ):
                        return cls._like(result, each)
        return result

    @classmethod
    def _like(cls, rows: Tensor, other: PlacedRows) -> Tensor:
        parameter = other._of()
        return rows if parameter is None else cls.of(rows, other._ids, parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy that is of the same batch."""
        copy = memo[id(self)] = self._like(plain(self).clone(), self)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor."""
        return plain(self).__reduce_ex__(protocol)


def plain(rows: Tensor) -> Tensor:
    """Return the rows as a tensor of torch's own, in the same memory."""
    if type(rows) is not PlacedRows:
        return rows
    found: Tensor = torch.Tensor._make_subclass(torch.Tensor, rows)
    return found


def one_batch(arguments: Sequence[Any]) -> None:
    """Raise InvalidInputError if tensors have as many rows, of two batches of a parameter."""
    first: dict[Any, Any] = {}
    for each in arguments:
        parameter: Any
        if isinstance(each, PlacedRows):
            ids, parameter = each._ids, each._of()
        elif isinstance(each, OfRows):
            ids, parameter = each.ids_now, each
        else:
            continue
        if ids is None or parameter is None:
            continue
        known, shape = first.setdefault(id(parameter), (ids, each.shape))
        if shape == each.shape and known is not ids and not torch.equal(known, ids):
            raise InvalidInputError(
                f"these are {len(ids)} rows of one batch of table {parameter.table.name!r} and as "
                "many of another, of other ids: a function of both would take the row of one id "
                "for that of another. Averages are emb.averaged() with ema= of the optimizer, and "
                "state of each row is that of a class given to TieredOptimizer; what else is kept "
                "between batches goes by emb.rows.ids, as in kept[emb.rows.ids]"
            )
