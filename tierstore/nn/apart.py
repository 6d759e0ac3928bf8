"""Rows that the ranks of a process group would train apart, each its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from tierstore._table.joint import JointTable
from tierstore._table.table import Table
from tierstore.distributed.apart import sharing
from tierstore.errors import FOR_RANKS, InvalidInputError

in_group: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
"""Tells whether this process is in a process group."""


def check_not_apart(table: Table | JointTable, optimizers: Iterable[Any]) -> None:
    """Raise InvalidInputError where the ranks of a group train rows that they do not share.

    Raise nothing where one of the `optimizers` is for copies that all ranks train alike.
    """
    ranks = dist.get_world_size()
    shared = sharing(table)
    if (
        ranks == 1
        or (shared is not None and shared.ranks.count == ranks)
        or any(each.replicated for each in optimizers)
    ):
        return
    raise InvalidInputError(
        f"{ranks} ranks train, and nothing combines the gradients of rows between them: each "
        f"rank would train rows of its own; {FOR_RANKS}. Or train on one rank, or give the "
        "optimizer replicated=True if every rank applies the gradients of all to a copy of the "
        "store"
    )
