"""What a GPU tier did, counted on the device, and the first bad id it met."""

from __future__ import annotations

from tierstore.errors import RowIndexError
from tierstore.stats import TierStats
from tierstore.tier.gpu.memory import GpuMemory

__all__ = ["Counts"]

_TOTALS = (
    "missed_ids",
    "missed_rows",
    "evicted_rows",
    "written_rows",
    "leased_rows",
    "leased_misses",
)


class Counts:
    """The counters of a tier: those the host knows by itself, and those it must ask the device for.

    Attributes:
        known: what the host has counted, and what it has taken over from the device.
    """

    def __init__(self, memory: GpuMemory) -> None:
        """Start at zero."""
        self.known = TierStats()
        self._memory = memory
        self._bad: tuple[int, int] | None = None

    def read(self, ids: int, nbytes: int) -> None:
        """Count a read of `nbytes` for each of its ids."""
        self.known.requested += ids
        self.known.bytes_out += ids * nbytes

    def wrote(self, ids: int, nbytes: int) -> None:
        """Count a write of `nbytes` for each of its ids."""
        self.known.requested += ids
        self.known.written += ids
        self.known.bytes_in += ids * nbytes

    def leased(self, ids: int) -> None:
        """Count a lease."""
        self.known.requested += ids
        self.known.unique_of += ids

    def take(self, stream: int) -> None:
        """Take over what the device has counted, and wait for it."""
        counts = self._memory.counters(stream)
        record = int(self._memory.argument.record)
        self.known.count(
            hits=-int(counts["missed_ids"]),
            evictions=int(counts["evicted_rows"]),
            write_backs=int(counts["written_rows"]),
            bytes_promoted=int(counts["missed_rows"]) * record,
            bytes_written_back=int(counts["written_rows"]) * record,
            unique=int(counts["leased_rows"]),
            unique_hits=int(counts["leased_rows"]) - int(counts["leased_misses"]),
        )
        self._memory.clear(_TOTALS, stream)

    def stats(self, stream: int) -> TierStats:
        """Wait, and return the counters since the tier was made.

        Distinct ids are counted for leases only: reads and writes need not tell them apart.
        """
        self.take(stream)
        stats = TierStats(**vars(self.known))
        stats.hits += stats.requested
        return stats

    def check(self, stream: int) -> None:
        """Wait; raise RowIndexError if any id since the last `forgive` was outside the table."""
        if self._bad is None:
            counts = self._memory.counters(stream)
            if counts["bad"]:
                self._bad = int(counts["bad_row"]), int(counts["bad_position"])
        if self._bad is not None:
            row, position = self._bad
            raise RowIndexError(
                f"row {row} at position {position} of a batch is outside the table, which has rows "
                f"0 to {self._memory.argument.rows - 1}; that batch read NaN there and wrote "
                "nothing. Nothing can be committed until rollback()"
            )

    def forgive(self) -> None:
        """Forget the bad id."""
        self._bad = None
