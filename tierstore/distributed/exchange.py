"""Rows and gradients between the ranks that use them and the ranks that own them.

A batch asks the owner of each of its distinct ids for the row; what the owners are asked for comes
to them in the order of ranks, and so do the gradients later: their sum repeats to the bit. Tensors
stay on their device; the one wait of a step is for the number of rows to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.distributed.ranks import Ranks
from tierstore.errors import InvalidInputError, RanksError, TierStoreError

__all__ = ["Exchange", "Request", "Wanted"]

_SHIFT = 48
"""Bits of an id; above them stands the rank that owns it."""
_BITS = 62
"""Features that one number of a message tells of."""


class Exchange:
    """Sends rows of a table, or of tables that are looked up as one, between the ranks.

    Attributes:
        owners_of: the rank that owns each of some ids.
        rows_of: the row of each id on its owner.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: str,
        name: str,
        *,
        owners_of: Callable[[Tensor], Tensor],
        rows_of: Callable[[Tensor], Tensor],
    ) -> None:
        """Serve what messages call `name`."""
        self.ranks = ranks
        self.device = device
        self.name = name
        self.owners_of = owners_of
        self.rows_of = rows_of

    def swap(self, values: Tensor, given: list[int] | None, taken: list[int] | None) -> Tensor:
        """Send rows `(n, …)` to the ranks, so many to each, and return what comes from each."""
        count = len(values) if taken is None else sum(taken)
        sent = values.contiguous()
        wide = sent.view(torch.uint8) if sent.element_size() == 2 else sent  # gloo lacks those
        out = wide.new_empty(count, *wide.shape[1:])
        with self.ranks.explained(f"exchange rows of table {self.name!r}"):
            dist.all_to_all_single(out, wide, taken, given, group=self.ranks.data_group)
        return out.view(sent.dtype)


@dataclass(frozen=True)
class Wanted:
    """The ids that one rank asks for.

    Attributes:
        ids: int64 `(n,)`, on the device of the table.
        tag: a number that is equal on ranks that look up the same.
        tables: the number of the table of each feature.
        lengths: how many of the ids each feature has.
        is_bad: whether some ids are of no row, bool `()` on a device, where that is not known yet.
        refuse: raises the error for such an id.
        error: what is wrong with the ids already.
    """

    ids: Tensor
    tag: int
    tables: Sequence[int] = (0,)
    lengths: Sequence[int] = (1,)
    is_bad: Tensor | None = None
    refuse: Callable[[], object] | None = None
    error: TierStoreError | None = None

    def used(self) -> list[int]:
        """Return which features have ids, as the bits of some numbers."""
        words = [0] * -(-len(self.lengths) // _BITS)
        for number, length in enumerate(self.lengths):
            if length:
                words[number // _BITS] |= 1 << number % _BITS
        return words


class Request:
    """The distinct rows that a batch asks for, and those that are asked of this rank.

    Attributes:
        positions: int64, for each id the index of its row among those that come back.
        size: the number of distinct ids.
        total: the number of ids of all ranks.
        asked: the rows of this rank that each rank asks for, in the order of ranks; distinct for
            each rank, and perhaps not among them.
        counts: for each feature 1 if any rank has ids of it, else 0.
    """

    def __init__(self, exchange: Exchange, wanted: Wanted) -> None:
        """Exchange how many rows are asked for, then which. Every rank does so at the same time.

        What is wrong with the ids of a rank is raised there once the others know, and RanksError on
        the others. Raises InvalidInputError on all ranks where they look up different tables.
        """
        self._exchange = exchange
        ranks, ids = exchange.ranks.count, wanted.ids
        self.positions: Tensor
        keys, self.positions = torch.unique(
            (exchange.owners_of(ids) << _SHIFT) + ids, return_inverse=True
        )
        self.size: int = len(keys)
        edges = torch.arange(ranks + 1, device=keys.device) << _SHIFT
        counts = torch.searchsorted(keys, edges).diff()
        failed = counts.new_full((1,), wanted.error is not None)
        if wanted.is_bad is not None:
            failed = failed + wanted.is_bad
        told = torch.tensor([wanted.tag, len(ids), *wanted.used()]).to(keys.device)
        same = torch.cat([failed, told]).expand(ranks, -1)
        mine = torch.cat([counts[:, None], same], 1)
        both = torch.stack([mine, exchange.swap(mine, None, None)]).tolist()  # the wait
        self._given: list[int] = [each[0] for each in both[0]]
        self._taken: list[int] = [each[0] for each in both[1]]
        self._check(wanted, both[1])
        self.total: int = sum(each[3] for each in both[1])
        self.counts: list[int] = [
            int(any(each[4 + number // _BITS] >> number % _BITS & 1 for each in both[1]))
            for number in range(len(wanted.lengths))
        ]
        self.touched: frozenset[int] = frozenset(compress(wanted.tables, self.counts))
        ids_of = keys & ((1 << _SHIFT) - 1)
        self.asked: Tensor = exchange.rows_of(exchange.swap(ids_of, self._given, self._taken))

    def _check(self, wanted: Wanted, told: list[list[int]]) -> None:
        """Raise what is wrong with the ids of this rank, or of another."""
        if wanted.error is not None:
            raise wanted.error
        own, name = self._exchange.ranks.rank, self._exchange.name
        if told[own][1] and wanted.refuse is not None:
            wanted.refuse()
        for rank, (_, failed, tag, *_) in enumerate(told):
            if failed:
                raise RanksError(
                    f"rank {rank} of {len(told)} asked table {name!r} for ids that it does not "
                    "have, and nothing was looked up; that rank says which"
                )
            if tag != wanted.tag:
                raise InvalidInputError(
                    f"rank {rank} of {len(told)} looks up something else than {name!r} on rank "
                    f"{own}: every rank calls the same layers in the same order, with the same "
                    "features"
                )

    def answer(self, rows: Tensor) -> Tensor:
        """Give the rows `(asked, dim)` to those who asked; return this rank's `(size, dim)`."""
        return self._exchange.swap(rows, self._taken, self._given)

    def deliver(self, values: Tensor) -> Tensor:
        """Give values `(size, dim)` of the distinct rows to their owners; return `(asked, dim)`."""
        return self._exchange.swap(values, self._given, self._taken)
