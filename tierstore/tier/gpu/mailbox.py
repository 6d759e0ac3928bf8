"""Numbers that the device leaves for the host to find, without anybody waiting."""

from __future__ import annotations

from typing import Any

import numpy as np

from tierstore.transfer import Device

__all__ = ["Letter", "Mailbox"]

_PLACES = 256


class Mailbox:
    """Pinned host memory with room for some numbers on their way."""

    def __init__(self, device: Device) -> None:
        """Reserve the memory."""
        self.device = device
        self._arena = device.stage(4 * _PLACES)
        self.numbers = self._arena.array[: 4 * _PLACES].view(np.uint32)
        self.free = [(place, device.event()) for place in range(_PLACES)]

    def post(self, source: int, stream: int) -> Letter | None:
        """Send the uint32 at an address on the device, in the order of the stream.

        Returns None if as many letters as there is room for are kept.
        """
        if not self.free:
            return None
        place, sent = self.free.pop()
        target = self.device.host_pointer(self._arena, self.numbers[place:])
        self.device.copy(target, source, 4, stream)
        self.device.record(sent, stream)
        return Letter(self, place, sent)

    def close(self) -> None:
        """Give the memory back; letters that are kept must not be read any more."""
        self.free.clear()
        self.numbers = np.empty(0, np.uint32)
        self._arena.close()


class Letter:
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
