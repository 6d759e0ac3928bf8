"""Ids on their way to the GPU, and numbers on their way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.gpu.abi import BatchArgument
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.memory import Workspace
from tierstore._tiers.memory import Arena

__all__ = ["AsyncScalar", "Inbox", "Mailbox"]


_BATCHES = 4
_LEAST_IDS = 1024
_HEAD = 32_768
"""Ids whose rows are on the link for longer than it takes to copy a few times as many ids."""


class Inbox:
    """Brings the ids of batches to the device, which the host may run a few batches ahead of.

    All places are in one block: of large batches that is large enough for huge pages.
    """

    def __init__(self, device: Device) -> None:
        """Reserve nothing: the places grow with the batches that come."""
        self._device = device
        self._arena: Arena | None = None
        self._places = np.empty((_BATCHES, 0), np.int64)
        self._pointer = 0
        self._read = [device.event() for _ in range(_BATCHES)]
        self._last = 0

    def split(self, ids: Any, slots: int) -> tuple[tuple[Any, int], ...]:
        """Return the parts that a batch is to go in, each with the number of ids before it.

        Most rows of a batch of more ids than there are slots must cross the link. Where its ids
        are the host's, the first part is on its way while the others are copied.
        """
        n = ids.shape[0]
        if n < 2 * _HEAD or n <= slots or not self._device.on_host(ids):
            return ((ids, 0),) if n else ()
        return (ids[:_HEAD], 0), (ids[_HEAD:], _HEAD)

    def bring(self, ids: Any, batch: BatchArgument, workspace: Workspace) -> None:
        """Let a batch find its ids where they are, or those of the host, copied, in a workspace."""
        if self._device.on_host(ids):
            batch.arriving = self._put(ids)
            batch.ids = workspace.ids
        else:
            batch.arriving = 0
            batch.ids = self._device.pointer(ids)

    def sent(self, batch: BatchArgument, stream: int) -> None:
        """Note that what reads the ids of the batch brought last is in the stream."""
        if batch.arriving:
            self._device.record(self._read[self._last], stream)

    def _put(self, ids: npt.NDArray[np.int64]) -> int:
        """Copy ids to a place that nothing reads any more; return where the device finds it."""
        if ids.size > self._places.shape[1]:
            self._grow(ids.size)
        self._last = self._free()
        self._places[self._last, : ids.size] = ids
        return self._pointer + self._last * self._places.strides[0]

    def _free(self) -> int:
        """Return the first place that is free: the host's caches may still have what lies there."""
        for place, event in enumerate(self._read):
            if self._device.passed(event):
                return place
        place = (self._last + 1) % _BATCHES
        self._device.await_event(self._read[place])
        return place

    def _grow(self, ids: int) -> None:
        for event in self._read:
            if not self._device.passed(event):
                self._device.await_event(event)
        self.close()
        size = max(_LEAST_IDS, 1 << (ids - 1).bit_length())
        self._arena = self._device.stage(8 * _BATCHES * size)
        block = self._arena.array[: 8 * _BATCHES * size]
        self._pointer = self._device.host_pointer(self._arena, block)
        self._places = block.view(np.int64).reshape(_BATCHES, size)

    def close(self) -> None:
        """Give the memory back, once the device is done."""
        self._places = np.empty((_BATCHES, 0), np.int64)
        if self._arena is not None:
            self._arena.close()


_LETTERS = 256


class Mailbox:
    """Pinned host memory with room for some numbers on their way."""

    def __init__(self, device: Device) -> None:
        """Reserve the memory."""
        self.device = device
        self._arena = device.stage(4 * _LETTERS)
        self.numbers = self._arena.array[: 4 * _LETTERS].view(np.uint32)
        self.free = [(place, device.event()) for place in range(_LETTERS)]

    def post(self, source: int, stream: int) -> AsyncScalar | None:
        """Send the uint32 at an address on the device, in the order of the stream.

        Returns None if as many letters as there is room for are kept.
        """
        if not self.free:
            return None
        place, sent = self.free.pop()
        target = self.device.host_pointer(self._arena, self.numbers[place:])
        self.device.copy(target, source, 4, stream)
        self.device.record(sent, stream)
        return AsyncScalar(self, place, sent)

    def close(self) -> None:
        """Give the memory back; letters that are kept must not be read any more."""
        self.free.clear()
        self.numbers = np.empty(0, np.uint32)
        self._arena.close()


class AsyncScalar:
    """A number on its way; keeps its place until `read` or `drop`."""

    def __init__(self, box: Mailbox, place: int, sent: Any) -> None:
        """Refer to a place of the mailbox and the marker behind the number."""
        self._box = box
        self._place = place
        self._sent = sent

    @property
    def arrived(self) -> bool:
        """Whether `read` would return at once."""
        return self._box.device.passed(self._sent)

    def read(self) -> int:
        """Wait for the number, unless it has arrived, and return it; once."""
        if not self.arrived:
            self._box.device.await_event(self._sent)
        number = int(self._box.numbers[self._place])
        self.drop()
        return number

    def drop(self) -> None:
        """Let the place go: the next number for it comes later in the order of the tier."""
        self._box.free.append((self._place, self._sent))
