"""A batch whose rows are on several ranks, each of which leases its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
from torch import Tensor

from tierstore._table.host import Lease
from tierstore.distributed.exchange import Answer
from tierstore.distributed.joint import DistributedJointTable
from tierstore.distributed.request import Call, Request
from tierstore.distributed.table import DistributedTable
from tierstore.nn.autograd import Batch, Gradient, add_as_it_comes, sum_by_row
from tierstore.nn.parts import SideBySide

if TYPE_CHECKING:
    from tierstore.nn.rows import RowsParameter

_WIDE = 128
"""Bytes of a row from which on one more element is little; a GPU copies bytes more slowly."""

Shared: TypeAlias = DistributedTable | DistributedJointTable
"""Tables whose rows several ranks share."""


class RemoteLease:
    """The rows that a rank requested from others, and its lease on those requested from it."""

    device = None
    """No kernel reaches rows of other ranks."""

    def __init__(self, request: Request, rows: Tensor, lease: Lease) -> None:
        """Hold the rows of a request, `(size, dim)`."""
        self._request = request
        self._rows: Tensor | None = rows
        self._lease = lease

    @classmethod
    def of(
        cls, table: Shared, ids: Tensor, field: str, like: Tensor, before: Callable[[], object]
    ) -> Self:
        """Request a field of rows, and lease those requested; see `DistributedTable.look_up`."""
        lease: Any = None

        def serve(request: Request) -> Answer:
            nonlocal lease
            lease = table.shard.lease(request.asked)
            return _answered(lease, field)

        return cls(*table.look_up(ids, Call("look up", field), like, serve, before), lease)

    @property
    def positions(self) -> Tensor:
        """For each id, the index of its row among those that came."""
        return self._request.positions

    def read(self, field: str) -> Tensor:
        """Return the rows that came, `(size, dim)`, of the requested field; once."""
        rows, self._rows = self._rows, None
        if rows is None:
            raise RuntimeError("the rows of other ranks are read once")
        return rows

    def expand(self, field: str) -> Tensor:
        """Return the row of each id, `(ids, dim)`, of the requested field; once."""
        return self._request.expand(self.read(field))

    def __enter__(self) -> Self:
        """Return the lease itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self._lease.release()


def _answered(lease: Any, field: str) -> Answer:
    """Return a field of the rows of a lease, which is released if they cannot be read."""
    try:
        return Answer(lease.expand(field), lease)
    except BaseException:
        lease.release()
        raise


class RemoteBatch:
    """The rows of one lookup on this rank, and the lease on those that all ranks request from it.

    Attributes:
        size: the number of ids of all ranks: a rank with none takes part where another has some.
        local: the rows of this rank's shard that were requested.
        lease: on the rows of the batch.
    """

    local: Batch

    def __init__(
        self,
        table: Shared,
        ids: Tensor,
        field: str,
        like: Tensor,
        counted: Tensor | None,
        own: RowsParameter,
    ) -> None:
        """Request rows, and lease those requested here; every rank does so at the same time.

        Args:
            table: whose.
            ids: of this rank.
            field: what is looked up.
            like: `(0, dim)`, of its type.
            counted: for each id whether it takes part in training, or None if all do, as on all
                ranks alike.
            own: the parameter, which settles before.
        """
        self._scale = table.ranks if table.average else 1

        def serve(request: Request) -> Answer:
            self.local = Batch(table.shard, request.asked, None, own.abandoned)
            return _answered(self.local.lease, field)

        request, rows = table.look_up(ids, Call("look up", field), like, serve, own.settle)
        self._request = request
        self._counted = counted
        self.size: int = request.total
        self.lease: RemoteLease = RemoteLease(request, rows, self.local.lease)

    @property
    def positions(self) -> Tensor:
        """For each id, the index of its row among those that came."""
        return self._request.positions

    @property
    def trained_positions(self) -> Tensor | None:
        """The positions, -1 for ids that take no part in training; None where all do."""
        if self._counted is None:
            return None
        return torch.where(self._counted.to(self.positions.device), self.positions, -1)

    def counts(self, lengths: Sequence[int]) -> Sequence[int]:
        """Return for each feature whether any rank has ids of it; see `Batch.counts`."""
        return self._request.counts

    def gradient(
        self,
        of_each: Tensor,
        positions: Tensor | None = None,
        touched: frozenset[int] | None = None,
        columns: SideBySide | None = None,
    ) -> Gradient:
        """Return the gradient of the rows of this rank's shard, summed over all ranks.

        `of_each` `(ids, dim)` is that of this rank's ids; for the rest see `Batch.gradient`. Sums
        by row go to the owners, which add them in the order of ranks.
        """
        of_each = of_each if columns is None else columns.in_order(of_each)
        if positions is None and self._counted is not None:
            positions = self.trained_positions
        where = self.positions if positions is None else positions
        return self._given(of_each, lambda: self._summed(of_each, where), positions, touched)

    def _summed(self, values: Tensor, positions: Tensor) -> Tensor:
        """Add row i of `values` to row `positions[i]` of `(size, dim)`, unless negative.

        Rows are added in the order of i; on a GPU as they come, unless deterministic algorithms are
        required.
        """
        size, lease = self._request.size, self.local.lease
        if not len(values):
            return values.new_zeros(size, values.shape[1])
        ordered = torch.are_deterministic_algorithms_enabled() or values.dtype != torch.float32
        if lease.device is None or ordered or lease.ended:
            return sum_by_row(values, positions, size)
        total = values.new_zeros(size, values.shape[1])
        add_as_it_comes(values, total, lease, positions.to(torch.int32))
        return total

    def gathered(
        self,
        values: Tensor,
        positions: Tensor | None = None,
        touched: frozenset[int] | None = None,
    ) -> Gradient:
        """Return the gradient of this rank's shard, given that of the distinct rows of the batch.

        Rows that no rank's `positions` name take no part in training; None names all. Every rank
        gives some, or none does.
        """
        positions = self.trained_positions if positions is None else positions
        return self._given(values, lambda: values, positions, touched)

    def _given(
        self,
        like: Tensor,
        sums: Callable[[], Tensor],
        positions: Tensor | None,
        touched: frozenset[int] | None,
    ) -> Gradient:
        """Give the owners what `sums` returns, and return what comes to this rank."""
        error: Exception | None = None
        try:
            message = _marked(sums(), positions)
        except Exception as found:
            error, none = found, like.new_zeros(self._request.size, like.shape[1])
            message = _marked(none, positions)
        arrived = self._request.deliver(message, error)
        given: Any = None
        if positions is not None:
            arrived, marks = _unmarked(arrived, like)
            given = torch.where(marks, self.local.positions, -1)
        touched = self._request.touched if touched is None else touched
        gradient = self.local.gradient(arrived, given, touched)
        if self._scale != 1:
            gradient.values.div_(self._scale)  # a sum of its own
        return gradient


def _marked(sums: Tensor, positions: Tensor | None) -> Tensor:
    """Return sums with a column that marks those that `positions` name; without it if None."""
    if positions is None:
        return sums
    kind = _kind_of(sums)
    named = torch.zeros(len(sums) + 1, 1, dtype=kind, device=sums.device)
    named[positions] = 1
    return torch.cat([sums.contiguous().view(kind), named[:-1]], 1)


def _unmarked(arrived: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums of some type, and bool `(n,)` which of them are named."""
    sums = arrived.new_empty(len(arrived), arrived.shape[1] - 1).copy_(arrived[:, :-1])
    return sums.view(like.dtype), arrived[:, -1] != 0


def _kind_of(sums: Tensor) -> torch.dtype:
    """Return the type of sums with a column more: bytes, where that makes a difference."""
    return torch.uint8 if sums.shape[1] * sums.element_size() < _WIDE else sums.dtype
