"""How a table reaches a GPU tier: torch tensors and CuPy arrays on the device, NumPy by way of it.

Work goes into the caller's current stream and nothing waits, but for NumPy, whose arrays are ready
when a call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tierstore.errors import DeviceError, InvalidTypeError
from tierstore.table.access import Piece
from tierstore.table.device_arrays import DeviceArrays
from tierstore.table.device_lease import DeviceLease
from tierstore.table.ids import Ids, check_range, host_ids, is_cupy, is_torch, on_host
from tierstore.table.prefetch import Prefetcher

__all__ = ["DeviceAccess"]


class DeviceAccess(DeviceArrays):
    """Access to a GPU tier; see `Access`.

    Ids that are on the device are checked there, without waiting: rows of bad ids read NaN, writes
    to them are dropped, and the next call that waits raises. With `sync_checks` every call does.
    """

    def ids(self, ids: object, *, later: bool = False) -> Ids:
        """Return ids as flat int64, where they are; those on the host are checked here, or later.

        Checked as they go, in parts, the first of them are on their way before the others are read.
        """
        if type(ids) is not np.ndarray:
            if is_torch(ids):
                return self._torch_ids(ids, later=later)
            if is_cupy(ids):
                return self._cupy_ids(ids)
        return self._host_ids(ids, later=later)

    def _host_ids(self, ids: object, *, later: bool) -> Ids:
        """Take ids that are on the host; where a prefetch has them on the device, return those."""
        found = host_ids(ids, self.gpu.rows, later=later)
        rows = self.gpu.foreseen(found.rows)
        return found if rows is None else Ids(rows, found.shape, found.kind)

    def _torch_ids(self, ids: Any, *, later: bool) -> Ids:
        import torch

        here = self.torch_device
        if ids.device != here and ids.device.type == "cpu":
            return self._host_ids(ids, later=later)
        if ids.dtype is not torch.int64 and (
            ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex()
        ):
            raise InvalidTypeError(f"row ids are whole numbers, not {ids.dtype}")
        shape = tuple(ids.shape)
        if ids.device != here:
            raise DeviceError(
                f"the ids are on {ids.device}, table {self.name!r} is on {here}; move them: "
                f"ids.to({str(here)!r})"
            )
        if ids.dtype is not torch.int64 or len(shape) != 1 or not ids.is_contiguous():
            ids = ids.reshape(-1).to(torch.int64).contiguous()
        return Ids(ids, shape, "torch")

    def _cupy_ids(self, ids: Any) -> Ids:
        import cupy

        if ids.dtype.kind not in "iu":
            raise InvalidTypeError(f"row ids are whole numbers, not {ids.dtype}")
        if f"cuda:{ids.device.id}" != self.device.torch_name:
            raise DeviceError(
                f"the ids are on cuda:{ids.device.id}, table {self.name!r} is on "
                f"{self.device.torch_name}"
            )
        return Ids(cupy.ascontiguousarray(ids.ravel(), cupy.int64), ids.shape, "cupy")

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool) -> Any:
        """Return bytes `lo:hi` of the records of `ids`; on the host for NumPy ids."""
        with self.using():
            self.gpu.epoch.check_open()
            out = self.empty(ids.kind, ids.rows.shape[0], hi - lo)
            stream = self.stream(ids.kind)
            for part, first in self.gpu.parts(ids.rows):
                if not ids.checked:
                    check_range(part, self.gpu.rows, first)
                self.gpu.read(part, out, lo, hi, first=first, admit=admit, stream=stream)
            return self.device.download(out) if ids.kind == "numpy" else out

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> None:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays."""
        with self.using(write=True):
            self.gpu.epoch.check_open()
            for lo, hi, data in pieces:
                kind = "torch" if ids.kind == "numpy" and is_torch(data) else ids.kind
                stream = self.stream(kind)
                given = self.device.upload(data, stream) if isinstance(data, np.ndarray) else data
                for part, first in self.gpu.parts(ids.rows):
                    self.gpu.write(part, given, lo, hi, first=first, stream=stream)

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
                self.gpu.epoch.check_open()
                self.gpu.fetch(given.rows, window, stream=self.stream(given.kind))
            return
        here = is_torch(ids) and getattr(ids, "device", None) == self.torch_device
        on_device = is_cupy(ids) or here
        if on_device:
            rows = on_host(self.ids(ids).rows)
            rows = rows[(rows >= 0) & (rows < self.gpu.rows)]
        else:
            rows = host_ids(ids, self.gpu.rows).rows.copy()  # the ids are the caller's

        gpu, epoch = self.gpu, self.gpu.epoch

        def look() -> Callable[[], None] | None:
            if epoch.ended:
                return None
            advice = gpu.host.prefetch(rows)

            def advise() -> None:
                if advice is not None:
                    advice()
                gpu.await_fetches()  # nor does the host tier wait for them within the guard

            return advise

        def fetch() -> None:
            with self.using():
                if not epoch.ended:
                    gpu.host.fetch(rows, window)
                    gpu.foresee(rows, window, stream=self.device.beside)

        prefetcher.submit(look, fetch)
