"""The seam of a policy: which slots to give up when a tier is full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Barred", "Policy", "Rows", "Slots"]

Rows = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Barred = Callable[[Slots], npt.NDArray[np.bool_]]
"""Tells which of some slots must stay."""


class Policy(Protocol):
    """What a tier asks of a policy, batch by batch: `use`, `touch`, `victims`, `next_batch`.

    A policy sees rows and slots, never bytes. It gives up the slots of least value; ties are open.
    """

    @property
    def keeps_batch(self) -> bool:
        """Whether rows that the current batch uses stay until it ends, done with or not."""

    @property
    def nbytes(self) -> int:
        """Bytes taken now."""

    def use(self, rows: Rows) -> None:
        """Note that a batch begins, which uses `rows`, with or without slots; they may repeat."""

    def touch(self, slots: Slots, *, done: bool = False) -> None:
        """Note that the rows in `slots`, which may repeat, belong to the current batch.

        `done`: they have been copied, so this batch may evict them already.
        """

    def order(self, rows: Rows) -> npt.NDArray[np.intp] | None:
        """Return the positions of `rows`, distinct, the most valuable first; None: as they are."""

    def victims(self, rows: Rows, barred: Barred | None = None, *, force: bool = False) -> Slots:
        """Take distinct slots to give up for a leading part of `rows`, least valuable first.

        `rows` have no slot and are in `order`. Never a slot that the current batch touched and is
        not done with, nor one that `barred` marks, nor, unless `force`, one whose row is worth no
        less than the row it would make room for. What is returned is forgotten until it is touched.
        """

    def forget(self, slots: Slots) -> None:
        """Note that `slots` are free: they are no victims until they are touched again."""

    def next_batch(self) -> None:
        """End the current batch."""

    def announce(self, rows: Rows) -> None:
        """Note that a batch to come, after those announced before, will use `rows`."""

    def prime(self, counts: npt.NDArray[np.float32]) -> None:
        """Take `counts`, how often every row was used before, for what was seen so far."""
