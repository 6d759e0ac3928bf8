"""A batch between its forward pass and the step that uses its gradient."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.table import Table
from tierstore.table.access import Lease

__all__ = ["Batch", "Gradient", "merged", "sum_by_row"]


class Batch:
    """The rows of one lookup, leased until their gradient was applied, or cannot come any more.

    Attributes:
        ids: the ids, flat.
        lease: the lease on their rows.
        positions: for each id, the index of its row in compact arrays; -1 for bad ids.
        counted: for each id whether it takes part in training, or None if all do.
    """

    def __init__(
        self, table: Table, ids: Tensor, padding_idx: int | None, abandoned: deque[Lease]
    ) -> None:
        """Lease the rows; the lease of a batch that is dropped goes to `abandoned`."""
        self.ids = ids.reshape(-1)
        self.lease = table.lease(self.ids)
        self._released = False
        self.bound = self.lease.bound
        self.positions = torch.as_tensor(self.lease.positions)
        self.counted = None if padding_idx is None else self.ids != padding_idx
        weakref.finalize(self, abandoned.append, self.lease).atexit = False

    def rows(self, field: str) -> Tensor:
        """Return a field of the row of each id, `(ids, dim)`."""
        rows: Tensor = self.lease.expand(field)
        return rows

    @property
    def usable(self) -> bool:
        """Whether the lease goes on, and holds what the rows are now."""
        return not self._released and self.lease.fresh

    def release(self) -> None:
        """Let the rows go; harmless when repeated."""
        self._released = True
        self.lease.release()

    def gradient(self, of_each: Tensor) -> Gradient:
        """Sum the gradients `(ids, dim)` of the ids by row."""
        if self.counted is None:
            return Gradient(self, sum_by_row(of_each, self.positions, self.bound))
        positions = torch.where(self.counted, self.positions, -1)
        trained = sum_by_row(of_each.new_ones(len(self.ids), 1), positions, self.bound) != 0
        return Gradient(self, sum_by_row(of_each, positions, self.bound), trained)


@dataclass
class Gradient:
    """The gradient of a batch.

    Attributes:
        batch: what it is the gradient of, and whose lease holds the rows.
        values: `(bound, dim)`, one row for each distinct row; zero behind them.
        trained: bool `(bound, 1)`, the rows that a step may change; None means all.
    """

    batch: Batch
    values: Tensor
    trained: Tensor | None = None


def sum_by_row(values: Tensor, positions: Tensor, bound: int) -> Tensor:
    """Add row i of `values` `(n, dim)` to row `positions[i]` of `(bound, dim)`, unless negative.

    In the order of i, with the operator that `torch.nn.Embedding` sums its gradient with.
    """
    return torch.ops.aten.embedding_dense_backward(values, positions, bound, -1, False)


def merged(table: Table, gradients: Sequence[Gradient], abandoned: deque[Lease]) -> Gradient:
    """Return the gradient of several batches of a table as that of one, over all their rows."""
    batch = Batch(table, torch.cat([each.batch.ids for each in gradients]), None, abandoned)
    places, found = [], batch.positions.split([len(each.batch.ids) for each in gradients])
    for each, there in zip(gradients, found, strict=True):
        here = each.batch.positions
        place = here.new_full((each.batch.bound + 1,), -1)
        place[torch.where(here < 0, each.batch.bound, here)] = there
        places.append(place[:-1])
    where = torch.cat(places)
    values = sum_by_row(torch.cat([each.values for each in gradients]), where, batch.bound)
    if all(each.trained is None for each in gradients):
        return Gradient(batch, values)
    counts = torch.cat(
        [
            values.new_ones(each.batch.bound, 1) if each.trained is None else each.trained
            for each in gradients
        ]
    )
    return Gradient(batch, values, sum_by_row(counts.to(values), where, batch.bound) != 0)
