"""A lease on a GPU tier as a table gives it: fields as arrays, and kernels on records in place."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from tierstore.errors import ClosedError
from tierstore.spec import Field
from tierstore.table.columns import Columns
from tierstore.table.device_arrays import DeviceArrays
from tierstore.table.ids import Ids
from tierstore.tier.gpu.lease import GpuLease
from tierstore.transfer import Device, Kernel

__all__ = ["DeviceLease"]


class DeviceLease:
    """A lease on the device; see `Lease`. `bound` is at least the number of distinct rows.

    Attributes:
        gpu: the tier's own lease, for kernels that work on records where they are.
    """

    def __init__(self, access: DeviceArrays, ids: Ids) -> None:
        """Promote and pin the distinct rows of a batch."""
        self._access = access
        self._kind = ids.kind
        with access.using():
            access.gpu.epoch.check_open()
            self.gpu: GpuLease = access.gpu.lease(ids.rows, stream=access.stream(ids.kind))
        nowhere = np.empty(0, np.int64)
        self._ids = Ids(nowhere, (self.gpu.bound,), ids.kind)
        self._batch = Ids(nowhere, ids.shape, ids.kind)

    @cached_property
    def positions(self) -> Any:
        """Int32, in the shape of the ids, of their kind; -1 for ids outside the table."""
        positions = self.device.export(self.gpu.positions, self._kind)
        return positions.reshape(self._batch.shape)

    @property
    def rows(self) -> Any:
        """The id of each distinct row, int64 `(bound,)`; undefined behind the distinct rows.

        The lease's own, whatever becomes of the ids it was asked for.
        """
        return self._rows[: self.bound]

    @cached_property
    def _rows(self) -> Any:
        return self.device.export(self.gpu.rows, self._kind)

    @property
    def bound(self) -> int:
        """The rows of a compact array; see `Lease`."""
        return self.gpu.bound

    @property
    def ended(self) -> bool:
        """Whether the lease was released, or its epoch has ended."""
        return self.gpu.ended

    @property
    def device(self) -> Device:
        """Where it is, which compiles kernels for `run`."""
        return self._access.device

    def trim(self, *, wait: bool) -> bool:
        """Lower `bound` to the number of distinct rows if that is known by now, or wait for it."""
        if self.gpu.trimmed:
            self.gpu.check()
            return True
        with self._access.using():
            trimmed = self.gpu.trim(wait=wait, stream=self._access.stream(self._kind))
        if trimmed:
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
        spans = [self._access.layout.span(field) for field in writes]
        stream = self._access.stream(self._kind)
        with self._access.using(write=bool(spans)):
            self.gpu.run(kernel, work, items, writes=spans, positions=positions, stream=stream)

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""
        return self._copied(self.gpu.gather, field, self._ids)

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, `ids.shape + (dim,)`; NaN for bad ids."""
        return self._copied(self.gpu.read, field, self._batch)

    def _copied(self, copy: Callable[..., None], field: str, ids: Ids) -> Any:
        access = self._access
        item, span = access.layout.field(field), access.layout.span(field)
        out = self._empty(item, ids)
        with access.using():
            copy(out, *span, stream=access.stream(self._kind))
            return self._answer(out, item, ids)

    def _empty(self, item: Field, ids: Ids) -> Any:
        """Return room on the device for a field of some rows."""
        if self._kind == "torch":
            return self._access.tensor(item, ids.shape)
        return self._access.empty(self._kind, math.prod(ids.shape), item.nbytes)

    def _answer(self, out: Any, item: Field, ids: Ids) -> Any:
        """Return what was copied there as an array of the ids' kind."""
        if self._kind == "torch":
            return out
        if self._kind == "numpy":
            out = self.device.download(out)
        return self._access.to_array(out, item, ids)

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""
        self.gpu.check()  # before the values are compared with its rows
        access = self._access
        data = access.to_bytes(values, access.layout.field(field), self._ids, field)
        with access.using(write=True):
            stream = access.stream(self._kind)
            given = self.device.upload(data, stream) if isinstance(data, np.ndarray) else data
            self.gpu.scatter(given, *access.layout.span(field), stream=stream)

    def read_columns(self, columns: Columns) -> dict[str, Any]:
        """Return several fields of the distinct rows as `read` does, by name; one launch."""
        fields = {name: columns.layout.field(name) for name in columns.names}
        out = {name: self._empty(item, self._ids) for name, item in fields.items()}
        self._copy(columns, "gather", out)
        return {name: self._answer(out[name], item, self._ids) for name, item in fields.items()}

    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        """Write `(bound, dim)` values over several fields of the distinct rows; two launches."""
        self.gpu.check()  # before the values are compared with its rows
        access, layout = self._access, columns.layout
        stream, given = access.stream(self._kind), {}
        for name in columns.names:
            data = access.to_bytes(values[name], layout.field(name), self._ids, name)
            given[name] = self.device.upload(data, stream) if isinstance(data, np.ndarray) else data
        self._copy(columns, "scatter", given, writes=columns.names)

    def _copy(
        self, columns: Columns, way: str, arrays: Mapping[str, Any], writes: Iterable[str] = ()
    ) -> None:
        pointers = {name: self.device.pointer(array) for name, array in arrays.items()}
        kernel, work, items = columns.copy(self.device, way, pointers, self.bound)
        self.run(kernel, work, items, writes=writes)

    def release(self) -> None:
        """End the lease; harmless when repeated."""
        if self.ended:
            return
        with contextlib.suppress(ClosedError), self._access.using():  # a closed store has no pins
            self.gpu.check()
            self.gpu.release(stream=self._access.stream(self._kind))

    def __enter__(self) -> DeviceLease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the lease."""
        self.release()
