"""One lookup for several features, of tables that share a space and a layout.

    rows = layer.in_space(ids, features, lengths)              # ids are checked here alone
    batch = layer.lease_rows(rows)                             # one lease for all of them
    looked.give(gradient)                                      # one sum by row

`ids` are those of all features, one feature after another, and `rows` are the rows of the space
that they stand for. Between these calls, `look_up` returns the rows as they are, and pooled bags
add them up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tierstore._table.joint import Features, JointTable
from tierstore._table.recycled import Recycled
from tierstore.distributed.joint import DistributedJointTable
from tierstore.distributed.known import Known, on_host
from tierstore.errors import InvalidInputError
from tierstore.nn import compiling
from tierstore.nn.autograd import Batch, accumulates
from tierstore.nn.jagged import Bags, no_padding
from tierstore.nn.layer import RowsLayer
from tierstore.nn.parts import Apart, SideBySide, as_one
from tierstore.nn.pooling import Part, Pooling, read_pooled, side_by_side
from tierstore.nn.remote import RemoteBatch
from tierstore.nn.rows import RowsParameter, tracing_refused


class Coming:
    """Ids of coming batches on a device, with one tensor of those of all features.

    A lookup of ids that were announced gets that tensor, by which the request for them is found.
    """

    def __init__(self) -> None:
        """Keep none."""
        self._kept: deque[tuple[Known, tuple[Tensor, list[int]]]] = deque()

    def __bool__(self) -> bool:
        """Whether any are kept."""
        return bool(self._kept)

    def keep(self, given: list[Tensor], joined: tuple[Tensor, list[int]], window: int) -> None:
        """Keep the ids of features, as given and as one tensor with their lengths."""
        if on_host(joined[0]):
            return  # those are known by their values
        while len(self._kept) >= max(window, 1):
            self._kept.popleft()
        self._kept.append((Known(*given), joined))

    def find(self, given: list[Tensor]) -> tuple[Tensor, list[int]] | None:
        """Return these ids as one tensor, and their lengths, if they are kept; forget them then."""
        if self._kept and not all(isinstance(each, Tensor) for each in given):
            return None
        for place, (known, joined) in enumerate(self._kept):
            if known.is_as(*given):
                del self._kept[place]
                return joined
        return None


@dataclass
class Looked:
    """A lookup of several features that awaits its gradient.

    Attributes:
        counted: bool `(n,)`, the ids that take part in training; None means all.
        touched: the numbers of the tables that have ids, of this rank.
    """

    layer: JointLayer
    batch: Batch | RemoteBatch
    features: Features
    lengths: Sequence[int]
    counted: Tensor | None
    touched: frozenset[int]

    def firsts(self) -> list[int] | None:
        """Return the first row of the table of each feature; None on several ranks."""
        batch = self.batch
        return batch.firsts(self.features.tables) if isinstance(batch, Batch) else None

    def take(self, parts: Sequence[Tensor], given: Sequence[bool] | None) -> None:
        """Do what `give` does for the gradients of the features `given`, a tensor of each."""
        firsts = self.firsts if given is None else None
        self.give(*as_one(parts, self.layer.memory, firsts), given)

    def give(
        self,
        gradient: Tensor | Apart,
        columns: SideBySide | None = None,
        given: Sequence[bool] | None = None,
    ) -> None:
        """Give the layer the gradient of ids, summed by row, for the optimizer.

        Args:
            gradient: of the ids of the features `given`, `(n, dim)`.
            columns: where in `gradient` that of each id is; None means in order.
            given: which features have one; the others are as if they had not been looked up. None
                means all.
        """
        batch, positions = self.batch, None
        counts = batch.counts(self.lengths)
        if self.counted is not None:
            every = batch.positions
            positions = torch.where(self.counted.to(every.device), every, -1)
        if given is not None:
            every = batch.positions if positions is None else positions
            positions = torch.cat(tuple(compress(every.split(list(self.lengths)), given)))
            counts = [count if each else 0 for count, each in zip(counts, given, strict=True)]
        layer, touched = self.layer, self.touched
        if given is not None or counts is not self.lengths:
            touched = self.features.touched(counts)
        if not touched:
            return
        with layer._together():
            if isinstance(gradient, Apart):
                if positions is None and isinstance(batch, Batch) and layer.is_single:
                    layer._own.deposit(batch.gradient(gradient, None, touched))
                    return
                gradient = gradient.in_order()
            own = gradient.to(layer._device, layer._dtype)
            if columns is None:
                layer._own.deposit(batch.gradient(own, positions, touched))
            elif positions is None and isinstance(batch, Batch):
                layer._own.deposit(batch.gradient(own, None, touched, columns))
            else:
                layer._own.deposit(batch.gradient(columns.in_order(own), positions, touched))


@dataclass
class PooledFeatures:
    """Bags of a graph that await their gradient.

    Attributes:
        weights: of all ids.
        counted: bool `(n,)`, the ids that were pooled; None means all.
        weighed: whether the weights need a gradient.
    """

    pooling: Pooling
    weights: Tensor | None
    counted: Tensor | None
    weighed: bool

    def give(self, gradient: Tensor, *, trained: bool) -> Tensor | None:
        """Give the layer the gradient of its rows if they are `trained`; return the weights'."""
        (found,) = self.pooling.backward(gradient, None, [trained], [self.weighed])
        if self.weights is None or not self.weighed:
            return None
        every = torch.zeros_like(self.weights)
        if found is not None and self.counted is None:
            every.copy_(found)
        elif found is not None and self.counted is not None:
            every[self.counted.to(every.device)] = found.to(every)
        return every


class JointLayer(RowsLayer):
    """A layer over a field of tables that are looked up and trained as one.

    Attributes:
        table: the tables, by rows of their space.
        coming: ids that were announced to tables which ranks share.
        memory: for gradients of features that are stored apart, as one tensor.
        is_single: whether gradients are floats of 32 bits on the host.
    """

    table: Any

    def __init__(self, table: JointTable | DistributedJointTable, field: str) -> None:
        """Put a layer over a field of a joint table."""
        super().__init__(table, field)
        self.memory: Recycled = Recycled()
        self.is_single: bool = self._dtype == torch.float32 and self._device == "cpu"

    def _begin(self, empty: Tensor, rows: RowsParameter) -> None:
        """Take a parameter, and a name for the operators; no ids are announced to it yet."""
        super()._begin(empty, rows)
        self.coming: Coming = Coming()
        self.number: str = compiling.register(self, rows.table, self.field)

    def look_up(
        self,
        ids: Tensor,
        features: Features,
        lengths: Sequence[int],
        counted: Tensor | None = None,
        *,
        apart: bool = True,
    ) -> tuple[Tensor, ...]:
        """Return the rows of each feature, `(length, dim)`, or all in one tensor unless `apart`.

        Args:
            ids: int64 `(n,)`, one feature after another.
            features: which.
            lengths: how many ids each has.
            counted: bool `(n,)`, the ids that take part in training; None means all.
            apart: whether features get tensors of their own.
        """
        self.refuse_transforms()
        with self._together():
            if self._trains():
                return _apply(self._own, (self, ids, features, lengths, counted, apart))
            rows = self.in_space(ids, features, lengths)
            read = self.read_rows(rows)
        return _parts(read, lengths, apart=apart)

    def _trains(self) -> bool:
        """Whether a lookup keeps its rows for a gradient; see `RowsParameter.trains`."""
        return self._own.trains(self)

    def refuse_transforms(self) -> None:
        """Raise InvalidInputError in `torch.jit.trace` and within `torch.func`."""
        if torch._C._is_tracing():
            raise tracing_refused()
        if torch._C._are_functorch_transforms_active():
            raise InvalidInputError(
                "a collection cannot be looked up within torch.func; TieredEmbedding can"
            )

    def in_space(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Tensor:
        """Return the rows of the space that ids stand for; see `JointTable.in_space`."""
        return self.table.in_space(ids, features, lengths)

    def checks_late(self, ids: Tensor) -> bool:
        """Whether `lease_features` checks ids in the launches of the lease."""
        return not self.is_shared and self.table.checks_late(ids)

    def lease_features(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Batch:
        """Lease the rows of ids for which `checks_late` is true, whose gradient may come."""
        self._check_trained()
        own = self._own
        own.settle()
        lease = self.table.lease_features(ids, features, lengths)
        return Batch(self.table, ids, None, own.abandoned, lease=lease, zeros=own.zeros)

    def _steps(self, rows: Tensor) -> Tensor:
        steps = torch.tensor([each.steps for each in self._averages], device=rows.device)
        return steps[self._shard.location.tables_of(rows)][:, None]

    def leased(
        self, ids: Tensor, features: Features, lengths: Sequence[int], counted: Tensor | None
    ) -> tuple[Looked, Tensor]:
        """Lease the rows of ids whose gradient may come, within `_together`; return each id's."""
        batch: Batch | RemoteBatch
        touched = features.touched(lengths)
        if self.is_shared:
            batch = self.lease_rows(self.in_space(ids, features, lengths))
            found: Tensor = batch.lease.expand(self.field)
        else:
            self._check_trained()
            own = self._own
            own.settle()
            lease, found = self.table.lease_and_read(ids, features, lengths, self.field)
            batch = Batch(self.table, ids, None, own.abandoned, lease=lease, zeros=own.zeros)
        found = found if self._as_stored else found.to(self._anchor)
        return Looked(self, batch, features, lengths, counted, touched), found

    # -- what the operators call

    def _lease_features(self, ids: Tensor, asked: compiling.Asked) -> tuple[Looked, Tensor]:
        """Do what `leased` does for ids, of which those of padding are not trained."""
        features, lengths = asked.features, asked.lengths
        counted = no_padding(ids, lengths, asked.padding)
        with self._together():
            return self.leased(ids, features, lengths, counted)

    def _read_features(self, ids: Tensor, asked: compiling.Asked) -> Tensor:
        """Return the row of each id, outside training."""
        features, lengths = asked.features, asked.lengths
        return self.read_rows(self.in_space(ids, features, lengths))

    def _take_gradient(self, looked: Looked, gradient: Tensor) -> None:
        """Take the gradient of each id's row."""
        looked.give(gradient)

    def _pool_features(
        self, bags: Bags, asked: compiling.Asked, dtype: torch.dtype, *, weighed: bool
    ) -> tuple[PooledFeatures, Tensor]:
        """Pool bags of rows whose gradient may come; return `(batch, features * dim)`, too."""
        part, counted = self._part(bags, asked)
        pooling, out = Pooling.of([part], dtype, [True], [weighed])
        return PooledFeatures(pooling, bags.weights, counted, weighed), out

    def _read_pooled(self, bags: Bags, asked: compiling.Asked, dtype: torch.dtype) -> Tensor:
        """Pool bags outside training."""
        return read_pooled([self._part(bags, asked)[0]], dtype)

    def _part(self, bags: Bags, asked: compiling.Asked) -> tuple[Part, Tensor | None]:
        """Return bags without padding, and which of their ids are left; None if all are."""
        features, lengths, padding, modes = asked
        counted = no_padding(bags.ids, lengths, padding)
        if counted is not None:
            bags, lengths = bags.without(counted, lengths)
        rows = replace(bags, ids=self.in_space(bags.ids, features, lengths))
        columns, places = side_by_side(modes, self.embedding_dim), tuple(range(len(modes)))
        return Part(self, columns, rows, features.tables, lengths, places), counted

    def extra_repr(self) -> str:
        """Name the tables."""
        return f"{self.table.name}, {self.embedding_dim}"

    # What state dicts hold is up to the collection: which tables are looked up together depends on
    # the budget that the store was opened with.

    def _save_to_state_dict(self, *_: Any) -> None:
        """Add nothing."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Take nothing."""


class KeyedJointLayer(JointLayer):
    """The same over tables by key; it takes row numbers, see `keyed.numbered`.

    In `eval()` it is not trained.
    """

    def _trains(self) -> bool:
        return self.training and super()._trains()

    def look_up_averages(self) -> None:
        """Raise InvalidInputError: averages go by row."""
        raise InvalidInputError(f"table {self.table.name!r} is by key; averages go by row")


_Call: TypeAlias = tuple[JointLayer, Tensor, Features, Sequence[int], Tensor | None, bool]
"""A layer, and the arguments of its `look_up`."""


def _parts(rows: Tensor, lengths: Sequence[int], *, apart: bool) -> tuple[Tensor, ...]:
    """Return the rows of each feature, or all in one tensor unless `apart`."""
    return tuple(torch.unsafe_split_with_sizes(rows, lengths)) if apart else (rows,)


class _Lookup(torch.autograd.Function):
    """Look up rows of several features; see `autograd.Lookup`."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, call: _Call) -> tuple[Tensor, ...]:
        """Return the rows of each feature, as no views of each other: they may be changed."""
        ctx.set_materialize_grads(False)
        layer, ids, features, lengths, counted, apart = call
        ctx.looked, found = layer.leased(ids, features, lengths, counted)
        return _parts(found, lengths, apart=apart)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Give the layer the gradient of the features that have one."""
        there = [each for each in gradients if each is not None]
        if there and accumulates(ctx.next_functions[0][0]):
            given = None
            if len(there) < len(gradients):
                given = [each is not None for each in gradients]
            if torch.is_grad_enabled():
                with torch.no_grad():
                    ctx.looked.take(there, given)
            else:
                ctx.looked.take(there, given)
        return None, None


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Lookup).apply
"""Calls `_Lookup` without what `torch.func` needs, which `refuse_transforms` has excluded."""
