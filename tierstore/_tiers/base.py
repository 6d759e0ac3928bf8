"""The seams between tiers: whole records by row, and nothing of fields or tables."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._counters import TierStats

__all__ = ["Bytes", "DeviceView", "LowestTier", "Rows", "Tier"]

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Tier(Protocol):
    """What a tier asks of the tier below: whole records of distinct, valid rows.

    Rows to `read` and `stream` ascend as well: a disk is faster in order, and so is finding which
    table a row belongs to. `read`, `stream`, `write` and `stage` may be called by several threads
    at a time, each of which sees and leaves whole records; everything else expects no other call.
    """

    rows: int
    record_bytes: int
    stats: TierStats

    def read(self, rows: Rows, out: Bytes) -> None:
        """Copy the records of `rows` `(n,)` into `out` `(n, record_bytes)`, which is contiguous."""

    def stream(self, rows: Rows) -> Generator[tuple[slice, Bytes]]:
        """Yield the records of `rows` part by part; an array is good until the next one."""

    def write(self, rows: Rows, records: Bytes, *, resident: bool = False) -> None:
        """Write `records` `(n, record_bytes)` over those of `rows` `(n,)`, in any order.

        `resident`: the tier above keeps the records, so that they are not read from here soon, and
        a caller waits for them to be in a file.
        """

    def stage(self, rows: Rows) -> Callable[[], None] | None:
        """Return what brings `rows` nearer, if anything does, to be called without any lock."""

    def flush(self) -> None:
        """Hand every changed record to the tier below."""


class Changed(Protocol):
    """Records that no version has yet."""

    @property
    def ids(self) -> Rows:
        """Their rows."""


class LowestTier(Tier, Protocol):
    """The lowest tier of a table: the disk, or what stands in for it.

    Attributes:
        queue_bytes: bytes of records that may wait in memory to be written.
    """

    queue_bytes: int

    @property
    def live(self) -> Changed | None:
        """What was handed down since the last commit."""

    def discard(self) -> Rows:
        """Drop what was handed down since the last commit; return its rows."""


class DeviceView(NamedTuple):
    """The memory of a host tier that kernels read and write by themselves.

    Attributes:
        records: uint8 `(slots, record_bytes)`.
        dirty: uint8 `(slots,)`, whether a record has changed.
        slot_of: int32 `(rows,)`, the slot of each row, negative without one; None where slot = row.
    """

    records: Bytes
    dirty: npt.NDArray[np.uint8]
    slot_of: npt.NDArray[np.int32] | None
