"""A GPU tier as its table uses it: under the store's lock, in the caller's stream, as arrays.

It knows fields, but neither ids nor leases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from tierstore.errors import DeviceError, InvalidInputError, InvalidTypeError
from tierstore.guard import Guard, Use
from tierstore.spec import Field, RecordLayout
from tierstore.table.driver import explained
from tierstore.table.ids import Ids, is_torch
from tierstore.table.values import from_bytes, to_bytes
from tierstore.tier.gpu import GpuTier

__all__ = ["DeviceArrays"]

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

    def __init__(self, access: DeviceArrays, *, write: bool) -> None:
        super().__init__(access.guard, write=write)
        self._access = access
        self._before = -1

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._before = self._access.device.enter()
        except BaseException as error:
            self._end(None, error)
        return self

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
        try:
            self._access.device.leave(self._before)
        except Exception as failed:
            found = found or failed
        self._end(error, found)

    def _end(self, error: BaseException | None, found: BaseException | None) -> None:
        """Let the next thread in, and raise what was found where the body did not raise that."""
        if found is None:
            super().__exit__()
            return
        meaning = explained(found, self._access.name) or found
        super().__exit__(type(meaning), meaning)
        if meaning is not error:
            raise meaning from (found if meaning is not found else None)


class DeviceArrays:
    """What every access to a GPU tier needs.

    Attributes:
        gpu: the tier.
        device: where it is.
        layout: of its records.
        guard: who may use the store.
        name: of the table, for messages.
        sync_checks: every use ends by looking for bad ids, which waits.
    """

    def __init__(
        self, gpu: GpuTier, layout: RecordLayout, guard: Guard, name: str, *, sync_checks: bool
    ) -> None:
        """Refer to an open GPU tier."""
        self.gpu = gpu
        self.layout = layout
        self.guard = guard
        self.name = name
        self.device = gpu.device
        self.sync_checks = sync_checks

    @functools.cached_property
    def torch_device(self) -> Any:
        """The device as torch has it."""
        import torch

        return torch.device(self.device.torch_name)

    @functools.cached_property
    def _torch_stream(self) -> Callable[[], int]:
        """Asks torch for its current stream; the public way makes an object and costs 4 us."""
        import torch

        index = self.torch_device.index
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:
            return lambda: int(raw(index))
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)

    def stream(self, kind: str) -> int:
        """Return the caller's current stream, torch's or CuPy's.

        Raises DeviceError if a CUDA graph is being captured there.
        """
        if kind == "torch" and self.torch_device.type == "cuda":
            stream = self._torch_stream()
        else:
            stream = self.device.current_stream()
        if self.device.capturing(stream):
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

            return torch.empty(count, nbytes, dtype=torch.uint8, device=self.torch_device)
        return self.device.borrow(count * nbytes, np.uint8).reshape(count, nbytes)

    def tensor(self, item: Field, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised tensor of a field on the device, `shape + (dim,)`."""
        import torch

        dtype = getattr(torch, item.dtype)
        return torch.empty((*shape, item.dim), dtype=dtype, device=self.torch_device)

    def using(self, *, write: bool = False) -> Use:
        """Enter the store, explain the driver's errors, and check ids if every call does."""
        return _Using(self, write=write)

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
        if not is_torch(values) or values.device.type != self.torch_device.type:
            return to_bytes(values, item, ids.shape, name)
        import torch

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
        plain = values.detach()
        if dtype != item.dtype or not plain.is_contiguous() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg().to(getattr(torch, item.dtype)).contiguous()
        if not plain.numel():  # of any strides
            return plain.new_empty((0, item.nbytes), dtype=torch.uint8)
        return plain.reshape(-1, item.dim).view(torch.uint8)


def _cupy_typed(data: Any, dtype: str) -> Any:
    import cupy

    data = cupy.ascontiguousarray(data)
    if dtype != "bfloat16":
        return data.view(dtype)
    import ml_dtypes

    return data.view(ml_dtypes.bfloat16)
