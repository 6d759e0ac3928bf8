"""Lookups in autograd: the batch of one, its gradient, and the sum of gradients by row.

    rows = look_up(Rows(layer), layer.own, ids)

There is one function of autograd. What was looked up lives as long as autograd's own graph. The
gradient goes to the layers, which give it to their parameters: autograd itself has none for those,
since the shape of a parameter is not that of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, repeat
from operator import is_not
from typing import Any, Protocol

import torch
from torch import Tensor

from tierstore._table.host import Lease
from tierstore._table.joint import Features, JointTable
from tierstore._table.table import Table, check_open, lease_and_read, renamed_since
from tierstore._tiers.gpu.abi import RECORDS
from tierstore._tiers.gpu.launcher import Kernel
from tierstore.errors import ClosedError, InvalidInputError
from tierstore.nn.parts import Apart, SideBySide, as_one
from tierstore.nn.zeros import Zeros

_SOURCE = RECORDS.extended("tierstore.nn", "sum.cu")
_Sum: Any = _SOURCE.structure("Sum")
_SUMMED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Types of gradients that a GPU adds as they come, as kernels name them."""
_CLEAR = {
    vector: Kernel(_SOURCE, "clear", macros={"VECTOR": vector, "EACH": "F32"}) for vector in (1, 4)
}
_ADD = {
    (dtype, vector): Kernel(_SOURCE, "sum", macros={"VECTOR": vector, "EACH": name})
    for dtype, name in _SUMMED.items()
    for vector in (1, 4)
}
_NARROW = {
    (dtype, vector): Kernel(_SOURCE, "narrow", macros={"VECTOR": vector, "EACH": name})
    for dtype, name in _SUMMED.items()
    for vector in (1, 4)
}
_LITTLE = 16 << 20
"""Bytes of sums that torch clears and rounds, also after the distinct rows, in microseconds."""
_EXACT = (torch.float32, torch.float64)
"""Types that `index_add_` sums as that operator does on the CPU, in half the time."""


def sum_by_row(values: Tensor, positions: Tensor, bound: int) -> Tensor:
    """Add row i of `values` `(n, dim)` to row `positions[i]` of `(bound, dim)`, unless negative.

    Rows are added in the order of i, so the result is, to the last bit, that of the operator with
    which `torch.nn.Embedding` sums its gradient.
    """
    if values.device.type == "cpu" and values.dtype in _EXACT:
        total = values.new_zeros(bound + 1, values.shape[1])  # the last is for negative positions
        return total.index_add_(0, positions.remainder(bound + 1), values)[:bound]
    return torch.ops.aten.embedding_dense_backward(values, positions, bound, -1, False)


def summed(
    values: Tensor | Apart,
    lease: Lease,
    positions: Tensor | None,
    columns: SideBySide | None = None,
    zeros: Zeros | None = None,
) -> Tensor:
    """Sum by row as `sum_by_row` does, for the distinct rows of a lease, `(lease.bound, dim)`.

    If `positions` is None, they are those of the lease's ids, and `columns` states where in
    `values` the row of each is. A GPU adds floats of up to 32 bits in float32 as they come, in no
    particular order, which is several times faster, and leaves the rows after the distinct ones
    undefined; `torch.use_deterministic_algorithms(True)` restores the order. If there are `zeros`,
    the sums start from them.
    """
    if isinstance(values, Apart):
        if positions is None and lease.groups is not None:
            return values.summed(lease.groups)
        values = values.in_order()
    if positions is None and lease.groups is not None and values.dtype in _EXACT:
        where = None if columns is None else columns.rows(values.device).numpy()
        values = values if values.stride(1) == 1 else values.contiguous()
        return torch.from_numpy(lease.groups.sums([values.numpy(force=True)], where))
    on_host = lease.device is None or values.dtype not in _SUMMED
    if on_host or is_deterministic():
        if columns is not None:
            values = columns.in_order(values)
        if positions is None:
            positions = torch.as_tensor(lease.positions)
        return sum_by_row(values, positions.reshape(-1), lease.bound)
    if columns is not None:
        own = torch.as_tensor(lease.positions).reshape(-1)
        positions = columns.spread(own, len(values))
    total = cleared(lease, values.shape[1], zeros)
    add_as_it_comes(values, total, lease, positions)
    return total if values.dtype == torch.float32 else _narrowed(total, lease, values.dtype)


def add_as_it_comes(values: Tensor, total: Tensor, lease: Lease, positions: Tensor | None) -> None:
    """Add row i of `values` `(n, dim)` to row `positions[i]` of `total` unless negative, on a GPU.

    Values are floats of 32 or 16 bits, the total is float32, positions are int32; None stands for
    those of the lease's ids.
    """
    values, dim = values.contiguous(), values.shape[1]
    work = _Sum(values.data_ptr(), total.data_ptr(), dim)
    fits = dim % 4 == 0 and values.data_ptr() % (4 * values.element_size()) == 0
    add = _ADD[values.dtype, 4 if fits else 1]
    count = values.shape[0]
    given = None if positions is None else (positions.data_ptr(), count)
    lease.launch(add, work, count, positions=given)


def cleared(lease: Lease, dim: int, zeros: Zeros | None = None) -> Tensor:
    """Return zeros for the distinct rows of a lease on a GPU, float32 `(lease.bound, dim)`.

    Rows after the distinct ones are undefined: a kernel skips them. If an earlier step left no
    `zeros`, torch clears few bytes in less of the host's time than a launch takes.
    """
    device, bound = lease.device, lease.bound
    if device is None:
        raise RuntimeError("sums are cleared so on a GPU")
    if 4 * bound * dim <= _LITTLE:
        found = None if zeros is None else zeros.take(bound)
        return torch.zeros(bound, dim, device=device.torch_name) if found is None else found
    total = torch.empty(bound, dim, device=device.torch_name)
    clear = _CLEAR[1 if dim % 4 else 4]
    lease.launch(clear, _Sum(0, total.data_ptr(), dim), bound)
    return total


def left_over(total: Tensor, zeros: Zeros | None) -> Zeros | None:
    """Return where a step may leave sums that `cleared` began, as zeros; None where it may not."""
    fits = total.dtype == torch.float32 and total.nbytes <= _LITTLE
    return zeros if fits else None


def _narrowed(total: Tensor, lease: Lease, dtype: torch.dtype) -> Tensor:
    """Return the sums of the distinct rows in 16 bits; see `cleared` for the rows after them."""
    if total.nbytes <= _LITTLE:
        return total.to(dtype)
    narrow = torch.empty_like(total, dtype=dtype)
    kernel = _NARROW[dtype, 1 if total.shape[1] % 4 else 4]
    lease.launch(kernel, _Sum(narrow.data_ptr(), total.data_ptr(), total.shape[1]), lease.bound)
    return narrow


is_deterministic: Any = torch._C._get_deterministic_algorithms
"""Tells whether an order is required; the public function costs one more call."""
FIRST = frozenset({0})
"""The numbers of the tables of a batch that is of one table."""


class Abandoned:
    """Leases of batches that were dropped, for the next call to release.

    A garbage collector may drop a batch at any moment, also one at which no lease can be released.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.leases: deque[Lease] = deque()

    def add(self, lease: Lease) -> None:
        """Leave a lease to the next call."""
        self.leases.append(lease)

    def release(self) -> None:
        """Release all of them; after an error, the rest stays for the call after."""
        while self.leases:
            lease = self.leases.popleft()
            try:
                lease.release()
            except BaseException:
                self.leases.appendleft(lease)
                raise


class Batch:
    """The rows of one lookup, leased until their gradient was applied, or cannot come any more.

    Attributes:
        size: the number of ids.
        lease: the lease on their rows.
        counted: for each id whether it takes part in training, or None if all do.
    """

    def __init__(
        self,
        table: Table | JointTable,
        ids: Tensor,
        counted: Tensor | None,
        abandoned: Abandoned,
        *,
        lease: Lease | None = None,
        zeros: Zeros | None = None,
    ) -> None:
        """Lease the rows; the lease of a batch that is dropped goes to `abandoned`.

        The ids are the caller's and may change afterwards: nothing refers to them. Those of a joint
        table are rows of its space. The batch takes over a `lease` on their rows. Sums of gradients
        may begin from `zeros`, and be left there.
        """
        self._table = table
        self._abandoned = abandoned
        self.zeros: Zeros | None = None
        self.size: int = ids.numel()
        self._joint = table if isinstance(table, JointTable) else None
        if self._joint is not None:
            self._placement = self._joint.location
        self.lease: Lease = table.lease(ids.reshape(-1)) if lease is None else lease
        self._names: Any = self.lease.names if self._joint is None else self._names_seen()
        self.counted: Tensor | None = counted
        if self.lease.device is not None:
            self.lease.trim(wait=False)  # requests the count, which the backward pass may find
            self.zeros = zeros

    def __del__(self) -> None:
        """Leave a lease that has not ended to the next call."""
        if hasattr(self, "lease") and not self.lease.ended:
            self._abandoned.add(self.lease)

    @property
    def ids(self) -> Tensor:
        """The ids, flat, from the rows that the lease holds; -1 for bad ones."""
        places = self.positions.clamp(min=0).long()
        return torch.where(self.positions < 0, -1, self.distinct[places])

    @cached_property
    def positions(self) -> Tensor:
        """For each id, the index of its row in compact arrays; -1 for bad ids."""
        return torch.as_tensor(self.lease.positions).reshape(-1)

    @property
    def distinct(self) -> Tensor:
        """The distinct rows, int64; entries after them are undefined until the lease is trimmed."""
        rows = torch.as_tensor(self.lease.rows)
        return rows if self._joint is None else self._joint.renumbered(rows, self._placement)

    @property
    def usable(self) -> bool:
        """Whether the lease has not ended."""
        return not self.lease.ended

    def _names_seen(self) -> Any:
        """Return the number of names of each table with which its lease began; see `Epoch`."""
        names = self._placement.names()
        return (-1,) * len(names) if self.lease.ended else names  # by another thread meanwhile

    def moved(self, touched: Iterable[int] | None = None) -> str:
        """Return why its rows may mean something else than when it looked them up.

        Empty if they do not: then they can be leased anew where the lease has ended. `touched` are
        the tables of a joint table to ask for; None means all.
        """
        return renamed_since(self._table)(self._names, touched) if self.lease.ended else ""

    def gradient(
        self,
        of_each: Tensor | Apart,
        positions: Tensor | None = None,
        touched: frozenset[int] = FIRST,
        columns: SideBySide | None = None,
    ) -> Gradient:
        """Sum the gradients `(n, dim)` of ids by row.

        Args:
            of_each: of all ids, or of those of the rows `positions`.
            positions: `(n,)`; rows that none of them names take no part in training.
            touched: the tables of a joint table that have ids among them.
            columns: where in `of_each` that of each is; None means in order.

        Raises ClosedError as `check_named` does.
        """
        if positions is None and self.counted is not None:
            positions = self.trained_positions
        if columns is not None and (positions is not None or self.lease.ended):
            of_each, columns = columns.in_order(of_each), None
        if self.lease.ended:  # a graph that is run backward again after the step, for example
            self.check_named(touched)
            if isinstance(of_each, Apart):
                of_each = of_each.in_order()
            where = self.positions if positions is None else positions
            total = sum_by_row(of_each, where.reshape(-1), self.lease.bound)
        else:
            if self.lease.device is not None:
                self.lease.trim(wait=False)
            total = summed(of_each, self.lease, positions, columns, self.zeros)
        if positions is None:
            zeros = None if self.zeros is None else left_over(total, self.zeros)
            return Gradient(self, total, None, touched, zeros)
        return self._marked(total, positions, touched)

    def gathered(
        self,
        values: Tensor,
        positions: Tensor | None = None,
        touched: frozenset[int] = FIRST,
    ) -> Gradient:
        """Return the gradients of the distinct rows, `(lease.bound, dim)`, as that of the batch.

        The other arguments are those of `gradient`, which sums them first.
        """
        self.check_named(touched)
        positions = self.trained_positions if positions is None else positions
        if positions is None:
            return Gradient(self, values, None, touched)
        return self._marked(values, positions, touched)

    def _marked(self, values: Tensor, positions: Tensor, touched: frozenset[int]) -> Gradient:
        """Return the gradient of the rows that `positions` names."""
        bound = self.lease.bound
        values = values if values.shape[0] == bound else values[:bound]  # of zeros for more rows
        trained = positions.new_zeros(bound + 1, dtype=torch.bool)
        trained.index_fill_(0, positions.long(), True)  # the last entry is for -1
        return Gradient(self, values, trained[:-1, None], touched)

    def counts(self, lengths: Sequence[int]) -> Sequence[int]:
        """Return what tells which features have ids, given how many each has on this rank."""
        return lengths

    def renewed(self, touched: frozenset[int] = FIRST) -> Batch:
        """Return the batch, or another one of the same ids where its lease has ended.

        Raises ClosedError as `check_named` does.
        """
        if not self.lease.ended:
            return self
        self.check_named(touched)
        other = Batch(self._table, self.ids, self.counted, self._abandoned)
        self.check_named(touched)  # again: another thread may have come before the lease
        return other

    @cached_property
    def trained_positions(self) -> Tensor | None:
        """The positions, -1 for ids that take no part in training; None where all do."""
        if self.counted is None:
            return None
        return torch.where(self.counted.to(self.positions.device), self.positions, -1)

    def check_named(self, touched: Iterable[int] | None = None) -> None:
        """Raise ClosedError where rows that it looked up may mean something else by now.

        As after a removal of keys, or a rollback; see `moved`.
        """
        if why := self.moved(touched):
            check_open(self._table)  # a store that was closed says so
            raise ClosedError(
                f"{why} since this forward pass through table {self._table.name!r}; run the "
                "forward pass again for a gradient"
            )


@dataclass
class Gradient:
    """The gradient of a batch.

    Attributes:
        batch: what it is the gradient of, and whose lease holds the rows.
        values: `(rows, dim)`, at least one row for each distinct row; rows after those are
            undefined.
        trained: bool `(rows, 1)`, the rows that a step may change; None means all.
        touched: the numbers of the tables that have ids in it; a table alone is number 0.
        zeros: where a step may leave the values, as zeros; None once they may be another's.
    """

    batch: Batch
    values: Tensor
    trained: Tensor | None = None
    touched: frozenset[int] = FIRST
    zeros: Zeros | None = None

    def trim(self) -> None:
        """Cut off the rows after the distinct ones; on a GPU this waits for their number.

        Values are trimmed before they are shown: from then on, others may use them too.
        """
        self.zeros = None
        self.batch.lease.trim(wait=True)
        bound = self.batch.lease.bound
        self.values = self.values[:bound]
        self.trained = None if self.trained is None else self.trained[:bound]


class Pending(Protocol):
    """What is looked up in a pass, and takes the gradient of it.

    Attributes:
        trained: for each layer whether its rows need a gradient.
    """

    trained: Sequence[bool]

    def forward(self, *tensors: Any) -> Any:
        """Look up; `tensors` are the parameters of the layers, then ids, or weights of bags."""

    def backward(
        self, gradients: Sequence[Tensor | None], trained: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Give the layers the gradient of their rows; return that of ids, or of weights.

        `gradients` are of what `forward` returned, and `trained` tells for each layer whether the
        backward pass under way accumulates into its parameter.
        """


class Rows:
    """The rows of ids, of which a layer takes the gradient.

    Attributes:
        layer: the layer.
        features: what the ids are of, one feature after another; None for a layer over one table.
        lengths: how many ids each has.
        counted: bool `(n,)`, the ids that take part in training; None means all, but for padding
            that the layer itself has.
        apart: whether features get tensors of their own.
    """

    __slots__ = ("__weakref__", "_batch", "apart", "counted", "features", "layer", "lengths")
    trained: Sequence[bool] = (True,)
    _batch: Any

    def __init__(
        self,
        layer: Any,
        features: Features | None = None,
        lengths: Sequence[int] = (),
        counted: Tensor | None = None,
        *,
        apart: bool = False,
    ) -> None:
        self.layer: Any = layer
        self.features: Features | None = features
        self.lengths: Sequence[int] = lengths
        self.counted: Tensor | None = counted
        self.apart: bool = apart

    def read(self, ids: Tensor) -> Any:
        """Return the rows, outside training: `ids.shape + (dim,)`, or those of each feature."""
        layer = self.layer
        if self.features is not None:
            ids = layer.in_space(ids, self.features, self.lengths)
        return self._parts(layer.read_rows(ids))

    def forward(self, *tensors: Any) -> Any:
        """Lease the rows of ids; return them as `read` does, as no views of each other."""
        layer, features, counted, ids = self.layer, self.features, self.counted, tensors[-1]
        rows: Tensor
        with layer.together():
            if layer.is_shared:
                self._batch = layer.lease_rows(ids, features, self.lengths, counted)
                rows = self._batch.lease.expand(layer.field)
                # A view made here could not be written to, as by those who put first rows in.
                rows = torch.ops.aten._unsafe_view(rows, (*ids.shape, layer.embedding_dim))
            else:
                own = layer.own
                own.settle()
                table: Any = layer.table
                if features is None:
                    if layer.padding_idx is not None and counted is None:
                        counted = ids.reshape(-1) != layer.padding_idx
                    lease, rows = lease_and_read(table, ids, layer.field)
                else:
                    lease, rows = table.lease_and_read(ids, features, self.lengths, layer.field)
                self._batch = Batch(
                    table, ids, counted, own.abandoned, lease=lease, zeros=own.zeros
                )
            if not layer.as_stored:
                rows = rows.to(layer.anchor)
        return self._parts(rows) if self.apart else rows

    def _parts(self, rows: Tensor) -> Any:
        return torch.unsafe_split_with_sizes(rows, self.lengths) if self.apart else rows

    def backward(
        self, gradients: Sequence[Tensor | None], trained: Sequence[bool]
    ) -> tuple[Tensor | None]:
        """Give the layer the gradient of the features that have one, summed by row."""
        given = list(map(is_not, gradients, repeat(None)))
        there = list(compress(gradients, given))
        if not (there and trained[0]):
            return (None,)
        layer, batch, features = self.layer, self._batch, self.features
        positions, touched, apart = None, FIRST, False
        if features is not None:
            counts = batch.counts(self.lengths)
            if len(there) < len(gradients):
                some = batch.trained_positions
                every = batch.positions if some is None else some
                positions = torch.cat(tuple(compress(every.split(list(self.lengths)), given)))
                counts = [n if each else 0 for n, each in zip(counts, given, strict=True)]
            else:
                apart = layer.is_single and not layer.is_shared
            touched = features.touched(counts)
        if not (touched and batch.size):
            return (None,)
        with layer.together():
            whole: Any = there[0]
            columns = None
            if len(there) == 1:
                whole = whole.reshape(-1, layer.embedding_dim)
            else:
                whole, columns = as_one(there, layer.memory, apart=apart)
            if not (layer.as_stored or isinstance(whole, Apart)):
                whole = whole.to(layer._device, layer._dtype)
            layer.own.deposit(batch.gradient(whole, positions, touched, columns))
        return (None,)


def accumulates(leaf: Any) -> bool:
    """Tell whether the backward pass under way accumulates into a leaf, given its node.

    Raises InvalidInputError for `torch.autograd.grad` with respect to it.
    """
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        raise InvalidInputError(
            "the gradient of the rows of a table is no tensor that torch.autograd.grad could "
            "return: take it with respect to what the layer returned, rows = emb(ids)"
        ) from None


class Lookup(torch.autograd.Function):
    """Look up what is pending; `tensors` are those of `Pending.forward`.

    `apply` is for `torch.func`, in which ids may be mapped over; elsewhere `look_up` leaves out
    what that needs.
    """

    @staticmethod
    def forward(pending: Pending, *tensors: Any) -> Any:
        """Look up."""
        return pending.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what is pending."""
        ctx.set_materialize_grads(False)
        ctx.pending = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Give the layers the gradient of their rows, and return those of weights."""
        # What refuses a second derivative takes as long as a launch, also where none is asked for.
        if torch.is_grad_enabled():
            found: tuple[Any, ...] = _once(ctx, *gradients)
            return found
        pending, edges = ctx.pending, ctx.next_functions
        trained = list(pending.trained)
        for k, each in enumerate(trained):
            trained[k] = each and accumulates(edges[k][0])
        return None, *[None] * len(trained), *pending.backward(gradients, trained)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], pending: Pending, own: Tensor, ids: Tensor
    ) -> tuple[Any, int]:
        """Look up the ids of all samples at once."""
        return Lookup.apply(pending, own, ids.movedim(in_dims[2], 0)), 0


_once: Any = torch.autograd.function.once_differentiable(Lookup.backward)
look_up: Callable[..., Any] = super(torch.autograd.Function, Lookup).apply
"""Calls `Lookup` without what `torch.func` needs."""
