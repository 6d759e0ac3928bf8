"""Bags of rows, pooled where the rows are: none is written out for an id, in either direction.

A call is parts, one for each layer, whose bags become columns of one tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tierstore._table.host import Lease
from tierstore._table.joint import Features, touched_by
from tierstore.errors import InvalidInputError
from tierstore.nn.autograd import Batch, accumulates, is_deterministic
from tierstore.nn.jagged import Bags
from tierstore.nn.keyed import FirstRows, Reading
from tierstore.nn.pooled import MODES, Composed, Form, Launched, Pooled, positions_of
from tierstore.spec import Field

_REMEMBERED = 64
"""Modes of features whose columns are kept."""


class Columns:
    """The columns that the bags of some features of one dim become, and how they are pooled.

    The bags of a feature follow one another, equally many of each.

    Attributes:
        modes: "sum", "mean" or "max" of each feature.
        first: the first column of each.
        dim: how many each has.
        width: of the output, columns of other features included.
        aligned: what every first column is a multiple of.
        form: the last one that a kernel pooled them in.
    """

    def __init__(
        self, modes: tuple[str, ...], first: tuple[int, ...], dim: int, width: int
    ) -> None:
        """Describe the columns."""
        self.modes = modes
        self.first = first
        self.dim = dim
        self.width = width
        self.aligned: int = math.gcd(width, *first)
        self.form: Form | None = None
        self._described: dict[torch.device, Tensor] = {}

    def batch(self, bags: Bags) -> int:
        """Return the number of bags of each feature."""
        return len(bags) // len(self.modes)

    def described(self, device: torch.device) -> Tensor:
        """Return them for the kernels, int32 `(features, 2)`."""
        if device not in self._described:
            modes = [MODES[mode] for mode in self.modes]
            both = torch.tensor([self.first, modes], dtype=torch.int32)
            self._described[device] = both.T.contiguous().to(device)
        return self._described[device]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The first feature and the end of each run of one mode and neighbouring columns."""
        found, first = [], 0
        for k in range(1, len(self.modes) + 1):
            if (
                k == len(self.modes)
                or self.modes[k] != self.modes[first]
                or self.first[k] != self.first[k - 1] + self.dim
            ):
                found.append((first, k))
                first = k
        return found

    def part(self, of: Tensor, run: tuple[int, int]) -> Tensor:
        """Return a run's columns of `(batch, width)`, `(features, batch, dim)`, as a view."""
        first, end = run
        start = self.first[first]
        columns = of[:, start : start + (end - first) * self.dim]
        return columns.unflatten(1, (end - first, self.dim)).transpose(0, 1)


@functools.lru_cache(_REMEMBERED)
def side_by_side(modes: tuple[str, ...], dim: int) -> Columns:
    """Return the columns of features that one layer pools alone."""
    first = tuple(dim * place for place in range(len(modes)))
    return Columns(modes, first, dim, dim * len(modes))


class Layer(Protocol):
    """What pooling needs of a layer over rows."""

    table: Any
    field: str
    _own: Any
    _anchor: Tensor

    def _together(self) -> AbstractContextManager[Any]:
        """Enter the store once for what a pass does."""

    def lease_rows(self, rows: Tensor) -> Batch:
        """Lease rows whose gradient may come."""

    def read_lease(self, rows: Tensor) -> Lease:
        """Lease rows that take no part in training."""

    def expands(self, nbytes: int) -> bool:
        """Tell whether to read a row for each id, so many bytes, that takes no part in training."""

    def read_rows(self, rows: Tensor) -> Tensor:
        """Return rows that take no part in training, `(n, dim)`."""


@dataclass(slots=True)
class Part:
    """The bags of a call that one layer pools.

    A kernel pools them on a GPU, in float32 and in the order of the ids; the gradients of a row are
    then added in no particular order. On the host torch pools the distinct rows, with the results
    of `torch.nn.EmbeddingBag` to the bit. On a GPU, torch pools a row for each id with
    `torch.use_deterministic_algorithms(True)`, and for types that the kernel cannot compute with.

    Attributes:
        layer: the layer.
        columns: where the bags go.
        bags: all of them, by feature.
        tables: the number of each feature's table in the layer.
        lengths: how many ids each feature has.
        places: which of the call's features they are.
        first: the rows of keys that have none, in place of those of their ids and not trained.
        features: those that the bags have ids of, on a device and not checked yet, where the layer
            is a `JointLayer`; None where the bags have rows of the space.
    """

    layer: Layer
    columns: Columns
    bags: Bags
    tables: tuple[int, ...]
    lengths: Sequence[int]
    places: tuple[int, ...]
    first: FirstRows | None = None
    features: Features | None = None

    @property
    def rows(self) -> Tensor:
        """The row of the space of each id."""
        ids, features, layer = self.bags.ids, self.features, cast(Any, self.layer)
        return ids if features is None else layer.in_space(ids, features, self.lengths)

    def lease(self) -> Batch:
        """Lease the rows of the ids, whose gradient may come."""
        ids, features = self.bags.ids, self.features
        if features is None:
            return self.layer.lease_rows(ids)
        layer: Any = self.layer
        batch: Batch = layer.lease_features(ids, features, self.lengths)
        return batch

    @property
    def item(self) -> Field:
        """The field that is pooled."""
        found: Field = self.layer.table.spec.layout.field(self.layer.field)
        return found

    def touched(
        self, given: Sequence[bool] | None = None, batch: Batch | None = None
    ) -> frozenset[int]:
        """Return the numbers of the tables that have ids, of the features `given`; all if None.

        A `batch` also counts the ids of other ranks.
        """
        counts = self.lengths if batch is None else batch.counts(self.lengths)
        return touched_by(self.tables, counts if given is None else self._of_given(counts, given))

    def trained_positions(self, batch: Batch, given: Sequence[bool] | None) -> Tensor | None:
        """Return the position of each id's row, -1 for the ids of other features than `given`.

        The ids of first rows get -1 too. None where all ids of the batch are trained.
        """
        is_whole = given is None or all(given[place] for place in self.places)
        if is_whole and self.first is None:
            return batch.trained_positions
        lengths = self._of_given(self.lengths, given)
        found = batch.positions.reshape(-1).clone()
        for piece, length in zip(found.split(list(self.lengths)), lengths, strict=True):
            if not length:
                piece.fill_(-1)
        if self.first is not None:
            found[self.first.at.to(found.device)] = -1
        return found

    def _of_given(self, counts: Sequence[int], given: Sequence[bool] | None) -> Sequence[int]:
        """Return the count of each feature, 0 where it is not given."""
        if given is None:
            return counts
        pairs = zip(counts, self.places, strict=True)
        return [count if given[place] else 0 for count, place in pairs]

    def pool(
        self,
        lease: Lease,
        dtype: torch.dtype,
        out: Tensor | None,
        *,
        trained: bool = False,
        weighed: bool = False,
    ) -> tuple[Tensor, Pooled]:
        """Return what the bags come to, `(batch, width)`, and what a backward pass needs.

        Args:
            lease: on the rows of their ids.
            dtype: of the result.
            out: where to write the columns; a new tensor if None.
            trained: whether the rows need a gradient.
            weighed: whether the weights need one.
        """
        pooled: Launched | Composed
        on: Any = lease.device
        if on is not None and self.first is None and not is_deterministic():
            form = Form.of(self, dtype, on)
            if form is not None:
                pooled = Launched(self, form, lease, trained=trained, weighed=weighed)
                return pooled.forward(lease, out), pooled
        positions = positions_of(lease)
        expanded = lease.device is not None or self.first is not None
        padding: int | None
        if expanded:
            rows = lease.expand(self.layer.field)
            ids, padding = self.bags.places(positions)
            if self.first is not None:
                self.first.put(rows)
        else:
            rows = lease.read(self.layer.field)
            ids, last = self.bags.split(positions)
            padding = None if last is None else int(last)
        pooled = Composed(self, rows.to(dtype), ids, padding, expanded=expanded)
        return pooled.forward(out), pooled

    def pool_rows(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return what bags come to, given the row of each id."""
        ids, padding = self.bags.places(self.bags.ids.to(rows.device))
        if self.first is not None:
            self.first.put(rows)
        return Composed(self, rows.to(dtype), ids, padding).forward(out)


def pool(parts: Sequence[Part], split: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Return what the bags of a call come to, `(batch, width)`, and the columns of each feature.

    Layers get the gradients of their rows, and bags those of their weights. A feature that gets no
    gradient is not trained. The columns are no views of the whole, whose memory they share.

    Args:
        parts: of the same store, and equally many bags for each feature.
        split: how many columns each feature has; None leaves them out.
    """
    parameters = [part.layer._own for part in parts]
    weights = [part.bags.weights for part in parts]
    return _apply(parts, split, *parameters, *weights)


def read_pooled(parts: Sequence[Part], dtype: torch.dtype | None = None) -> Tensor:
    """Return what the bags of a call come to, `(batch, width)`, with no part in training.

    It is of `dtype`, or of the type that takes the rows of all layers.
    """
    out: Any = None
    dtype = type_of(parts) if dtype is None else dtype
    for part in parts:
        layer, ids = part.layer, part.rows
        if layer.expands(part.item.nbytes * len(ids)):
            out = part.pool_rows(layer.read_rows(ids), dtype, out)
        else:
            with layer.read_lease(ids) as lease:
                out, _ = part.pool(lease, dtype, out)
    found: Tensor = out.to(parts[0].layer._anchor.device)
    return found


def type_of(parts: Sequence[Part]) -> torch.dtype:
    """Return the type that takes the rows of all layers."""
    if len(parts) == 1:
        return parts[0].layer._anchor.dtype
    return functools.reduce(torch.promote_types, [part.layer._anchor.dtype for part in parts])


@dataclass
class Pooling:
    """Parts that were pooled, until their gradient has come.

    Attributes:
        parts: the parts.
        pooled: the batch of each, and what pooled it; None where it was only read.
    """

    parts: Sequence[Part]
    pooled: list[tuple[Batch, Pooled] | None]

    @staticmethod
    def of(
        parts: Sequence[Part],
        dtype: torch.dtype,
        trained: Sequence[bool],
        weighed: Sequence[bool],
    ) -> tuple[Pooling, Tensor]:
        """Pool parts; return what they come to, too, `(batch, width)`.

        `trained` and `weighed` tell for each part whether its rows and weights need a gradient.
        """
        out, found = None, Pooling(parts, [])
        with parts[0].layer._together() if parts else nullcontext():
            for part, rows_need, weights_need in zip(parts, trained, weighed, strict=True):
                if isinstance(part.layer, Reading) and not weights_need:
                    rows = part.layer.read_rows(part.rows)
                    out = part.pool_rows(rows, dtype, out)
                    found.pooled.append(None)
                    continue
                batch = part.lease()
                out, pooled = part.pool(
                    batch.lease, dtype, out, trained=rows_need, weighed=weights_need
                )
                found.pooled.append((batch, pooled))
        if out is None:
            raise InvalidInputError("a call needs the bags of at least one feature")
        return found, out.to(parts[0].layer._anchor.device)

    def backward(
        self,
        gradient: Tensor,
        given: Sequence[bool] | None,
        trained: Sequence[bool],
        weighed: Sequence[bool],
    ) -> list[Tensor | None]:
        """Give the layers the gradient of their rows; return that of the weights of each part.

        `gradient` is that of what all came to; for `given` see `Part.trained_positions`.
        """
        found: list[Tensor | None] = [None] * len(self.parts)
        for k, (part, of_part) in enumerate(zip(self.parts, self.pooled, strict=True)):
            if of_part is None or not part.touched(given, of_part[0]):
                continue
            batch, pooled = of_part
            with part.layer._together():
                whole, of_weights = pooled.backward(
                    batch, gradient, given, trained=trained[k], weighed=weighed[k]
                )
                weights = part.bags.weights
                if of_weights is not None and weights is not None:
                    found[k] = of_weights.to(weights.device)  # which may not be where the rows are
                if whole is not None:
                    part.layer._own.deposit(whole)
        return found


class _Lookup(torch.autograd.Function):
    """Look up and pool bags of rows outside graphs; see `autograd.Lookup`."""

    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Part], split: Sequence[int] | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what `pool` does; `tensors` are the parameters of the parts, then weights."""
        ctx.set_materialize_grads(False)
        needed, count = ctx.needs_input_grad[2:], len(parts)
        ctx.pooling, out = Pooling.of(parts, type_of(parts), needed[:count], needed[count:])
        ctx.split = split
        return (out, *(() if split is None else torch.unsafe_split_with_sizes(out, split, 1)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Give the layers the gradient of their rows, and return those of the weights."""
        # What refuses a second derivative takes as long as a launch, also where none is asked for.
        found: tuple[Any, ...] = (_once if torch.is_grad_enabled() else _back)(ctx, *gradients)
        return found


def _back(ctx: Any, of_all: Tensor | None, *of_each: Tensor | None) -> tuple[Any, ...]:
    """Do what `_Lookup.backward` does."""
    needed, count = ctx.needs_input_grad[2:], len(ctx.pooling.parts)
    gradient, given = _joined(of_all, of_each, ctx.split)
    if gradient is None:
        return None, None, *[None] * len(needed)
    nodes = [node for node, _ in ctx.next_functions[:count]]
    trained = [need and accumulates(node) for need, node in zip(needed[:count], nodes, strict=True)]
    of_weights = ctx.pooling.backward(gradient, given, trained, needed[count:])
    return None, None, *[None] * count, *of_weights


_once: Any = torch.autograd.function.once_differentiable(_back)


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


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Lookup).apply
"""Calls `_Lookup` without what `torch.func` needs; see `joint._apply`."""
