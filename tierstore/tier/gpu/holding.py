"""Which leases of a GPU tier are open, and which rows they keep from being promoted."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.tier.gpu.arguments import Arguments
from tierstore.tier.gpu.lease import GpuLease

__all__ = ["Holding"]

_Launch = Callable[[str, Arguments, int, int | None], None]


class Holding:
    """The open leases, and ended ones whose rows in host memory may still be another's."""

    def __init__(self, launch: _Launch) -> None:
        """Start with none; `launch` runs a kernel on so many records of a lease, in a stream."""
        self._launch = launch
        self._open: set[GpuLease] = set()
        self._ended: list[GpuLease] = []

    @property
    def bound(self) -> int:
        """Most slots that the open leases can hold."""
        return sum(lease.bound for lease in self._open)

    def add(self, lease: GpuLease) -> None:
        """Take note of a new lease."""
        self._open.add(lease)

    def end(self, lease: GpuLease, stream: int | None) -> None:
        """Unpin the records of a lease.

        Rows that leases keep in direct host memory may be promoted again when the last one ends:
        until then another lease may hold the same.
        """
        if lease not in self._open:
            return
        self._launch("release", lease.arguments, lease.bound, stream)
        self._open.remove(lease)
        if lease.kept_rows:
            self._ended.append(lease)
        if not self._open:
            for ended in self._ended:
                self._launch("forget", ended.arguments, ended.bound, stream)
            self._ended.clear()

    def clear(self) -> None:
        """Forget every lease, as the device has: their epoch has ended."""
        self._open.clear()
        self._ended.clear()
