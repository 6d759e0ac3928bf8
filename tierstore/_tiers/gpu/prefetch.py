"""Prefetches of a GPU tier that are under way, or whose rows it still keeps for their batch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.gpu.abi import TIER, BatchArgument, BatchArguments
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import OWN, Launcher
from tierstore._tiers.gpu.memory import Workspace

_MOST = 62
_WINDOW = TIER.constants["WINDOW"]
_CERTAIN = TIER.constants["CERTAIN"]


@dataclass(eq=False)
class Fetch:
    """A prefetch.

    Attributes:
        number: its place in the order of prefetches.
        rows: its ids on the device.
        ids: the same on the host, where its rows are held for the batch of these ids; else None.
        within: the rows of the extent that the ids are in.
    """

    number: int
    done: Any
    workspace: Workspace
    rows: Any
    ids: npt.NDArray[np.int64] | None
    within: range | None


class Fetches:
    """A queue of prefetches, numbered in order.

    The maps change in the caller's stream, before this class receives a prefetch; the copies that
    must follow run in the stream `beside`, one prefetch after another.

    Attributes:
        newest: number of the last prefetch.
        expired: number of the last one whose rows may be evicted again even if they were not used.
    """

    def __init__(self, launcher: Launcher, device: Device, tier: Any) -> None:
        """Start with none."""
        self.newest = 0
        self.expired = 0
        self._device = device
        self._tier = tier
        self._start = launcher.start
        self._queue: deque[Fetch] = deque()
        self._spare: list[Workspace] = []
        self._verdicts = device.stage(4 * _WINDOW)

    @property
    def held(self) -> int:
        """Most slots that prefetches hold for their batches."""
        return sum(fetch.ids.size for fetch in self._queue if fetch.ids is not None)

    def begin(self, ids: int, window: int, stream: int) -> Workspace:
        """End the prefetches `window` before the one to come; return its workspace."""
        self.end(self.newest + 1 - max(1, min(window, _MOST)), stream)
        for workspace in self._spare:
            if workspace.size >= ids:
                self._spare.remove(workspace)
                return workspace
        self._spare.clear()
        return Workspace.for_ids(self._device, ids, prefetch=True)

    def end(self, last: int, stream: int) -> None:
        """End the pins of prefetches up to number `last`."""
        while self._queue and self._queue[0].number <= last:
            fetch = self._queue.popleft()
            self.expired = fetch.number
            self._device.follow(stream, fetch.done)
            if fetch.ids is not None:
                batch = BatchArgument()
                fetch.workspace.bind(batch)
                batch.count += 4  # of the slots it holds, after those it moved
                arguments = BatchArguments(self._tier, batch)
                self._start(OWN.RELEASE, arguments, stream, fetch.ids.size)
            self._spare.append(fetch.workspace)

    def hold(self, batch: BatchArgument) -> None:
        """Make the next prefetch hold its rows and report whether it lacks any."""
        verdicts = self._verdicts.array.view(np.uint32)
        at = (self.newest + 1) % _WINDOW
        verdicts[at] = 0
        batch.verdict = self._device.host_pointer(self._verdicts, verdicts[at:])

    def copy(
        self,
        arguments: BatchArguments,
        workspace: Workspace,
        rows: Any,
        ids: npt.NDArray[np.int64] | None,
        within: range | None,
        planned: Any,
    ) -> None:
        """Copy the records planned by prefetch number `newest + 1`, after the marker `planned`."""
        device, beside = self._device, self._device.beside
        device.follow(beside, planned)
        self._start(OWN.MOVE, arguments, beside)
        self._start(OWN.ANNOUNCE, arguments, beside)
        done = device.event()
        device.record(done, beside)
        self.newest += 1
        self._queue.append(Fetch(self.newest, done, workspace, rows, ids, within))

    def find(self, ids: npt.NDArray[np.int64], within: range | None) -> Any:
        """Return the device's copy of these ids, if rows are held for them; else None."""
        for fetch in tuple(self._queue):
            held = fetch.ids
            if held is None or fetch.within != within:
                continue
            if held.size != ids.size or held[0] != ids[0]:
                continue  # most others differ at once, which array_equal would not notice
            if np.array_equal(held, ids):
                return fetch.rows
        return None

    def reach(self, rows: Any, stream: int) -> bool:
        """End prefetches before the batch of these ids, an array that `find` returned.

        Returns whether all its rows are certain to have slots. They stay held until a later batch
        is reached: a step may use them several times.
        """
        for fetch in self._queue:
            if fetch.rows is rows and fetch.ids is not None:
                self.end(fetch.number - 1, stream)
                verdicts = self._verdicts.array.view(np.uint32)
                return int(verdicts[fetch.number % _WINDOW]) == _CERTAIN
        return False

    def __bool__(self) -> bool:
        """Whether copies may still be under way."""
        return bool(self._queue) and not self._device.passed(self._queue[-1].done)

    def follow(self, stream: int) -> None:
        """Make a stream wait, on the device, until all copies are over."""
        for fetch in self._queue:
            self._device.follow(stream, fetch.done)

    def wait(self) -> None:
        """Wait on the host until all copies are over."""
        for fetch in tuple(self._queue):
            if not self._device.passed(fetch.done):
                self._device.await_event(fetch.done)

    def clear(self) -> None:
        """Forget them all, once they are over, and restart the numbering."""
        self.newest = self.expired = 0
        self._queue.clear()
        self._spare.clear()

    def close(self) -> None:
        """Free the memory."""
        self.clear()
        self._verdicts.close()
