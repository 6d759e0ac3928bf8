"""A table's access to its tiers from a GPU: torch and CuPy arrays, streams, leases."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

from tierstore._door import Door, Errand
from tierstore._dtypes import DEFAULT_DTYPE, ELEMENT_TYPES, DTypeName, ElementType, check_dtype
from tierstore._scaled import ScaledElements
from tierstore._table.access import Access, Lease
from tierstore._table.address import (
    Ids,
    as_dense,
    host_ids,
    is_cupy,
    is_torch,
    is_transformed,
    on_host,
)
from tierstore._table.prefetch import Prefetcher, Rows
from tierstore._table.using import Part, Together, Using
from tierstore._table.values import (
    Columns,
    Piece,
    check_out,
    converted,
    from_bytes,
    to_bytes,
    unscaling,
    writable_bytes,
)
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.abi import Structure
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import Kernel
from tierstore._tiers.gpu.lease import GpuLease
from tierstore._tiers.gpu.link import FeatureIds
from tierstore._tiers.space import Extent, WholeSpace
from tierstore.errors import (
    ClosedError,
    DeviceError,
    InvalidInputError,
    InvalidTypeError,
)
from tierstore.spec import Field, RecordLayout

_NOWHERE = np.empty(0, np.int64)
_INSIDE = contextlib.nullcontext()


class Apart(NamedTuple):
    """The bytes of a scaled field whose elements and scales are in two places on the device."""

    elements: Any
    scales: Any


class DeviceLease(Lease):
    """A lease on the device. `bound` is at least the number of distinct rows.

    Attributes:
        gpu: the tier's own lease, for kernels that work on records in place.
    """

    _access: DeviceAccess
    device: Device

    def __init__(
        self, access: DeviceAccess, ids: Ids, *into: Any, features: FeatureIds | None = None
    ) -> None:
        """Promote and pin the distinct rows of a batch, within a use; see `GpuTier.lease`."""
        self._access = access
        self._kind = ids.kind
        epoch = access.extent.epoch
        if epoch.ended:
            epoch.check_open()
        self.names: int = epoch.names
        stream = access.stream(ids.kind)
        self.gpu: GpuLease = access.gpu.lease(
            ids.rows, *into, within=access.within, features=features, stream=stream
        )
        self.device = access.device
        self._shape = ids.shape

    @cached_property
    def positions(self) -> Any:
        positions = self.device.export(self.gpu.positions, self._kind)
        return positions.reshape(self._shape)

    @property
    def rows(self) -> Any:
        return self._rows[: self.bound]

    @cached_property
    def _rows(self) -> Any:
        rows, start = self.device.export(self.gpu.rows, self._kind), self._access.extent.start
        return rows - start if start else rows

    @property
    def bound(self) -> int:
        return self.gpu.bound

    @property
    def count(self) -> Any:
        return self.device.export(self.gpu.count.view(np.int32), self._kind)

    @property
    def ended(self) -> bool:
        return self.gpu.ended

    def trim(self, *, wait: bool) -> bool:
        lease = self.gpu
        if lease.trimmed or not (wait or lease.asks):
            lease.check()
            return lease.trimmed
        with self._access.using():
            return lease.trim(wait=wait, stream=self._access.stream(self._kind))

    def launch(
        self,
        kernel: Kernel,
        work: Structure,
        items: int,
        *,
        writes: Sequence[tuple[int, int]] = (),
        positions: tuple[int, int] | None = None,
        ends: bool = False,
    ) -> None:
        access, launch = self._access, self.gpu.launch
        together = access.together_in
        if together is None or together.thread != get_ident() or self._kind != "torch":
            with access.using(write=bool(writes)):
                stream = access.stream(self._kind)
                launch(kernel, work, items, writes, positions, ends=ends, stream=stream)
            return
        try:  # like a `Part` of them, without its calls: a small step makes three launches
            together.check(write=bool(writes))
            launch(kernel, work, items, writes, positions, ends=ends, stream=together.stream)
        except BaseException as error:
            together.explain(error)
            raise

    def read(self, field: str) -> Any:
        return self._copied(self.gpu.gather, field, self._distinct)

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, `ids.shape + (dim,)`; NaN for bad ids."""
        return self._copied(self.gpu.read, field, Ids(_NOWHERE, self._shape, self._kind))

    @property
    def _distinct(self) -> Ids:
        """Ids in place of the distinct rows, for their number and kind only."""
        return Ids(_NOWHERE, (self.bound,), self._kind)

    def _copied(self, copy: Callable[..., None], field: str, ids: Ids) -> Any:
        access = self._access
        item, span = access.layout.field(field), access.layout.span(field)
        out = access.room(item, ids)
        with access.using():
            copy(out, *span, stream=access.stream(self._kind))
            if item.scaled is None:
                return access.answer(out, item, ids)
        return access.answer(out, item, ids)

    def write(self, field: str, values: Any) -> None:
        self.gpu.check()  # before the values are compared with its rows
        access = self._access
        data = access.encoded(values, access.layout.field(field), (self.bound,), field)
        with access.using(write=True):
            stream = access.stream(self._kind)
            given = self.device.upload(data, stream) if isinstance(data, np.ndarray) else data
            self.gpu.scatter(given, *access.layout.span(field), stream=stream)

    def read_columns(self, columns: Columns) -> dict[str, Any]:
        """Return several fields of the distinct rows as `read` does, by name; one launch."""
        fields = {name: columns.layout.field(name) for name in columns.names}
        access, ids = self._access, self._distinct
        out = {name: access.room(item, ids) for name, item in fields.items()}
        self._copy(columns, "gather", out)
        return {
            name: out[name] if columns.is_raw(item) else access.answer(out[name], item, ids)
            for name, item in fields.items()
        }

    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        """Write `(bound, dim)` values over several fields of the distinct rows; two launches."""
        self.gpu.check()  # before the values are compared with its rows
        access, layout = self._access, columns.layout
        stream, given = access.stream(self._kind), {}
        for name in columns.names:
            item, data = layout.field(name), values[name]
            if not columns.is_raw(item):
                data = access.encoded(data, item, (self.bound,), name)
            given[name] = self.device.upload(data, stream) if isinstance(data, np.ndarray) else data
        self._copy(columns, "scatter", given, writes=columns.spans)

    def _copy(
        self,
        columns: Columns,
        way: str,
        arrays: Mapping[str, Any],
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        pointers = {name: self.device.pointer(array) for name, array in arrays.items()}
        kernel, work, items = columns.copy(way, pointers, self.bound)
        self.launch(kernel, work, items, writes=writes)

    def release(self) -> None:
        if self.ended:
            return
        with contextlib.suppress(ClosedError), self._access.using():  # a closed store has no pins
            self.gpu.check()
            self.gpu.release(stream=self._access.stream(self._kind))


class DeviceAccess(Access):
    """Access to a GPU tier.

    Ids that are on the device are checked there, without waiting: rows of bad ids read NaN, writes
    to them are dropped, and the next call that waits raises. With `sync_checks` every call waits.

    Attributes:
        gpu: the tier.
        within: the rows of the table in it, as a range.
        device: where it is.
        name: of the table, for messages.
        sync_checks: every use ends with a check for bad ids, which waits.
        together_in: several uses that a thread has entered.
    """

    def __init__(
        self,
        gpu: GpuTier,
        extent: Extent | WholeSpace,
        layout: RecordLayout,
        door: Door,
        *,
        sync_checks: bool,
    ) -> None:
        """Refer to the rows of a table, or of all, in an open GPU tier."""
        super().__init__(extent, layout, door)
        self.gpu = gpu
        self.within: range = extent.range
        self.name: str = extent.table
        self.device: Device = gpu.device
        self.place: str = gpu.device.torch_name
        self.sync_checks = sync_checks
        self.together_in: Together | None = None

    @functools.cached_property
    def torch_device(self) -> Any:
        """The device as a torch.device."""
        import torch

        return torch.device(self.device.torch_name)

    @functools.cached_property
    def _torch(self) -> Any:
        """The module; an import at every call would take too long."""
        import torch

        return torch

    @functools.cached_property
    def torch_stream(self) -> Callable[[], int]:
        """Returns torch's current stream; the public way makes an object and takes 4 us."""
        import torch

        if self.torch_device.type != "cuda":
            return self.device.current_stream
        index = self.torch_device.index
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:
            return functools.partial(raw, index)
        return lambda: int(torch.cuda.current_stream(index).cuda_stream)

    def stream(self, kind: str) -> int:
        """Return the caller's current stream, torch's or CuPy's.

        Raises DeviceError if a CUDA graph is being captured there.
        """
        together = self.together_in
        if together is not None and together.thread == get_ident() and kind == "torch":
            return together.stream
        stream = self.any_stream(kind)
        if self.device.capturing(stream):
            raise self.captured()
        return stream

    def captured(self) -> DeviceError:
        """Return the error for a use within a graph."""
        return DeviceError(
            f"table {self.name!r} was used while a CUDA graph is captured: replayed, it would "
            "read what is in the slots now; use table.read_into(ids, out), which a graph can "
            "contain, or read the rows before"
        )

    def any_stream(self, kind: str) -> int:
        """Return the caller's current stream, also where a graph is captured."""
        return self.torch_stream() if kind == "torch" else self.device.current_stream()

    def empty(self, kind: str, count: int, nbytes: int) -> Any:
        """Return uninitialised bytes `(count, nbytes)` on the device, of the requested library."""
        if kind == "torch":
            import torch

            return torch.empty(count, nbytes, dtype=torch.uint8, device=self.torch_device)
        return self.device.borrow(count * nbytes, np.uint8).reshape(count, nbytes)

    def tensor(self, item: Field, shape: tuple[int, ...]) -> Any:
        """Return an uninitialised tensor of a field on the device, `shape + (dim,)`."""
        dtype = item.element.torch_dtype()
        return self._torch.empty((*shape, item.dim), dtype=dtype, device=self.torch_device)

    def room(self, item: Field, ids: Ids) -> Any:
        """Return room on the device for a field of some rows; for a scaled field, for bytes."""
        if ids.kind == "torch" and item.scaled is None:
            return self.tensor(item, ids.shape)
        return self.empty(ids.kind, math.prod(ids.shape), item.nbytes)

    def answer(self, out: Any, item: Field, ids: Ids) -> Any:
        """Return such room, once filled, as the array for these ids."""
        if ids.kind == "torch" and item.scaled is None:
            return out
        if ids.kind == "numpy":
            out = self.device.download(out)
        return self.decoded(out, item, ids)

    def using(self, *, write: bool = False) -> AbstractContextManager[Any]:
        """Enter the store, explain the driver's errors, and check ids if every call does."""
        together = self.together_in
        if together is not None and together.thread == get_ident():
            return Part(together, write=write)
        return Using(self, write=write)

    def together(self) -> AbstractContextManager[Any]:
        """Enter the store once for several uses of this thread, in torch's current stream."""
        together = self.together_in
        if together is not None and together.thread == get_ident():
            return _INSIDE
        return Together(self)

    def decoded(
        self, data: Any, item: Field, ids: Ids, dtype: DTypeName | None = None, out: Any = None
    ) -> Any:
        """Return the bytes of a field as the array for these ids; see `Access.decoded`.

        Of a scaled field they may be `Apart`.
        """
        if item.scaled is not None and ids.kind != "numpy":
            data, scales = data if isinstance(data, Apart) else (data, None)
            rows = self._unscaled(data, item.scaled, ids.kind, dtype, apart=scales, out=out)
            return rows.reshape(*ids.shape, item.dim)
        rows = self._typed(data, item, ids)
        return rows if dtype is None else converted(rows, dtype)

    def _unscaled(
        self,
        data: Any,
        scaled: ScaledElements,
        kind: str,
        dtype: DTypeName | None,
        *,
        apart: Any,
        out: Any,
    ) -> Any:
        """Return the rows of a scaled field on the device, rounded once to `dtype`."""
        wanted = DEFAULT_DTYPE if dtype is None else check_dtype(dtype)
        element = ELEMENT_TYPES[wanted if ELEMENT_TYPES[wanted].kernel else DEFAULT_DTYPE]
        count = data.shape[0]
        if kind == "torch":
            import torch

            data = data.contiguous()
            if self.device.pointer(data) % 16:  # one row of a wider piece
                data = data.clone()
            fits = out is not None and element.name == wanted and not self.device.pointer(out) % 16
            shape, own = (count, scaled.dim), element.torch_dtype()
            if fits:
                out = out.view(shape)
            else:
                out = torch.empty(shape, dtype=own, device=self.torch_device)
        else:
            import cupy

            data = cupy.ascontiguousarray(data)
            if self.device.pointer(data) % 16:
                data = data.copy()
            out = element.to_cupy(cupy.empty((count, scaled.dim), element.stored))
        if count:
            with self.using():
                self._unscale(data, out, scaled, element, self.stream(kind), apart)
        return out if element.name == wanted else converted(out, wanted)

    def _unscale(
        self,
        data: Any,
        out: Any,
        scaled: ScaledElements,
        element: ElementType,
        stream: int,
        apart: Any,
    ) -> None:
        """Write rows of a scaled field, as bytes at a multiple of 16, to `out` as floats."""
        rows, to = self.device.pointer(data), self.device.pointer(out)
        kernel, arguments = unscaling(scaled, rows, to, len(data), element, apart)
        self.gpu.launcher.launch(kernel, arguments, len(data) * scaled.dim, stream)

    def _typed(self, data: Any, item: Field, ids: Ids) -> Any:
        if isinstance(data, np.ndarray) and ids.kind == "numpy":
            return from_bytes(data, item, ids)
        if ids.kind == "torch":
            flat = data.contiguous().view(-1)  # of a single row, strides may be anything
            typed = flat.view(item.element.torch_dtype())
        else:
            import cupy

            typed = item.element.to_cupy(cupy.ascontiguousarray(data))
        return typed.reshape(*ids.shape, item.dim)

    def encoded(self, values: Any, item: Field, shape: tuple[int, ...], name: str) -> Any:
        """Return values for ids as checked bytes of a field, in the same place."""
        here = is_torch(values) and values.device.type == self.torch_device.type
        if not here or item.scaled is not None:
            return to_bytes(values, item, shape, name)
        import torch

        dtype = str(values.dtype).removeprefix("torch.")
        if not item.element.accepts(dtype):
            raise InvalidTypeError(
                f"{name} holds {item.dtype}, these values are {dtype}; convert them first: "
                f"values.to(torch.{item.dtype})"
            )
        expected = (*shape, item.dim)
        if tuple(values.shape) != expected:
            raise InvalidInputError(
                f"{name} for these ids is {expected}, not {tuple(values.shape)}"
            )
        plain = as_dense(values, f"values of {name}").detach()
        if dtype != item.dtype or not plain.is_contiguous() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg().to(item.element.torch_dtype()).contiguous()
        if not plain.numel():  # of any strides
            return plain.new_empty((0, item.nbytes), dtype=torch.uint8)
        return plain.reshape(-1, item.dim).view(torch.uint8)

    def ids(self, ids: object) -> Ids:
        """Return ids as flat int64, in place; those on the host are checked."""
        if type(ids) is not np.ndarray:
            if is_torch(ids):
                return self.torch_ids(ids)
            if is_cupy(ids):
                return self._cupy_ids(ids)
        return self._host_ids(ids)

    def _host_ids(self, ids: object) -> Ids:
        """Check ids on the host; return the copy that a prefetch has on the device, if any."""
        found = host_ids(ids, len(self.within))
        rows = self.gpu.prefetched_for(found.rows, self.within)
        return found if rows is None else Ids(rows, found.shape, found.kind)

    def torch_ids(self, ids: Any) -> Ids:
        """Check a tensor as `ids` does."""
        import torch

        here = self.torch_device
        if ids.layout is not torch.strided or ids.is_nested or is_transformed(ids):
            as_dense(ids, "the ids")
        if ids.dtype is torch.int64 and ids.device == here and ids.ndim == 1:
            return Ids(ids.contiguous(), ids.shape, "torch")
        if ids.device != here and ids.device.type == "cpu":
            return self._host_ids(ids)
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
        return Ids(ids.reshape(-1).to(torch.int64).contiguous(), shape, "torch")

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

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        with self.using():
            self.extent.epoch.check_open()
            there = into is not None and not isinstance(into, np.ndarray)
            out = into if there else self.empty(ids.kind, ids.rows.shape[0], hi - lo)
            stream = self.stream(ids.kind)
            self._read_parts(ids.rows, out, lo, hi, admit=admit, stream=stream)
            return self.device.download(out) if ids.kind == "numpy" else out

    def _read_parts(
        self, rows: Any, out: Any, lo: int, hi: int, *, admit: bool, stream: int
    ) -> None:
        """Copy bytes `lo:hi` of the tier's record of each row into `out`."""
        for part, first in self.gpu.parts(rows):
            self.gpu.read(
                part, out, lo, hi, first=first, admit=admit, within=self.within, stream=stream
            )

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> bool:
        with self.using(write=True):
            self.extent.epoch.check_open()
            if ids.moved:
                return False
            for lo, hi, data in pieces:
                kind = "torch" if ids.kind == "numpy" and is_torch(data) else ids.kind
                stream = self.stream(kind)
                given = self.device.upload(data, stream) if isinstance(data, np.ndarray) else data
                for part, first in self.gpu.parts(ids.rows):
                    self.gpu.write(
                        part, given, lo, hi, first=first, within=self.within, stream=stream
                    )
        return True

    def capture(self, ids: Any, out: Any, name: str) -> bool:
        """Make the graph under capture read a field into `out`; False if there is none.

        Raises DeviceError for ids that a graph cannot read, and before the first read outside of
        one.
        """
        here = is_torch(ids) and ids.device == self.torch_device
        stream = self.any_stream("torch" if here else "numpy")
        if not self.device.capturing(stream):
            with self.door.use(), self.using():  # replays read the host tier, errands change it
                self.gpu.prepare_replays(stream)
            return False
        import torch

        if not here or ids.dtype is not torch.int64 or not ids.is_contiguous():
            raise DeviceError(
                f"a CUDA graph reads table {self.name!r} by contiguous int64 ids on "
                f"{self.torch_device}"
            )
        if not self.gpu.replays.ready:
            raise DeviceError(
                f"call table.read_into(ids, out) of table {self.name!r} once before the capture, "
                "which reserves memory"
            )
        self.door.check()
        self.extent.epoch.check_open()
        item, batch = self.layout.field(name), Ids(ids.view(-1), tuple(ids.shape), "torch")
        kind = check_out(out, item, batch, str(self.torch_device), name)
        lo, hi = self.layout.span(name)
        count, scaled = len(batch.rows), item.scaled
        if scaled is not None and (kind.kernel is None or self.device.pointer(out) % 16):
            raise InvalidInputError(
                f"out for {name} in a CUDA graph is float32, bfloat16 or float16, at a multiple of "
                f"16 bytes; this is {kind.name}"
            )
        if not count:
            return True
        if scaled is None:
            self._capture_bytes(batch.rows, writable_bytes(out, item), lo, hi, stream)
            return True
        data, apart = self._capture_scaled(batch.rows, scaled, lo, hi, stream)
        rows, to = self.device.pointer(data), self.device.pointer(out)
        kernel, arguments = unscaling(scaled, rows, to, count, kind, apart)
        # Not `launch`: its markers of work outside a graph cannot be in one.
        self.gpu.launcher.start(kernel, arguments, stream, count * scaled.dim)
        return True

    def _capture_bytes(self, rows: Any, out: Any, lo: int, hi: int, stream: int) -> None:
        """Make a graph read bytes `lo:hi` of the records of `rows` into `out`."""
        self.gpu.capture(rows, out, lo, hi, within=self.within, stream=stream)

    def _capture_scaled(
        self, rows: Any, scaled: ScaledElements, lo: int, hi: int, stream: int
    ) -> tuple[Any, Any]:
        """Make a graph read a scaled field to memory of its own; return that memory.

        Also return the `Scales`, if they are separate.
        """
        data = self.empty("torch", len(rows), hi - lo)
        self._capture_bytes(rows, data, lo, hi, stream)
        return data, None

    def adapt(self) -> None:
        """Admit the rows that replays of graphs have read; see `GpuTier.adapt`."""
        with self.using():
            self.extent.epoch.check_open()
            self.gpu.adapt(self.stream("torch"))

    def lease(
        self, ids: Ids, features: FeatureIds | None = None, into: Sequence[Any] = ()
    ) -> DeviceLease:
        """Pin the distinct rows of a batch; on the device, ids may be those of `features`.

        `into` are memory on the device, and the bytes of the record of each id to copy there.
        """
        together = self.together_in
        if together is None or together.thread != get_ident():
            with self.using():
                return DeviceLease(self, ids, *into, features=features)
        try:  # see `DeviceLease.launch`
            together.check(write=False)
            return DeviceLease(self, ids, *into, features=features)
        except BaseException as error:
            together.explain(error)
            raise

    def lease_and_read(
        self, ids: Ids, field: str, features: FeatureIds | None = None
    ) -> tuple[DeviceLease, Any]:
        """Pin the distinct rows, and return one field of the row of each id; the same launches.

        The ids may be those of `features`, on the device.
        """
        columns = self.columns[field,]
        item, lo, hi = columns.items[0], columns.lo, columns.hi
        if ids.kind == "torch" and item.scale is None:
            shape, dtype = (*ids.shape, item.dim), columns.torch_dtype
            out = self._torch.empty(shape, dtype=dtype, device=self.torch_device)
            return self.lease(ids, features, (out, lo, hi)), out
        out = self.room(item, ids)
        with self.using():
            lease = DeviceLease(self, ids, out, lo, hi, features=features)
            if item.scaled is None:
                return lease, self.answer(out, item, ids)
        return lease, self.answer(out, item, ids)

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Start promoting rows to the device; see `GpuTier.fetch`.

        Where the host tier is a cache itself, rows it lacks come from the disk first, on the
        prefetcher's thread, and ids that are on the device are waited for. Once graphs read the
        table, all is done before this returns, in the order of the stream.
        """
        replayed = self.gpu.replays.ready
        if self.gpu.host.direct:
            given = self.ids(ids)
            with self.using():
                self.extent.epoch.check_open()
                stream = self.stream(given.kind)
                if replayed:
                    self.gpu.bring(given.rows, within=self.within, stream=stream)
                else:
                    self.gpu.fetch(given.rows, window, within=self.within, stream=stream)
            return
        here = is_torch(ids) and getattr(ids, "device", None) == self.torch_device
        on_device = is_cupy(ids) or here
        if on_device:
            rows = on_host(self.ids(ids).rows)
            # As unsigned, a negative id is huge.
            if rows.size and np.maximum.reduce(rows.view(np.uint64)) >= len(self.within):
                rows = rows[(rows >= 0) & (rows < len(self.within))]
        else:
            rows = host_ids(ids, len(self.within)).rows.copy()  # the ids are the caller's

        gpu, epoch, held = self.gpu, self.extent.epoch, self.extent.in_space(rows)
        if replayed:
            with self.using():
                epoch.check_open()
                gpu.host.fetch(held, window)
                if (gpu.host.map.lookup(held) < 0).any():  # pins of earlier ones make room
                    gpu.host.fetch(held[:0], 1)
                    gpu.host.fetch(held, window)
                gpu.check()
            return

        def look(distinct: Rows) -> Callable[[], None] | None:
            if epoch.ended:
                return None
            advice = gpu.host.stage(distinct)

            def advise() -> None:
                if advice is not None:
                    advice()
                gpu.await_fetches()  # so the host tier does not wait for them under its lock

            return advise

        def fetch(distinct: Rows) -> None:
            with Errand(self.door):
                if epoch.ended or gpu.replays.ready:
                    return
                before = self.device.enter()
                try:
                    gpu.host.fetch(distinct, window)
                finally:
                    self.device.leave(before)
            with self.using():
                if not epoch.ended:
                    stream = self.device.beside
                    gpu.prefetch_for(rows, window, within=self.within, stream=stream)

        prefetcher.submit(held, look, fetch)
