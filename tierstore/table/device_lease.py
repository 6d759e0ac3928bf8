"""A lease on a GPU tier as a table gives it: fields as arrays, and kernels on records in place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tierstore.table.access import check_lease
from tierstore.table.ids import Ids
from tierstore.tier.gpu.lease import GpuLease
from tierstore.transfer import Device, Kernel

if TYPE_CHECKING:
    from tierstore.table.device_access import DeviceAccess

__all__ = ["DeviceLease"]


class DeviceLease:
    """A lease on the device; see `Lease`. `bound` is at least the number of distinct rows.

    Attributes:
        positions: int32, in the shape of the ids, of their kind; -1 for ids outside the table.
        gpu: the tier's own lease, for kernels that work on records where they are.
    """

    def __init__(self, access: DeviceAccess, ids: Ids) -> None:
        """Promote and pin the distinct rows of a batch."""
        self._access = access
        self._kind = ids.kind
        with access.using():
            self.gpu: GpuLease = access.gpu.lease(ids.rows, stream=access.stream(ids.kind))
        self.bound = self.gpu.bound
        self._ids = Ids(np.empty(0, np.int64), (self.bound,), ids.kind)
        self._batch = ids
        self._open = True
        positions = access.gpu.device.export(self.gpu.positions, ids.kind)
        self.positions = positions.reshape(ids.shape)

    @property
    def fresh(self) -> bool:
        """Whether it holds what the rows are now; see `GpuLease.fresh`."""
        return self.gpu.fresh and not self._access.closed

    @property
    def device(self) -> Device:
        """Where it is, which compiles kernels for `run`."""
        return self._access.gpu.device

    def trim(self, *, wait: bool) -> bool:
        """Lower `bound` to the number of distinct rows if that is known by now, or wait for it."""
        self._check()
        with self.device.current():
            trimmed = self.gpu.trim(wait=wait, stream=self._access.stream(self._kind))
        self.bound = self.gpu.bound
        self._ids = Ids(self._ids.rows, (self.bound,), self._kind)
        return trimmed

    def run(
        self,
        kernel: tuple[Kernel, int],
        work: ctypes.Structure,
        items: int,
        *,
        writes: Iterable[str] = (),
        positions: tuple[int, int] | None = None,
    ) -> None:
        """Launch a kernel on the records, which `writes` the fields of these names.

        See `GpuLease.run`.
        """
        self._check()
        spans = [self._access.layout.span(field) for field in writes]
        stream = self._access.stream(self._kind)
        with self._access.using(write=bool(spans)):
            self.gpu.run(kernel, work, items, writes=spans, positions=positions, stream=stream)

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""
        self._check()
        access, item = self._access, self._access.layout.field(field)
        out = access.empty(self._kind, self.bound, item.nbytes)
        with access.using():
            self.gpu.gather(out, *access.layout.span(field), stream=access.stream(self._kind))
            if self._kind == "numpy":
                out = access.gpu.device.download(out)
        return access.to_array(out, item, self._ids)

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, `ids.shape + (dim,)`; NaN for bad ids."""
        self._check()
        access, item = self._access, self._access.layout.field(field)
        out = access.empty(self._kind, len(self._batch.rows), item.nbytes)
        with access.using():
            self.gpu.read(out, *access.layout.span(field), stream=access.stream(self._kind))
            if self._kind == "numpy":
                out = access.gpu.device.download(out)
        return access.to_array(out, item, self._batch)

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""
        self._check()
        access = self._access
        data = access.to_bytes(values, access.layout.field(field), self._ids, field)
        with access.using(write=True):
            given = access.gpu.device.upload(data) if isinstance(data, np.ndarray) else data
            self.gpu.scatter(given, *access.layout.span(field), stream=access.stream(self._kind))

    def release(self) -> None:
        """End the lease; harmless when repeated."""
        if self._open:
            self._open = False
            if not self._access.guard.closed and not self._access.closed:
                with self._access.using():
                    self.gpu.release(stream=self._access.stream(self._kind))

    def _check(self) -> None:
        check_lease(self._open, self._access)

    def __enter__(self) -> DeviceLease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the lease."""
        self.release()
