"""How a table reaches its tiers from the host: NumPy arrays, and torch tensors on the CPU.

An access converts arguments into rows and bytes, passes them to the nearest tier, and converts
bytes into results. `DeviceAccess` does the same on a GPU; a table has one of the two.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore._door import Call, Door, Use, interrupts_deferred, may_be_interrupted
from tierstore._dtypes import DTypeName
from tierstore._rowcopy import Groups
from tierstore._table.address import Ids, host_ids, last_of_each
from tierstore._table.prefetch import Prefetcher, Rows
from tierstore._table.recycled import LARGE, Recycled
from tierstore._table.values import Columns, from_bytes, to_bytes
from tierstore._tiers.base import lease_ended
from tierstore._tiers.gpu.abi import Structure
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import Kernel
from tierstore._tiers.host import APART_BYTES, Change
from tierstore._tiers.space import Extent, Space, WholeSpace
from tierstore.errors import ClosedError, DeviceError
from tierstore.spec import Field, RecordLayout

_INT64 = np.dtype(np.int64)
_NOTHING = nullcontext()

Piece = tuple[int, int, Any]
"""A byte range `lo, hi` of the records and its bytes `(n, hi - lo)`."""


class Lease(Protocol):
    """The distinct records of a batch, kept in place during a computation.

    Every computation on rows uses a lease: `read` the fields it needs as compact arrays, `write`
    the changed ones, `release`. Rows that find no room in the nearest tier are read and written in
    the tier below, with the same results: every later read and commit contains the writes of a
    lease, and a lease reads what others wrote meanwhile. It excludes nobody: threads that compute
    new rows from the old ones of each other share a lock of their own.

    A lease ends at `release`, at `store.rollback()`, and when its table gets other fields or rows,
    or another version. From then on `trim`, reads and writes raise ClosedError; `release` does
    nothing more.
    """

    @property
    def bound(self) -> int:
        """The rows of a compact array; on a GPU more than the distinct rows before `trim`.

        Rows after the distinct ones are undefined, and are not written.
        """

    @property
    def rows(self) -> Any:
        """The id of each distinct row, int64 `(bound,)`; on a GPU of the ids' kind."""

    @property
    def count(self) -> Any:
        """The number of distinct rows: a number on the host, int32 `(1,)` on a GPU."""

    @property
    def positions(self) -> Any:
        """For each id of the batch, in its shape, the index of its row in compact arrays."""

    @property
    def groups(self) -> Groups | None:
        """The ids grouped by row; None on a GPU."""

    @property
    def device(self) -> Device | None:
        """The device with the records, for kernels; None on the host."""

    @property
    def ended(self) -> bool:
        """Whether the lease has ended."""

    @property
    def names(self) -> int:
        """The number of names with which it began; see `Epoch.names_hold`."""

    def trim(self, *, wait: bool) -> bool:
        """Lower `bound` to the number of distinct rows if that is known by now, or wait for it.

        The first call requests the number from a GPU. Returns whether `bound` is the number.
        """

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, a fresh array `ids.shape + (dim,)`."""

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""

    def read_columns(self, columns: Columns) -> dict[str, Any]:
        """Return several fields of the distinct rows as `read` does, by name."""

    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        """Write `(bound, dim)` values over several fields of the distinct rows."""

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
        """Launch a kernel on the records in place, if there is a `device`.

        Args:
            kernel: of a source that extends `abi.RECORDS`.
            work: its second structure, copied by the launch.
            items: the amount of work, which determines the kernel's grid.
            writes: the byte ranges of records that it writes.
            positions: address and number of positions other than those of the lease's ids.
            ends: whether the lease ends with it; it calls `unpin` for each record.
        """

    def release(self) -> None:
        """End the lease; harmless when repeated."""

    def __enter__(self) -> Lease:
        """Return the lease itself."""

    def __exit__(self, *error: object) -> None:
        """End the lease."""


class Access(Protocol):
    """The seam between a table and the side of its nearest tier.

    A call that had to wait until its table got other tiers raises ClosedError.
    """

    def ids(self, ids: object) -> Ids:
        """Check ids and bring them to this side."""

    def using(self, *, write: bool = False) -> AbstractContextManager[Any]:
        """Enter the store as a read of this side does."""

    def together(self) -> AbstractContextManager[Any]:
        """Defer interrupts for several calls of this thread; on a GPU enter the store once."""

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`, contiguous.

        They are fresh, or `into`, bytes of that shape, where it can be filled without a copy.
        """

    def read_field(
        self,
        ids: Ids,
        item: Field,
        lo: int,
        hi: int,
        *,
        admit: bool,
        dtype: DTypeName | None = None,
        out: Any = None,
    ) -> Any:
        """Return a field, bytes `lo:hi` of records, as the array for these ids.

        It may be in `out`, which is of that shape and `dtype`.
        """

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> bool:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays.

        Returns whether that was done: not where the ids have `moved` since.
        """

    def to_array(self, data: Any, item: Field, ids: Ids, dtype: DTypeName | None = None) -> Any:
        """Return the bytes of a field as the array for these ids, of `dtype` if given."""

    def to_bytes(self, values: Any, item: Field, ids: Ids, name: str) -> Any:
        """Return values for these ids as bytes of a field, on this side, checked."""

    def capture(self, ids: Any, out: Any, name: str) -> bool:
        """Make the CUDA graph under capture read a field into `out`; False if there is none."""

    def adapt(self) -> None:
        """Admit the rows that replays of CUDA graphs have read to the GPU tier."""

    def zeros(self, like: Any, nbytes: int) -> Any:
        """Return zero bytes, `nbytes` for each row of `like`, of the same library and device."""

    def lease(self, ids: Ids) -> Lease:
        """Pin the distinct rows of a batch."""

    def lease_and_read(self, ids: Ids, field: str) -> tuple[Lease, Any]:
        """Pin the distinct rows, and return the result of the lease's `expand`."""

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Check ids, and start bringing their rows nearer.

        They stay until they are used, or `window` newer batches came. A prefetch is dropped if the
        epoch ends first.
        """


def assembled(access: Access, pieces: Sequence[Piece], width: int) -> Piece:
    """Return pieces of every field as one of whole records; no copy if it is one already."""
    if pieces[0][:2] == (0, width):
        return pieces[0]
    records = access.zeros(pieces[0][2], width)
    for lo, hi, data in pieces:
        records[:, lo:hi] = data
    return 0, width, records


class HostAccess:
    """Access from the host to the tiers of a space."""

    def __init__(
        self, space: Space, extent: Extent | WholeSpace, layout: RecordLayout, door: Door
    ) -> None:
        """Refer to the rows of one table, or of all, in a space that has no GPU tier."""
        self.extent = extent
        self.start = extent.start
        self.rows = extent.rows
        self.door = door
        self.layout = layout
        self.fields = {name: (item, *layout.span(name)) for name, item in layout.fields}
        self.nearest = space.nearest
        self._results = Recycled()
        self._still = _NOTHING if space.host is None else space.host.still
        self._host = space.host if isinstance(extent, Extent) else None
        self._within = self.start, self.rows
        if self._host is not None:
            self._stats = self._host.counters_from(extent.start)
        self._plain: dict[str | None, tuple[int, np.dtype[Any], int, int]] = {
            name: (lo, np.dtype(item.storage), item.dim, hi - lo)
            for name, (item, lo, hi) in self.fields.items()
            if not item.element.as_bits and item.scaled is None
        }
        first = layout.fields[0][0]
        if first in self._plain:
            self._plain[None] = self._plain[first]

    def place_of(self, field: str) -> tuple[Field, int, int]:
        """Return a field and its byte range; raises UnknownNameError for an unknown one."""
        found = self.fields.get(field)
        if found is None:
            self.layout.field(field)
        return found or self.fields[field]

    def ids(self, ids: object) -> Ids:
        """Check ids and bring them to the host; see `host_ids`."""
        return host_ids(ids, self.rows)

    def using(self, *, write: bool = False) -> Call:
        """Enter the store concurrently with the calls of other threads."""
        return Call(self.door, write=write)

    def read_resident(self, ids: npt.NDArray[Any], name: str | None) -> Any:
        """Return a field of valid rows, `ids.shape + (dim,)`, if one call of the core suffices.

        A `name` of None means the first field. Returns None for ids and fields that need more work,
        or an error.
        """
        place = self._plain.get(name)
        if place is None or self._host is None or ids.dtype != _INT64:
            return None
        lo, dtype, dim, nbytes = place
        nbytes *= ids.size
        if not 0 < nbytes < LARGE:
            return None
        out = np.empty((*ids.shape, dim), dtype)
        return out if self._read_resident(ids, lo, out, nbytes, True) else None

    def _read_resident(
        self, ids: npt.NDArray[Any], lo: int, out: npt.NDArray[Any], nbytes: int, admit: bool
    ) -> bool:
        """Read if all rows are resident; return whether that was done, in an open store."""
        host, door = self._host, self.door
        if host is None or os.getpid() != door.pid or not ids.flags.c_contiguous:
            return False
        if nbytes < APART_BYTES:
            found = host.read_resident(ids, self._within, lo, out, nbytes, self._stats, admit)
        elif may_be_interrupted():
            with interrupts_deferred():
                found = host.read_apart(ids, self._within, lo, out, nbytes, self._stats, admit)
        else:
            found = host.read_apart(ids, self._within, lo, out, nbytes, self._stats, admit)
        return found and not (door.reason or self.extent.epoch.ended)

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`."""
        if into is None:
            shape = ids.rows.size, hi - lo
            large = math.prod(shape) >= LARGE
            out = self._results.take(*shape) if large else np.empty(shape, np.uint8)
        else:
            out = into if isinstance(into, np.ndarray) else into.numpy()
        extent = self.extent
        if ids.rows.size and not self._read_resident(ids.rows, lo, out, out.nbytes, admit):
            with Call(self.door):
                if extent.epoch.ended:
                    extent.epoch.check_open()
                rows = ids.rows + self.start if self.start else ids.rows
                self.nearest.read(rows, out, lo, hi, admit=admit)
        return out if into is None else into

    def writing(self, pieces: Sequence[Piece]) -> tuple[type[Call], AbstractContextManager[object]]:
        """Return how to enter the store for a write, and a lock to hold meanwhile.

        No read sees some pieces of a row without the others: no `Call`, and no `read_resident`.
        """
        return (Call, _NOTHING) if len(pieces) == 1 else (Use, self._still)

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> bool:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays."""
        rows, last = ids.rows, last_of_each(ids.rows)
        rows = rows if last is None else rows[last]
        if not rows.size:
            return True
        enter, still = self.writing(pieces)
        with enter(self.door, write=True):
            self.extent.epoch.check_open()
            if ids.moved:
                return False
            rows = rows + self.start if self.start else rows
            with still:
                for lo, hi, data in pieces:
                    self.nearest.write(rows, data if last is None else data[last], lo, hi)
        return True

    together = interrupts_deferred
    to_array = staticmethod(from_bytes)

    def read_field(
        self,
        ids: Ids,
        item: Field,
        lo: int,
        hi: int,
        *,
        admit: bool,
        dtype: DTypeName | None = None,
        out: Any = None,
    ) -> Any:
        """Return a field, bytes `lo:hi` of records, as the array for these ids.

        It may be in `out`, which is of that shape and `dtype`.
        """
        return from_bytes(self.read(ids, lo, hi, admit=admit), item, ids, dtype)

    def to_bytes(self, values: Any, item: Field, ids: Ids, name: str) -> Any:
        """Return values for these ids as bytes of a field; see `values.to_bytes`."""
        return to_bytes(values, item, ids.shape, name)

    def capture(self, ids: Any, out: Any, name: str) -> bool:
        """Return False: a table on the host is in no graph."""
        return False

    def adapt(self) -> None:
        """Check that the table is open; there are no slots."""
        with Call(self.door):
            self.extent.epoch.check_open()

    def zeros(self, like: Any, nbytes: int) -> Any:
        """Return zero bytes, `nbytes` for each row of `like`."""
        return np.zeros((len(like), nbytes), np.uint8)

    def lease(self, ids: Ids) -> HostLease:
        """Pin the distinct rows of a batch."""
        return HostLease(self, ids)

    def lease_and_read(self, ids: Ids, field: str) -> tuple[HostLease, Any]:
        """Pin the distinct rows, and return one field of the row of each id, in one call."""
        item, lo, hi = self.place_of(field)
        shape = ids.rows.size, hi - lo
        large = math.prod(shape) >= LARGE
        out = self._results.take(*shape) if large else np.empty(shape, np.uint8)
        lease = HostLease(self, ids, out, lo)
        return lease, from_bytes(out, item, ids)

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Announce rows to the disk, then load them into the host tier, on another thread."""
        nearest, epoch = self.nearest, self.extent.epoch
        rows = self.ids(ids).rows + self.start  # a copy: the ids are the caller's

        def look(distinct: Rows) -> Callable[[], None] | None:
            return None if epoch.ended else nearest.stage(distinct)

        def fetch(distinct: Rows) -> None:
            with Call(self.door):
                if not epoch.ended:
                    nearest.fetch(distinct, window)

        prefetcher.submit(rows, look, fetch)


class HostLease:
    """A lease on the host; see `Lease`. Here `bound` is the number of distinct rows.

    Attributes:
        groups: the ids grouped by row, by rows of the space.
        bound: the number of distinct rows.
        names: the number of names with which it began; see `Epoch.names_hold`.
    """

    device = None

    def __init__(self, access: HostAccess, ids: Ids, out: Any = None, lo: int = 0) -> None:
        """Promote and pin the distinct rows of a batch; read bytes `lo …` of each id into `out`."""
        rows = ids.rows + access.start if access.start else ids.rows
        self.groups: Groups = Groups(rows)
        self.bound: int = self.groups.rows.size
        self._access = access
        self._door = access.door
        self._nearest = access.nearest
        self._shape = ids.shape
        self._kind = ids.kind
        self._released = False
        with Call(self._door):
            self._epoch = access.extent.epoch
            if self._epoch.ended:
                self._epoch.check_open()
            self.names: int = self._epoch.names
            self._pinned = self._nearest.lease(self.groups, rows, out, lo)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The distinct row ids, int64 `(bound,)`, ascending."""
        start = self._access.start
        return self.groups.rows - start if start else self.groups.rows

    @property
    def positions(self) -> npt.NDArray[np.intp]:
        """For each id the index of its distinct row, in the shape of the ids."""
        return self.groups.positions.reshape(self._shape)

    @property
    def count(self) -> int:
        """The number of distinct rows."""
        return self.bound

    @property
    def ended(self) -> bool:
        """Whether the lease was released, or its epoch has ended."""
        return self._released or bool(self._epoch.ended)

    def trim(self, *, wait: bool) -> bool:
        """Return True: `bound` is the number of distinct rows."""
        if self._released or self._epoch.ended:
            self._refuse()
        return True

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""
        item, lo, hi = self._access.place_of(field)
        return from_bytes(self._gather(lo, hi), item, self._distinct)

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, a fresh array `ids.shape + (dim,)`."""
        item, lo, hi = self._access.place_of(field)
        ids = Ids(self.groups.order, self._shape, self._kind)
        return from_bytes(self._gather(lo, hi, each=True), item, ids)

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""
        self.write_columns(Columns(self._access.layout, [field]), {field: values})

    def read_columns(self, columns: Columns) -> dict[str, Any]:
        """Return several fields of the distinct rows as `read` does, by name."""
        return columns.parted(self._gather(columns.lo, columns.hi), self._distinct)

    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        """Write `(bound, dim)` values over several fields of the distinct rows."""
        if self._released or self._epoch.ended:
            self._refuse()
        pieces = columns.joined(values, self._distinct)
        enter, still = self._access.writing(pieces)
        with enter(self._door, write=True):
            if self._released or self._epoch.ended:
                self._refuse()
            with still:
                for lo, hi, data in pieces:
                    self._nearest.write_held(self.groups.rows, data, lo, hi)

    def update(self, lo: int, hi: int, change: Change) -> bool:
        """Change bytes `lo:hi` of the distinct rows in place, part by part.

        Returns False and changes nothing if rows are in a lower tier; see `HostTier.update_held`.
        """
        with Call(self._door, write=True):
            if self._released or self._epoch.ended:
                self._refuse()
            return self._nearest.update_held(self.groups.rows, lo, hi, change)

    def launch(self, *_: object, **__: object) -> None:
        """Raise DeviceError: kernels cannot reach these records."""
        raise DeviceError("this lease is on the host, where no kernel can reach its rows")

    @property
    def _distinct(self) -> Ids:
        """The distinct rows as ids."""
        return Ids(self.groups.rows, (self.bound,), self._kind)

    def _gather(self, lo: int, hi: int, *, each: bool = False) -> Any:
        """Return bytes `lo:hi` of the distinct rows, or of the row of each id."""
        rows = self.groups.order.size if each else self.bound
        out = np.empty((rows, hi - lo), np.uint8)
        with Call(self._door):
            if self._released or self._epoch.ended:
                self._refuse()
            self._nearest.read_held(self.groups, out, lo, each=each)
        return out

    def release(self) -> None:
        """End the lease; harmless when repeated."""
        if self._released or self._epoch.ended:
            return
        if self._pinned.size:
            with contextlib.suppress(ClosedError), Call(self._door):  # a closed store has no pins
                if not self.ended:
                    self._nearest.give_back(self._pinned)
        self._released = True

    def _refuse(self) -> None:
        raise lease_ended(self._epoch)

    def __enter__(self) -> HostLease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the lease."""
        self.release()
