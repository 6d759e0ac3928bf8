"""Rows that come more than once in a batch, and their gradient.

Each copy of a row in the batch's parameter gets a gradient of its own. SpeedTorch let every copy
take its step, and kept the one that was written back last: the other updates were lost. Here every
copy gets the gradient of the row, so that all take the same step, that of a whole table.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from tierstore.errors import InvalidInputError
from tierstore.nn.gradient import sum_by_row
from tierstore.table import Table

__all__ = ["POLICIES", "Copies", "check_policy", "warn_of_copies"]

POLICIES = ("sum", "mean", "last")


def check_policy(duplicates: str) -> str:
    """Return one of the policies, or raise InvalidInputError."""
    if duplicates not in POLICIES:
        raise InvalidInputError(f"duplicates is 'sum', 'mean' or 'last', not {duplicates!r}")
    return duplicates


class Copies:
    """A hook on the parameter of a batch, which gives every copy of a row the row's gradient."""

    def __init__(self, table: Table, ids: Tensor, policy: str) -> None:
        """Remember whose rows they are; `policy` is "sum" or "mean"."""
        self._table = table
        # Whoever gave them may go on to the next batch. Torch would wake all its threads to copy.
        self._ids = ids.clone() if ids.is_cuda else torch.from_numpy(ids.numpy().copy())
        self._mean = policy == "mean"

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the gradient with that of each row summed, or averaged, over its copies."""
        with self._table.lease(self._ids) as lease:
            bound = lease.bound
            owners = torch.as_tensor(lease.positions).to(gradient.device, torch.int64)
        if not gradient.is_sparse:
            total = self._total(gradient, owners, bound)
            return torch.nn.functional.embedding(owners.clamp(min=0), total)
        gradient = gradient.coalesce()
        touched_by = owners[gradient.indices()[0]]
        total = self._total(gradient.values(), touched_by, bound)
        touched = torch.zeros(bound, dtype=torch.bool, device=gradient.device)
        touched[touched_by] = True
        copies = touched[owners].nonzero()[:, 0]
        values = total[owners[copies]]
        return torch.sparse_coo_tensor(
            copies[None], values, gradient.shape, is_coalesced=True, check_invariants=False
        )

    def _total(self, values: Tensor, owners: Tensor, bound: int) -> Tensor:
        total = sum_by_row(values, owners, bound)
        if self._mean:
            total /= sum_by_row(values.new_ones(len(values), 1), owners, bound).clamp(min=1)
        return total


def warn_of_copies(ids: Tensor, policy: str) -> None:
    """Say how many rows of a batch are copies, and what becomes of their updates."""
    share = 1 - torch.unique(ids).numel() / max(1, ids.numel())
    if not share:
        return
    if policy == "last":
        message = "the update of the last copy stays and those of the others are lost"
        advice = "duplicates='sum' keeps them all"
    else:
        message = f"every copy takes the step of the row's {policy} of gradients"
        advice = "SpeedTorch kept the last copy's update alone, as duplicates='last' does"
    warnings.warn(
        f"{share:.1%} of the {ids.numel()} rows of this batch are copies of others: "
        f"{message}; {advice}",
        stacklevel=4,
    )
