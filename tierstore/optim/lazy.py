"""Says once that rows that are not in a batch stay, where torch's optimizer would change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import LazyUpdatesWarning, warn
from tierstore.nn.autograd import Gradient
from tierstore.optim.probe import changes_unused
from tierstore.optim.trained import TrainedField

__all__ = ["LazyRows"]


class LazyRows:
    """Looks for a step that leaves rows as they are though the class, over a weight, would not.

    A class that does not change a row without a gradient, and batches of all rows, have none. An
    optimizer with moments changes such rows only once they had a gradient; so the rows of the first
    batch are looked for in later ones, ever more rarely, in steps both even and odd, since fields
    may take turns: in steps 2, 4, 7, 12, 20, 33 and so on.

    Attributes:
        wait: how many steps it is to the next look, which the optimizer counts; none at 0 or below.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], options: Any) -> None:
        """Look at no field yet."""
        self._class = optimizer_class
        self._options = options
        self._when: dict[TrainedField, str | None] = {}
        self._first: dict[TrainedField, Tensor] = {}
        self._fields: set[TrainedField] = set()
        self._told = False
        self._waits = 1, 2
        self.wait: int = 0

    def add(self, fields: Iterable[TrainedField]) -> None:
        """Look at fields too, unless the warning has come."""
        self._fields.update(fields)
        if self._fields and not self._told:
            self.wait, self._waits = 1, (1, 2)

    def look(
        self,
        gradients: Iterable[tuple[TrainedField, Gradient]],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Look at the gradients of a step, before it is taken."""
        for field, gradient in gradients:
            if field not in self._fields:
                continue
            if field not in self._when:
                self._when[field] = self._tried(field, groups)
            when = self._when[field]
            if when is None:
                self._fields.remove(field)
            elif self._lacks_rows(field, gradient, at_once=when == "always"):
                self._told = True
                self._fields.clear()
                self._first.clear()
                self._tell(field, when)
        if self._fields:
            self.wait, after = self._waits
            self._waits = after, self.wait + after

    def _tried(self, field: TrainedField, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Return when the class changes rows without a gradient, by the options of any table."""
        rows = field.rows
        where = {"dim": rows.shape[1], "device": rows.table.device}
        numbers = {field.group, *field.groups.values()} - {None}
        found = {
            changes_unused(self._class, self._options, groups[number], **where)
            for number in numbers
            if number is not None
        }
        return min(filter(None, found), default=None)

    def _lacks_rows(self, field: TrainedField, gradient: Gradient, *, at_once: bool) -> bool:
        """Whether rows that the optimizer would change are not in a batch, as far as is known.

        Where a GPU is not waited for, there may be fewer rows than `bound`.
        """
        lease = gradient.batch.lease
        has_all = lease.bound >= sum(
            getattr(table, "shard", table).rows for table in field.rows.tables
        )
        if at_once:
            return not has_all
        first = self._first.get(field)
        if first is None:
            self._first[field] = gradient.batch.distinct.clone()
            return False
        if has_all or not lease.trim(wait=False):
            return not has_all
        return not bool(torch.isin(first, gradient.batch.distinct).all())

    def _tell(self, field: TrainedField, when: str) -> None:
        name = self._class.__name__
        by = "by weight decay" if when == "always" else "by what it keeps of earlier gradients"
        warn(
            "rows that are not in a batch stay as they are, here of table "
            f"{field.rows.table.name!r}, as with torch.optim.SparseAdam: over a torch.nn.Embedding "
            f"{name} changes every row at each step, {by}, and a program that does so trains "
            "differently. For the same results look up every row, "
            "emb(torch.arange(emb.num_embeddings)), or take SGD or Adagrad without weight decay in "
            "both programs. If rows are to stay, as in most recommenders, "
            'warnings.filterwarnings("ignore", category='
            "tierstore.errors.LazyUpdatesWarning)",
            LazyUpdatesWarning,
        )
