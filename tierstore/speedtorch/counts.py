"""A square array of counts of which pairs occur together: what all COM classes are."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore.errors import InvalidInputError, RowIndexError
from tierstore.speedtorch.array import ArrayRows
from tierstore.speedtorch.layout import ArrayLayout
from tierstore.speedtorch.where import Where
from tierstore.table import Table

__all__ = ["CountRows"]

_BLOCK_BYTES = 64 << 20


class CountRows(ArrayRows):
    """Counts of pairs, `(total_classes, total_classes)`, all zero at first.

    On disk and in ordinary memory only rows that were counted in take space.
    """

    _first_calls = "comInit()"

    def __init__(self, total_classes: int, datatype: Any, where: Where) -> None:
        super().__init__(where.near(None))
        self.total_classes = total_classes
        self.datatype = datatype
        name = str(datatype).removeprefix("torch.")
        dtype = np.dtype(name if "torch" in str(datatype) else datatype)
        self._known = ArrayLayout((total_classes, total_classes), dtype)

    def _accept(self, table: Table) -> None:
        own = self._layout
        super()._accept(table)
        if self._known != own:
            self._known = own
            raise InvalidInputError(f"{table} does not hold counts {own.shape} of {own.dtype}")

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make all counts zero. `CPUPinn` is ignored, as it was: the class was given it."""
        self._hold(self._layout, None)

    def addCounts(self, rows: Any, columns: Any, counts: Any = 1) -> None:
        """Add to the counts of pairs; a pair that comes several times counts each time.

        Args:
            rows: one class of each pair.
            columns: the other, as many.
            counts: what to add to each, or one number for all.
        """
        rows, columns = np.ravel(rows), np.ravel(columns)
        counts = np.broadcast_to(np.ravel(np.asarray(counts, self.dtype)), rows.shape)
        if rows.shape != columns.shape:
            raise InvalidInputError(f"{rows.size} rows are counted with {columns.size} columns")
        for classes in (rows, columns):
            if classes.size and not 0 <= classes.min() <= classes.max() < self.total_classes:
                raise RowIndexError(f"classes are not all within 0..{self.total_classes - 1}")
        ids, places = np.unique(rows, return_inverse=True)
        step = max(1, _BLOCK_BYTES // (self.total_classes * self.dtype.itemsize))
        for start in range(0, ids.size, step):
            part = ids[start : start + step]
            here = (places >= start) & (places < start + step)
            block = self.to_numpy(part)
            np.add.at(block, (places[here] - start, columns[here]), counts[here])
            self.insertData(block, part)
