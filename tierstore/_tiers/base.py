"""The seam between tiers: whole records by row, byte ranges of them, and nothing of fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tierstore.stats import TierStats

__all__ = ["Bytes", "Rows", "Streaming", "Tier"]

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """Records by row. Rows are valid: `_table.address` has checked them.

    `read`, `write` and `prefetch` may be called by several threads at a time, each of which sees
    and leaves whole records; everything else expects no other call.
    """

    rows: int
    record_bytes: int
    stats: TierStats

    def read(
        self, rows: Rows, out: Bytes, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` `(n, hi - lo)`.

        `admit=False` leaves the tier's choice of rows to keep as it is.
        """

    def write(
        self, rows: Rows, records: Bytes, lo: int = 0, hi: int | None = None, *, kept: bool = False
    ) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of records `rows` `(n,)`, distinct.

        `kept`: the tier above keeps the records, so that they are not read from here soon, and a
        caller waits for them to be in a file.
        """

    def prefetch(self, rows: Rows) -> Callable[[], None] | None:
        """Return what brings `rows` nearer, if anything does, to be called without any lock."""

    def flush(self) -> None:
        """Hand every changed record to the tier below."""


@runtime_checkable
class Streaming(Protocol):
    """A tier that reads ahead of what it hands out."""

    def stream(self, rows: Rows) -> Iterator[tuple[slice, Bytes]]:
        """Yield the records of `rows` part by part; an array is good until the next one."""
