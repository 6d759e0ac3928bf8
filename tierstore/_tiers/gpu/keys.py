"""Rows of keys on the device: the part of a key table's map that was requested there."""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._tiers.gpu.abi import Arguments, Source
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import Kernel, Launcher, as_large_as_the_work

KEYS = Source(
    ("tierstore._tiers.gpu", "kernels/prelude.cuh"), ("tierstore._tiers.gpu", "kernels/keys.cu")
)
"""The kernels on maps of keys, which take a `KeyMap` and `Keys`."""

_KeyMap: Any = KEYS.structure("KeyMap")
_Keys: Any = KEYS.structure("Keys")
_FIND = Kernel(KEYS, "find_keys", as_large_as_the_work)
_ENTER = Kernel(KEYS, "enter_keys", as_large_as_the_work)
_MOST_SLOTS = (1 << 32) - 1
_SLOT_BYTES = 16
_GUESSES = 64
"""Guesses of threads that may be open at once."""


class DeviceKeys:
    """Finds rows of int64 keys by their codes; requests missing keys from the host and keeps them.

    It holds at most `most` keys, and starts again empty when more come. Call `clear` before rows of
    its keys change. Calls run after all earlier launches of the launcher.
    """

    BYTES = 2 * _SLOT_BYTES
    """Device bytes for each key, at half of the slots."""

    def __init__(self, launcher: Launcher, device: Device, most: int) -> None:
        """Reserve the memory for at most so many keys."""
        self._launcher = launcher
        self._device = device
        slots = min(2 * most, _MOST_SLOTS)
        self._slots = device.allocate(2 * slots, "u8")
        self._count = device.allocate(1, "u4")
        device.fill(device.pointer(self._count), 0, 4, launcher.stream)
        launcher.mark()
        self._mailbox = device.stage(4 * (1 + _GUESSES))
        self._told = itertools.cycle([(at, device.event()) for at in range(1, 1 + _GUESSES)])
        seed = secrets.randbits(64)
        self._map = _KeyMap(slots=device.pointer(self._slots), capacity=slots, seed=seed)
        self._most = slots // 2
        self._held = 0
        self.source: int = -1
        """The number of names that the rows are of; code that fills the map sets it, and clears the
        map for another."""

    def __len__(self) -> int:
        """Return how many keys it holds, at most."""
        return self._held

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self._slots.nbytes) + 4

    def clear(self, stream: int | None = None) -> None:
        """Forget all keys."""
        stream = self._launcher.enter(stream)
        self._device.fill(self._map.slots, 0, self._slots.nbytes, stream)
        self._launcher.mark()
        self._held = 0

    def find(self, codes: Any, rows: Any, stream: int | None = None) -> Missing | None:
        """Put the row of each code `(n,)` into `rows`, int64; both on the device.

        Waits, and waits again if keys are missing. Returns the missing keys, or None if it has all.
        """
        n = codes.shape[0]
        if not n:
            return None
        device, stream = self._device, self._launcher.enter(stream)
        missing = device.borrow(n, "u4", stream)
        missing_codes = device.borrow(n, "u8", stream)
        mailbox = self._mailbox.array[:4]
        host, number = device.host_pointer(self._mailbox, mailbox), mailbox.view(np.uint32)
        number[0] = 0
        keys = _Keys(
            codes=device.pointer(codes),
            rows=device.pointer(rows),
            missing=device.pointer(missing),
            missing_codes=device.pointer(missing_codes),
            count=device.pointer(self._count),
            lacks=host,
            n=n,
        )
        self._launcher.launch(_FIND, Arguments(self._map, keys), n, stream)
        device.synchronize(stream)
        if not number[0]:
            return None
        device.copy(host, keys.count, 4, stream)
        device.fill(keys.count, 0, 4, stream)
        device.synchronize(stream)
        count = int(number[0])
        return Missing(rows, missing[:count], missing_codes[:count], device)

    def guess(self, codes: Any, rows: Any, stream: int | None = None) -> Guess:
        """Put the row of each code into `rows` as `find` does, 0 for missing codes.

        Does not wait. The guess tells later whether every key was found, so work with these rows
        may be launched meanwhile, and repeated if the guess was wrong.
        """
        n = codes.shape[0]
        device, stream = self._device, self._launcher.enter(stream)
        at, event = next(self._told)
        mailbox = self._mailbox.array[4 * at : 4 * at + 4]
        mailbox[:] = 0
        keys = _Keys(
            codes=device.pointer(codes),
            rows=device.pointer(rows),
            lacks=device.host_pointer(self._mailbox, mailbox),
            n=n,
        )
        self._launcher.launch(_FIND, Arguments(self._map, keys), n, stream)
        device.record(event, stream)
        return Guess(device, event, mailbox)

    def enter(
        self, codes: Any, rows: Any, stream: int | None = None, missing: Missing | None = None
    ) -> None:
        """Keep the rows of codes, both `(n,)` on the device; a row of -1 means no key.

        Rows of missing keys are also put in place.
        """
        n = codes.shape[0]
        device, known = self._device, self._map
        stream = self._launcher.enter(stream)
        if self._held + n > self._most:
            self.clear(stream)
        if n > self._most:
            known = _KeyMap()
        else:
            self._held += n
        keys = _Keys(codes=device.pointer(codes), rows=device.pointer(rows), n=n)
        if missing is not None:
            keys.missing = device.pointer(missing.positions)
            keys.all_rows = device.pointer(missing.rows)
        self._launcher.launch(_ENTER, Arguments(known, keys), n, stream)

    def fill(self, missing: Missing, rows: npt.NDArray[np.int64], stream: int) -> None:
        """Keep and put in place the rows of keys that were missing, in the order of `on_host`."""
        given = np.empty_like(rows)
        given[missing.order] = rows
        self.enter(missing.codes, self._device.upload(given, stream), stream, missing)

    def close(self) -> None:
        """Free the memory."""
        self._mailbox.close()


class Guess:
    """The rows of a batch of keys, if a device's map has all of them."""

    def __init__(self, device: Device, event: Any, mailbox: npt.NDArray[np.uint8]) -> None:
        """Refer to the result of the search, and to the event after it."""
        self._device = device
        self._event = event
        self._mailbox = mailbox

    def is_right(self) -> bool:
        """Whether every key was found; waits for the search, not for launches after it."""
        self._device.await_event(self._event)
        return not self._mailbox.any()


class Missing:
    """Keys of a batch that a device's map lacks.

    Attributes:
        rows: the rows of the batch, which take theirs.
        positions, codes: on the device, in any order.
        order: their order by position; only `on_host` sets it.
    """

    def __init__(self, rows: Any, positions: Any, codes: Any, device: Device) -> None:
        """Refer to lists on the device, which `find` has waited for."""
        self.rows = rows
        self.positions = positions
        self.codes = codes
        self._device = device
        self.order: npt.NDArray[np.intp] = np.empty(0, np.intp)

    def on_host(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the positions, ascending, and the codes there."""
        positions = self._device.download(self.positions)
        codes = self._device.download(self.codes)
        self.order = np.argsort(positions)
        return positions[self.order].astype(np.int64), codes[self.order]
