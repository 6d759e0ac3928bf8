"""Reads that CUDA graphs replay: their setup on the host, and their log."""

from __future__ import annotations

from typing import Any

from tierstore._tiers.gpu.abi import BatchArgument, BatchArguments
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import OWN, Launcher
from tierstore._tiers.gpu.memory import GpuMemory

_MOST_LOGGED = 1 << 16


class Replays:
    """The log of the rows that replays have read, which `GpuTier.adapt` admits to slots.

    Attributes:
        ready: whether reads can be captured. From then on replays may be under way at any time.
    """

    def __init__(self, launcher: Launcher, device: Device, memory: GpuMemory) -> None:
        """Reserve nothing before `prepare`."""
        self.ready: bool = False
        self._start = launcher.start
        self._device = device
        self._memory = memory
        self._log: Any = None
        self._size = 0

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return 8 * self._size

    def prepare(self, slots: int, stream: int) -> None:
        """Reserve the log, and load the kernel: neither is possible during a capture."""
        self._size = 1 << (min(slots, _MOST_LOGGED).bit_length() - 1)
        self._log = self._device.allocate(self._size, "i8")
        self.launch(BatchArgument(), stream)
        self.ready = True

    def launch(self, batch: BatchArgument, stream: int) -> None:
        """Read a batch, now or in each replay of the graph that the stream captures."""
        batch.rows, batch.limit = self._device.pointer(self._log), self._size
        arguments = BatchArguments(self._memory.argument, batch)
        self._start(OWN.LOOK_UP, arguments, stream, batch.n)

    def take(self, stream: int) -> Any:
        """Wait for all replays; return the last rows that they read, on the device, and forget."""
        self._device.drain()
        logged = min(int(self._memory.counters(stream)["logged"]), self._size)
        self._memory.clear(("logged",), stream)
        return self._log[:logged]

    def close(self) -> None:
        """Free the log."""
        self.ready = False
        self._log, self._size = None, 0
