"""Several lowest tiers as one: rows of a space go to the tier of the extent they are in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from tierstore._counters import TierStats
from tierstore._tiers.base import Bytes, LowestTier, Rows

__all__ = ["Router"]


class Router:
    """The lowest tier of a space of several extents, which lie end to end."""

    def __init__(self, tiers: Sequence[LowestTier]) -> None:
        """Lay the rows of `tiers`, whose records are equally long, end to end."""
        self.record_bytes = tiers[0].record_bytes
        self.stats = TierStats()
        self._tiers = tuple(tiers)
        self._starts = np.cumsum([0, *(tier.rows for tier in tiers)])
        self.rows = int(self._starts[-1])

    def _routed(self, rows: Rows) -> Iterator[tuple[LowestTier, slice, Rows]]:
        """Yield each tier that has some of `rows`, ascending, which of them, and its own rows."""
        edges = np.searchsorted(rows, self._starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            part = slice(int(edges[number]), int(edges[number + 1]))
            yield self._tiers[number], part, rows[part] - self._starts[number]

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)`, ascending, into `out` `(n, record_bytes)`."""
        for tier, part, own in self._routed(rows):
            tier.read(own, out[part])

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows`, ascending, part by part."""
        for tier, part, own in self._routed(rows):
            for within, records in tier.stream(own):
                yield slice(part.start + within.start, part.start + within.stop), records

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Write `records` `(n, record_bytes)` over those of `rows` `(n,)`, in any order."""
        if (rows[1:] < rows[:-1]).any():
            order = np.argsort(rows)
            rows, records = rows.take(order), records.take(order, axis=0)
        for tier, part, own in self._routed(rows):
            tier.write(own, records[part], resident=resident)

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return what brings `rows`, ascending, nearer in all the tiers, if anything does."""
        advice = [tier.stage(own) for tier, _, own in self._routed(rows)]
        calls = [call for call in advice if call is not None]

        def advise() -> None:
            for call in calls:
                call()

        return advise if calls else None

    def flush(self) -> None:
        """Flush all the tiers."""
        for tier in self._tiers:
            tier.flush()
