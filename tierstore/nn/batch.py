"""A batch between its forward pass and the step that uses its gradient."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tierstore.nn.gradient import sum_by_row, summed
from tierstore.table import Table
from tierstore.table.access import Lease

__all__ = ["Abandoned", "Batch", "Gradient", "merged"]


class Abandoned:
    """Leases of batches that were dropped, for the next call to release.

    A garbage collector may drop a batch at any moment, also one at which no lease can be released.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._leases: deque[Lease] = deque()

    def add(self, lease: Lease) -> None:
        """Leave a lease to the next call."""
        self._leases.append(lease)

    def release(self) -> None:
        """Release all of them; after an error, the rest stays for the call after."""
        while self._leases:
            lease = self._leases.popleft()
            try:
                lease.release()
            except BaseException:
                self._leases.appendleft(lease)
                raise


class Batch:
    """The rows of one lookup, leased until their gradient was applied, or cannot come any more.

    Attributes:
        size: the number of ids.
        lease: the lease on their rows.
        counted: for each id whether it takes part in training, or None if all do.
    """

    def __init__(
        self, table: Table, ids: Tensor, padding_idx: int | None, abandoned: Abandoned
    ) -> None:
        """Lease the rows; the lease of a batch that is dropped goes to `abandoned`.

        The ids are the caller's and may change afterwards: nothing refers to them.
        """
        ids = ids if ids.ndim == 1 else ids.reshape(-1)
        self._abandoned = abandoned
        self.size = len(ids)
        self.lease = table.lease(ids)
        self.counted = None if padding_idx is None else ids != padding_idx
        self.lease.trim(wait=False)  # asks for the count, which the backward pass may find

    def __del__(self) -> None:
        """Leave the lease to the next call."""
        if hasattr(self, "lease"):
            self._abandoned.add(self.lease)

    @property
    def ids(self) -> Tensor:
        """The ids, flat, from the rows that the lease holds; -1 for bad ones."""
        rows = torch.as_tensor(self.lease.rows)
        return torch.where(self.positions < 0, -1, rows[self.positions.clamp(min=0).long()])

    @cached_property
    def positions(self) -> Tensor:
        """For each id, the index of its row in compact arrays; -1 for bad ids."""
        return torch.as_tensor(self.lease.positions)

    def rows(self, field: str) -> Tensor:
        """Return a field of the row of each id, `(ids, dim)`."""
        rows: Tensor = self.lease.expand(field)
        return rows

    @property
    def usable(self) -> bool:
        """Whether the lease goes on."""
        return not self.lease.ended

    def release(self) -> None:
        """Let the rows go; harmless when repeated."""
        self.lease.release()

    def gradient(self, of_each: Tensor) -> Gradient:
        """Sum the gradients `(ids, dim)` of the ids by row."""
        positions, trained, usable = None, None, self.usable
        if usable:
            self.lease.trim(wait=False)
        if self.counted is not None:
            positions = torch.where(self.counted.to(self.positions.device), self.positions, -1)
            trained = positions.new_zeros(self.lease.bound + 1, dtype=torch.bool)
            trained.index_fill_(0, positions.long(), True)  # the last entry is for -1
            trained = trained[:-1, None]
        if usable:
            return Gradient(self, summed(of_each, self.lease, positions), trained)
        # A graph that is run backward again after the step, for example.
        where = self.positions if positions is None else positions
        return Gradient(self, sum_by_row(of_each, where, self.lease.bound), trained)


@dataclass
class Gradient:
    """The gradient of a batch.

    Attributes:
        batch: what it is the gradient of, and whose lease holds the rows.
        values: `(rows, dim)`, at least one row for each distinct row; undefined behind them.
        trained: bool `(rows, 1)`, the rows that a step may change; None means all.
    """

    batch: Batch
    values: Tensor
    trained: Tensor | None = None

    def trim(self) -> None:
        """Cut off what is behind the distinct rows; on a GPU this waits for their number."""
        self.batch.lease.trim(wait=True)
        bound = self.batch.lease.bound
        self.values = self.values[:bound]
        self.trained = None if self.trained is None else self.trained[:bound]


def merged(table: Table, gradients: Sequence[Gradient], abandoned: Abandoned) -> Gradient:
    """Return the gradient of several batches of a table as that of one, over all their rows."""
    batch = Batch(table, torch.cat([each.batch.ids for each in gradients]), None, abandoned)
    places, found = [], batch.positions.split([each.batch.size for each in gradients])
    for each, there in zip(gradients, found, strict=True):
        here, rows = each.batch.positions, len(each.values)
        place = here.new_full((rows + 1,), -1)
        place[torch.where(here < 0, rows, here)] = there
        places.append(place[:-1])
    where = torch.cat(places)
    total = summed(torch.cat([each.values for each in gradients]), batch.lease, where)
    merged = Gradient(batch, total)
    if any(each.trained is not None for each in gradients):
        marks = [
            torch.ones_like(place, dtype=torch.bool) if each.trained is None else each.trained[:, 0]
            for each, place in zip(gradients, places, strict=True)
        ]
        trained = where.new_zeros(batch.lease.bound + 1, dtype=torch.bool)
        trained.index_fill_(0, torch.where(torch.cat(marks), where, -1).long(), True)
        merged.trained = trained[:-1, None]
    return merged
