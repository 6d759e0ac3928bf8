"""Memory of tiers: pageable, pinned or managed, and arrays laid end to end in it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import _cgroups
from tierstore.errors import CapacityError, InvalidInputError

KINDS = ("pageable", "pinned", "managed")

_HUGE_PAGE = 2 << 20
_TOUCH_BYTES = 64 << 20
_PORTABLE_MAPPED = 1 | 2
_ATTACH_GLOBAL = 1
_CONCURRENT_MANAGED_ACCESS = "ConcurrentManagedAccess"


class Arena(Protocol):
    """A block of zeroed memory, which its one owner closes."""

    kind: str
    array: npt.NDArray[np.uint8]
    device_pointer: int | None

    def close(self) -> None:
        """Free the memory; views of `array` must not be used any more. May be repeated."""


class PageableArena:
    """Ordinary memory, which the system backs with huge pages where it can."""

    kind = "pageable"
    device_pointer: int | None = None

    def __init__(self, nbytes: int) -> None:
        """Reserve `nbytes`; pages are taken as they are first touched."""
        try:
            region = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"cannot reserve {nbytes} bytes of memory: {error}") from None
        if nbytes >= _HUGE_PAGE:
            region.madvise(mmap.MADV_HUGEPAGE)
        self._region: mmap.mmap | None = region
        self.array: npt.NDArray[np.uint8] = np.frombuffer(region, np.uint8, nbytes)

    def close(self) -> None:
        """Return the pages at once; a remaining view of the block reads zeros."""
        if self._region is not None:
            self._region.madvise(mmap.MADV_DONTNEED)
        self.array, self._region = np.empty(0, np.uint8), None


class PinnedArena(PageableArena):
    """Memory locked in place and mapped into every GPU.

    Huge pages that many threads touch and that are then registered take a sixth of the time of
    cudaHostAlloc (20 against 3 GB/s).
    """

    kind = "pinned"

    def __init__(self, nbytes: int) -> None:
        """Take all pages of `nbytes` and register them."""
        import cupy

        super().__init__(max(nbytes, 1))
        runtime = cupy.cuda.runtime
        pointer = self.array.ctypes.data
        _touch(pointer, self.array.nbytes)
        try:
            runtime.hostRegister(pointer, self.array.nbytes, _PORTABLE_MAPPED)
        except runtime.CUDARuntimeError as error:
            raise CapacityError(
                f"cannot pin {nbytes} bytes of host memory ({error}); "
                "give a smaller host budget, or raise the limit that `ulimit -l` shows"
            ) from None
        self.device_pointer = pointer
        # A block that is dropped unclosed must not return its pages while they are registered:
        # their next owner could not register them.
        self._unpin = weakref.finalize(self, _unpin, runtime, self.array, os.getpid())
        self._unpin.atexit = False

    def close(self) -> None:
        """Wait for the device, unregister the block and drop it."""
        self._unpin()
        self.device_pointer = None
        super().close()


class ManagedArena:
    """Managed memory that stays on the host, with the current GPU mapped to it."""

    kind = "managed"
    reserved = 0
    """Bytes of all managed arenas of the process; see `_room`."""

    def __init__(self, nbytes: int) -> None:
        """Take all pages of `nbytes` on the host and map the current device to them."""
        import cupy

        runtime = self._runtime = cupy.cuda.runtime
        nbytes = max(nbytes, 1)
        if nbytes > _room(runtime):
            raise CapacityError(
                f"{nbytes} bytes of managed memory exceed what the GPU has free, and may hang it; "
                "use a pinned arena"
            )
        self._pid = os.getpid()
        self._nbytes = nbytes
        self.device_pointer: int | None
        try:
            self.device_pointer = runtime.mallocManaged(nbytes, _ATTACH_GLOBAL)
        except runtime.CUDARuntimeError as error:
            raise CapacityError(
                f"cannot take {nbytes} bytes of managed memory ({error}); "
                "give a smaller host budget"
            ) from None
        ManagedArena.reserved += nbytes
        try:
            device, pointer = runtime.getDevice(), self.device_pointer
            runtime.memAdvise(pointer, nbytes, runtime.cudaMemAdviseSetAccessedBy, device)
            _touch(pointer, nbytes)
        except BaseException as error:
            self.close()
            if isinstance(error, runtime.CUDARuntimeError):
                raise CapacityError(
                    f"cannot map {nbytes} bytes of managed memory to the GPU ({error}); "
                    "give a smaller host budget"
                ) from None
            raise
        block = (ctypes.c_uint8 * nbytes).from_address(pointer)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(memoryview(block), np.uint8)

    def close(self) -> None:
        """Wait for the device and free the block."""
        self.array = np.empty(0, np.uint8)
        if self.device_pointer is not None and os.getpid() == self._pid:
            self._runtime.free(self.device_pointer)
            ManagedArena.reserved -= self._nbytes
        self.device_pointer = None


def _unpin(runtime: Any, block: npt.NDArray[np.uint8], pid: int) -> None:
    if os.getpid() == pid:
        runtime.hostUnregister(block.ctypes.data)


def _room(runtime: Any) -> int:
    """Bytes of managed memory that may still be allocated: never more than the GPU has free.

    A program whose managed memory exceeds that can hang the GPU, even where all of it stays on the
    host.
    """
    return int(runtime.memGetInfo()[0]) - ManagedArena.reserved


def _touch(pointer: int | None, nbytes: int) -> None:
    """Take the pages of a block by writing zeros, with as many threads as there are processors."""
    if pointer is None:
        return
    starts = range(pointer, pointer + nbytes, _TOUCH_BYTES)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
        sizes = [min(_TOUCH_BYTES, pointer + nbytes - start) for start in starts]
        list(pool.map(ctypes.memset, starts, [0] * len(sizes), sizes))


def choose(nbytes: int, device: int) -> str:
    """Return the best kind of arena of `nbytes` for a GPU to read: "managed" or "pinned".

    Managed memory needs a system that lets host and GPU access it at the same time, and no more of
    it than the GPU has free.
    """
    import cupy

    with cupy.cuda.Device(device) as on_device:
        concurrent = on_device.attributes.get(_CONCURRENT_MANAGED_ACCESS, 0)
        fits = nbytes <= _room(cupy.cuda.runtime)
    return "managed" if concurrent and fits else "pinned"


def allocate(nbytes: int, kind: str = "pageable") -> Arena:
    """Reserve a zeroed arena of `nbytes` bytes of the given kind.

    Pinned and managed arenas are for the current CUDA device. Raises CapacityError if there is not
    as much memory of that kind.
    """
    if kind == "pageable":
        return PageableArena(nbytes)
    if kind == "pinned":
        return PinnedArena(nbytes)
    if kind == "managed":
        return ManagedArena(nbytes)
    raise InvalidInputError(f"not a kind of memory: {kind!r}; there are {', '.join(KINDS)}")


def give_back() -> None:
    """Return memory that a burst of work took and freed to the system, if the C library can.

    Small objects that stay keep the heap from shrinking by itself.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def available_bytes() -> int:
    """Return how much memory may still be taken, within the limits of memory cgroups.

    Pages of files count as free, in a cgroup as in the whole machine.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        available = int(line.split()[1]) * 1024
    return min([available, *(free for _, free in _cgroups.free_memory())])


ALIGNMENT = 256
"""Each array starts at a multiple of this many bytes."""


class Arrays:
    """A block of memory of one kind, allocated from its start."""

    def __init__(self, kind: str, nbytes: int) -> None:
        """Reserve the block; see `memory.allocate` for the kinds."""
        self.memory = allocate(nbytes, kind)
        self._used = 0

    def take(self, name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
        """Return the next array."""
        nbytes = size * np.dtype(dtype).itemsize
        start = self._used
        self._used = -(-(start + nbytes) // ALIGNMENT) * ALIGNMENT
        return self.memory.array[start : start + nbytes].view(dtype)
