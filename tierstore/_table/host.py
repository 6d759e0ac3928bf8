"""How a table reaches its tiers from the host: NumPy arrays, and torch tensors on the CPU.

An access turns what users give into rows and bytes, hands them to the nearest tier, and turns bytes
into what users get. `device_access` does the same on a GPU; a table has one of the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tierstore import _rowcopy
from tierstore._door import Door
from tierstore._table.address import Ids, host_ids, last_of_each
from tierstore._table.columns import Columns
from tierstore._table.prefetch import Prefetcher
from tierstore._table.values import from_bytes, to_bytes
from tierstore._tiers.base import Tier
from tierstore._tiers.epoch import Epoch, check_lease
from tierstore._tiers.host import HostTier
from tierstore.errors import ClosedError
from tierstore.spec import Field, RecordLayout

__all__ = ["Access", "HostAccess", "HostLease", "Lease", "Piece", "assembled"]


Piece = tuple[int, int, Any]
"""A byte range `lo, hi` of the records and its bytes `(n, hi - lo)`."""


class Lease(Protocol):
    """The distinct records of a batch, kept in place while something computes on them.

    Everything that computes on rows goes through a lease: `read` the fields it needs as compact
    arrays, `write` what changed, `release`. Rows that find no room in the nearest tier are read and
    written in the tier below, with the same results: what a lease wrote is in every later read and
    commit, and a lease reads what others wrote meanwhile.

    A lease ends at `release`, at `store.rollback()`, and when its table gets other fields or rows,
    or another version. From then on `trim`, reads and writes raise ClosedError; `release` does
    nothing more.

    """

    @property
    def bound(self) -> int:
        """The rows of a compact array; on a GPU more than the distinct rows before `trim`.

        Those behind the distinct rows are undefined, and are not written.
        """

    @property
    def rows(self) -> Any:
        """The id of each distinct row, int64 `(bound,)`; on a GPU of the ids' kind."""

    @property
    def positions(self) -> Any:
        """For each id of the batch, in its shape, the index of its row in compact arrays."""

    @property
    def ended(self) -> bool:
        """Whether the lease has ended."""

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

    A call that had to wait until its table got other tiers raises ClosedError.
    """

    def ids(self, ids: object, *, later: bool = False) -> Ids:
        """Check ids and bring them to this side; with `later` it may be `read` that checks them."""

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`, contiguous.

        They are fresh, or `into`, bytes of that shape, where it can be filled without a copy.
        """

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

        They stay until they are used, or `window` newer batches came. A prefetch that the end of
        the epoch overtakes is dropped.
        """


def assembled(access: Access, pieces: Sequence[Piece], width: int) -> Piece:
    """Return pieces of every field as one of whole records; no copy if it is one already."""
    if pieces[0][:2] == (0, width):
        return pieces[0]
    records = access.zeros(pieces[0][2], width)
    for lo, hi, data in pieces:
        records[:, lo:hi] = data
    return 0, width, records


class HostTiers(Protocol):
    """What an access on the host needs of the tiers of its table; see `Tiers`."""

    below: Tier
    host: HostTier | None
    epoch: Epoch


class HostAccess:
    """Access from the host to the host tier, or to the disk tier where there is none."""

    def __init__(self, tiers: HostTiers, layout: RecordLayout, guard: Door) -> None:
        """Refer to the tiers, none of which is on a GPU."""
        self.tiers = tiers
        self.layout = layout
        self.guard = guard
        self._top = tiers.below

    def ids(self, ids: object, *, later: bool = False) -> Ids:
        """Check ids against the table, now; see `host_ids`."""
        return host_ids(ids, self._top.rows)

    def read(self, ids: Ids, lo: int, hi: int, *, admit: bool, into: Any = None) -> Any:
        """Return bytes `lo:hi` of the records of `ids`, `(n, hi - lo)`."""
        if into is None:
            out = np.empty((ids.rows.size, hi - lo), np.uint8)
        else:
            out = into if isinstance(into, np.ndarray) else into.numpy()
        if ids.rows.size:
            with self.guard.use():
                self.tiers.epoch.check_open()
                self._top.read(ids.rows, out, lo, hi, admit=admit)
        return out if into is None else into

    def write(self, ids: Ids, pieces: Sequence[Piece]) -> None:
        """Write pieces over the records of `ids`; where an id repeats, its last record stays."""
        rows, last = ids.rows, last_of_each(ids.rows)
        rows = rows if last is None else rows[last]
        if not rows.size:
            return
        with self.guard.use(write=True):
            self.tiers.epoch.check_open()
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
        return HostLease(self, ids)

    def prefetch(self, ids: object, window: int, prefetcher: Prefetcher) -> None:
        """Announce rows to the disk, then take them into the host tier, on another thread."""
        rows, epoch = self.ids(ids).rows.copy(), self.tiers.epoch  # the ids are the caller's

        def look() -> Callable[[], None] | None:
            return None if epoch.ended else self._top.prefetch(rows)

        def fetch() -> None:
            if self.tiers.host is not None and not epoch.ended:
                self.tiers.host.fetch(rows, window)

        prefetcher.submit(look, fetch)


class HostLease:
    """A lease on the host; see `Lease`. Here `bound` is the number of distinct rows.

    Attributes:
        rows: the distinct row ids, int64 `(bound,)`, ascending.
        positions: intp, in the shape of the ids.
    """

    def __init__(self, access: HostAccess, ids: Ids) -> None:
        """Promote and pin the distinct rows of a batch."""
        self.rows, positions = np.unique(ids.rows, return_inverse=True)
        self.positions = positions.reshape(ids.shape)
        self.bound = int(self.rows.size)
        self._access = access
        self._layout = access.layout
        self._guard = access.guard
        self._tiers = access.tiers
        self._ids = Ids(self.rows, (self.bound,), ids.kind)
        self._released = False
        with self._guard.use():
            self._epoch = self._tiers.epoch
            self._epoch.check_open()
            host = self._tiers.host
            self._slots = None if host is None else host.lease(self.rows, positions)

    @property
    def ended(self) -> bool:
        """Whether the lease was released, or its epoch has ended."""
        return self._released or bool(self._epoch.ended)

    def trim(self, *, wait: bool) -> bool:
        """Return True: `bound` is the number of distinct rows."""
        self._check()
        return True

    def read(self, field: str) -> Any:
        """Return one field of the distinct rows, a fresh `(bound, dim)` array of the ids' kind."""
        return self._access.to_array(self._gather(field), self._layout.field(field), self._ids)

    def expand(self, field: str) -> Any:
        """Return one field of the row of each id, a fresh array `ids.shape + (dim,)`."""
        compact = self._gather(field)
        positions = self.positions.reshape(-1)
        out = np.empty((positions.size, compact.shape[1]), np.uint8)
        _rowcopy.gather(compact, positions, out)
        batch = Ids(positions, self.positions.shape, self._ids.kind)
        return self._access.to_array(out, self._layout.field(field), batch)

    def write(self, field: str, values: Any) -> None:
        """Write `(bound, dim)` values over one field of the distinct rows."""
        self._check()
        data = self._access.to_bytes(values, self._layout.field(field), self._ids, field)
        lo, hi = self._layout.span(field)
        with self._guard.use(write=True):
            self._check()
            if self._tiers.host is not None:
                self._tiers.host.write_held(self.rows, data, lo, hi)
            elif self.bound:
                self._tiers.below.write(self.rows, data, lo, hi)

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
        out = np.empty((self.bound, hi - lo), np.uint8)
        with self._guard.use():
            self._check()
            if self._tiers.host is not None:
                self._tiers.host.read_held(self.rows, out, lo, hi)
            elif self.bound:
                self._tiers.below.read(self.rows, out, lo, hi)
        return out

    def release(self) -> None:
        """End the lease; harmless when repeated."""
        if self.ended:
            return
        with contextlib.suppress(ClosedError), self._guard.use():  # a closed store has no pins
            host = self._tiers.host
            if host is not None and self._slots is not None and not self.ended:
                host.give_back(self._slots)
            self._released = True

    def _check(self) -> None:
        check_lease(self._epoch, released=self._released)

    def __enter__(self) -> HostLease:
        """Return the lease itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the lease."""
        self.release()
