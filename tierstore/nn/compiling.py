"""Lookups as operators of torch, for torch.compile, torch.export and torch.func.

An operator gets the name of a module, which looks rows up and takes their gradient. Between forward
and backward a graph carries a ticket, a number in a tensor that owns the batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tierstore._table.joint import Features, JointTable
from tierstore._table.table import Table, where_from
from tierstore.errors import ClosedError
from tierstore.nn.autograd import Module, accumulates
from tierstore.nn.jagged import Bags

_BETWEEN = "\x1f"
"""Stands between the names of features, and between modes: operators take no lists of texts.

The separator of ASCII, since torch's compiler writes arguments into comments, which a line break
would end (torch 2.11, for a GPU).
"""
_numbers = itertools.count(1)
_modules: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(module: Any, table: Table | JointTable, field: str) -> str:
    """Give a module a name for the operators, valid as long as the module lives.

    It begins with the store or files, tables and field, so that an exported program finds them
    elsewhere.
    """
    tables = table.tables if isinstance(table, JointTable) else (table,)
    places = " and ".join(dict.fromkeys(map(where_from, tables)))
    names = ",".join(each.name for each in tables)
    name = f"{_BETWEEN.join((places, names, field))}#{next(_numbers)}"
    _modules[name] = module
    return name


def _named(name: str) -> Any:
    """Return the module of this name, or another one over the same field."""
    found = _modules.get(name)
    if found is not None:
        return found
    where = name.rpartition("#")[0]
    for other, module in list(_modules.items()):
        if other.rpartition("#")[0] == where:
            return module
    places, table, field = where.split(_BETWEEN)
    raise ClosedError(
        f"this program looks up field {field!r} of table {table!r} of {places}, and no layer over "
        "it is there: open that, make the same layer over it, and keep that while the program runs"
    )


class _Owner(np.ndarray[Any, Any]):
    """Memory of a ticket, which owns the batch."""

    batch: Any


def _ticket(batch: Any) -> Tensor:
    number = next(_numbers)
    memory = np.array(number, np.int64).view(_Owner)
    memory.batch = batch
    _batches[number] = batch
    return torch.from_numpy(memory)


def _batch_of(ticket: Tensor) -> Any:
    batch = _batches.get(int(ticket))
    if batch is None:
        raise ClosedError("the batch of this lookup has ended; run the forward pass again")
    return batch


class Asked(NamedTuple):
    """What a graph requests from a layer over several tables.

    Attributes:
        features: which.
        lengths: how many ids each has.
        padding: the row of padding of each, -1 for none.
        modes: how the bags of each are pooled; empty for rows.
    """

    features: Features
    lengths: Sequence[int]
    padding: Sequence[int]
    modes: tuple[str, ...] = ()


class JointModule(Protocol):
    """What the operators need of a layer over several tables, besides what `Module` has."""

    def _lease_features(self, ids: Tensor, asked: Asked) -> tuple[Any, Tensor]:
        """Lease the rows of ids whose gradient may come; return that of each id, too."""

    def _read_features(self, ids: Tensor, asked: Asked) -> Tensor:
        """Return the row of each id, outside training."""

    def _pool_features(
        self, bags: Bags, asked: Asked, dtype: torch.dtype, *, weighed: bool
    ) -> tuple[Any, Tensor]:
        """Pool bags of rows whose gradient may come; return `(batch, features * dim)`, too."""

    def _read_pooled(self, bags: Bags, asked: Asked, dtype: torch.dtype) -> Tensor:
        """Pool bags outside training."""


# The operators take the ids of a layer over one table, or of several features, one after another,
# with their names, tables, lengths and padding; these with offsets and modes if they are pooled.


@torch.library.custom_op("tierstore::lookup", mutates_args=())
def lookup(
    ids: Tensor,
    anchor: Tensor,
    module: str,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tables: Sequence[int] | None = None,
    names: str | None = None,
    lengths: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    modes: str = "",
    weighed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the row of each id, `ids.shape + (dim,)`, and the ticket of the batch.

    Rows have the type, device and `dim` of the anchor. Pooled ones are of `dtype`, `(batch,
    features * dim)`, and `weighed` tells whether their weights need a gradient.
    """
    found = _named(module)
    asked = _asked(names, tables, lengths, padding, modes)
    if asked is None:
        batch, rows = found._lease_rows(ids)
    elif offsets is None:
        batch, rows = found._lease_features(ids, asked)
    else:
        bags = Bags(ids, offsets, weights)
        batch, rows = found._pool_features(bags, asked, dtype, weighed=weighed)
    return rows, _ticket(batch)


@torch.library.custom_op("tierstore::read", mutates_args=())
def read(
    ids: Tensor,
    anchor: Tensor,
    module: str,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tables: Sequence[int] | None = None,
    names: str | None = None,
    lengths: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    modes: str = "",
) -> Tensor:
    """Return what `lookup` does, outside training."""
    found: Any = _named(module)
    asked = _asked(names, tables, lengths, padding, modes)
    if asked is None:
        rows: Tensor = found._read_rows(ids)
    elif offsets is None:
        rows = found._read_features(ids, asked)
    else:
        rows = found._read_pooled(Bags(ids, offsets, weights), asked, dtype)
    return rows


@torch.library.custom_op("tierstore::deposit", mutates_args=())
def deposit(
    gradient: Tensor,
    ticket: Tensor,
    anchor: Tensor,
    module: str,
    weights: Tensor | None,
    pooled: bool,
) -> tuple[Tensor, Tensor]:
    """Give a module the gradient of a lookup; return the anchor's own, which is empty.

    And that of the weights of bags; empty where there are none.
    """
    found, of_weights = _named(module), None
    trained = accumulates(found._node)
    if pooled:
        of_weights = _batch_of(ticket).give(gradient, trained=trained)
    elif trained:
        found._take_gradient(_batch_of(ticket), gradient.reshape(-1, anchor.shape[1]))
    none = anchor.new_empty(0) if weights is None else torch.zeros_like(weights)
    return torch.empty_like(anchor), none if of_weights is None else of_weights


def _asked(
    names: str | None,
    tables: Sequence[int] | None,
    lengths: Sequence[int] | None,
    padding: Sequence[int] | None,
    modes: str,
) -> Asked | None:
    """Return what is asked of a layer over several tables; None of one over a table."""
    if names is None:
        return None
    features = Features(tuple(names.split(_BETWEEN)), tuple(tables or ()))
    pooled = tuple(modes.split(_BETWEEN)) if modes else ()
    return Asked(features, list(lengths or ()), padding or (), pooled)


@read.register_fake
def _like(
    ids: Tensor,
    anchor: Tensor,
    module: str,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tables: Sequence[int] | None = None,
    *_: Any,
) -> Tensor:
    dim = anchor.shape[1]
    if offsets is None or tables is None:
        return anchor.new_empty((*ids.shape, dim))
    batch = (offsets.shape[0] - 1) // len(tables)
    return anchor.new_empty((batch, len(tables) * dim), dtype=dtype)


@lookup.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    return _like(*args), torch.empty((), dtype=torch.int64)


@deposit.register_fake
def _(
    gradient: Tensor,
    ticket: Tensor,
    anchor: Tensor,
    module: str,
    weights: Tensor | None,
    pooled: bool,
) -> tuple[Tensor, Tensor]:
    of_weights = anchor.new_empty(0) if weights is None else torch.empty_like(weights)
    return torch.empty_like(anchor), of_weights


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, anchor, ctx.module, offsets, weights, *_rest = inputs
    ctx.pooled = offsets is not None
    ctx.save_for_backward(output[1], anchor, *(() if weights is None else (weights,)))


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
    ticket, anchor, *kept = ctx.saved_tensors
    weights = kept[0] if kept else None
    given = deposit(gradient, ticket, anchor, ctx.module, weights, ctx.pooled)
    return None, given[0], None, None, None if weights is None else given[1], *[None] * 7


lookup.register_autograd(_backward, setup_context=_remember)


class Transformed(torch.autograd.Function):
    """Look up rows inside `torch.func`: what `Lookup` does, with a rule for `vmap`."""

    @staticmethod
    def forward(parameter: Tensor, ids: Tensor, module: Module) -> tuple[Tensor, Tensor]:
        """Return the row of each id, `ids.shape + (dim,)`, and the ticket of the batch."""
        batch, rows = module._lease_rows(ids)
        return rows, _ticket(batch)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep the ticket, which owns the batch."""
        *_, ctx.module = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[None, None, None]:
        """Give the module the gradient of the rows."""
        (ticket,) = ctx.saved_tensors
        if accumulates(ctx.next_functions[0][0]):
            ctx.module._take_gradient(_batch_of(ticket), gradient.reshape(-1, gradient.shape[-1]))
        return None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], parameter: Tensor, ids: Tensor, module: Module
    ) -> tuple[Any, tuple[int, None]]:
        """Look up the ids of all samples at once."""
        return Transformed.apply(parameter, ids.movedim(in_dims[1], 0), module), (0, None)


def _read_of_all(
    info: Any, in_dims: tuple[Any, ...], ids: Tensor, *rest: Any
) -> tuple[Tensor, int]:
    return read(ids.movedim(in_dims[0], 0), *rest), 0


read.register_vmap(_read_of_all)


def look_up(
    ids: Tensor,
    layer: Any,
    asked: Asked,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the row of each id of some features within a graph, `(n, dim)`.

    Or what their bags come to, `(batch, features * dim)`.

    Args:
        ids: int64 `(n,)`, one feature after another.
        layer: over the tables.
        asked: what is to be looked up.
        offsets: where each bag begins and the last one ends; None for rows.
        weights: of bags.
        dtype: of bags.
    """
    (names, tables), lengths, padding, modes = asked
    told = dtype, tables, _BETWEEN.join(names), lengths, padding, _BETWEEN.join(modes)
    trained, weighed = layer._trained, weights is not None and weights.requires_grad
    anchor, number = layer._anchor if trained else layer._anchor.detach(), layer.number
    if (trained or weighed) and torch.is_grad_enabled():
        return lookup(ids, anchor, number, offsets, weights, *told, weighed)[0]
    return read(ids, anchor.detach(), number, offsets, weights, *told)
