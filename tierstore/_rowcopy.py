"""Copies of scattered records, where they go, and the order of values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore import _core

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.integer[Any]]
Integer = TypeVar("Integer", bound=np.integer[Any])

_BLOCK = 1 << 20
"""Values compared at a time."""
_SHORT = 1 << 32
"""Values below which four bytes hold each."""


def gather(records: Bytes, slots: Index, out: npt.NDArray[Any], lo: int = 0) -> None:
    """Copy bytes `lo …` of records `slots` `(n,)` into contiguous `out`, n items of any type.

    `records` is `(slots, record_bytes)` and may be mapped from a file. Raises IndexError for a slot
    that is none.
    """
    _core.gather(records, np.ascontiguousarray(slots), lo, out)


def scatter(records: Bytes, slots: Index, values: npt.NDArray[Any], lo: int = 0) -> None:
    """Copy contiguous `values`, n items of any type, to bytes `lo …` of distinct records `slots`.

    Raises IndexError for a slot that is none.
    """
    _core.scatter(records, np.ascontiguousarray(slots), lo, values)


def copy(records: Bytes, which: Any, out: Bytes) -> None:
    """Copy whole records, a slice or those at positions, into contiguous `out`."""
    if isinstance(which, slice):
        out[:] = records[which]
    else:
        gather(records, which, out)


class Target(NamedTuple):
    """Where n records go: to `records` `(n, bytes)`, or to the distinct `slots` `(n,)` of more."""

    records: Bytes
    slots: Index | None = None

    def of(self, which: slice | npt.NDArray[np.intp]) -> Target:
        """Return where some of the records go, a slice of them or those at positions."""
        if self.slots is not None:
            return Target(self.records, self.slots[which])
        if isinstance(which, slice):
            return Target(self.records[which])
        return Target(self.records, which)

    def put(self, values: Bytes) -> None:
        """Copy all n records from contiguous `values` `(n, bytes)`."""
        if self.slots is None:
            self.records[:] = values
        else:
            scatter(self.records, self.slots, values)


def call_at(
    call: Callable[[Any, Bytes], object],
    which: npt.NDArray[np.intp],
    part: Any,
    records: Bytes,
) -> None:
    """Call with records that are a part, a slice or positions, of those at positions `which`."""
    call(which[part], records)


def ascends(values: Index, *, strictly: bool = False) -> bool:
    """Whether no value of `(n,)` is less than the one before it; if `strictly`, every one is more.

    Values may be those of a damaged file: neighbours are compared, as differences could wrap.
    """
    starts = range(0, values.size, _BLOCK)
    blocks = (values[start : start + _BLOCK + 1] for start in starts)
    if strictly:
        return all(bool((each[1:] > each[:-1]).all()) for each in blocks)
    return all(bool((each[1:] >= each[:-1]).all()) for each in blocks)


def unique(values: npt.NDArray[Integer]) -> npt.NDArray[Integer]:
    """Return the distinct `values` `(n,)` in ascending order, as a new array.

    Since NumPy 2.3, `np.unique` hashes integers: 5 ms for 32k mostly distinct values, 850 ms for a
    million (NumPy 2.4.6). Sorting takes 0.3 ms and 14 ms. Values below 2³² are sorted as such:
    fewer bytes take less time.
    """
    if ascends(values, strictly=True):
        return values.copy()
    short = np.minimum.reduce(values) >= 0 and np.maximum.reduce(values) < _SHORT
    ascending = values.astype(np.uint32) if short else values.copy()
    ascending.sort()
    first = np.ones(ascending.size, np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending.compress(first).astype(values.dtype, copy=False)


class Groups:
    """The ids of a batch grouped by row.

    Attributes:
        rows: the distinct rows `(m,)`, ascending.
        order: the positions of the ids `(n,)`, row by row, ascending within a row.
        starts: where each row's part of `order` begins, and its end, `(m + 1,)`.
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        """Group ids `(n,)`, none negative; nothing refers to them afterwards."""
        count = ids.size
        order, starts, rows = (
            np.empty(count, np.int64),
            np.empty(count + 1, np.int64),
            np.empty(count, np.int64),
        )
        distinct = _core.group(np.ascontiguousarray(ids), order, starts, rows)
        self.order: npt.NDArray[np.int64] = order
        self.starts: npt.NDArray[np.int64] = starts[: distinct + 1]
        self.rows: npt.NDArray[np.int64] = rows[:distinct]

    @cached_property
    def positions(self) -> npt.NDArray[np.intp]:
        """Which of the distinct rows each id `(n,)` is of."""
        numbers = np.empty(self.order.size, np.intp)
        numbers[self.order] = np.arange(self.rows.size).repeat(self.repeats)
        return numbers

    def sums(
        self, parts: list[npt.NDArray[Any]], where: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[Any]:
        """Return the sum of the values of each row, those of ids in their order, `(m, dim)`.

        Args:
            parts: the values, float32 or float64 `(…, dim)`, one part after another; the numbers of
                each lie side by side.
            where: which of them is that of each id, `(n,)`; None means in order.
        """
        order = self.order if where is None else where[self.order]
        sums = np.empty((self.rows.size, parts[0].shape[1]), parts[0].dtype)
        _core.sum_groups(parts, order, self.starts, sums)
        return sums

    @property
    def repeats(self) -> npt.NDArray[np.int64]:
        """How many ids are of each row `(m,)`."""
        return self.starts[1:] - self.starts[:-1]
