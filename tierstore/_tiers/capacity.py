"""How many bytes a host tier of so many slots takes, and how many slots fit so many bytes."""

from __future__ import annotations

from tierstore._tiers.slots import CachedSlots, DirectSlots
from tierstore.errors import CapacityError
from tierstore.policy import PolicySpec, lru

__all__ = [
    "STAGING_BYTES",
    "arena_bytes",
    "bytes_for",
    "queue_bytes",
    "slots_for",
    "staging_rows",
]

STAGING_BYTES = 2 << 20
"""Records that go to or come from the tier below are moved this many bytes at a time."""

_QUEUE_BYTES = 8 << 20
_QUEUE_SHARE = 16


def staging_rows(record_bytes: int) -> int:
    """Return the number of records moved at a time."""
    return max(1, STAGING_BYTES // record_bytes)


def queue_bytes(record_bytes: int, slots: int) -> int:
    """Bytes of records, handed down, that may wait to be written to a disk."""
    return min(_QUEUE_BYTES, slots * record_bytes // _QUEUE_SHARE)


def bytes_for(rows: int, record_bytes: int, slots: int, policy: PolicySpec | None = None) -> int:
    """Bytes of a tier: its arena, staging, and what it handed down that waits to be written.

    A thread that misses while another does takes as much staging again.
    """
    slots = min(slots, rows)
    staging = min(staging_rows(record_bytes), slots) * record_bytes
    arena = arena_bytes(rows, record_bytes, slots, policy)
    return arena + staging + queue_bytes(record_bytes, slots)


def arena_bytes(rows: int, record_bytes: int, slots: int, policy: PolicySpec | None = None) -> int:
    """Bytes of records, maps, marks and policy."""
    if slots == rows:
        return slots * record_bytes + DirectSlots.bytes_for(rows)
    return slots * record_bytes + CachedSlots.bytes_for(rows, slots, policy or lru())


def slots_for(rows: int, record_bytes: int, nbytes: int, policy: PolicySpec | None = None) -> int:
    """Return the most slots that fit `nbytes`, maps included; 0 for a budget of 0.

    Raises CapacityError if a budget above 0 has no room for a single slot and the maps.
    """
    if nbytes == 0:
        return 0
    if bytes_for(rows, record_bytes, rows) <= nbytes:
        return rows
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = bytes_for(rows, record_bytes, middle, policy) <= nbytes
        low, high = (middle, high) if fits else (low, middle - 1)
    if low == 0:
        least = min(bytes_for(rows, record_bytes, slots, policy) for slots in (1, rows))
        raise CapacityError(
            f"a host budget of {nbytes} bytes cannot hold the map of {rows} rows and one "
            f"record: that takes {least}; give more, or 0 for no host tier"
        )
    return low
