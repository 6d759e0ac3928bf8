"""Rows and gradients between the ranks that use them and the ranks that own them.

A batch asks the owner of each of its distinct ids for the row; what the owners are asked for comes
to them in the order of ranks, and so do the gradients later: their sum repeats to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore._disk.partitioning import Shard
from tierstore.distributed.ranks import Ranks
from tierstore.errors import RanksError, TierStoreError

__all__ = ["Exchange", "Request"]


class Exchange:
    """Sends rows of a table between the ranks."""

    def __init__(self, ranks: Ranks, shard: Shard, device: str, name: str) -> None:
        """Serve a table of this name by a shard of it on a device."""
        self.ranks = ranks
        self.shard = shard
        self.device = device
        self.name = name

    def request(self, check: Callable[[], Tensor]) -> Request:
        """Ask the owners for rows; every rank does so at the same time, perhaps for none.

        `check` returns the ids, flat int64; what it raises is raised here once the others know, and
        RanksError there.
        """
        error: TierStoreError | None = None
        try:
            ids = check()
        except TierStoreError as found:
            error, ids = found, torch.empty(0, dtype=torch.int64)
        return Request(self, ids.to(self.device), error)

    def swap(self, values: Tensor, given: list[int] | None, taken: list[int] | None) -> Tensor:
        """Send rows `(n, …)` to the ranks, so many to each, and return what comes from each."""
        count = len(values) if taken is None else sum(taken)
        sent = values.contiguous()
        wide = sent.view(torch.uint8) if sent.element_size() == 2 else sent  # gloo lacks those
        out = wide.new_empty(count, *wide.shape[1:])
        with self.ranks.explained(f"exchange rows of table {self.name!r}"):
            dist.all_to_all_single(out, wide, taken, given, group=self.ranks.data_group)
        return out.view(sent.dtype)


class Request:
    """The distinct rows that a batch asks for, and those that are asked of this rank.

    Attributes:
        positions: int64, for each id the index of its row among those that come back.
        size: the number of distinct ids.
        total: the number of ids of all ranks.
        asked: the rows of the shard that each rank asks for, in the order of ranks; distinct for
            each rank, and perhaps not among them.
    """

    def __init__(self, exchange: Exchange, ids: Tensor, error: TierStoreError | None) -> None:
        """Exchange how many rows are asked for, then which."""
        self._exchange = exchange
        ranks, shard = exchange.ranks, exchange.shard
        distinct, inverse = torch.unique(ids, return_inverse=True)
        owner = shard.partition_of(distinct) * ranks.count // shard.partitions
        order = torch.argsort(owner, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        self.positions: Tensor = place[inverse]
        self.size: int = len(distinct)
        counts = torch.bincount(owner, minlength=ranks.count)
        mine = torch.stack(
            [
                counts,
                torch.full_like(counts, len(ids)),
                torch.full_like(counts, error is not None),
            ],
            dim=1,
        )
        there = exchange.swap(mine, None, None)
        self._raise(error, there[:, 2].tolist())
        self._given: list[int] = counts.tolist()
        self._taken: list[int] = there[:, 0].tolist()
        self.total: int = int(there[:, 1].sum())
        wanted = exchange.swap(distinct[order], self._given, self._taken)
        self.asked: Tensor = shard.rows_of(wanted)

    def _raise(self, error: TierStoreError | None, failed: list[int]) -> None:
        """Raise what is wrong with the ids of this rank, or of another."""
        if error is not None:
            raise error
        if any(failed):
            rank = failed.index(1)
            raise RanksError(
                f"rank {rank} of {len(failed)} asked table {self._exchange.name!r} for ids that it "
                "does not have, and nothing was looked up; that rank says which"
            )

    def answer(self, rows: Tensor) -> Tensor:
        """Give the rows `(asked, dim)` to those who asked; return this rank's `(size, dim)`."""
        return self._exchange.swap(rows, self._taken, self._given)

    def deliver(self, values: Tensor) -> Tensor:
        """Give values `(size, dim)` of the distinct rows to their owners; return `(asked, dim)`."""
        return self._exchange.swap(values, self._given, self._taken)

    def padding(self, padding_idx: int | None) -> int | None:
        """Return the row of the shard that a padding id is; None where another rank has it."""
        if padding_idx is None:
            return None
        exchange = self._exchange
        shard, one = exchange.shard, torch.tensor([padding_idx])
        number = int(shard.partition_of(one)) - shard.first
        return int(shard.rows_of(one)) if 0 <= number < shard.count else None
