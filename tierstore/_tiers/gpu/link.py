"""The link between host and GPU: ids to the device, numbers back, the order of copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.gpu.abi import TIER, BatchArgument, Mode
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.host import HostTier
from tierstore._tiers.memory import Arena

_BATCHES = 4
_LEAST_IDS = 1024
_HEAD = 32_768
"""Ids whose rows are on the link for longer than it takes to copy a few times as many ids."""


class FeatureIds:
    """How consecutive ids of several features become rows of the space of their tables.

    The device checks each against the table of its feature: a bad one becomes a number that encodes
    feature and id, and is no row.
    """

    def __init__(self, device: Device, lengths: Sequence[int], bounds: Any, stream: int) -> None:
        """Bring where the ids of each feature end to the device.

        `bounds` are there: start, rows and number of the table of each, `(3, features)`.
        """
        ends = device.upload(np.cumsum(np.array(lengths, np.int64)), stream)
        self._arrays = ends, bounds
        self._features = len(lengths)
        self._ends, self._bounds = device.pointer(ends), device.pointer(bounds)

    def bind(self, batch: BatchArgument) -> None:
        """Make a batch read its ids as those of the features."""
        batch.features, batch.ends, batch.bounds = self._features, self._ends, self._bounds


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
        self._on_host = False

    def split(self, ids: Any, slots: int) -> tuple[tuple[Any, int], ...]:
        """Return the parts that a batch is to go in, each with the number of ids before it.

        Most rows of a batch of more ids than there are slots must cross the link. If its ids are on
        the host, the first part is in transit while the others are copied.
        """
        n = ids.shape[0]
        if n < 2 * _HEAD or n <= slots or not self._device.on_host(ids):
            return ((ids, 0),) if n else ()
        return (ids[:_HEAD], 0), (ids[_HEAD:], _HEAD)

    def bring(self, ids: Any, batch: BatchArgument, target: int) -> None:
        """Point a batch to its ids, or to the address `target` if they must be copied.

        Ids are copied there from the host, and to become rows of a space.
        """
        self._on_host = self._device.on_host(ids)
        if self._on_host or batch.start or batch.features:
            batch.arriving = self._put(ids) if self._on_host else self._device.pointer(ids)
            batch.ids = target
        else:
            batch.arriving = 0
            batch.ids = self._device.pointer(ids)

    def sent(self, stream: int) -> None:
        """Note that the reader of the ids of the last batch is in the stream."""
        if self._on_host:
            self._device.record(self._read[self._last], stream)

    def _put(self, ids: npt.NDArray[np.int64]) -> int:
        """Copy ids to a place that nothing reads any more; return its address on the device."""
        if ids.size > self._places.shape[1]:
            self._grow(ids.size)
        self._last = self._free()
        self._places[self._last, : ids.size] = ids
        return self._pointer + self._last * self._places.strides[0]

    def _free(self) -> int:
        """Return the first place that is free: the host's caches may still hold it."""
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
        """Free the memory, once the device is done with it."""
        self._places = np.empty((_BATCHES, 0), np.int64)
        if self._arena is not None:
            self._arena.close()


_NUMBERS = 256


class Mailbox:
    """Pinned host memory with room for some numbers in transit."""

    def __init__(self, device: Device) -> None:
        """Reserve the memory."""
        self.device = device
        self._arena = device.stage(4 * _NUMBERS)
        self.numbers: npt.NDArray[np.uint32] = self._arena.array[: 4 * _NUMBERS].view(np.uint32)
        self._address = device.host_pointer(self._arena, self.numbers)
        self.free: list[tuple[int, Any]] = [(place, device.event()) for place in range(_NUMBERS)]

    def post(self, source: int, stream: int) -> AsyncScalar | None:
        """Send the uint32 at an address on the device, in the order of the stream.

        Returns None if all places are taken.
        """
        if not self.free:
            return None
        place, sent = self.free.pop()
        self.device.copy(self._address + 4 * place, source, 4, stream)
        self.device.record(sent, stream)
        return AsyncScalar(self, place, sent)

    def close(self) -> None:
        """Free the memory; do not read numbers in transit afterwards."""
        self.free.clear()
        self.numbers = np.empty(0, np.uint32)
        self._arena.close()


class AsyncScalar:
    """A number in transit; keeps its place until `read` or `drop`."""

    def __init__(self, box: Mailbox, place: int, sent: Any) -> None:
        """Refer to a place of the mailbox and the marker after the number."""
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
        """Free the place: the next number for it comes later in the order of the tier."""
        self._box.free.append((self._place, self._sent))


_REGIONS = TIER.constants["REGIONS"]
_SCATTERED_BYTES = 1 << 30


def region_bits(rows: int) -> int:
    """Return the binary logarithm of the rows of a region, of which there are at most `REGIONS`."""
    return (-(-rows // _REGIONS) - 1).bit_length()


class Ordering:
    """Which batches are copied in the order of host memory rather than of their ids.

    Random rows of a large host tier miss in every cache of address translations between the GPU and
    them. Where the copies of a batch go through host memory region by region, few translations are
    needed at a time. Measured on an H200 behind an IOMMU, 131,072 rows of 512 bytes of 16 million:
    out of pinned memory 2.1 to 2.3 ms instead of 4.4, into it 2.1 instead of 4.4; into managed
    memory, which is mapped in pages of 2 MiB, 1.5 instead of 1.7; out of managed memory no less.

    Attributes:
        least: fewest ids for which it pays; with fewer, hardly two rows are in one region.
        scattered: whether the host tier's memory is mapped in so many pages that reads gain too.
    """

    CLAIMS, WAITS = TIER.constants["CLAIMS"], TIER.constants["WAITS"]
    """What is ordered: rows to promote, positions of rows that stay in place."""

    def __init__(self, host: HostTier, slots: int) -> None:
        """Inspect the memory of the host tier below so many slots.

        Rows of a host tier that is a cache are in no known order.
        """
        self._direct = host.direct
        self._slots = slots
        self.least: int = 2 * _REGIONS
        self.scattered: bool = (
            host.arena.kind == "pinned" and host.arena.array.nbytes > _SCATTERED_BYTES
        )

    def of(self, ids: int, mode: int, *, admit: bool) -> int:
        """Return what to order for a batch of so many ids: `CLAIMS`, `WAITS`, both or 0."""
        if ids < self.least or not self._direct:
            return 0
        stay = mode in (Mode.READ, Mode.WRITE) and (not admit or ids > self._slots)
        waits = self.WAITS if stay and (self.scattered or mode == Mode.WRITE) else 0
        claims = self.CLAIMS if self.scattered and admit else 0
        return waits | claims
