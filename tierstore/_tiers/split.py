"""Records in two parts: the bytes that a cache holds, and those that are held whole beside it.

Each part forms records of its own for the tiers that hold it, which do not know the other. If a
file has both in one piece, host memory separates them as rows are promoted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tierstore._tiers.base import Bytes, MappedTier, Rows
from tierstore.stats import TierStats

_WIDEST = 16
"""Most bytes that a kernel moves in one access."""


class Piece(NamedTuple):
    """Bytes `lo:hi` of a record, which begin at byte `at` of something narrower."""

    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class Selection:
    """Some bytes of each record, as records of their own.

    Attributes:
        pieces: the bytes, by place in the whole record.
        nbytes: of one narrow record, padding included.
    """

    pieces: tuple[Piece, ...]
    nbytes: int

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]], unit: int = 1) -> Selection:
        """Lay byte ranges end to end, each as aligned as it was, in a multiple of `unit` bytes."""
        pieces, end = [], 0
        for lo, hi in sorted(spans):
            bits = lo | (hi - lo) | _WIDEST
            step = bits & -bits
            at = -(-end // step) * step
            pieces.append(Piece(lo, hi, at))
            end, unit = at + hi - lo, max(unit, step)
        return cls(tuple(pieces), -(-end // unit) * unit)

    def within(self, lo: int, hi: int) -> list[Piece]:
        """Return its pieces of bytes `lo:hi` of a record: its own bytes, and where they belong.

        A piece `(begin, end, at)` states that bytes `begin:end` here are bytes `at …` of the range.
        """
        pieces = []
        for piece in self.pieces:
            begin, end = max(lo, piece.lo), min(hi, piece.hi)
            if begin < end:
                here = piece.at + begin - piece.lo
                pieces.append(Piece(here, here + end - begin, begin - lo))
        return pieces

    def copy(self, records: Bytes, out: Bytes) -> None:
        """Copy the selected bytes of `records` `(n, record_bytes)` into `out` `(n, nbytes)`."""
        if sum(hi - lo for lo, hi, _ in self.pieces) < self.nbytes:
            out[:] = 0
        for lo, hi, at in self.pieces:
            out[:, at : at + hi - lo] = records[:, lo:hi]


@dataclass(frozen=True)
class Split:
    """The two parts of records.

    Attributes:
        cached: the bytes that the tiers cache by row.
        whole: the bytes that are on the GPU for every row.
        record_bytes: of a record in one piece.
    """

    cached: Selection
    whole: Selection
    record_bytes: int


class Selected:
    """Some bytes of the records of a tier, for reading only."""

    def __init__(self, below: MappedTier, selection: Selection) -> None:
        """Refer to the tier that has whole records."""
        self.rows: int = below.rows
        self.record_bytes: int = selection.nbytes
        self.stats: TierStats = below.stats
        self._below = below
        self._selection = selection

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)`, ascending, into `out` `(n, record_bytes)`."""
        with contextlib.closing(self._below.stream(rows)) as stream:
            for part, records in stream:
                self._selection.copy(records, out[part])

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows`, ascending, part by part."""
        with contextlib.closing(self._below.stream(rows)) as stream:
            for part, records in stream:
                out = np.empty((len(records), self.record_bytes), np.uint8)
                self._selection.copy(records, out)
                yield part, out

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Refuse: writers have whole records."""
        raise RuntimeError("records that are split are only read")

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return a call that brings `rows` nearer to the tier below, or None."""
        return self._below.stage(rows)

    def let_go(self, rows: Rows) -> None:
        """Unmap the memory that was mapped to read ascending `rows`."""
        self._below.let_go(rows)

    def flush(self) -> None:
        """Do nothing: nothing is written."""
