"""Tiers over one that is a plain array, and the invariants of their maps."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.host import HostTier
from tierstore._tiers.slots import CachedSlots, DirectSlots
from tierstore.stats import TierStats, tally

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]


class ArrayTier:
    """A tier that holds every record in an array, and counts what it is asked for."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.rows, self.record_bytes = records.shape
        self.stats = TierStats()
        self.prefetched: list[int] = []
        self.full = False

    def read(
        self, rows: Rows, out: Records, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        out[:] = self.records[rows, lo:hi]
        tally(self.stats, requested=rows.size)

    def write(
        self,
        rows: Rows,
        records: Records,
        lo: int = 0,
        hi: int | None = None,
        *,
        kept: bool = False,
    ) -> None:
        assert np.unique(rows).size == rows.size
        if self.full:
            raise OSError("no space")
        self.records[rows, lo:hi] = records
        tally(self.stats, written=rows.size)

    def prefetch(self, rows: Rows) -> None:
        self.prefetched += rows.tolist()

    def flush(self) -> None:
        pass


def check(tier: HostTier) -> None:
    """Raise AssertionError unless the maps of a tier are consistent; no thread is in a call."""
    slots = tier.map
    assert not tier._moves, "a move has not ended"
    if isinstance(slots, DirectSlots):
        assert not np.any(slots.dirty & ~slots.resident & 1)
        assert slots.used == np.count_nonzero(slots.resident)
        return
    assert isinstance(slots, CachedSlots)
    rows = np.flatnonzero(slots.slot_of >= 0)
    taken = slots.slot_of[rows]
    assert np.unique(taken).size == taken.size, "two rows in one slot"
    assert np.array_equal(slots.row_of[taken], rows), "row_of is not the inverse of slot_of"
    assert np.count_nonzero(slots.row_of >= 0) == taken.size, "a free slot names a row"
    assert not np.any(slots.dirty[slots.row_of < 0]), "a free slot is dirty"
    assert taken.size == slots.used <= tier.slots, "a slot is lost"
    assert slots.pins.leases.min() >= 0
    assert slots.pins.leases.sum() == slots.pins._leased, "a pin is lost"


def random_span(rng: np.random.Generator, record_bytes: int) -> tuple[int, int]:
    """Return a byte range such as a field has, or all of a record."""
    if rng.random() < 0.5:
        return 0, record_bytes
    lo = 2 * int(rng.integers(0, record_bytes // 2))
    return lo, int(rng.integers(lo // 2 + 1, record_bytes // 2 + 1)) * 2


def read(tier: Any, rows: Any, lo: int = 0, hi: int | None = None, **options: Any) -> Records:
    """Return byte ranges of records as a fresh array."""
    rows = np.asarray(rows, np.int64)
    out = np.empty((rows.size, (tier.record_bytes if hi is None else hi) - lo), np.uint8)
    tier.read(rows, out, lo, hi, **options)
    return out
