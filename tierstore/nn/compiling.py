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


@torch.library.custom_op("tierstore::lookup", mutates_args=())
def lookup(ids: Tensor, anchor: Tensor, module: str) -> tuple[Tensor, Tensor]:
    """Return the row of each id, `ids.shape + (dim,)`, and the ticket of the batch.

    Rows have the type, device and `dim` of the anchor.
    """
    found = _named(module)
    batch, rows = found._lease_rows(ids)
    return rows, _ticket(batch)


@torch.library.custom_op("tierstore::deposit", mutates_args=())
def deposit(gradient: Tensor, ticket: Tensor, anchor: Tensor, module: str) -> Tensor:
    """Give a module the gradient of a lookup's rows; return the anchor's own, which is empty."""
    found = _named(module)
    if accumulates(found._node):
        found._take_gradient(_batch_of(ticket), gradient.reshape(-1, anchor.shape[1]))
    return torch.empty_like(anchor)


@torch.library.custom_op("tierstore::read", mutates_args=())
def read(ids: Tensor, anchor: Tensor, module: str) -> Tensor:
    """Return the row of each id, `ids.shape + (dim,)`, outside training."""
    return _named(module)._read_rows(ids)


@lookup.register_fake
def _(ids: Tensor, anchor: Tensor, module: str) -> tuple[Tensor, Tensor]:
    return anchor.new_empty((*ids.shape, anchor.shape[1])), torch.empty((), dtype=torch.int64)


@deposit.register_fake
def _(gradient: Tensor, ticket: Tensor, anchor: Tensor, module: str) -> Tensor:
    return torch.empty_like(anchor)


@read.register_fake
def _(ids: Tensor, anchor: Tensor, module: str) -> Tensor:
    return anchor.new_empty((*ids.shape, anchor.shape[1]))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, anchor, ctx.module = inputs
    ctx.save_for_backward(output[1], anchor)


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[None, Tensor, None]:
    ticket, anchor = ctx.saved_tensors
    return None, deposit(gradient, ticket, anchor, ctx.module), None


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
    info: Any, in_dims: tuple[Any, ...], ids: Tensor, anchor: Tensor, module: int
) -> tuple[Tensor, int]:
    return read(ids.movedim(in_dims[0], 0), anchor, module), 0


read.register_vmap(_read_of_all)


# -- several features of tables that are looked up as one


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


def _asked(
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
    modes: str = "",
) -> Asked:
    features = Features(tuple(names.split(_BETWEEN)), tuple(tables))
    return Asked(features, list(lengths), padding, tuple(modes.split(_BETWEEN)) if modes else ())


@torch.library.custom_op("tierstore::look_up_features", mutates_args=())
def _look_up(
    ids: Tensor,
    anchor: Tensor,
    module: str,
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    found: JointModule = _named(module)
    batch, rows = found._lease_features(ids, _asked(names, tables, lengths, padding))
    return rows, _ticket(batch)


@torch.library.custom_op("tierstore::read_features", mutates_args=())
def _read_features(
    ids: Tensor,
    anchor: Tensor,
    module: str,
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
) -> Tensor:
    found: JointModule = _named(module)
    return found._read_features(ids, _asked(names, tables, lengths, ()))


@torch.library.custom_op("tierstore::pool_features", mutates_args=())
def _pool(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    anchor: Tensor,
    module: str,
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
    modes: str,
    dtype: torch.dtype,
    weighed: bool,
) -> tuple[Tensor, Tensor]:
    found: JointModule = _named(module)
    bags, asked = Bags(ids, offsets, weights), _asked(names, tables, lengths, padding, modes)
    pooled, out = found._pool_features(bags, asked, dtype, weighed=weighed)
    return out, _ticket(pooled)


@torch.library.custom_op("tierstore::deposit_pooled", mutates_args=())
def _deposit_pooled(
    gradient: Tensor, ticket: Tensor, anchor: Tensor, module: str, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Give a module the gradient of pooled rows; return the anchor's own, and the weights'."""
    pooled = _batch_of(ticket)
    of_weights = pooled.give(gradient, trained=accumulates(_named(module)._node))
    none = anchor.new_empty(0) if weights is None else torch.zeros_like(weights)
    return torch.empty_like(anchor), none if of_weights is None else of_weights


@torch.library.custom_op("tierstore::read_pooled", mutates_args=())
def _read_pooled(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    anchor: Tensor,
    module: str,
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
    modes: str,
    dtype: torch.dtype,
) -> Tensor:
    found: JointModule = _named(module)
    bags, asked = Bags(ids, offsets, weights), _asked(names, tables, lengths, padding, modes)
    return found._read_pooled(bags, asked, dtype)


def _pooled_like(
    offsets: Tensor, anchor: Tensor, tables: Sequence[int], dtype: torch.dtype
) -> Tensor:
    batch = (offsets.shape[0] - 1) // len(tables)
    return anchor.new_empty((batch, len(tables) * anchor.shape[1]), dtype=dtype)


@_look_up.register_fake
def _(ids: Tensor, anchor: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return anchor.new_empty((ids.shape[0], anchor.shape[1])), torch.empty((), dtype=torch.int64)


@_read_features.register_fake
def _(ids: Tensor, anchor: Tensor, *_: Any) -> Tensor:
    return anchor.new_empty((ids.shape[0], anchor.shape[1]))


@_pool.register_fake
def _(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    anchor: Tensor,
    module: str,
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
    modes: str,
    dtype: torch.dtype,
    weighed: bool,
) -> tuple[Tensor, Tensor]:
    return _pooled_like(offsets, anchor, tables, dtype), torch.empty((), dtype=torch.int64)


@_deposit_pooled.register_fake
def _(
    gradient: Tensor, ticket: Tensor, anchor: Tensor, module: str, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    of_weights = anchor.new_empty(0) if weights is None else torch.empty_like(weights)
    return torch.empty_like(anchor), of_weights


@_read_pooled.register_fake
def _(
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    anchor: Tensor,
    module: str,
    names: str,
    tables: Sequence[int],
    lengths: Sequence[int],
    padding: Sequence[int],
    modes: str,
    dtype: torch.dtype,
) -> Tensor:
    return _pooled_like(offsets, anchor, tables, dtype)


def _remember_features(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, anchor, ctx.module, *_rest = inputs
    ctx.save_for_backward(output[1], anchor)


def _backward_features(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
    ticket, anchor = ctx.saved_tensors
    return None, deposit(gradient, ticket, anchor, ctx.module), None, None, None, None, None


def _remember_pooled(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, weights, anchor, ctx.module, *_rest = inputs
    kept = (weights,) if weights is not None else ()
    ctx.save_for_backward(output[1], anchor, *kept)


def _backward_pooled(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
    ticket, anchor, *kept = ctx.saved_tensors
    weights = kept[0] if kept else None
    of_anchor, of_weights = _deposit_pooled(gradient, ticket, anchor, ctx.module, weights)
    return None, None, None if weights is None else of_weights, of_anchor, *[None] * 8


_look_up.register_autograd(_backward_features, setup_context=_remember_features)
_pool.register_autograd(_backward_pooled, setup_context=_remember_pooled)


def look_up(ids: Tensor, layer: Any, asked: Asked) -> Tensor:
    """Return the row of each id of some features within a graph, `(n, dim)`.

    Args:
        ids: int64 `(n,)`, one feature after another.
        layer: over the tables.
        asked: what is to be looked up.
    """
    (names, tables), lengths, padding, _ = asked
    told, joined = layer.number, _BETWEEN.join(names)
    if layer._trained and torch.is_grad_enabled():
        return _look_up(ids, layer._anchor, told, joined, tables, lengths, padding)[0]
    return _read_features(ids, layer._anchor.detach(), told, joined, tables, lengths)


def pool(
    bags: tuple[Tensor, Tensor, Tensor | None], layer: Any, asked: Asked, dtype: torch.dtype
) -> Tensor:
    """Return what the bags of some features come to within a graph, `(batch, features * dim)`.

    Args:
        bags: ids, int64 `(n,)`; where each bag begins and the last one ends; weights.
        layer: over the tables.
        asked: what is to be looked up.
        dtype: of the result.
    """
    (names, tables), *rest, modes = asked
    weights, trained = bags[2], layer._trained
    told = layer.number, _BETWEEN.join(names), tables, *rest, _BETWEEN.join(modes), dtype
    weighed = weights is not None and weights.requires_grad
    anchor = layer._anchor if trained else layer._anchor.detach()
    if (trained or weighed) and torch.is_grad_enabled():
        return _pool(*bags, anchor, *told, weighed)[0]
    return _read_pooled(*bags, anchor.detach(), *told)
