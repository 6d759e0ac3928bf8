"""How a table reaches its tiers from the host: NumPy arrays, and torch tensors on the CPU.

An access turns what users give into rows and bytes, hands them to the nearest tier, and turns bytes
into what users get. `device_access` does the same on a GPU; a table has one of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tierstore import rowcopy
from tierstore.errors import ClosedError
from tierstore.guard import Guard
from tierstore.spec import Field, RecordLayout
from tierstore.table.columns import Columns
from tierstore.table.ids import Ids, host_ids, last_of_each
from tierstore.table.prefetch import Prefetcher
from tierstore.table.values import from_bytes, to_bytes
from tierstore.tier.base import Tier
from tierstore.tier.host import HostTier

__all__ = ["Access", "HostAccess", "HostLease", "Lease", "Piece", "assembled", "check_lease"]

Piece = tuple[int, int, Any]
"""A byte range `lo, hi` of the records and its bytes `(n, hi - lo)`."""


class Lease(Protocol):
    """The distinct records of a batch, kept in place while something computes on them.

    Everything that computes on rows goes through a lease: `read` the fields it needs as compact
    arrays, `write` what changed, `release`. Rows that find no room in the nearest tier are read and
    written in the tier below, with the same results.

    Attributes:
        bound: the rows of a compact array; on a GPU more than the distinct rows before `trim`:
            those behind them are undefined, and are not written.
    """

    bound: int

    @property
    def rows(self) -> Any:
        """The id of each distinct row, int64 `(bound,)`; on a GPU of the ids' kind."""

    @property
    def positions(self) -> Any:
        """For each id of the batch, in its shape, the index of its row in compact arrays."""

    @property
    def fresh(self) -> bool:
        """Whether it holds what the rows are now, and no copies older than another's writes."""

    def trim(self, *, wait: bool) -> bool:
        """Lower `bound` to the number of distinct rows if that is known by now, or wait for it.

        The first call asks a GPU to tell. Returns whether `bound` is the number.
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

    def release(self) -> None:
        """End the lease; harmless when repeated."""

    def __enter__(self) -> Lease:
        """Return the lease itself."""

    def __exit__(self, *error: object) -> None:
        """End the lease."""


class Access(Protocol):
    """The seam between a table and the side its nearest tier is on.

    Attributes:
        closed: whether the table has other tiers by now.
    """

    closed: bool

    def ids(self, ids: object, *, later: bool = False) -> Ids:
        """Check ids and bring them to this side; with `later` it may be `read` that checks them."""

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`, fresh and contiguous."""

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> None:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays."""

    def to_array(self, data: Any, item: Field, ids: Ids) -> Any:
        """Return the bytes of a field as the array that answers these ids."""

    def to_bytes(self, values: Any, item: Field, ids: Ids, name: str) -> Any:
        """Return values for these ids as bytes of a field, on this side, checked."""

    def zeros(self, like: Any, nbytes: int) -> Any:
        """Return zero bytes, `nbytes` for each row of `like`, of its library and place."""

    def lease(self, ids: Ids) -> Lease:
        """Pin the distinct rows of a batch."""

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Check ids, and start bringing their rows nearer.

        They stay until they are used, or `window` newer batches came.
        """

    def close(self) -> None:
        """End every lease: the table has other tiers from now on."""


def assembled(access: Access, pieces: Sequence[Piece], width: int) -> Piece:
    """Return pieces of every field as one of whole records; no copy if it is one already."""
    if pieces[0][:2] == (0, width):
        return pieces[0]
    records = access.zeros(pieces[0][2], width)
    for lo, hi, data in pieces:
        records[:, lo:hi] = data
    return 0, width, records


def check_lease(is_open: bool, closed: bool) -> None:
    """Raise ClosedError for a lease that was released, or whose table has other tiers by now."""
    if not is_open:
        raise ClosedError("this lease has ended; take a new one with table.lease(ids)")
    if closed:
        raise ClosedError(
            "the table got other fields or rows since this lease began, which ended it; take a new "
            "one with table.lease(ids), or run the forward pass again"
        )


class HostAccess:
    """Access from the host to the host tier, or to the disk tier where there is none."""

    def __init__(
        self, top: Tier, host: HostTier | None, layout: RecordLayout, guard: Guard
    ) -> None:
        """Refer to the nearest tier; `host` is the same if it is a host tier."""
        self._top = top
        self._host = host
        self._layout = layout
        self._guard = guard
        self.closed = False

    def close(self) -> None:
        """End every lease; see `Access`."""
        self.closed = True

    def ids(self, ids: object, *, later: bool = False) -> Ids:
        """Check ids against the table, now; see `host_ids`."""
        return host_ids(ids, self._top.rows)

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`."""
        out = np.empty((ids.rows.size, hi - lo), np.uint8)
        if ids.rows.size:
            with self._guard.use():
                self._top.read(ids.rows, out, lo, hi, admit=admit)
        return out

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> None:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays."""
        rows, last = ids.rows, last_of_each(ids.rows)
        rows = rows if last is None else rows[last]
        if not rows.size:
            return
        with self._guard.use(write=True):
            for lo, hi, data in pieces:
                self._top.write(rows, data if last is None else data[last], lo, hi)

    def to_array(self, data: Any, item: Field, ids: Ids) -> Any:
        """Return the bytes of a field as the array that answers these ids."""
        return from_bytes(np.ascontiguousarray(data), item, ids.shape, ids.kind)

    def to_bytes(self, values: Any, item: Field, ids: Ids, name: str) -> Any:
        """Return values for these ids as bytes of a field; see `values.to_bytes`."""
        return to_bytes(values, item, ids.shape, name)

    def zeros(self, like: Any, nbytes: int) -> Any:
        """Return zero bytes, `nbytes` for each row of `like`."""
        return np.zeros((len(like), nbytes), np.uint8)

    def lease(self, ids: Ids) -> HostLease:
        """Pin the distinct rows of a batch."""
        return HostLease(self, self._layout, self._host, ids, self._guard)

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Announce rows to the disk, then take them into the host tier, on another thread."""
        rows = self.ids(ids).rows.copy()  # the caller may fill its array anew

        def look() -> Callable[[], None] | None:
            return None if self.closed else self._top.prefetch(rows)

        def fetch() -> None:
            if self._host is not None and not self.closed:
                self._host.fetch(rows, window)

        prefetcher.submit(look, fetch)


class HostLease:
    """A lease on the host; see `Lease`. Here `bound` is the number of distinct rows.

    Attributes:
        rows: the distinct row ids, int64 `(bound,)`, ascending.
        positions: intp, in the shape of the ids.
    """

    def __init__(
        self,
        access: HostAccess,
        layout: RecordLayout,
        host: HostTier | None,
        ids: Ids,
        guard: Guard,
    ) -> None:
        """Promote and pin the distinct rows of a batch."""
        self.rows, positions = np.unique(ids.rows, return_inverse=True)
        self.positions = positions.reshape(ids.shape)
        self.bound = int(self.rows.size)
        self._access = access
        self._layout = layout
        self._host = host
        self._guard = guard
        self._ids = Ids(self.rows, (self.bound,), ids.kind)
        self._open = True
        with guard.use():
            self._slots = None if host is None else host.lease(self.rows, positions)

    @property
    def fresh(self) -> bool:
        """True until the table has other tiers: rows are read where they are."""
        return not self._access.closed

    def trim(self, *, wait: bool) -> bool:
        """Return True: `bound` is the number of distinct rows."""
        return True

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""
        self._check()
        return self._access.to_array(self._gather(field), self._layout.field(field), self._ids)

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, a fresh array `ids.shape + (dim,)`."""
        self._check()
        compact = self._gather(field)
        positions = self.positions.reshape(-1)
        out = np.empty((positions.size, compact.shape[1]), np.uint8)
        rowcopy.gather(compact, positions, out)
        batch = Ids(positions, self.positions.shape, self._ids.kind)
        return self._access.to_array(out, self._layout.field(field), batch)

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""
        self._check()
        data = self._access.to_bytes(values, self._layout.field(field), self._ids, field)
        lo, hi = self._layout.span(field)
        if self._host is None:
            self._access.write(self._ids, [(lo, hi, data)])
            return
        with self._guard.use(write=True):
            self._host.write_held(self.rows, data, lo, hi)

    def read_columns(self, columns: Columns) -> dict[str, Any]:
        """Return several fields of the distinct rows as `read` does, by name."""
        return {name: self.read(name) for name in columns.names}

    def write_columns(self, columns: Columns, values: Mapping[str, Any]) -> None:
        """Write `(bound, dim)` values over several fields of the distinct rows."""
        for name in columns.names:
            self.write(name, values[name])

    def _gather(self, field: str) -> Any:
        """Return the bytes of one field of the distinct rows."""
        lo, hi = self._layout.span(field)
        if self._host is None:
            return self._access.read(self._ids, lo, hi, admit=True)
        out = np.empty((self.bound, hi - lo), np.uint8)
        with self._guard.use():
            self._host.read_held(self.rows, out, lo, hi)
        return out

    def release(self) -> None:
        """End the lease; harmless when repeated."""
        if self._open:
            self._open = False
            gone = self._guard.closed or self._access.closed
            if self._host is not None and self._slots is not None and not gone:
                with self._guard.use():
                    self._host.give_back(self._slots)

    def _check(self) -> None:
        check_lease(self._open, self._access.closed)

    def __enter__(self) -> HostLease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the lease."""
        self.release()
