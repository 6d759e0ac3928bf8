"""The map of a GPU tier of very many rows: places of open addressing instead of a number a row.

A row of a batch takes a place and keeps it when its record leaves the slots, so that nothing moves
while kernels search. Before the places run out, the map is swept: it is emptied, then filled with
the rows of the slots and those that leases use in host memory. Ids that are there take no place,
and only the device knows which are: the host counts all of them, and where they might not fit has
the device decide whether to sweep, without a wait.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tierstore._tiers.gpu.abi import TIER
from tierstore._tiers.gpu.device import Device

PLACES: Any = TIER.structure("Places")
"""The structure that kernels read."""

_PLACE_BYTES = 12
_PER_SLOT = 2
_HEADER = ctypes.sizeof(PLACES)
_UNMADE = 1 << 62  # more taken places than any map has: the next sweep makes it


class Places:
    """Device memory of a map with two places a slot, and more where a batch needs them.

    It is at most three quarters full.

    Attributes:
        address: of the structure on the device, for as long as the map lives; graphs have it.
    """

    BYTES = _PER_SLOT * _PLACE_BYTES
    """Device bytes for each slot."""

    def __init__(self, device: Device, slots: int) -> None:
        """Reserve the memory; `clear`, or a sweep, makes it a map."""
        self._device = device
        self._header = device.allocate(_HEADER, "u1")
        self._mailbox = device.stage(_HEADER)
        self.address: int = device.pointer(self._header)
        self._least = _PER_SLOT * slots
        self._count = self._free = 0
        self._reserve(self._least)

    @property
    def grown_bytes(self) -> int:
        """Bytes of device memory beyond those of two places a slot."""
        return _PLACE_BYTES * (self._count - self._least)

    @property
    def count(self) -> int:
        """How many places there are."""
        return self._count

    @property
    def _room(self) -> int:
        return self._count * 3 // 4

    @property
    def header(self) -> Any:
        """The structure's words, on the device; for tests."""
        return self._header

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
        self._rows, self._entries, self._count, self._free = rows, entries, count, 0
        made = PLACES(device.pointer(rows), device.pointer(entries), count, _UNMADE, 0)
        self._mailbox.array[:_HEADER] = bytearray(made)
        source = device.host_pointer(self._mailbox, self._mailbox.array)
        device.copy(self.address, source, _HEADER, 0)
        device.synchronize(0)

    def take(self, rows: int) -> bool:
        """Take at most so many places; return False and take none if they might not be free."""
        if rows > self._free:
            return False
        self._free -= rows
        return True

    def clear(self, stream: int) -> None:
        """Empty the map, in the order of the stream, and take no place."""
        for array, size in ((self._rows, 8), (self._entries, 4)):
            self._device.fill(self._device.pointer(array), 0xFF, size * self._count, stream)
        self._device.fill(self.address + PLACES.taken.offset, 0, PLACES.taken.size, stream)
        self._free = self._room

    def provide(self, kept: int, rows: int) -> int:
        """Return how many places a sweep must leave free for a batch of so many rows.

        `kept` rows at most are in the map after a sweep. More places than the batch needs are left
        free, so that small batches rarely ask for a sweep. A map that is too small gets new memory,
        and is a map again once the sweep has entered the rows.
        """
        if kept + rows > self._room:
            self._reserve(2 * (kept + rows))
        return max(rows, (self._room - kept) // 2)

    def grant(self, rows: int) -> None:
        """Let batches to come take so many places: a sweep that leaves them free is launched."""
        self._free = rows

    def close(self) -> None:
        """Free the memory."""
        self._rows = self._entries = None
        self._mailbox.close()
