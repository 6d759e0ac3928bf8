"""Byte ranges of any rows, in any order, over a tier that moves whole records of ascending rows.

Used by a table without a host tier, and by a host tier for rows that find no room in it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._tiers.base import Bytes, Held, MappedTier, Rows, Tier

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


_FEW = 64
"""Rows that may stay mapped: dropping them would take longer than reading them."""
_KEPT_BYTES = 8 << 20
"""Mapped memory that a read of scattered rows, which are not kept, may hold at once."""
_AROUND_BYTES = 1 << 16
"""Most bytes of a file that the kernel maps around a place that is read."""


def read_once(below: MappedTier, rows: Rows, out: Bytes, lo: int) -> None:
    """Read like `read_ranges`, then unmap the file pages that were mapped for it.

    Rows that are far apart would map most of a file, however few they are.
    """
    order = np.argsort(rows, kind="stable") if (rows[1:] < rows[:-1]).any() else None
    ascending = rows if order is None else rows.take(order)
    for part in pieces_of(ascending, below.record_bytes):
        some = ascending[part]
        if order is None:
            read_ranges(below, some, out[part], lo)
        else:
            read_ranges(below, some, out, lo, at=order[part])
        below.let_go(some)


def pieces_of(rows: Rows, record_bytes: int) -> list[slice]:
    """Divide ascending rows so that each piece maps little; neighbours stay together."""
    apart = np.diff(rows, prepend=rows[:1]) * record_bytes
    if not rows.size or int(rows[-1] - rows[0]) <= 2 * rows.size:
        return [slice(0, rows.size)]
    mapped = np.minimum(apart, _AROUND_BYTES).cumsum() // _KEPT_BYTES
    edges = [0, *(np.flatnonzero(np.diff(mapped)) + 1).tolist(), rows.size]
    return [slice(*pair) for pair in pairwise(edges)]


class Uncached:
    """Stands in for a host tier, and keeps nothing."""

    slots = 0

    def __init__(self, below: MappedTier) -> None:
        """Refer to the tier that holds every row."""
        self.below = below
        self.rows: int = below.rows
        self.record_bytes: int = below.record_bytes
        self._lock = threading.Lock()

    def grow(self, rows: int) -> None:
        """Grow to `rows` rows; the tier below already has the new ones."""
        self.rows = rows

    def read(
        self, rows: Rows, out: Bytes, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` `(n, hi - lo)`.

        `admit` is for tiers that keep what they read; without it, not even files stay mapped.
        """
        if admit or rows.size <= _FEW:
            read_ranges(self.below, rows, out, lo)
        else:
            read_once(self.below, rows, out, lo)

    def write(self, rows: Rows, records: Bytes, lo: int = 0, hi: int | None = None) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of records `rows` `(n,)`, distinct."""
        with self._lock:
            write_ranges(self.below, rows, np.ascontiguousarray(records), lo)

    def lease(
        self, batch: _rowcopy.Groups, ids: Rows | None = None, out: Bytes | None = None, lo: int = 0
    ) -> Held:
        """Return no slots: no row has to stay. Fill `out` with bytes `lo …` of each of `ids`."""
        if out is not None:
            self.read_held(batch, out, lo, each=True)
        return Held(batch.rows[:0], False)

    def read_held(self, batch: _rowcopy.Groups, out: Bytes, lo: int, *, each: bool = False) -> None:
        """Copy bytes `lo …` of the distinct rows, or with `each` of the row of each id."""
        rows = batch.rows.take(batch.positions) if each else batch.rows
        read_ranges(self.below, rows, out, lo)

    def write_held(self, rows: Rows, records: Bytes, lo: int, hi: int) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of leased rows, distinct."""
        self.write(rows, records, lo, hi)

    def update_held(self, *_: object) -> NoReturn:
        """Refuse: no lease is whole."""
        raise RuntimeError("no record is here")

    def give_back(self, held: Held) -> None:
        """End a lease."""

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return a call that brings rows nearer to the tier below, or None."""
        return self.below.stage(_rowcopy.unique(rows))

    def fetch(self, rows: Rows, window: int) -> None:
        """Do nothing: no tier here can take rows."""

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
