"""Gradients of several batches as that of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tierstore._table.joint import JointTable
from tierstore._table.table import Table
from tierstore.nn.autograd import Abandoned, Batch, Gradient, summed


def merged(
    table: Table | JointTable, gradients: Sequence[Gradient], abandoned: Abandoned
) -> Gradient:
    """Return the gradient of several batches of a table as that of one, over all their rows.

    Raises ClosedError as `Batch.check_named` does.
    """
    touched = _touched(gradients)
    for each in gradients:
        each.batch.check_named(each.touched)
    batch = Batch(table, torch.cat([each.batch.ids for each in gradients]), None, abandoned)
    for each in gradients:  # again: another thread may have come before the lease
        each.batch.check_named(each.touched)
    places, found = [], batch.positions.split([each.batch.size for each in gradients])
    for each, there in zip(gradients, found, strict=True):
        here, rows = each.batch.positions, len(each.values)
        place = here.new_full((rows + 1,), -1)
        place[torch.where(here < 0, rows, here)] = there
        places.append(place[:-1])
    where = torch.cat(places)
    total = summed(torch.cat([each.values for each in gradients]), batch.lease, where)
    merged = Gradient(batch, total, touched=touched)
    if any(each.trained is not None for each in gradients):
        marks = [
            torch.ones_like(place, dtype=torch.bool) if each.trained is None else each.trained[:, 0]
            for each, place in zip(gradients, places, strict=True)
        ]
        trained = where.new_zeros(batch.lease.bound + 1, dtype=torch.bool)
        trained.index_fill_(0, torch.where(torch.cat(marks), where, -1).long(), True)
        merged.trained = trained[:-1, None]
    return merged


def placed(batch: Batch, gradients: Sequence[Gradient]) -> Gradient | None:
    """Return the sum of gradients in the order of a batch's rows; None if it lacks some of them."""
    if not batch.usable:
        return None
    rows, order = batch.distinct.sort()
    total = trained = None
    for each in gradients:
        each.trim()
        wanted = each.batch.distinct
        found = torch.searchsorted(rows, wanted).clamp(max=len(rows) - 1)
        if not torch.equal(rows[found], wanted):
            return None
        places = order[found]
        if total is None or trained is None:
            total = each.values.new_zeros(len(rows), each.values.shape[1])
            trained = torch.zeros(len(rows), 1, dtype=torch.bool, device=total.device)
        total.index_add_(0, places, each.values)
        marks = torch.ones_like(wanted, dtype=torch.bool)[:, None]
        trained[places] |= marks if each.trained is None else each.trained
    return None if total is None else Gradient(batch, total, trained, _touched(gradients))


def _touched(gradients: Sequence[Gradient]) -> frozenset[int]:
    """Return the tables that have ids in any of some gradients."""
    return frozenset().union(*(each.touched for each in gradients))
