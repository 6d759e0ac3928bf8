"""A batch whose rows lie on several ranks: they are leased where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from tierstore._table.host import Lease
from tierstore.distributed.exchange import Request
from tierstore.distributed.joint import DistributedJointTable
from tierstore.distributed.table import DistributedTable
from tierstore.nn.autograd import Abandoned, Batch, Gradient, add_as_it_comes, sum_by_row

__all__ = ["RemoteBatch", "RemoteLease", "Shared"]

_WIDE = 128
"""Bytes of a row beside which one element more is little; a GPU copies bytes more slowly."""

Shared: TypeAlias = DistributedTable | DistributedJointTable
"""What several ranks share the rows of."""


class RemoteLease:
    """A lease on what this rank is asked for, and the rows that it asked others for.

    Every rank reads the same fields at the same time.
    """

    device = None
    """No kernel reaches rows of other ranks."""

    def __init__(self, request: Request, lease: Lease) -> None:
        """Answer a request from a lease on what was asked."""
        self._request = request
        self._lease = lease

    @property
    def positions(self) -> Tensor:
        """For each id, the index of its row among the distinct ones."""
        return self._request.positions

    def read(self, field: str) -> Tensor:
        """Return a field of the distinct rows, `(size, dim)`."""
        return self._request.answer(self._lease.expand(field))

    def expand(self, field: str) -> Tensor:
        """Return a field of the row of each id, `(ids, dim)`."""
        return self.read(field).index_select(0, self._request.positions)

    def __enter__(self) -> Self:
        """Return the lease itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self._lease.release()


class RemoteBatch:
    """The rows of one lookup on this rank, and the lease on those that all ranks ask this one for.

    Attributes:
        size: the number of ids of all ranks: a rank with none takes part where another has some.
        local: the rows of this rank's shard that were asked for.
        lease: on the rows of the batch.
    """

    trained_positions = None
    """All ids take part in training; the owner of a row of padding leaves it out."""

    def __init__(
        self, table: Shared, ids: Tensor, padding_idx: int | None, abandoned: Abandoned
    ) -> None:
        """Ask for rows, and lease what is asked for; every rank does so at the same time."""
        self._scale = table.ranks if table.average else 1
        request = self._request = table.request(ids)
        self.size: int = request.total
        self.local: Batch = Batch(
            table.shard, request.asked, table.padding(padding_idx), abandoned, request.touched
        )
        self.lease: RemoteLease = RemoteLease(request, self.local.lease)

    @property
    def positions(self) -> Tensor:
        """For each id, the index of its row among the distinct ones."""
        return self._request.positions

    def counts(self, lengths: Sequence[int]) -> Sequence[int]:
        """Return for each feature whether any rank has ids of it; see `Batch.counts`."""
        return self._request.counts

    def gradient(
        self,
        of_each: Tensor,
        positions: Tensor | None = None,
        touched: frozenset[int] | None = None,
    ) -> Gradient:
        """Return the gradient of the rows of this rank's shard, summed over all ranks.

        `of_each` `(ids, dim)` is that of this rank's ids; for the rest see `Batch.gradient`. Sums
        by row go to the owners, which add them in the order of ranks.
        """
        where = self.positions if positions is None else positions
        return self.gathered(self._summed(of_each, where), positions, touched)

    def _summed(self, values: Tensor, positions: Tensor) -> Tensor:
        """Add row i of `values` to row `positions[i]` of `(size, dim)`, unless negative.

        In the order of i, but on a GPU as it comes, unless deterministic algorithms are asked for.
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
        touched = self._request.touched if touched is None else touched
        given: Any = None
        if positions is None:
            arrived = self._request.deliver(values)
        else:  # whether a row is named goes with its sum
            is_narrow = values.shape[1] * values.element_size() < _WIDE
            kind = torch.uint8 if is_narrow else values.dtype
            named = torch.zeros(len(values) + 1, 1, dtype=kind, device=values.device)
            named[positions] = 1
            sums = values.contiguous().view(kind)
            both = self._request.deliver(torch.cat([sums, named[:-1]], 1))
            arrived = both.new_empty(len(both), sums.shape[1]).copy_(both[:, :-1])
            arrived, marks = arrived.view(values.dtype), both[:, -1] != 0
            own = self.local.trained_positions
            own = self.local.positions if own is None else own
            given = torch.where(marks, own, -1)
        gradient = self.local.gradient(arrived, given, touched)
        if self._scale != 1:
            gradient.values.div_(self._scale)  # a sum of its own
        return gradient
