"""Launches kernels: compiles each once, checks its arguments, picks its grid, keeps the order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tierstore._tiers.gpu.abi import TIER, Arguments, Source
from tierstore._tiers.gpu.device import BLOCK, Device, Start

Grid = Callable[[int, int, int], int]
"""Number of blocks for some items, of which so many run at a time, on so many multiprocessors."""

_MOST_BLOCKS = 2**31 - 1
_COPY_BLOCKS = 32
"""Enough to fill the link; more would take multiprocessors from concurrent computation."""
_LINK_BLOCKS = TIER.constants["LINK_BLOCKS"]


def strided(items: int, resident: int, processors: int) -> int:
    """Return a block for 32 items, as far as all run at a time; each takes several rounds."""
    blocks = -(-items // 32)  # compared without `min` and `max`: this runs at every launch
    return resident if blocks > resident else blocks or 1


def as_large_as_the_work(items: int, resident: int, processors: int) -> int:
    """Return a thread for each item."""
    blocks = -(-items // BLOCK)
    return _MOST_BLOCKS if blocks > _MOST_BLOCKS else blocks or 1


def _all_resident(items: int, resident: int, processors: int) -> int:
    return resident


def _beside_copies(items: int, resident: int, processors: int) -> int:
    """Return all that run at once, minus room for the copies of a prefetch."""
    return max(2, resident - processors)


def _one(items: int, resident: int, processors: int) -> int:
    return 1


def _copying(items: int, resident: int, processors: int) -> int:
    return _COPY_BLOCKS


def _on_the_link(items: int, resident: int, processors: int) -> int:
    return min(_LINK_BLOCKS, resident)


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of a source; keep it, because a launcher uses it as the key of its loaded kernels.

    Attributes:
        name: its name after `tierstore_` in the source.
        grid: how many blocks it gets.
        macros: macros for the compilation of its source.
        cooperative: whether its blocks wait for each other, so that all must run at a time.
        takes: the names of the structures that are its parameters.
    """

    source: Source
    name: str
    grid: Grid = strided
    macros: Mapping[str, object] = field(default_factory=dict)
    cooperative: bool = False
    takes: tuple[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Look the parameters up in the source."""
        object.__setattr__(self, "takes", self.source.kernels[self.name])


class OWN:
    """The kernels of the tier itself."""

    IN_SPACE = Kernel(TIER, "in_space", as_large_as_the_work)
    PROBE = Kernel(TIER, "probe", as_large_as_the_work)
    FENCE = Kernel(TIER, "fence", _one)
    PROMOTE = Kernel(TIER, "promote", _all_resident, cooperative=True)
    PROMOTE_BESIDE_COPIES = Kernel(TIER, "promote", _beside_copies, cooperative=True)
    SWAP_CHUNK = Kernel(TIER, "swap_chunk", _on_the_link)
    INSTALL = Kernel(TIER, "install", _all_resident)
    PLACE_SPILL = Kernel(TIER, "place_spill", _all_resident)
    COMPLETE = Kernel(TIER, "complete", _all_resident, cooperative=True)
    ABANDON = Kernel(TIER, "abandon", _all_resident, cooperative=True)
    MOVE = Kernel(TIER, "move", _copying)
    ANNOUNCE = Kernel(TIER, "announce", _one)
    RELEASE = Kernel(TIER, "release")
    FORGET = Kernel(TIER, "forget")
    LEASE_GATHER = Kernel(TIER, "lease_gather")
    LEASE_SCATTER = Kernel(TIER, "lease_scatter")
    LEASE_READ = Kernel(TIER, "lease_read")
    LOOK_UP = Kernel(TIER, "look_up")
    FLUSH = Kernel(TIER, "flush")
    REPORT = Kernel(TIER, "report")
    REBASE = Kernel(TIER, "rebase")
    RESCALE = Kernel(TIER, "rescale")
    SWEEP = Kernel(TIER, "sweep", _one)
    EMPTY = Kernel(TIER, "empty")
    ENTER_SLOTS = Kernel(TIER, "enter_slots")
    ENTER_KEPT = Kernel(TIER, "enter_kept")


class Launcher:
    """Launches kernels on one device.

    A `launch` runs after every earlier `launch`, in any streams.

    Attributes:
        stream: where the last work in this order went.
        last: a marker after it, once `mark` or `enter` has recorded it.
        waits: whether the code that set this calls `mark`, at the end of several launches.
    """

    def __init__(self, device: Device, *, sparse: bool = False) -> None:
        """Load the tier's own kernels and start in the current stream.

        `sparse`: load the kernels whose map of rows is `Places`.
        """
        self._device = device
        self._sparse = sparse
        self._loaded: dict[Kernel, tuple[Start, int]] = {}
        for kernel in vars(OWN).values():
            if isinstance(kernel, Kernel):
                self._load(kernel)
        self.stream: int = device.current_stream()
        self.last: Any = device.event()
        self.waits: bool = False
        self._marked = False
        self.mark()

    def _load(self, kernel: Kernel) -> tuple[Start, int]:
        text, name, macros = kernel.source.text, kernel.name, kernel.macros
        if self._sparse and kernel.source is TIER:
            macros = {**macros, "SPARSE": 1}
        loaded = self._device.load(text, name, macros, cooperative=kernel.cooperative)
        self._loaded[kernel] = loaded
        return loaded

    def enter(self, stream: int | None) -> int:
        """Continue in a stream, or in the current one, after the last work; return the stream."""
        stream = self._device.current_stream() if stream is None else stream
        if stream != self.stream:
            if not self._marked:
                self.mark()
            self._device.follow(stream, self.last)
            self.stream = stream
        return stream

    def mark(self) -> None:
        """Record the marker after the last launch."""
        self._device.record(self.last, self.stream)
        self._marked = True

    def launched(self) -> None:
        """Record the marker, unless the caller `waits` to do so."""
        self._marked = False
        if not self.waits:
            self.mark()

    def settle(self) -> None:
        """Record the marker if that was left to the caller."""
        self.waits = False
        if not self._marked:
            self._device.record(self.last, self.stream)
            self._marked = True

    def launch(
        self, kernel: Kernel, arguments: Arguments, items: int, stream: int | None = None
    ) -> None:
        """Launch a kernel that works through a number of items, after the last work."""
        if stream is None or stream != self.stream:
            stream = self.enter(stream)
        self.start(kernel, arguments, stream, items)
        self._marked = False
        if not self.waits:
            self.mark()

    def start(self, kernel: Kernel, arguments: Arguments, stream: int, items: int = 1) -> None:
        """Launch a kernel in a stream, without order between streams: that is the caller's task.

        Raises TypeError for arguments of other structures than the kernel takes.
        """
        start, resident = self._loaded.get(kernel) or self._load(kernel)
        if arguments.structs != kernel.takes:
            raise TypeError(f"{kernel.name} takes {kernel.takes}, not {arguments.structs}")
        blocks = kernel.grid(items, resident, self._device.processors)
        start(blocks, arguments.address, stream)
