"""The CUDA device: memory, streams, and the kernels that copy records between the tiers.

`Device` is the small interface that the GPU tier needs. It knows no rows, slots or tables.
`CudaDevice` is a real GPU, through CuPy, which is imported when the first one is made.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._tiers import memory
from tierstore._tiers.gpu.abi import TIER
from tierstore.errors import (
    CapacityError,
    DeviceError,
    DeviceLostError,
    MissingExtraError,
)

BLOCK = TIER.constants["THREADS"]
"""Threads of a block, in every kernel."""

Start = Callable[[int, int, int], None]
"""Starts a kernel, given a number of blocks, the address of its argument pointers, and a stream."""


class Device(Protocol):
    """What the GPU tier needs from a device. Streams are the driver's handles, as integers.

    Attributes:
        processors: its multiprocessors.
        beside: a stream for copies beside the caller's own.
        arrays: the module of its arrays, which has NumPy's functions.
    """

    processors: int
    beside: int
    arrays: Any

    @property
    def torch_name(self) -> str:
        """The name of the device in torch: "cuda:0"."""

    def load(
        self, source: str, name: str, macros: Mapping[str, object], *, cooperative: bool = False
    ) -> tuple[Start, int]:
        """Return a kernel of a source, and the most blocks of it that can run at a time.

        A source is compiled once for each set of macros. Blocks of a cooperative kernel wait for
        each other: they all start at once.
        """

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Show what is launched in a context under a name in the device's profiler."""

    def allocate(self, size: int, dtype: npt.DTypeLike) -> Any:
        """Reserve an array of `size` zeros for long use; freed with its last reference."""

    def borrow(self, size: int, dtype: npt.DTypeLike, stream: int | None = None) -> Any:
        """Take an uninitialised array from the pool, for use in a stream, or the current one."""

    def stage(self, nbytes: int) -> memory.Arena:
        """Reserve host memory that the device reads and writes."""

    def current(self) -> AbstractContextManager[Any]:
        """Make this the current device for the length of a context."""

    def enter(self) -> int:
        """Make this the current device; return the argument for `leave`."""

    def leave(self, before: int) -> None:
        """Restore the previous current device."""

    def arena_kind(self, nbytes: int) -> str:
        """Return the best kind of host memory of that size for the device to read."""

    def free_bytes(self) -> int:
        """Return the device memory that may still be taken."""

    def total_bytes(self) -> int:
        """Return the memory of the device, taken or not."""

    def upload(self, array: npt.NDArray[Any], stream: int | None = None) -> Any:
        """Copy a host array to the device, in the order of a stream, or the current one."""

    def download(self, array: Any) -> npt.NDArray[Any]:
        """Copy a device array to the host, and wait for it."""

    def on_host(self, array: Any) -> bool:
        """Return whether an array is the host's, not one that the device reads fast."""

    def export(self, array: Any, kind: str) -> Any:
        """Return a device array as one of "torch" or "cupy", shared, or copied for "numpy"."""

    def pointer(self, array: Any) -> int:
        """Return the address of a device array."""

    def host_pointer(self, arena: memory.Arena, view: npt.NDArray[Any]) -> int:
        """Return the address of part of a host arena as the device sees it."""

    def current_stream(self) -> int:
        """Return the caller's current stream."""

    def capturing(self, stream: int) -> bool:
        """Return whether the stream records work for a CUDA graph instead of running it."""

    def fill(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes on the device, in the order of the stream."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy bytes between host and device, in the order of the stream."""

    def copy_columns(
        self, target: int, source: int, width: int, pitch: int, rows: int, stream: int
    ) -> None:
        """Copy `width` bytes every `pitch`, `rows` times, without gaps; both on the device."""

    def synchronize(self, stream: int) -> None:
        """Wait until everything given to the stream so far is done."""

    def drain(self) -> None:
        """Wait until everything given to any stream so far is done."""

    def event(self) -> Any:
        """Make a marker for `record`, `follow`, `passed` and `await_event`."""

    def record(self, event: Any, stream: int) -> None:
        """Put the marker into the stream."""

    def follow(self, stream: int, event: Any) -> None:
        """Make the stream wait, on the device, for the marker."""

    def passed(self, event: Any) -> bool:
        """Return, without waiting, whether the marker was reached."""

    def await_event(self, event: Any) -> None:
        """Wait on the host until the marker is reached."""


def _has_driver() -> bool:
    """Return whether this machine has an NVIDIA driver."""
    if os.path.exists("/dev/nvidiactl"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class CudaDevice(Device):
    """One CUDA device. Driver errors are CuPy's, except for a missing device."""

    def __init__(self, index: int = 0) -> None:
        """Compile the kernels for device number `index`, or take them from CuPy's cache on disk."""
        try:
            import cupy
            from cupyx.profiler import time_range
        except ImportError as error:
            if not _has_driver():
                raise DeviceError(
                    "no CUDA device can be used: there is no NVIDIA driver on this machine"
                ) from None
            raise MissingExtraError(
                f"the GPU tier needs CuPy ({error}); pip install 'tierstore[cuda13x]', "
                "or 'tierstore[cuda12x]' for a driver before 580"
            ) from None
        runtime = cupy.cuda.runtime
        try:
            count = runtime.getDeviceCount()
        except runtime.CUDARuntimeError as error:
            raise DeviceError(f"no CUDA device can be used: {error}") from None
        if not 0 <= index < count:
            raise DeviceError(f"there is no CUDA device {index}; this machine has {count}")
        self.index = index
        self.arrays = self._cupy = cupy
        self._runtime = runtime
        self._range = time_range if cupy.cuda.nvtx.available else nullcontext
        self._ranges: dict[str, AbstractContextManager[Any]] = {}
        with cupy.cuda.Device(index) as device:
            self.processors: int = device.attributes["MultiProcessorCount"]
            self._modules: dict[tuple[str, ...], Any] = {}
            self._kernels: dict[tuple[str, ...], tuple[Start, int]] = {}
            self._beside = cupy.cuda.Stream(non_blocking=True)
        self._streams: dict[int, Any] = {0: cupy.cuda.Stream.null}
        self.beside: int = self._beside.ptr

    def load(
        self, source: str, name: str, macros: Mapping[str, object], *, cooperative: bool = False
    ) -> tuple[Start, int]:
        """Return a kernel of a source, and the most blocks of it that can run at a time.

        A source is compiled once for each set of macros, or comes from CuPy's cache on disk. A
        launch takes the host about 2 us: the arguments are structures already in memory.
        """
        driver = self._cupy.cuda.driver
        symbol = f"tierstore_{name}"
        get_device = self._runtime.getDevice
        options = ("--std=c++17", *(f"-D{macro}={value}" for macro, value in macros.items()))
        if (source, name, *options) in self._kernels:
            return self._kernels[source, name, *options]
        with self._cupy.cuda.Device(self.index):
            module = self._modules.get((source, *options))
            if module is None:
                module = self._cupy.RawModule(code=source, options=options)
                self._modules[source, *options] = module
            function = module.get_function(symbol).kernel.ptr
            blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, BLOCK, 0)
        index, on_device = self.index, self._cupy.cuda.Device(self.index)

        start = driver.launchCooperativeKernel if cooperative else driver.launchKernel
        extra = () if cooperative else (0,)

        def launch(blocks: int, arguments: int, stream: int) -> None:
            if get_device() == index:
                start(function, blocks, 1, 1, BLOCK, 1, 1, 0, stream, arguments, *extra)
            else:
                with on_device:
                    start(function, blocks, 1, 1, BLOCK, 1, 1, 0, stream, arguments, *extra)

        self._kernels[source, name, *options] = launch, blocks * self.processors
        return self._kernels[source, name, *options]

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Push an NVTX range for the length of a context."""
        context = self._ranges.get(name)
        if context is None:
            context = self._ranges[name] = self._range(name)
        return context

    def allocate(self, size: int, dtype: npt.DTypeLike) -> Any:
        """Reserve an array of `size` zeros, outside CuPy's pool; freed with its last reference."""
        cupy = self._cupy
        nbytes = max(1, size * np.dtype(dtype).itemsize)
        with cupy.cuda.Device(self.index):
            pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
            self._runtime.memset(pointer.ptr, 0, nbytes)
            self._runtime.streamSynchronize(0)
            return cupy.ndarray((size,), dtype, memptr=pointer)

    def borrow(self, size: int, dtype: npt.DTypeLike, stream: int | None = None) -> Any:
        """Take an uninitialised array from CuPy's pool, for use in a stream, or CuPy's current.

        The pool reuses freed memory only in the same stream, after its last use.
        """
        before = self.enter()
        try:
            if stream is None or stream == self.current_stream():
                return self._cupy.empty(size, dtype)
            with self._in(stream):
                return self._cupy.empty(size, dtype)
        finally:
            self.leave(before)

    def stage(self, nbytes: int) -> memory.Arena:
        return memory.allocate(nbytes, "pinned")

    @property
    def torch_name(self) -> str:
        return f"cuda:{self.index}"

    def current(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cupy.cuda.Device(self.index)
        return context

    def enter(self) -> int:
        before = int(self._runtime.getDevice())
        if before != self.index:
            self._runtime.setDevice(self.index)
        return before

    def leave(self, before: int) -> None:
        if before != self.index:
            self._runtime.setDevice(before)

    def _in(self, stream: int) -> Any:
        """Return CuPy's object for a stream, to make it the current one for a while."""
        if stream == self.beside:
            return self._beside
        external = self._streams.get(stream)
        if external is None:
            with warnings.catch_warnings():
                # The replacement in CuPy 14 destroys the stream with the object.
                warnings.simplefilter("ignore", DeprecationWarning)
                external = self._cupy.cuda.ExternalStream(stream, self.index)
            self._streams[stream] = external
        return external

    def arena_kind(self, nbytes: int) -> str:
        """Return "managed" or "pinned"; see `memory.choose`."""
        return memory.choose(nbytes, self.index)

    def free_bytes(self) -> int:
        with self.current():
            return int(self._runtime.memGetInfo()[0])

    def total_bytes(self) -> int:
        with self.current():
            return int(self._runtime.memGetInfo()[1])

    def upload(self, array: npt.NDArray[Any], stream: int | None = None) -> Any:
        with self.current():
            if stream is None or stream == self.current_stream():
                return self._cupy.asarray(array)
            with self._in(stream):
                return self._cupy.asarray(array)

    def download(self, array: Any) -> npt.NDArray[Any]:
        with self.current():
            copied: npt.NDArray[Any] = array.get()
            return copied

    def on_host(self, array: Any) -> bool:
        return isinstance(array, np.ndarray)

    def export(self, array: Any, kind: str) -> Any:
        """Return a CuPy array as one of torch, shared, or of NumPy, copied."""
        if kind == "torch":
            import torch

            return torch.as_tensor(array, device=self.torch_name)
        return self.download(array) if kind == "numpy" else array

    def pointer(self, array: Any) -> int:
        """Return the address of a torch tensor, a CuPy array, or another array on the device."""
        if isinstance(array, self._cupy.ndarray):  # first: a failed attribute look-up takes long
            return int(array.data.ptr)
        if hasattr(array, "data_ptr"):
            return int(array.data_ptr())
        return int(array.__cuda_array_interface__["data"][0])

    def host_pointer(self, arena: memory.Arena, view: npt.NDArray[Any]) -> int:
        if arena.device_pointer is None:
            raise DeviceError(f"the GPU cannot read {arena.kind} host memory")
        return arena.device_pointer + view.ctypes.data - arena.array.ctypes.data

    def current_stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream(self.index).ptr)

    def capturing(self, stream: int) -> bool:
        return bool(self._runtime.streamIsCapturing(stream))

    def fill(self, pointer: int, value: int, nbytes: int, stream: int) -> None:
        self._runtime.memsetAsync(pointer, value, nbytes, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(target, source, nbytes, self._runtime.memcpyDefault, stream)

    def copy_columns(
        self, target: int, source: int, width: int, pitch: int, rows: int, stream: int
    ) -> None:
        kind = self._runtime.memcpyDeviceToDevice
        self._runtime.memcpy2DAsync(target, width, source, pitch, width, rows, kind, stream)

    def synchronize(self, stream: int) -> None:
        self._runtime.streamSynchronize(stream)

    def drain(self) -> None:
        with self.current():
            self._runtime.deviceSynchronize()

    def event(self) -> Any:
        with self._cupy.cuda.Device(self.index):
            return self._cupy.cuda.Event(disable_timing=True)

    def record(self, event: Any, stream: int) -> None:
        self._runtime.eventRecord(event.ptr, stream)

    def follow(self, stream: int, event: Any) -> None:
        self._runtime.streamWaitEvent(stream, event.ptr)

    def passed(self, event: Any) -> bool:
        return bool(event.done)

    def await_event(self, event: Any) -> None:
        self._runtime.eventSynchronize(event.ptr)


def device_error(error: BaseException | None, table: str) -> BaseException | None:
    """Return an error of the CUDA driver in a user's terms, other errors unchanged."""
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        return CapacityError(
            f"the GPU has no memory left for a batch of table {table!r} ({error}); "
            "give the store a smaller gpu budget, or the batch fewer ids"
        )
    if kind in ("CUDARuntimeError", "CUDADriverError"):
        return DeviceLostError(
            f"the GPU failed ({error}): rows of table {table!r} that were only there are lost, "
            "the last commit is intact; start a new process and open the store again"
        )
    return error
