"""How a GPU tier and a host tier that is itself a cache exchange what neither can fetch alone.

The kernels look the misses up in the host tier's map and copy what is there by themselves. They
list the rest, at most `limit` records at a time: records to take in, which the host tier may have
to write to the disk, and rows to read, which it may have to read from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.tier.gpu_arguments import Arguments, Mode
from tierstore.tier.gpu_memory import GpuMemory
from tierstore.tier.host import HostTier
from tierstore.transfer import Device

__all__ = ["Staging"]

_STAGING_BYTES = 8 << 20
_LINK_BLOCKS = 64


class Staging:
    """Pinned host memory for `limit` records each way, and the exchange through it."""

    def __init__(self, device: Device, host: HostTier, memory: GpuMemory, limit: int) -> None:
        """Reserve the memory."""
        self.limit = limit
        self._host = host
        self._memory = memory
        self._device = device
        record = host.record_bytes
        self._arena = device.stage(limit * (2 * record + 24))
        block = self._arena.array
        self._staged = block[: limit * record].reshape(limit, record)
        self._evicted = block[limit * record : 2 * limit * record].reshape(limit, record)
        rows = block[2 * limit * record :]
        self._staged_rows = rows[: 8 * limit].view(np.int64)
        self._evicted_rows = rows[8 * limit : 16 * limit].view(np.int64)
        self._staged_place = rows[16 * limit : 20 * limit].view(np.int32)
        self._swap_chunk, self._chunk_blocks = device.kernel("swap_chunk")
        self._install, self._install_blocks = device.kernel("install")
        self._complete, self._complete_blocks = device.kernel("complete")
        self._place_spill, self._place_blocks = device.kernel("place_spill")
        self._pointers: dict[str, npt.NDArray[Any]] = {
            "staged": self._staged,
            "evicted": self._evicted,
            "staged_rows": self._staged_rows,
            "evicted_rows": self._evicted_rows,
            "staged_place": self._staged_place,
        }

    @staticmethod
    def limit_for(record_bytes: int, slots: int) -> int:
        """A number of records that makes copies long and the memory small."""
        return max(1, min(slots, _STAGING_BYTES // record_bytes))

    def bind(self, arguments: Arguments) -> None:
        """Let a batch use this staging."""
        for name, view in self._pointers.items():
            pointer = self._device.host_pointer(self._arena, view)
            setattr(arguments.batch, name, pointer)

    def settle(
        self,
        arguments: Arguments,
        stream: int,
        *,
        quiet: Callable[[], None],
        spill: Callable[[int], int],
    ) -> npt.NDArray[np.int64]:
        """Finish a batch after `promote`; return the rows that went to a lease's spill.

        Waits once for the stream, and once more for every further chunk of `limit` misses. `quiet`
        is called before the host tier changes: it waits until nothing on the device reads there.
        `spill` gives a lease room for a number of records.
        """
        batch = arguments.batch
        counts = self._memory.counters(stream)
        missed, victims = int(counts["missed"]), int(counts["victims"])
        if missed:
            quiet()
        overflow = missed - victims
        spilled = np.empty(overflow if batch.mode == Mode.LEASE else 0, np.int64)
        if batch.mode == Mode.LEASE:
            batch.spill = spill(overflow) if overflow else 0
        for first in range(0, max(missed, 1), self.limit):
            if first:
                batch.first, batch.limit = first, self.limit
                self._memory.clear(("absent", "evicted"), stream)
                self._swap_chunk(min(_LINK_BLOCKS, self._chunk_blocks), arguments.address, stream)
                counts = self._memory.counters(stream)
            absent = int(counts["absent"])
            self._exchange(absent, int(counts["evicted"]), bool(batch.load))
            if absent:
                batch.limit = absent
                self._install(self._install_blocks, arguments.address, stream)
                batch.limit = self.limit
            batch.last = int(first + self.limit >= missed)
            place = self._staged_place[:absent]
            homeless = place < 0
            if batch.mode == Mode.LEASE:
                spilled[-1 - place[homeless]] = self._staged_rows[:absent][homeless]
                if batch.last and overflow:
                    self._place_spill(self._place_blocks, arguments.address, stream)
            if batch.last or (batch.mode != Mode.LEASE and homeless.any()):
                self._complete(self._complete_blocks, arguments.address, stream)
            if batch.mode == Mode.WRITE and homeless.any():
                self._device.synchronize(stream)
                rows = self._staged_rows[:absent][homeless]
                self._host.write(rows, self._staged[:absent][homeless])
        return spilled

    def _exchange(self, absent: int, evicted: int, load: bool) -> None:
        """Give the host tier what was evicted, and take what is absent from it."""
        if evicted:
            self._host.write(self._evicted_rows[:evicted], self._evicted[:evicted])
        if absent and load:
            self._host.read(self._staged_rows[:absent], self._staged[:absent])

    def drain(self, evicted: int) -> None:
        """Give the host tier records that a flush has listed."""
        self._exchange(0, evicted, load=False)

    def close(self) -> None:
        """Give the memory back."""
        self._pointers.clear()
        empty: npt.NDArray[Any] = np.empty(0, np.uint8)
        self._staged = self._evicted = empty
        self._staged_rows = self._evicted_rows = self._staged_place = empty
        self._arena.close()
