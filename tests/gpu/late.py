"""The emulated device with streams that run as late as a GPU's may."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Set
from random import Random
from typing import Any

import numpy as np

from tests.gpu.emulator import EmulatedDevice
from tierstore._tiers import memory
from tierstore._tiers.gpu import device
from tierstore._tiers.gpu.abi import COUNTERS, TierArgument

Work = Callable[[], None]


class Marker:
    """What one `record` of an event has put into a stream."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.reached = False

    def reach(self) -> None:
        self.reached = True


class Event:
    def __init__(self) -> None:
        self.marker: Marker | None = None


class LateDevice(EmulatedDevice):
    """Runs what a stream was given when something waits for it, and not before.

    A launch copies its arguments, an event stands for its last record, and memory is kept: where a
    wait is missing, what was there before shows, or what came since, never an invalid address.

    `late` are the streams that are so, all if None; others run at once. With `haste` above 0 a
    stream gets on by itself now and then, which shows what both extremes hide.
    """

    def __init__(
        self,
        *,
        late: Set[int] | None = None,
        haste: float = 0.0,
        processors: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(processors=processors, seed=seed)
        self._late = late
        self._haste = haste
        self._toss = Random(seed)
        self._work: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._kept: list[Any] = []
        self._lock = threading.RLock()

    # -- streams

    def _give(self, stream: int, work: Work) -> None:
        with self._lock:
            self._work[stream].append(work)
            if self._late is not None and stream not in self._late:
                self.run(stream)
            while self._toss.random() < self._haste:
                chosen = self._toss.choice(list(self._work))
                if self._work[chosen]:
                    self._work[chosen].popleft()()

    def run(self, stream: int, until: Marker | None = None) -> None:
        """Do the work of a stream, all of it or up to a marker."""
        with self._lock:
            work = self._work[stream]
            while work and not (until is not None and until.reached):
                work.popleft()()

    def _reach(self, marker: Marker | None) -> None:
        if marker is not None:
            self.run(marker.stream, marker)

    def finish(self) -> None:
        for stream in list(self._work):
            self.run(stream)

    def _mark(self, stream: int) -> Marker:
        marker = Marker(stream)
        self._give(stream, marker.reach)
        return marker

    # -- what a GPU does in the order of a stream

    def _loaded(
        self, found: ctypes.CDLL, name: str, *, cooperative: bool
    ) -> tuple[device.Start, int]:
        launch, blocks = super()._loaded(found, name, cooperative=cooperative)
        sizes = found.size_of_first(), found.size_of_second()

        def give(blocks: int, arguments: int, stream: int) -> None:
            given = (ctypes.c_void_p * 2).from_address(arguments)
            copies = [
                ctypes.create_string_buffer(ctypes.string_at(pointer, size), size)
                for pointer, size in zip(given, sizes, strict=True)
            ]
            pointers = (ctypes.c_void_p * 2)(*map(ctypes.addressof, copies))
            launched = self._mark(self.beside) if name == "fence" else None

            def work() -> None:
                if launched is not None and lacks(TierArgument.from_buffer(copies[0])):
                    self._reach(launched)  # a fence runs until the copies launched before are over
                launch(blocks, ctypes.addressof(pointers), stream)

            self._give(stream, work)

        return give, blocks

    def fill(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        self._give(stream, lambda: super(LateDevice, self).fill(pointer, value, nbytes, stream))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._give(stream, lambda: super(LateDevice, self).copy(target, source, nbytes, stream))

    def copy_columns(
        self, target: int, source: int, width: int, pitch: int, rows: int, stream: int
    ) -> None:
        given = target, source, width, pitch, rows, stream
        self._give(stream, lambda: super(LateDevice, self).copy_columns(*given))

    # -- what waits

    def synchronize(self, stream: int) -> None:
        super().synchronize(stream)
        self.run(stream)

    def download(self, array: Any) -> Any:
        self.run(self.current_stream())
        return super().download(array)

    def export(self, array: Any, kind: str) -> Any:
        return self.download(array) if kind == "numpy" else super().export(array, kind)

    def event(self) -> Any:
        return Event()

    def record(self, event: Any, stream: int) -> None:
        event.marker = self._mark(stream)

    def follow(self, stream: int, event: Any) -> None:
        marker = event.marker
        self._give(stream, lambda: self._reach(marker))

    def passed(self, event: Any) -> bool:
        return event.marker is None or bool(event.marker.reached)

    def await_event(self, event: Any) -> None:
        super().await_event(event)
        self._reach(event.marker)

    # -- memory

    def _keep(self, block: Any) -> Any:
        self._kept.append(block)
        return block

    def allocate(self, size: int, dtype: Any) -> Any:
        return self._keep(super().allocate(size, dtype))

    def borrow(self, size: int, dtype: Any, stream: int | None = None) -> Any:
        return self._keep(super().borrow(size, dtype, stream))

    def upload(self, array: Any, stream: int | None = None) -> Any:
        return self._keep(super().upload(array, stream))

    def stage(self, nbytes: int) -> memory.Arena:
        arena = super().stage(nbytes)
        self._keep(arena.array)
        return arena


def lacks(tier: Any) -> bool:
    """Whether the batch under way lacks rows or must wait for some."""
    block = (ctypes.c_uint8 * COUNTERS.itemsize).from_address(tier.counters)
    counters = np.frombuffer(block, COUNTERS)[0]
    return bool(counters["missed"] or counters["deferred"])
