"""A batch whose rows lie on several ranks: they are leased where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from tierstore.distributed.table import DistributedTable
from tierstore.nn.autograd import Abandoned, Batch, Gradient, sum_by_row

__all__ = ["RemoteBatch"]


class RemoteBatch:
    """The rows of one lookup on this rank, and the lease on those that all ranks ask this one for.

    Attributes:
        size: the number of ids of all ranks: a rank with none takes part where another has some.
        local: the rows of this rank's shard that were asked for.
    """

    def __init__(
        self,
        table: DistributedTable,
        ids: Tensor,
        padding_idx: int | None,
        abandoned: Abandoned,
    ) -> None:
        """Ask for rows, and lease what is asked for; every rank does so at the same time."""
        self._scale = table.ranks if table.average else 1
        self._request = table.request(ids)
        self.size: int = self._request.total
        padding = self._request.padding(padding_idx)
        self.local: Batch = Batch(table.shard, self._request.asked, padding, abandoned)

    def rows(self, field: str) -> Tensor:
        """Return a field of the row of each id, `(ids, dim)`."""
        return self._request.answer(self.local.rows(field))[self._request.positions]

    def gradient(self, of_each: Tensor) -> Gradient:
        """Return the gradient of the rows of this rank's shard, summed over all ranks.

        `of_each` `(ids, dim)` is that of this rank's ids. Sums by row go to the owners, which add
        them in the order of ranks.
        """
        sums = of_each[:0]
        if self._request.size:
            sums = sum_by_row(of_each, self._request.positions, self._request.size)
        arrived = self._request.deliver(sums)
        gradient = self.local.gradient(arrived)
        if self._scale != 1:
            gradient.values = torch.div(gradient.values, self._scale)
        return gradient
