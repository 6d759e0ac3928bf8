"""Ids of the host on their way to the device: pinned memory, which `probe` reads by itself."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.memory import Arena
from tierstore.tier.gpu.arguments import BatchArgument
from tierstore.tier.gpu.memory import Workspace
from tierstore.transfer import Device

__all__ = ["Inbox"]

_PLACES = 4
_LEAST_IDS = 1024


class Inbox:
    """Brings the ids of batches to the device, which the host may run a few batches ahead of."""

    def __init__(self, device: Device) -> None:
        """Reserve nothing: places grow with the batches that come."""
        self._device = device
        self._places = deque(_Place(device) for _ in range(_PLACES))

    def bring(self, ids: Any, batch: BatchArgument, workspace: Workspace) -> None:
        """Let a batch find its ids where they are, or those of the host, copied, in a workspace."""
        if self._device.on_host(ids):
            self._places.rotate()
            batch.arriving = self._places[0].put(ids)
            batch.ids = workspace.ids
        else:
            batch.arriving = 0
            batch.ids = self._device.pointer(ids)

    def sent(self, batch: BatchArgument, stream: int) -> None:
        """Note that what reads the ids of the batch brought last is in the stream."""
        if batch.arriving:
            self._device.record(self._places[0].read, stream)

    def close(self) -> None:
        """Give the memory back, once the device is done."""
        for place in self._places:
            place.close()


class _Place:
    """Pinned memory, and the marker behind the last work that reads it."""

    def __init__(self, device: Device) -> None:
        self.read: Any = device.event()
        self._device = device
        self._arena: Arena | None = None
        self._ids = np.empty(0, np.int64)
        self._pointer = 0

    def put(self, ids: npt.NDArray[np.int64]) -> int:
        if self._arena is not None and not self._device.passed(self.read):
            self._device.await_event(self.read)
        if ids.size > self._ids.size:
            self._grow(ids.size)
        self._ids[: ids.size] = ids
        return self._pointer

    def _grow(self, ids: int) -> None:
        self.close()
        size = max(_LEAST_IDS, 1 << (ids - 1).bit_length())
        self._arena = self._device.stage(8 * size)
        self._ids = self._arena.array[: 8 * size].view(np.int64)
        self._pointer = self._device.host_pointer(self._arena, self._ids)

    def close(self) -> None:
        self._ids = np.empty(0, np.int64)
        if self._arena is not None:
            self._arena.close()
