"""The map of a GPU tier of very many rows: places of open addressing instead of a number a row.

A row of a batch takes a place and keeps it when its record leaves the slots, so that nothing moves
while kernels search. Before the places run out, the map is swept: it is emptied, then filled with
the rows of the slots and those that leases use in host memory.
"""

from __future__ import annotations

from typing import Any

from tierstore._tiers.gpu.abi import TIER
from tierstore._tiers.gpu.device import Device

__all__ = ["PLACES", "Places"]

PLACES: Any = TIER.structure("Places")
"""The structure that kernels read."""

_PLACE_BYTES = 12
_PER_SLOT = 2
_HEADER = 24


class Places:
    """Device memory of a map with two places a slot, and more where a batch needs them.

    It is at most three quarters full.

    Attributes:
        address: of the structure on the device, for as long as the map lives; graphs have it.
    """

    BYTES = _PER_SLOT * _PLACE_BYTES
    """Device bytes for each slot."""

    def __init__(self, device: Device, slots: int) -> None:
        """Reserve the memory; `clear` makes it a map."""
        self._device = device
        self._header = device.allocate(_HEADER, "u1")
        self._mailbox = device.stage(_HEADER)
        self.address: int = device.pointer(self._header)
        self._least = _PER_SLOT * slots
        self._count = self._taken = 0
        self._reserve(self._least)

    @property
    def grown_bytes(self) -> int:
        """Bytes of device memory beyond those of two places a slot."""
        return _PLACE_BYTES * (self._count - self._least)

    @property
    def arrays(self) -> tuple[Any, Any]:
        """The row of each place, -1 where it is free, and its entry; for tests."""
        return self._rows, self._entries

    def _reserve(self, count: int) -> None:
        """Reserve so many places; waits if kernels may be reading others."""
        device = self._device
        rows, entries = device.allocate(count, "i8"), device.allocate(count, "i4")
        if self._count:
            device.drain()
        self._rows, self._entries, self._count = rows, entries, count
        made = PLACES(device.pointer(self._rows), device.pointer(self._entries), count)
        self._mailbox.array[:_HEADER] = bytearray(made)
        source = device.host_pointer(self._mailbox, self._mailbox.array)
        device.copy(self.address, source, _HEADER, 0)
        device.synchronize(0)

    def take(self, rows: int) -> bool:
        """Take at most so many places; return False and take none if they might not be free."""
        if self._taken + rows > self._count * 3 // 4:
            return False
        self._taken += rows
        return True

    def clear(self, stream: int, rows: int = 0) -> None:
        """Empty the map, in the order of the stream, with places for so many rows."""
        if rows > self._count * 3 // 4:
            self._reserve(2 * rows)
        for array, size in ((self._rows, 8), (self._entries, 4)):
            self._device.fill(self._device.pointer(array), 0xFF, size * self._count, stream)
        self._taken = rows

    def close(self) -> None:
        """Free the memory."""
        self._rows = self._entries = None
        self._mailbox.close()
