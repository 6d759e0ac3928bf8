"""Tiers over one that is a plain array, and the invariants of their maps."""

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.host import HostTier
from tierstore._tiers.slots import CachedSlots, DirectSlots
from tierstore._tiers.uncached import Uncached
from tierstore.stats import TierStats, tally

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]


class ArrayTier:
    """A tier that holds every record in an array, and counts what it is asked for."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.rows, self.record_bytes = records.shape
        self.stats = TierStats()
        self.staged: list[int] = []
        self.full = False

    def read(self, rows: Rows, out: Records) -> None:
        assert np.all(rows[1:] > rows[:-1]), "rows repeat, or do not ascend"
        out[:] = self.records[rows]
        tally(self.stats, requested=rows.size)

    def stream(self, rows: Rows) -> Generator[tuple[slice, Records]]:
        assert np.all(rows[1:] > rows[:-1]), "rows repeat, or do not ascend"
        block = np.empty((7, self.record_bytes), np.uint8)
        for start in range(0, rows.size, 7):
            part = slice(start, min(start + 7, rows.size))
            self.read(rows[part], block[: part.stop - start])
            yield part, block[: part.stop - start]

    def write(self, rows: Rows, records: Records, *, resident: bool = False) -> None:
        assert np.unique(rows).size == rows.size
        assert records.shape == (rows.size, self.record_bytes)
        if self.full:
            raise OSError("no space")
        self.records[rows] = records
        tally(self.stats, written=rows.size)

    def stage(self, rows: Rows) -> None:
        assert np.all(rows[1:] > rows[:-1]), "rows repeat, or do not ascend"
        self.staged += rows.tolist()

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
    taken = slots.lookup(np.arange(tier.rows))
    rows = np.flatnonzero(taken >= 0)
    taken = taken[rows]
    assert np.unique(taken).size == taken.size, "two rows in one slot"
    assert np.array_equal(slots.row_of[taken], rows), "row_of is not the inverse of slot_of"
    assert slots.resident.size == taken.size, "a free slot names a row"
    free = np.setdiff1d(np.arange(tier.slots), taken)
    assert not np.any(slots.dirty[free]), "a free slot is dirty"
    assert taken.size == slots.used <= tier.slots, "a slot is lost"
    assert slots.pins.leases.min() >= 0
    assert slots.pins.leases.sum() == slots.pins.leased, "a pin is lost"


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
    nearest = tier if isinstance(tier, HostTier | Uncached) else Uncached(tier)
    nearest.read(rows, out, lo, hi, **options)
    return out
