"""The ids of a batch grouped by row, by one sort."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy

__all__ = ["Groups"]


class Groups:
    """The ids of a batch grouped by row.

    Attributes:
        rows: the distinct rows `(m,)`, ascending.
        order: the positions of the ids `(n,)`, row by row, ascending within a row.
        starts: where each row's part of `order` begins, and its end, `(m + 1,)`.
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        """Group ids `(n,)`; nothing refers to them afterwards."""
        count = ids.size
        order = _rowcopy.order(ids)
        ordered = ids.take(order)
        first = np.empty(count + 1, np.bool_)
        first[0] = first[count] = True
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:-1])
        self.order: npt.NDArray[np.intp] = order
        self.starts: npt.NDArray[np.int64] = first.nonzero()[0]
        self.rows: npt.NDArray[np.int64] = ordered.take(self.starts[:-1])

    @cached_property
    def positions(self) -> npt.NDArray[np.intp]:
        """Which of the distinct rows each id `(n,)` is of."""
        found = np.empty(self.order.size, np.intp)
        found[self.order] = np.repeat(np.arange(self.rows.size), self.repeats)
        return found

    @property
    def repeats(self) -> npt.NDArray[np.int64]:
        """How many ids are of each row `(m,)`."""
        return np.diff(self.starts)
