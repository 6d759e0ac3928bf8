"""Prefetches of a GPU tier that are under way, or whose rows it still keeps for their batch."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from tierstore.tier.gpu.arguments import Arguments
from tierstore.tier.gpu.memory import Workspace
from tierstore.transfer import Device

__all__ = ["Fetches"]

_MOST = 62
_COPY_BLOCKS = 32
"""Enough to fill the link; more would take multiprocessors from what computes meanwhile."""


class _Fetch(NamedTuple):
    number: int
    done: Any
    workspace: Workspace
    rows: Any


class Fetches:
    """A queue of prefetches, numbered in order.

    The maps change in the caller's stream, before this class hears of a prefetch; the copies that
    must follow run in the stream beside, one prefetch after another.

    Attributes:
        newest: number of the last prefetch.
        expired: number of the last one whose rows may be evicted again though nobody used them.
    """

    def __init__(self, device: Device) -> None:
        """Start with none."""
        self.newest = 0
        self.expired = 0
        self._device = device
        self._move = device.kernel("move")[0]
        self._announce = device.kernel("announce")[0]
        self._queue: deque[_Fetch] = deque()
        self._spare: list[Workspace] = []

    def begin(self, ids: int, window: int, stream: int) -> Workspace:
        """End the pins of prefetches `window` before the one to come; return its workspace."""
        oldest = self.newest + 1 - max(1, min(window, _MOST))
        while self._queue and self._queue[0].number <= oldest:
            fetch = self._queue.popleft()
            self.expired = fetch.number
            self._device.follow(stream, fetch.done)
            self._spare.append(fetch.workspace)
        for workspace in self._spare:
            if workspace.size >= ids:
                self._spare.remove(workspace)
                return workspace
        self._spare.clear()
        return Workspace.for_ids(self._device, ids, prefetch=True)

    def copy(self, arguments: Arguments, workspace: Workspace, rows: Any, planned: Any) -> None:
        """Copy what prefetch number `newest + 1` has planned, behind the marker `planned`."""
        device, beside = self._device, self._device.beside
        device.follow(beside, planned)
        self._move(_COPY_BLOCKS, arguments.address, beside)
        self._announce(1, arguments.address, beside)
        done = device.event()
        device.record(done, beside)
        self.newest += 1
        self._queue.append(_Fetch(self.newest, done, workspace, rows))

    def __bool__(self) -> bool:
        """Whether copies may still be under way."""
        return bool(self._queue) and not self._device.passed(self._queue[-1].done)

    def follow(self, stream: int) -> None:
        """Let a stream wait, on the device, until all copies are over."""
        for fetch in self._queue:
            self._device.follow(stream, fetch.done)

    def wait(self) -> None:
        """Wait on the host until all copies are over."""
        for fetch in self._queue:
            self._device.await_event(fetch.done)

    def clear(self) -> None:
        """Forget them all, once they are over, and start numbering anew."""
        self.newest = self.expired = 0
        self._queue.clear()
        self._spare.clear()
