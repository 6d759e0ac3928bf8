"""How a table reaches its tiers from the host: NumPy arrays, and torch tensors on the CPU."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._door import Call, Door, Use, interrupts_deferred, may_be_interrupted
from tierstore._dtypes import DTypeName
from tierstore._rowcopy import Groups
from tierstore._table.access import Access as Access
from tierstore._table.access import Lease as Lease
from tierstore._table.address import Ids, host_ids, last_of_each
from tierstore._table.prefetch import Prefetcher, Rows
from tierstore._table.recycled import LARGE, Recycled
from tierstore._table.values import Columns, Piece, from_bytes, is_plain
from tierstore._tiers.base import lease_ended
from tierstore._tiers.host import APART_BYTES, Change
from tierstore._tiers.space import Extent, Nearest, Space, WholeSpace
from tierstore.errors import ClosedError
from tierstore.spec import Field, RecordLayout

_INT64 = np.dtype(np.int64)
_NOTHING = nullcontext()


class HostAccess(Access):
    """Access from the host to the tiers of a space."""

    def __init__(
        self, space: Space, extent: Extent | WholeSpace, layout: RecordLayout, door: Door
    ) -> None:
        """Refer to the rows of one table, or of all, in a space that has no GPU tier."""
        super().__init__(extent, layout, door)
        self.start: int = extent.start
        self.rows: int = extent.rows
        self.nearest: Nearest = space.nearest
        self._results = Recycled()
        self._still = _NOTHING if space.host is None else space.host.still
        self.pins: bool = space.host is not None and not space.host.direct
        self._host = space.host if isinstance(extent, Extent) else None
        self._within = self.start, self.rows
        if self._host is not None:
            self._stats = self._host.counters_from(extent.start)
        self._plain: dict[str | None, tuple[int, np.dtype[Any], int, int]] = {
            name: (layout.span(name)[0], np.dtype(item.storage), item.dim, item.nbytes)
            for name, item in layout.fields
            if is_plain(item)
        }
        first = layout.fields[0][0]
        if first in self._plain:
            self._plain[None] = self._plain[first]

    def ids(self, ids: object) -> Ids:
        return host_ids(ids, self.rows)

    def using(self, *, write: bool = False) -> Call:
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

    def decoded(
        self, data: Any, item: Field, ids: Ids, dtype: DTypeName | None = None, out: Any = None
    ) -> Any:
        return from_bytes(data, item, ids, dtype)

    def adapt(self) -> None:
        with Call(self.door):
            self.extent.epoch.check_open()

    def lease(self, ids: Ids) -> HostLease:
        return HostLease(self, ids)

    def lease_and_read(self, ids: Ids, field: str) -> tuple[HostLease, Any]:
        columns = self.columns[field,]
        shape = ids.rows.size, columns.hi - columns.lo
        large = math.prod(shape) >= LARGE
        out = self._results.take(*shape) if large else np.empty(shape, np.uint8)
        lease = HostLease(self, ids, out, columns.lo)
        return lease, from_bytes(out, columns.items[0], ids)

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        nearest, epoch = self.nearest, self.extent.epoch
        rows = self.ids(ids).rows + self.start  # a copy: the ids are the caller's

        def look(distinct: Rows) -> Callable[[], None] | None:
            return None if epoch.ended else nearest.stage(distinct)

        def fetch(distinct: Rows) -> None:
            with Call(self.door):
                if not epoch.ended:
                    nearest.fetch(distinct, window)

        prefetcher.submit(rows, look, fetch)


class HostLease(Lease):
    """A lease on the host, whose `bound` is the number of distinct rows."""

    _access: HostAccess
    bound: int = 0

    def __init__(self, access: HostAccess, ids: Ids, out: Any = None, lo: int = 0) -> None:
        """Promote and pin the distinct rows of a batch; read bytes `lo …` of each id into `out`."""
        rows = ids.rows + access.start if access.start else ids.rows
        self.groups: Groups = Groups(rows)
        self.bound = self.groups.rows.size
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
            self._held = self._nearest.lease(self.groups, rows, out, lo)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        start = self._access.start
        return self.groups.rows - start if start else self.groups.rows

    @property
    def positions(self) -> npt.NDArray[np.intp]:
        return self.groups.positions.reshape(self._shape)

    @property
    def count(self) -> int:
        return self.bound

    @property
    def ended(self) -> bool:
        return self._released or bool(self._epoch.ended)

    def trim(self, *, wait: bool) -> bool:
        if self._released or self._epoch.ended:
            self._refuse()
        return True

    def expand(self, field: str) -> Any:
        columns = self._access.columns[field,]
        ids = Ids(self.groups.order, self._shape, self._kind)
        return from_bytes(self._gather(columns.lo, columns.hi, each=True), columns.items[0], ids)

    def read_columns(self, columns: Columns) -> dict[str, Any]:
        return columns.values(self._gather(columns.lo, columns.hi), self._distinct)

    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        if self._released or self._epoch.ended:
            self._refuse()
        pieces = columns.pieces(values, self._distinct)
        enter, still = self._access.writing(pieces)
        with enter(self._door, write=True):
            if self._released or self._epoch.ended:
                self._refuse()
            with still:
                for lo, hi, data in pieces:
                    self._nearest.write_held(self.groups.rows, data, lo, hi)

    def update(self, lo: int, hi: int, change: Change) -> bool:
        with Call(self._door, write=True):
            if self._released or self._epoch.ended:
                self._refuse()
            if self._held.whole:
                self._nearest.update_held(self.groups.rows, self._held, lo, hi, change)
            return self._held.whole

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
        if self._released or self._epoch.ended:
            return
        if self._access.pins:
            with contextlib.suppress(ClosedError), Call(self._door):  # a closed store has no pins
                if not self.ended:
                    self._nearest.give_back(self._held)
        self._released = True

    def _refuse(self) -> None:
        raise lease_ended(self._epoch)
