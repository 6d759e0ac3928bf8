"""From a budget to tiers: how many slots a table gets, and where."""

from __future__ import annotations

import contextlib

from tierstore.budget import Budget
from tierstore.disk.tier import DiskTier
from tierstore.errors import InvalidInputError
from tierstore.tier.host import HostTier

__all__ = ["available_bytes", "host_tier"]


def host_tier(below: DiskTier, name: str, budget: Budget, *, share: float) -> HostTier | None:
    """Return the host tier a budget gives to a table over its disk tier, or None to do without.

    `share` is the table's part of what is given for all tables. Raises CapacityError.
    """
    slots = budget.slots("host", name)
    if slots is None:
        nbytes = budget.nbytes("host", name, share)
        if nbytes is None:
            whole = HostTier.bytes_for(below.rows, below.record_bytes, below.rows)
            nbytes = min(whole, int(available_bytes() // 4 * share))
        slots = HostTier.slots_for(below.rows, below.record_bytes, nbytes)
    if slots < 0:
        raise InvalidInputError(f"host_rows cannot be negative: {slots}")
    return HostTier(below, slots=slots) if slots else None


def available_bytes() -> int:
    """Return the memory this process may still take, a memory cgroup's limit included."""
    free = 0
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(_text(limit)) - int(_text(used)))
    return max(free, 0)


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
