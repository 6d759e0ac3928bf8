"""Tensors that have a row for each of a batch, which do not mix with those of another batch.

What a parameter of rows gives between a backward pass and its step is in the order of that batch.
A program that keeps it, as an average or a momentum by hand does, would add the row of one id to
that of another wherever two batches have as many rows; with a weight of torch it would not.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Self

import torch
from torch import Tensor

from tierstore.errors import InvalidInputError
from tierstore.nn.by_row import BLANK, TURNED, WHOLE, dim_of_rows, joined, pairs
from tierstore.nn.values import OfRows

_functorch: Any = torch._C._functorch
_SHARING = frozenset(("data__set__", "set_"))
"""Functions that have a tensor share the memory of another."""

_ATTRIBUTES = TURNED | {"data__get__", "data__set__", "grad__set__", "real__get__"}
"""Functions of attributes that have rows; others, as `shape` and `device`, are just called."""


class Order:
    """Of which rows memory is, in their order; views of it share this.

    Attributes:
        ids: the rows, as batches have them; None where any fit, as in a tensor of zeros.
        of: the parameter that they are rows of, by a weak reference.
    """

    __slots__ = ("ids", "of")

    def __init__(self, ids: Tensor | None, of: weakref.ref[Any]) -> None:
        self.ids: Tensor | None = ids
        self.of: weakref.ref[Any] = of

    def is_of(self, other: Order) -> bool:
        """Tell whether rows in this order may be taken with those in another."""
        if self is other or self.ids is other.ids or self.ids is None or other.ids is None:
            return True
        parameter = self.of()
        if parameter is None or parameter is not other.of():
            return True
        is_same: bool = torch.equal(self.ids, other.ids)
        return is_same

    @property
    def is_live(self) -> bool:
        """Whether the memory is the parameter's own, so that it cannot be of other rows."""
        parameter = self.of()
        return parameter is not None and parameter.live_order is self


class PlacedRows(torch.Tensor):
    """Rows or gradients in the order of a batch, and what was computed of them row by row.

    It is an ordinary tensor, but that a function which pairs rows of this with rows of a batch of
    other ids raises InvalidInputError before anything is written. So it is with norms of rows,
    columns, transposed and flat ones, and with what they are written into; zeros and what is
    overwritten as a whole are of any batch. Rows that were indexed, sorted or stacked, and those
    joined to others, are ordinary tensors, as is `as_subclass(torch.Tensor)`: what goes by ids is
    free.
    """

    row_order: Order
    row_dim: int

    @classmethod
    def of(cls, rows: Tensor, order: Order, dim: int = 0) -> Self:
        """Have rows in an order, in one dimension; memory is shared."""
        made: Any = torch.Tensor._make_subclass(cls, rows)
        made.row_order, made.row_dim = order, dim
        placed: Self = made
        return placed

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
        if name in ("__get__", "__set__"):
            name = function.__self__.__name__ + name
            if name not in _ATTRIBUTES:
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args)
        with torch._C.DisableTorchFunctionSubclass():
            if not given and name not in WHOLE and _is_alone(args):
                result = function(*args)
                rows = args[0]
                return result if result is rows else like(name, args, given, result, rows)
            if not name.startswith("_foreach_"):
                call = _Operation(name, args, given)
                return call.noted(_called(function, (call,), args, given))
            lists = [part for part in args if isinstance(part, list | tuple)]
            calls = [
                _Operation(name.removeprefix("_foreach_"), row, {})
                for row in zip(*lists, strict=False)
            ]
            result = _called(function, calls, args, given)
            if not isinstance(result, list | tuple):
                return [call.noted(None) for call in calls] and result
            return [call.noted(part) for call, part in zip(calls, result, strict=True)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy that is of the same batch."""
        copy: Any = PlacedRows.of(plain(self).clone(), _copied(self.row_order), self.row_dim)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy)
        memo[id(self)] = found = copy.requires_grad_(self.requires_grad)
        made: Tensor = found
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle an ordinary tensor, or an ordinary parameter."""
        rows = plain(self).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            rows = torch.nn.Parameter(rows.detach(), self.requires_grad)
        return rows.__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        """Show what an ordinary tensor shows."""
        shown: str = plain(self).requires_grad_(self.requires_grad).__repr__(**options)
        return shown


def _is_alone(args: Sequence[Any]) -> bool:
    """Whether there are rows, and a number at most."""
    if type(args[0]) is not PlacedRows or len(args) > 2:
        return False
    number = args[-1]
    is_number = type(number) in (bool, float, int) or (type(number) is Tensor and not number.ndim)
    return len(args) == 1 or is_number


def plain(rows: Tensor) -> Tensor:
    """Return the rows as a tensor of torch's own, in the same memory."""
    if type(rows) is not PlacedRows:
        return rows
    tensor: Tensor = torch.Tensor._make_subclass(torch.Tensor, rows)
    return tensor


def _copied(order: Order) -> Order:
    return Order(order.ids, order.of)


def order_of(each: Any) -> Any:
    """Return of which rows a tensor is, an Order; None where it has none of a batch."""
    return each.row_order if isinstance(each, PlacedRows | OfRows) else None


def one_batch(name: str, *args: Any) -> None:
    """Raise InvalidInputError if a function of a name would pair rows of two batches."""
    _Operation(name, args, {})


def _refused(one: Order, other: Order) -> InvalidInputError:
    parameter: Any = one.of()
    few, many = (0 if each.ids is None else len(each.ids) for each in (one, other))
    others = "as many" if few == many else many
    return InvalidInputError(
        f"these are {few} rows of one batch of table {parameter.table.name!r} and {others} "
        "of another, of other ids: a function of both would take the row of one id for that of "
        "another. Averages are emb.averaged() with ema= of the optimizer, and state of each row is "
        "that of a class given to TieredOptimizer; what else is kept between batches goes by "
        "emb.rows.ids, as in kept[emb.rows.ids]"
    )


def _written(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return what a function writes into, or None, and whether it writes all of that."""
    if given.get("out") is not None:
        return given["out"], True
    if name == "__setitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return args[0], all(each is Ellipsis or each == slice(None) for each in index)
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name == "data__set__" or (name.startswith("__i") and name.endswith("__")):
        return args[0], name in WHOLE
    return None, False


def like(name: str, args: Sequence[Any], given: Mapping[str, Any], result: Any, each: Any) -> Any:
    """Return what a function made of some rows, as rows where it has theirs.

    `each` are those, with attributes `row_order` and `row_dim`.
    """
    if isinstance(result, list | tuple):
        return type(result)([like(name, args, given, part, each) for part in result])
    if type(result) is not Tensor or result.requires_grad or result.layout is not torch.strided:
        return result
    dim = dim_of_rows(name, args, given, each, each.row_dim, result)
    if dim is None or _is_transformed():
        return result
    if name in BLANK:
        return PlacedRows.of(result, Order(None, each.row_order.of), dim)
    shares = result.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()
    return PlacedRows.of(result, each.row_order if shares else _copied(each.row_order), dim)


def _is_transformed() -> bool:
    """Whether a tensor may have more than values, as in `torch.func.jvp`, which would be lost."""
    is_dual = torch.autograd.forward_ad._current_level >= 0
    return is_dual or _functorch.peek_interpreter_stack() is not None


def _called(
    function: Any, calls: Sequence[_Operation], args: Sequence[Any], given: Mapping[str, Any]
) -> Any:
    """Call a function; where it fails for shapes of batches of other numbers of rows, say so."""
    try:
        return function(*args, **given)
    except (IndexError, RuntimeError, ValueError) as error:
        for call in calls:
            if call.apart is not None:
                raise _refused(*call.apart) from error
        raise


class _Operation:
    """A function and tensors of one row, some of which have rows of batches: never of two.

    Attributes:
        apart: the orders of two batches of other numbers of rows, which may not fit.
    """

    def __init__(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        self.name, self.args, self.given = name, args, given
        self.apart: tuple[Order, Order] | None = None
        self.target, self.is_whole = _written(name, args, given)
        order = order_of(self.target)
        is_free = self.is_whole and not (order is not None and order.is_live)
        taken = [*args, *(part for key, part in given.items() if key != "out")]
        taken += joined(name, args, given)
        if "item__" in name and isinstance(args[1], tuple):
            taken += args[1]
        self.rows = [
            each
            for each in taken
            if order_of(each) is not None and not (is_free and each is self.target)
        ]
        for one, other in combinations(self.rows, 2):
            first, second = order_of(one), order_of(other)
            if not first.is_of(second) and pairs(name, args, given, one, other):
                few, many = sorted((len(first.ids), len(second.ids)))
                if few == many or few == 1:
                    raise _refused(first, second)
                self.apart = first, second
        if self.rows and pairs(name, args, given, self.rows[0], self.rows[0]):
            self._check_at_rest(self.rows[0])

    def _check_at_rest(self, rows: Any) -> None:
        parameter = order_of(rows).of()
        for each in self.args:
            is_empty = type(each) is Tensor and each.ndim and len(each) == 0 < len(rows)
            if is_empty and each.shape[1:] == rows.shape[1:] and parameter is not None:
                raise InvalidInputError(
                    f"a tensor of shape {tuple(each.shape)} was made while the parameter of table "
                    f"{parameter.table.name!r} had no rows, and now there are {len(rows)}: make "
                    "one of all rows, torch.zeros(emb.num_embeddings, emb.embedding_dim), and go "
                    "by kept[emb.rows.ids]; state of each row is that of a class given to "
                    "TieredOptimizer"
                )

    def noted(self, result: Any) -> Any:
        """Note what was written; return the result, as rows where it has theirs."""
        sources = [each for each in self.rows if each is not self.target]
        target, order = self.target, order_of(self.target)
        if order is not None and not order.is_live:
            if self.name in _SHARING:
                target.row_order = order_of(sources[0]) if sources else Order(None, order.of)
            elif self.is_whole or (order.ids is None and sources):
                order.ids = None
                if sources:
                    other = order_of(sources[0])
                    order.ids, order.of = other.ids, other.of
        elif order is None and type(target) is Tensor and not target.requires_grad:
            for each in sources:
                if each.shape == target.shape and not _is_transformed():
                    target.__class__ = PlacedRows
                    is_shared = self.name in _SHARING
                    target.row_order = order_of(each) if is_shared else _copied(order_of(each))
                    target.row_dim = each.row_dim
                    break
        for each in sorted(self.rows, key=lambda each: order_of(each).ids is None):
            noted = like(self.name, self.args, self.given, result, each)
            if noted is not result:
                return noted
        return result
