"""The order of a tier's work on its device: one thing after another, whatever streams it is for."""

from __future__ import annotations

from tierstore._tiers.gpu.abi import Arguments
from tierstore._tiers.gpu.device import Device, Kernel

__all__ = ["Order"]


class Order:
    """Launches kernels, each behind everything before.

    Attributes:
        kernels: the tier's own, by name, with the most blocks of each that run at a time.
        stream: where the last work went.
        last: a marker behind it.
    """

    def __init__(self, device: Device) -> None:
        """Load the kernels and start in the current stream."""
        self.kernels = {name: device.kernel(name) for name in _KERNELS}
        self.stream = device.current_stream()
        self.last = device.event()
        self._device = device
        self.mark()

    def enter(self, stream: int | None) -> int:
        """Go on in a stream, or in the current one; return it."""
        stream = self._device.current_stream() if stream is None else stream
        if stream != self.stream:
            self._device.follow(stream, self.last)
            self.stream = stream
        return stream

    def mark(self) -> None:
        """Put the marker behind what was launched."""
        self._device.record(self.last, self.stream)

    def launch(self, kernel: str, arguments: Arguments, items: int, stream: int | None) -> None:
        """Launch a kernel that works through a number of items."""
        self.run(self.kernels[kernel], arguments.address, items, stream)

    def run(
        self, kernel: tuple[Kernel, int], arguments: int, items: int, stream: int | None
    ) -> None:
        """Launch a kernel that need not be the tier's own; see `Device.load`."""
        stream = self.enter(stream)
        function, most = kernel
        function(min(most, -(-items // 32)), arguments, stream)
        self.mark()


_KERNELS = (
    "probe",
    "promote",
    "fence",
    "release",
    "forget",
    "lease_gather",
    "lease_scatter",
    "lease_read",
    "flush",
    "report",
    "rebase",
    "rescale",
)
