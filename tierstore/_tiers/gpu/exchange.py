"""How a GPU tier and a host tier that is a cache exchange records that neither fetches alone.

The kernels look the misses up in the host tier's map and copy the records found there. They list
the rest, at most `limit` records at a time: records to take in, which the host tier may have to
write to the disk, and rows to read, which it may have to read from there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.gpu.abi import BatchArguments, Mode
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import OWN, Launcher
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.host import HostTier

_STAGING_BYTES = 16 << 20


class Staging:
    """Pinned host memory for `limit` records each way, and the exchange through it.

    Attributes:
        complete: every row has its slot on the device, so that the host is not needed any more.
    """

    def __init__(
        self, launcher: Launcher, device: Device, host: HostTier, memory: GpuMemory
    ) -> None:
        """Reserve the memory, for so many records that copies are long and it is small."""
        record = host.record_bytes
        self.limit = limit = max(1, min(host.slots, _STAGING_BYTES // record))
        self._host = host
        self._memory = memory
        self._device = device
        self._arena = device.stage(limit * (2 * record + 24))
        block = self._arena.array
        self._staged = block[: limit * record].reshape(limit, record)
        self._evicted = block[limit * record : 2 * limit * record].reshape(limit, record)
        rows = block[2 * limit * record :]
        self._staged_rows = rows[: 8 * limit].view(np.int64)
        self._evicted_rows = rows[8 * limit : 16 * limit].view(np.int64)
        self._staged_place = rows[16 * limit : 20 * limit].view(np.int32)
        self.complete = False
        self._owed = 0
        self._start = launcher.start
        self._pointers: dict[str, npt.NDArray[Any]] = {
            "staged": self._staged,
            "evicted": self._evicted,
            "staged_rows": self._staged_rows,
            "evicted_rows": self._evicted_rows,
            "staged_place": self._staged_place,
        }

    def bind(self, arguments: BatchArguments) -> None:
        """Point a batch to this staging."""
        for name, view in self._pointers.items():
            pointer = self._device.host_pointer(self._arena, view)
            setattr(arguments.batch, name, pointer)

    def settle(
        self,
        arguments: BatchArguments,
        stream: int,
        counts: npt.NDArray[Any],
        *,
        spill: Callable[[int], int],
    ) -> npt.NDArray[np.int64]:
        """Finish a batch; return the rows that went to a lease's spill.

        `counts` are the counters after `promote`. Waits for the stream once for every further chunk
        of `limit` misses. `spill` gives a lease room for a number of records. If the host tier
        fails, the batch is undone, and its evicted records are offered again before the next batch.
        """
        batch, memory = arguments.batch, self._memory
        missed, victims = int(counts["missed"]), int(counts["victims"])
        overflow = missed - victims if batch.mode == Mode.LEASE else 0
        spilled = np.empty(overflow, np.int64)
        absent = int(counts["absent"])
        try:
            if overflow:
                batch.spill = spill(overflow)
            for first in range(0, max(missed, 1), self.limit):
                if first:
                    batch.first, batch.limit = first, self.limit
                    with self._host.still:
                        memory.clear(("absent", "evicted"), stream)
                        self._start(OWN.SWAP_CHUNK, arguments, stream)
                        counts = memory.counters(stream)
                    absent = int(counts["absent"])
                self.owe(int(counts["evicted"]))
                self.pay()
                place = self._take_in(arguments, absent, stream)
                batch.last = int(first + self.limit >= missed)
                if overflow:
                    homeless = place < 0
                    spilled[-1 - place[homeless]] = self._staged_rows[:absent][homeless]
                    if batch.last:
                        self._start(OWN.PLACE_SPILL, arguments, stream)
                self._end_chunk(arguments, place, stream)
        except BaseException:
            batch.limit = absent
            self._start(OWN.ABANDON, arguments, stream)
            raise
        self.complete = int(counts["filled"]) == self._memory.argument.rows
        return spilled

    def _take_in(
        self, arguments: BatchArguments, absent: int, stream: int
    ) -> npt.NDArray[np.int32]:
        """Read the absent rows from the host tier and install them; return where they go."""
        batch = arguments.batch
        if absent:
            if batch.load:
                self._host.read(self._staged_rows[:absent], self._staged[:absent])
            batch.limit = absent
            self._start(OWN.INSTALL, arguments, stream)
            batch.limit = self.limit
        return self._staged_place[:absent]

    def _end_chunk(
        self, arguments: BatchArguments, place: npt.NDArray[np.int32], stream: int
    ) -> None:
        """Serve the positions of rows without a slot, and with the last chunk all others."""
        batch = arguments.batch
        homeless = place < 0
        serves = batch.mode != Mode.LEASE and bool(homeless.any())
        if batch.last or serves:
            self._start(OWN.COMPLETE, arguments, stream)
        if batch.mode == Mode.WRITE and serves:
            self._device.synchronize(stream)
            rows = self._staged_rows[: place.size][homeless]
            self._host.write(rows, self._staged[: place.size][homeless])

    def owe(self, evicted: int) -> None:
        """Note that the host tier must take in that many evicted records."""
        self._owed = evicted

    def forget(self) -> None:
        """Forget the owed records, and that the device held every row."""
        self._owed = 0
        self.complete = False

    def pay(self) -> None:
        """Write the owed records to the host tier; if that fails, they remain owed."""
        if self._owed:
            self._host.write(self._evicted_rows[: self._owed], self._evicted[: self._owed])
            self._owed = 0

    def close(self) -> None:
        """Free the memory."""
        self._pointers.clear()
        empty: npt.NDArray[Any] = np.empty(0, np.uint8)
        self._staged = self._evicted = empty
        self._staged_rows = self._evicted_rows = self._staged_place = empty
        self._arena.close()
