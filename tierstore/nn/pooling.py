"""Bags of rows, pooled where the rows are: none is written out for an id, in either direction.

A call is parts, one for each layer, whose bags become columns of one tensor. A kernel pools them on
a GPU, in float32 and in the order of the ids; the gradients of a row are then added in no
particular order. On the host torch pools the distinct rows, with the results of
`torch.nn.EmbeddingBag` to the bit. On a GPU, torch pools a row for each id with
`torch.use_deterministic_algorithms(True)`, and for types that the kernel cannot compute with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import is_deterministic, look_up
from tierstore.nn.part import Part
from tierstore.nn.pooled import Composed, Form, Launched, positions_of


def pool(parts: Sequence[Part], split: Sequence[int] | None = None) -> Sequence[Tensor]:
    """Return what the bags of a call come to, `(batch, width)`, and the columns of each feature.

    Layers that are trained get the gradients of their rows, and bags those of their weights. A
    feature that gets no gradient is not trained. Where a gradient may come, the columns are no
    views of the whole, whose memory they share.

    Args:
        parts: of the same store, and equally many bags for each feature.
        split: how many columns each feature has; None leaves them out.
    """
    if not parts:
        raise InvalidInputError("a call needs the bags of at least one feature")
    is_enabled, rows, weights = torch.is_grad_enabled(), list[Any](), list[Tensor | None]()
    trained, weighed = list[bool](), list[bool]()
    for part in parts:
        own = part.bags.weights
        rows.append(part.layer.own)
        weights.append(own)
        trained.append(part.trains)
        weighed.append(own is not None and own.requires_grad and is_enabled)
    pending = Pooling(parts, type_of(parts), split, trained, weighed)
    if any(trained) or any(weighed):
        found: Any = look_up(pending, *rows, *weights)
        return (found,) if split is None else found
    whole = pending.read()
    return (whole,) if split is None else (whole, *whole.split(split, 1))


def type_of(parts: Sequence[Part]) -> torch.dtype:
    """Return the type that takes the rows of all layers."""
    if len(parts) == 1:
        return parts[0].layer.anchor.dtype
    return functools.reduce(torch.promote_types, [part.layer.anchor.dtype for part in parts])


class Pooling:
    """The bags of a call, of which layers and weights take the gradient.

    Attributes:
        parts: the parts.
        dtype: of what they come to.
        split: how many columns each feature has; None leaves them out.
        trained, weighed: whether the rows, and the weights, of each part need a gradient.
    """

    __slots__ = ("__weakref__", "_pooled", "dtype", "parts", "split", "trained", "weighed")
    _pooled: list[tuple[Any, Composed | Launched] | None]
    """The batch of each part, and what pooled it; None where it was only read."""

    def __init__(
        self,
        parts: Sequence[Part],
        dtype: torch.dtype,
        split: Sequence[int] | None,
        trained: Sequence[bool],
        weighed: Sequence[bool],
    ) -> None:
        self.parts: Sequence[Part] = parts
        self.dtype: torch.dtype = dtype
        self.split: Sequence[int] | None = split
        self.trained: Sequence[bool] = trained
        self.weighed: Sequence[bool] = weighed

    def read(self, *tensors: Any) -> Tensor:
        """Return what the bags come to, `(batch, width)`, with no part in training."""
        out: Any = None
        with self.parts[0].layer.together():
            for part in self.parts:
                layer, ids = part.layer, part.rows
                if layer.expands(part.item.nbytes * len(ids)):
                    out = _pooled_rows(part, layer.read_rows(ids), self.dtype, out)
                else:
                    with layer.read_lease(ids) as lease:
                        out, _ = _pooled(part, lease, self.dtype, out)
        pooled: Tensor = out.to(self.parts[0].layer.anchor.device)
        return pooled

    def forward(self, *tensors: Any) -> Any:
        """Pool; return `(batch, width)`, and if they are `split` the columns of each feature."""
        out: Any = None
        self._pooled = []
        with self.parts[0].layer.together():
            for part, trained, weighed in zip(self.parts, self.trained, self.weighed, strict=True):
                if part.reads:
                    if weighed:
                        raise InvalidInputError(
                            "weights that need a gradient are for training: the bags of table "
                            f"{part.layer.table.name!r} are only read, in eval() or frozen"
                        )
                    rows = part.layer.read_rows(part.rows)
                    out = _pooled_rows(part, rows, self.dtype, out)
                    self._pooled.append(None)
                    continue
                batch = part.lease()
                out, how = _pooled(
                    part, batch.lease, self.dtype, out, trained=trained, weighed=weighed
                )
                self._pooled.append((batch, how))
        out = out.to(self.parts[0].layer.anchor.device)
        if self.split is None:
            return out
        return out, *torch.unsafe_split_with_sizes(out, self.split, 1)

    def backward(
        self, gradients: Sequence[Tensor | None], trained: Sequence[bool]
    ) -> list[Tensor | None]:
        """Give the layers the gradient of their rows; return that of the weights of each part."""
        shown: list[Tensor | None] = [None] * len(self.parts)
        gradient, given = _joined(gradients[0], gradients[1:], self.split)
        if gradient is None:
            return shown
        for k, (part, of_part) in enumerate(zip(self.parts, self._pooled, strict=True)):
            if of_part is None or not part.touched(given, of_part[0]):
                continue
            batch, pooled = of_part
            with part.layer.together():
                whole, of_weights = pooled.backward(
                    batch, gradient, given, trained=trained[k], weighed=self.weighed[k]
                )
                if whole is not None:
                    part.layer.own.deposit(whole)
            if of_weights is not None:
                shown[k] = part.of_all(of_weights)
        return shown


def _joined(
    of_all: Tensor | None, of_each: Sequence[Tensor | None], split: Sequence[int] | None
) -> tuple[Tensor | None, list[bool] | None]:
    """Return the gradient of all columns, and which features have one; None where all have."""
    there = [each for each in of_each if each is not None]
    if split is None or not there:
        return of_all, None
    given = None
    if len(there) < len(of_each):
        given, like = [each is not None for each in of_each], there[0]
        there = [
            like.new_zeros(len(like), width) if each is None else each
            for each, width in zip(of_each, split, strict=True)
        ]
    columns = there[0] if len(there) == 1 else torch.cat(there, 1)
    return (columns, given) if of_all is None else (columns + of_all, None)


def _pooled(
    part: Part,
    lease: Any,
    dtype: torch.dtype,
    out: Tensor | None,
    *,
    trained: bool = False,
    weighed: bool = False,
) -> tuple[Tensor, Composed | Launched]:
    """Return what the bags come to, `(batch, width)`, and what a backward pass needs.

    Args:
        part: the bags.
        lease: on the rows of their ids.
        dtype: of the result.
        out: where to write the columns; a new tensor if None.
        trained: whether the rows need a gradient.
        weighed: whether the weights need one.
    """
    pooled: Launched | Composed
    on: Any = lease.device
    if on is not None and part.first is None and not is_deterministic():
        form = Form.of(part, dtype, on)
        if form is not None:
            pooled = Launched(part, form, lease, trained=trained, weighed=weighed)
            return pooled.forward(lease, out), pooled
    positions = positions_of(lease)
    expanded = lease.device is not None or part.first is not None
    padding: int | None
    if expanded:
        rows = lease.expand(part.layer.field)
        ids, padding = part.bags.places(positions)
        if part.first is not None:
            part.first.put(rows)
    else:
        rows = lease.read(part.layer.field)
        ids, last = part.bags.split(positions)
        padding = None if last is None else int(last)
    pooled = Composed(part, rows.to(dtype), ids, padding, expanded=expanded)
    return pooled.forward(out), pooled


def _pooled_rows(part: Part, rows: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return what bags come to, given the row of each id."""
    ids, padding = part.bags.places(part.bags.ids.to(rows.device))
    if part.first is not None:
        part.first.put(rows)
    return Composed(part, rows.to(dtype), ids, padding).forward(out)
