"""Lookups as operators of torch, for torch.compile, torch.export and torch.func.

An operator gets the name of a layer, which looks rows up and takes their gradient. Between forward
and backward a graph carries a ticket, a number in a tensor that owns what is pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierstore._table.joint import Features
from tierstore.nn.autograd import Pending, Rows, accumulates
from tierstore.nn.features import Bags, no_padding
from tierstore.nn.naming import BETWEEN, named, of_ticket, ticket
from tierstore.nn.part import Part, side_by_side
from tierstore.nn.pooling import Pooling


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


# The operators take the ids of a layer over one table, or of several features, one after another,
# with their names, tables, lengths and padding; these with offsets and modes if they are pooled.


@torch.library.custom_op("tierstore::look_up", mutates_args=())
def _look_up(
    ids: Tensor,
    anchor: Tensor,
    layer: str,
    trained: bool,
    weighed: bool = False,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tables: Sequence[int] | None = None,
    names: str | None = None,
    lengths: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    modes: str = "",
) -> tuple[Tensor, Tensor]:
    """Return the row of each id, `ids.shape + (dim,)`, and the ticket of what is pending.

    Rows have the type, device and `dim` of the anchor. Pooled ones are of `dtype`, `(batch,
    features * dim)`. `trained` and `weighed` tell whether the rows and the weights of bags need a
    gradient; without, the ticket is of nothing.
    """
    found = named(layer)
    pending: Rows | Pooling
    if names is None:
        pending = Rows(found)
    else:
        features = Features(tuple(names.split(BETWEEN)), tuple(tables or ()))
        counted = no_padding(ids, lengths or (), padding or ())
        if offsets is None:
            pending = Rows(found, features, list(lengths or ()), counted)
        else:
            columns = side_by_side(tuple(modes.split(BETWEEN)), found.embedding_dim)
            bags, every = Bags(ids, offsets, weights), list(lengths or ())
            if counted is not None:  # as if the others had not been given
                bags, every = bags.without(counted, every)
            places = tuple(range(len(every)))
            part = Part(found, columns, bags, features, every, places, counted=counted)
            pending = Pooling([part], dtype, None, [trained], [weighed])
    if trained or weighed:
        return pending.forward(ids), ticket(pending)
    return pending.read(ids), anchor.new_empty((), dtype=torch.int64)


@torch.library.custom_op("tierstore::deposit", mutates_args=())
def _deposit(
    gradient: Tensor, ticket: Tensor, anchor: Tensor, layer: str, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Give a layer the gradient of a lookup; return the anchor's own, which is empty.

    And that of the weights of bags; empty where there are none.
    """
    pending: Pending = of_ticket(ticket)
    trained = [each and accumulates(named(layer)._node) for each in pending.trained]
    (of_weights,) = pending.backward([gradient], trained)
    found = anchor.new_empty(0) if weights is None else torch.zeros_like(weights)
    return torch.empty_like(anchor), found if of_weights is None else found.copy_(of_weights)


@_look_up.register_fake
def _(
    ids: Tensor,
    anchor: Tensor,
    layer: str,
    trained: bool,
    weighed: bool = False,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tables: Sequence[int] | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    dim, count = anchor.shape[1], len(tables or ())
    if offsets is None:
        rows = anchor.new_empty((*ids.shape, dim))
    else:
        rows = anchor.new_empty(((offsets.shape[0] - 1) // count, count * dim), dtype=dtype)
    where = "cpu" if trained or weighed else anchor.device
    return rows, torch.empty((), dtype=torch.int64, device=where)


@_deposit.register_fake
def _(
    gradient: Tensor, ticket: Tensor, anchor: Tensor, layer: str, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    of_weights = anchor.new_empty(0) if weights is None else torch.empty_like(weights)
    return torch.empty_like(anchor), of_weights


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, anchor, ctx.layer, *_rest = inputs
    weights = inputs[6]
    ctx.save_for_backward(output[1], anchor, *(() if weights is None else (weights,)))


def _backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Any, ...]:
    ticket, anchor, *kept = ctx.saved_tensors
    weights = kept[0] if kept else None
    of_anchor, of_weights = _deposit(gradient, ticket, anchor, ctx.layer, weights)
    none = [None] * 4
    return None, of_anchor, *none, None if weights is None else of_weights, *none, None, None


def _of_all(info: Any, in_dims: tuple[Any, ...], ids: Tensor, *rest: Any) -> tuple[Any, Any]:
    return _look_up(ids.movedim(in_dims[0], 0), *rest), (0, None)


_look_up.register_autograd(_backward, setup_context=_remember)
_look_up.register_vmap(_of_all)


def look_up(
    ids: Tensor,
    layer: Any,
    asked: Asked | None = None,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    reads: bool = False,
) -> Tensor:
    """Return the row of each id within a graph, `ids.shape + (dim,)`.

    Or what bags come to, `(batch, features * dim)`.

    Args:
        ids: of a layer over one table; or int64 `(n,)`, of one feature after another.
        layer: over the tables.
        asked: what is to be looked up of several features.
        offsets: where each bag begins and the last one ends; None for rows.
        weights: of bags.
        dtype: of bags.
        reads: whether no gradient comes back, also where the layer is trained.
    """
    told: tuple[Any, ...] = ()
    if asked is not None:
        (names, tables), lengths, padding, modes = asked
        own = dtype, tables, BETWEEN.join(names), lengths, padding, BETWEEN.join(modes)
        told = offsets, weights, *own
    comes_back = torch.is_grad_enabled() and not reads
    trained = layer._trained and comes_back
    weighed = weights is not None and weights.requires_grad and comes_back
    anchor = layer.anchor if trained else layer.anchor.detach()
    return _look_up(ids, anchor, layer._number, trained, weighed, *told)[0]
