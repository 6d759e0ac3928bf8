"""The seam between tiers: whole records by row, byte ranges of them, and nothing of fields."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierstore.stats import TierStats

__all__ = ["Tier"]

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """Records by row. Rows are valid: they were checked where they came in."""

    rows: int
    record_bytes: int
    stats: TierStats

    def read(
        self, rows: Rows, out: Bytes, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        """Copy bytes `lo:hi` of records `rows` `(n,)`, which may repeat, into `out` `(n, hi - lo)`.

        `admit=False` leaves the tier's choice of rows to keep as it is.
        """

    def write(self, rows: Rows, records: Bytes, lo: int = 0, hi: int | None = None) -> None:
        """Write `records` `(n, hi - lo)` over bytes `lo:hi` of records `rows` `(n,)`, distinct."""

    def prefetch(self, rows: Rows) -> None:
        """Start bringing `rows` nearer, without waiting."""

    def flush(self) -> None:
        """Hand every changed record to the tier below."""
