"""What each tier did, and how full it is: counters kept next to the work, and their rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["Hits", "Occupancy", "TierStats", "tally"]


@dataclass(frozen=True)
class Occupancy:
    """How full a tier is.

    Attributes:
        slots: records it has room for.
        used: records it holds.
        dirty: of these, changed since the tier below saw them.
    """

    slots: int
    used: int
    dirty: int


@dataclass
class Hits:
    """What was asked of a tier, and found in it.

    Attributes:
        requested: row ids asked of the tier, duplicates included.
        hits: of these, found in it.
        unique, unique_hits: the same over the distinct ids of each batch.
    """

    requested: int = 0
    hits: int = 0
    unique: int = 0
    unique_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over requested ids; 0 before the first."""
        return self.hits / self.requested if self.requested else 0.0

    @property
    def unique_hit_rate(self) -> float:
        """Hits over the distinct ids of each batch, which is what decides the bytes moved."""
        return self.unique_hits / self.unique if self.unique else 0.0


def tally(counters: Hits, **amounts: int) -> None:
    """Add to the named counters."""
    for name, amount in amounts.items():
        setattr(counters, name, getattr(counters, name) + amount)


@dataclass
class TierStats(Hits):
    """Counters of one tier since it was opened, beside those of `Hits`.

    Attributes:
        unique_of: the requested ids of the batches whose distinct ids were counted; less than
            `requested` where only a sample was.
        evictions: records that made room for others.
        write_backs: evicted or flushed records that had changed and went to the tier below.
        written: records written into the tier from above.
        bytes_out, bytes_in: bytes handed up, and bytes taken from above.
        bytes_promoted, bytes_written_back: bytes that came from, and went to, the tier below.
    """

    unique_of: int = 0
    evictions: int = 0
    write_backs: int = 0
    written: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_promoted: int = 0
    bytes_written_back: int = 0

    @property
    def misses(self) -> int:
        """Requested ids that were not in the tier."""
        return self.requested - self.hits

    @property
    def unique_sampled(self) -> bool:
        """Whether the distinct ids were counted in a sample of the batches only."""
        return self.unique_of < self.requested

    def to_dict(self) -> dict[str, int | float | bool]:
        """Return counters and rates under stable keys."""
        return {
            **asdict(self),
            "misses": self.misses,
            "hit_rate": self.hit_rate,
            "unique_hit_rate": self.unique_hit_rate,
            "unique_sampled": self.unique_sampled,
        }
