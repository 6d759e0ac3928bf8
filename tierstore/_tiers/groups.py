"""The ids of a batch grouped by row, by one sort."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["Groups"]

_FEW = 96
"""Ids up to which sorting positions takes less time than sorting row and position as one number."""
_LOW = 0xFFFFFFFF
_BLOCK = 256
_BLOCKS = 16
"""Blocks of ids from which it pays to look for parts that can be sorted apart."""


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
        if count <= _FEW or ids.max() > _LOW >> 1:
            order = ids.argsort(kind="stable")
            ordered = ids.take(order)
        else:
            ordered = ids << 32
            ordered |= np.arange(count)
            for part in _runs(ids):
                ordered[part].sort()
            order = ordered & _LOW
            ordered >>= 32
        first = np.empty(count + 1, np.bool_)
        first[0] = first[count] = True
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:-1])
        self.order: npt.NDArray[np.int64] = order
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


def _runs(ids: npt.NDArray[np.int64]) -> list[slice]:
    """Return parts of `ids`, in order, of which none has an id less than one before it.

    Features whose tables lie one behind the other in a space are such parts, and sorting each takes
    half as long as sorting all at once. They are looked for where whole blocks end.
    """
    blocks = ids.size // _BLOCK
    quarter = ids.size // 4
    if blocks < _BLOCKS or ids[:quarter].max() >= ids[-quarter:].min():
        return [slice(None)]
    parts = ids[: blocks * _BLOCK].reshape(blocks, _BLOCK)
    most, least = np.maximum.accumulate(parts.max(1)), parts.min(1)
    least[-1] = ids[(blocks - 1) * _BLOCK :].min()
    least = np.minimum.accumulate(least[::-1])[::-1]
    edges = (np.flatnonzero(most[:-1] < least[1:]) + 1) * _BLOCK
    return [slice(*pair) for pair in pairwise([0, *edges.tolist(), ids.size])]
