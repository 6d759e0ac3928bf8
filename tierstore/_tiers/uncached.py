"""Byte ranges of any rows, in any order, over a tier that moves whole records of ascending rows.

What a table without a host tier does, and a host tier with the rows that find no room in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._tiers.base import Bytes, Rows, Tier
from tierstore._tiers.slots import Slots

__all__ = ["Uncached", "read_ranges", "write_ranges"]

Positions = npt.NDArray[np.intp]


def read_ranges(
    below: Tier, rows: Rows, out: Bytes, lo: int, *, at: Positions | None = None
) -> None:
    """Copy bytes `lo …` of records `rows` `(n,)`, which may repeat, to rows `at` of `out`.

    `out` is `(n or more, width)`, contiguous; None for `at` is `0..n-1`. A record is read once.
    """
    order, distinct = None, rows
    if (rows[1:] <= rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        distinct = rows.take(order)
        first = np.ones(rows.size, np.bool_)
        np.not_equal(distinct[1:], distinct[:-1], out=first[1:])
        starts = np.append(np.flatnonzero(first), rows.size)
        distinct = distinct.compress(first)
    elif at is None and out.shape[1] == below.record_bytes:
        below.read(rows, out)
        return
    width = out.shape[1]
    with contextlib.closing(below.stream(distinct)) as stream:
        for part, records in stream:
            if order is None:
                to, block = np.arange(part.start, part.stop), records[:, lo : lo + width]
            else:
                to = order[starts[part.start] : starts[part.stop]]
                index = np.repeat(
                    np.arange(len(records)), np.diff(starts[part.start :][: len(records) + 1])
                )
                block = np.empty((index.size, width), np.uint8)
                _rowcopy.gather(records, index, block, lo)
            to = to if at is None else at.take(to)
            _rowcopy.scatter(out, to, np.ascontiguousarray(block))


def write_ranges(below: Tier, rows: Rows, records: Bytes, lo: int) -> None:
    """Write `records` `(n, width)` over bytes `lo …` of records `rows` `(n,)`, distinct.

    The rest of each record stays: nothing else may write to these rows meanwhile.
    """
    if records.shape[1] != below.record_bytes:
        order = np.argsort(rows)
        rows = rows.take(order)
        whole = np.empty((rows.size, below.record_bytes), np.uint8)
        below.read(rows, whole)
        whole[:, lo : lo + records.shape[1]] = records.take(order, axis=0)
        records = whole
    below.write(rows, records)


class Uncached:
    """Stands where a host tier would, and keeps nothing."""

    slots = 0

    def __init__(self, below: Tier) -> None:
        """Refer to the tier that holds every row."""
        self.below = below
        self.rows: int = below.rows
        self.record_bytes: int = below.record_bytes
        self._lock = threading.Lock()

    def grow(self, rows: int) -> None:
        """Have `rows` rows instead of fewer, of which the tier below has the new ones by now."""
        self.rows = rows

    def read(
        self, rows: Rows, out: Bytes, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` `(n, hi - lo)`.

        `admit` is for tiers that keep what they read.
        """
        read_ranges(self.below, rows, out, lo)

    def write(self, rows: Rows, records: Bytes, lo: int = 0, hi: int | None = None) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of records `rows` `(n,)`, distinct."""
        with self._lock:
            write_ranges(self.below, rows, np.ascontiguousarray(records), lo)

    def lease(
        self, batch: _rowcopy.Groups, ids: Rows | None = None, out: Bytes | None = None, lo: int = 0
    ) -> Rows:
        """Return no slots: nothing has to stay. Fill `out` with bytes `lo …` of each of `ids`."""
        if out is not None:
            self.read_held(batch, out, lo, each=True)
        return batch.rows[:0]

    def read_held(self, batch: _rowcopy.Groups, out: Bytes, lo: int, *, each: bool = False) -> None:
        """Copy bytes `lo …` of the distinct rows, or with `each` of the row of each id."""
        rows = batch.rows.take(batch.positions) if each else batch.rows
        read_ranges(self.below, rows, out, lo)

    def write_held(self, rows: Rows, records: Bytes, lo: int, hi: int) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of leased rows, distinct."""
        self.write(rows, records, lo, hi)

    def update_held(self, *_: object) -> bool:
        """Return False: no record is here."""
        return False

    def give_back(self, slots: Slots) -> None:
        """End a lease."""

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return what brings rows nearer to the tier below, if anything does."""
        return self.below.stage(_rowcopy.unique(rows))

    def fetch(self, rows: Rows, window: int) -> None:
        """Do nothing: there is no place to bring rows to."""

    def flush(self) -> None:
        """Flush the tier below."""
        self.below.flush()

    def discard(self, rows: Rows) -> None:
        """Do nothing: no record is here."""

    def dirty(self) -> Rows:
        """Return no rows."""
        return np.empty(0, np.int64)

    def close(self) -> None:
        """Do nothing: no memory is held."""
