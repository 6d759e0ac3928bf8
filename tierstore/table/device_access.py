"""How a table reaches a GPU tier: torch tensors and CuPy arrays on the device, NumPy by way of it.

Work goes into the caller's current stream and nothing waits, but for NumPy, whose arrays are ready
when a call returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import (
    DeviceError,
    InvalidInputError,
    InvalidTypeError,
)
from tierstore.guard import Guard, Use
from tierstore.spec import Field, RecordLayout
from tierstore.table.access import Piece
from tierstore.table.device_lease import DeviceLease
from tierstore.table.driver import explained
from tierstore.table.ids import Ids, host_ids, is_cupy, is_torch, on_host
from tierstore.table.prefetch import Prefetcher
from tierstore.table.values import from_bytes, to_bytes
from tierstore.tier.gpu import GpuTier

__all__ = ["DeviceAccess"]

_WIDER = {
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "float32": ("float32", "float16", "bfloat16"),
    "float64": ("float64", "float32", "float16", "bfloat16"),
}


class _Using(Use):
    """A use of the store on its device, whichever was the current one.

    It explains the driver's errors, and checks ids if every call does.
    """

    __slots__ = ("_access", "_before")

    def __init__(self, access: DeviceAccess, *, write: bool) -> None:
        super().__init__(access.guard, write=write)
        self._access = access
        self._before = -1

    def __enter__(self) -> None:
        super().__enter__()
        self._before = self._access.gpu.device.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        found = error
        if error is None and self._access.sync_checks:
            try:
                self._access.gpu.check()
            except Exception as failed:
                found = failed
        self._access.gpu.device.leave(self._before)
        if found is None:
            super().__exit__()
            return
        meaning = explained(found, self._access.name) or found
        super().__exit__(type(meaning), meaning, trace)
        if meaning is not error:
            raise meaning from (found if meaning is not found else None)


class DeviceAccess:
    """Access to a GPU tier; see `Access`.

    Ids that are on the device are checked there, without waiting: rows of bad ids read NaN, writes
    to them are dropped, and the next call that waits raises. With `sync_checks` every call does.
    """

    def __init__(
        self, gpu: GpuTier, layout: RecordLayout, guard: Guard, name: str, *, sync_checks: bool
    ) -> None:
        """Refer to an open GPU tier."""
        self.gpu = gpu
        self.layout = layout
        self.guard = guard
        self.name = name
        self._device = gpu.device
        self.sync_checks = sync_checks
        self.closed = False

    def close(self) -> None:
        """End every lease; see `Access`."""
        self.closed = True

    def ids(self, ids: object) -> Ids:
        """Return ids as flat int64, where they are; those on the host are checked here."""
        if is_torch(ids):
            return self._torch_ids(ids)
        if is_cupy(ids):
            return self._cupy_ids(ids)
        return self._host_ids(ids, "numpy")

    def _host_ids(self, ids: object, kind: str) -> Ids:
        """Check ids that are on the host; where a prefetch has them on the device, return those."""
        checked = host_ids(ids, self.gpu.rows)
        rows = self.gpu.foreseen(checked.rows)
        return Ids(checked.rows if rows is None else rows, checked.shape, kind)

    def _torch_ids(self, ids: Any) -> Ids:
        import torch

        shape, here = tuple(ids.shape), self._torch_device
        if ids.dtype is not torch.int64 and (
            ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()
        ):
            raise InvalidTypeError(f"row ids are whole numbers, not {ids.dtype}")
        if ids.device != here:
            if ids.device.type == "cpu":
                return self._host_ids(ids, "torch")
            raise DeviceError(
                f"the ids are on {ids.device}, table {self.name!r} is on {here}; move them: "
                f"ids.to({str(here)!r})"
            )
        if ids.dtype is not torch.int64 or len(shape) != 1 or not ids.is_contiguous():
            ids = ids.reshape(-1).to(torch.int64).contiguous()
        return Ids(ids, shape, "torch")

    @functools.cached_property
    def _torch_device(self) -> Any:
        import torch

        return torch.device(self._device.torch_name)

    @functools.cached_property
    def _torch_stream(self) -> Callable[[], int]:
        """Asks torch for its current stream; the public way makes an object and costs 4 us."""
        import torch

        index = self._torch_device.index
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:
            return lambda: int(raw(index))
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)

    def _cupy_ids(self, ids: Any) -> Ids:
        import cupy

        if ids.dtype.kind not in "iu":
            raise InvalidTypeError(f"row ids are whole numbers, not {ids.dtype}")
        if f"cuda:{ids.device.id}" != self._device.torch_name:
            raise DeviceError(
                f"the ids are on cuda:{ids.device.id}, table {self.name!r} is on "
                f"{self._device.torch_name}"
            )
        return Ids(cupy.ascontiguousarray(ids.ravel(), cupy.int64), ids.shape, "cupy")

    def stream(self, kind: str) -> int:
        """Return the caller's current stream, torch's or CuPy's.

        Raises DeviceError if a CUDA graph is being captured there.
        """
        if kind == "torch" and self._torch_device.type == "cuda":
            stream = self._torch_stream()
        else:
            stream = self._device.current_stream()
        if self._device.capturing(stream):
            raise DeviceError(
                f"table {self.name!r} was used while a CUDA graph is captured: replayed, it would "
                "read what lay in the slots now; read the rows before, and let the graph start "
                "from a copy of them"
            )
        return stream

    def empty(self, kind: str, count: int, nbytes: int) -> Any:
        """Return uninitialised bytes `(count, nbytes)` on the device, of the library asked for."""
        if kind == "torch":
            import torch

            return torch.empty(count, nbytes, dtype=torch.uint8, device=self._torch_device)
        return self._device.borrow(count * nbytes, np.uint8).reshape(count, nbytes)

    def tensor(self, item: Field, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised tensor of a field on the device, `shape + (dim,)`."""
        import torch

        dtype = getattr(torch, item.dtype)
        return torch.empty((*shape, item.dim), dtype=dtype, device=self._torch_device)

    def using(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Enter the store, explain the driver's errors, and check ids if every call does."""
        return _Using(self, write=write)

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool) -> Any:
        """Return bytes `lo:hi` of the records of `ids`; on the host for NumPy ids."""
        with self.using():
            out = self.empty(ids.kind, ids.rows.shape[0], hi - lo)
            self.gpu.read(ids.rows, out, lo, hi, stream=self.stream(ids.kind), admit=admit)
            return self._device.download(out) if ids.kind == "numpy" else out

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> None:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays."""
        with self.using(write=True):
            for lo, hi, data in pieces:
                given = self._device.upload(data) if isinstance(data, np.ndarray) else data
                self.gpu.write(ids.rows, given, lo, hi, stream=self.stream(ids.kind))

    def to_array(self, data: Any, item: Field, ids: Ids) -> Any:
        """Return the bytes of a field as the array that answers these ids."""
        if isinstance(data, np.ndarray) and ids.kind == "numpy":
            return from_bytes(np.ascontiguousarray(data), item, ids.shape, "numpy")
        if ids.kind == "torch":
            import torch

            typed = data.contiguous().view(getattr(torch, item.dtype))
        else:
            typed = _cupy_typed(data, item.dtype)
        return typed.reshape(*ids.shape, item.dim)

    def to_bytes(self, values: Any, item: Field, ids: Ids, name: str) -> Any:
        """Return values for these ids as bytes of a field, checked, where they were."""
        if not is_torch(values) or self._device.torch_name == "cpu":
            return to_bytes(values, item, ids.shape, name)
        import torch

        if values.device.type == "cpu":
            return to_bytes(values, item, ids.shape, name)
        dtype = str(values.dtype).removeprefix("torch.")
        if dtype not in _WIDER[item.dtype]:
            raise InvalidTypeError(
                f"{name} holds {item.dtype}, these values are {dtype}; convert them first: "
                f"values.to(torch.{item.dtype})"
            )
        expected = (*ids.shape, item.dim)
        if tuple(values.shape) != expected:
            raise InvalidInputError(
                f"{name} for these ids is {expected}, not {tuple(values.shape)}"
            )
        plain = values.detach().resolve_conj().resolve_neg().to(getattr(torch, item.dtype))
        return plain.contiguous().reshape(-1, item.dim).view(torch.uint8)

    def zeros(self, like: Any, nbytes: int) -> Any:
        """Return zero bytes, `nbytes` for each row of `like`, of its library and place."""
        if is_torch(like):
            return like.new_zeros((len(like), nbytes))
        return np.zeros((len(like), nbytes), np.uint8)

    def lease(self, ids: Ids) -> DeviceLease:
        """Pin the distinct rows of a batch."""
        return DeviceLease(self, ids)

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Start promoting rows to the device; see `GpuTier.fetch`.

        Where the host tier is a cache itself, rows it lacks come from the disk first, on the
        prefetcher's thread, and ids that are on the device are waited for.
        """
        if self.gpu.host.direct:
            given = self.ids(ids)
            with self.using():
                self.gpu.fetch(given.rows, window, stream=self.stream(given.kind))
            return
        here = is_torch(ids) and getattr(ids, "device", None) == self._torch_device
        on_device = is_cupy(ids) or here
        if on_device:
            rows = on_host(self.ids(ids).rows)
            rows = rows[(rows >= 0) & (rows < self.gpu.rows)]
        else:
            rows = host_ids(ids, self.gpu.rows).rows.copy()  # the caller may go on to change his
        prefetcher.submit(self._fetch_through(rows, window))

    def _fetch_through(self, rows: npt.NDArray[np.int64], window: int) -> Callable[[], None]:
        def fetch() -> None:
            with self.guard.use():
                announce = self.gpu.host.prefetch(rows)
            if announce is not None:  # without the lock: it waits for the disk
                announce()
            self.gpu.await_fetches()
            with self.using():
                self.gpu.await_fetches()  # those of another thread, begun meanwhile
                self.gpu.host.fetch(rows, window)
                self.gpu.foresee(rows, window, stream=self._device.beside)

        return fetch


def _cupy_typed(data: Any, dtype: str) -> Any:
    import cupy

    data = cupy.ascontiguousarray(data)
    if dtype != "bfloat16":
        return data.view(dtype)
    import ml_dtypes

    return data.view(ml_dtypes.bfloat16)
