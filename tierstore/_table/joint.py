"""Tables of one space and one layout as one: a call on all of them is one lookup.

    joint = JointTable([store["user"], store["item"]])
    features = Features(("user", "item", "bought"), (0, 1, 1))
    rows = joint.in_space(ids, features, lengths)        # ids of all features in sequence
    with joint.lease(rows, ...) as lease: ...

Its rows are those of the space. `in_space` turns ids of tables into such rows, and only it checks
them; all other methods of a joint table take rows that it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore._door import INTERNAL, internal_error, internal_errors
from tierstore._table.address import is_torch, on_host
from tierstore._table.gpu import DeviceAccess
from tierstore._table.host import Access, Lease
from tierstore._table.table import Owner, Table, Together, recorded, renamed
from tierstore._tiers.base import Rows
from tierstore._tiers.gpu.link import FeatureIds
from tierstore._tiers.gpu.memory import MOST_FEATURES
from tierstore.errors import InvalidInputError, RowIndexError
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tierstore._store.store import Store

_SHOWN = 3
"""Most tables that a message names."""
_REMEMBERED = 64
"""Numbers of ids by feature that are kept on a device; training has a few."""


class Features(NamedTuple):
    """Features in the order in which their ids come.

    Attributes:
        names: for messages.
        tables: the number of the table of each, in the joint table.
    """

    names: tuple[str, ...]
    tables: tuple[int, ...]

    def touched(self, lengths: Sequence[int]) -> frozenset[int]:
        """Return the numbers of the tables that have ids, given how many each feature has."""
        return touched_by(self.tables, lengths)


def touched_by(tables: tuple[int, ...], lengths: Sequence[int]) -> frozenset[int]:
    """Return the tables of features that have ids, given how many each feature has."""
    return _all_of(tables) if all(lengths) else frozenset(compress(tables, lengths))


@lru_cache(_REMEMBERED)
def _all_of(tables: tuple[int, ...]) -> frozenset[int]:
    return frozenset(tables)


class Location:
    """Where the tables of a joint table are now: they move when other tables come, grow or change.

    Attributes:
        together: the space that they share, and where in it.
        access: to all of its rows.
        tables: the tables.
        names: returns the number of names of each table; see `Epoch`.
        starts, rows: of each table, its first row in the space and the number of its rows, int64.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Look the tables up. Raises InvalidInputError if they no longer share a space."""
        self.together: Together = Together(tables)
        self.names: Callable[[], tuple[int, ...]] = self.together.names
        self.tables: tuple[Table, ...] = tuple(tables)
        self.starts: Rows = self.together.starts
        self.rows: Rows = np.array([table.rows for table in tables], np.int64)
        self.access: Access = self.together.access(_listed(tables))
        self._on_device = self.access if isinstance(self.access, DeviceAccess) else None
        self._device_type = "" if self._on_device is None else self._on_device.torch_device.type
        self._order = np.argsort(self.starts)
        self._numbers: dict[Features, Rows] = {}
        self._bounds: dict[Features, Any] = {}
        self._ids: dict[tuple[Features, tuple[int, ...]], FeatureIds] = {}
        self._last: tuple[Features, tuple[int, ...], FeatureIds] | None = None

    # -- from ids of tables to rows of the space

    def in_space(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Tensor:
        """Return the rows of ids; see `JointTable.in_space`."""
        import torch

        if self.has(ids):
            return self._checked_on_device(ids, features, tuple(lengths))
        return torch.from_numpy(self._checked(ids.numpy(force=True), features, lengths))

    def _checked(
        self, ids: npt.NDArray[np.int64], features: Features, lengths: Sequence[int]
    ) -> Rows:
        numbers = self._numbers.get(features)
        if numbers is None:
            numbers = self._numbers[features] = np.array(features.tables, np.intp)
        counts = np.array(lengths, np.int64)
        if ids.size:
            ends = counts.cumsum()
            filled = counts.nonzero()[0]
            # As unsigned, a negative id is huge.
            most = np.maximum.reduceat(ids.view(np.uint64), (ends - counts)[filled])
            if (most >= self.rows[numbers[filled]].view(np.uint64)).any():
                self._refuse(ids, features, ends.tolist())
        rows: Rows = self.starts[numbers].repeat(counts)
        rows += ids
        return rows

    def _refuse(self, ids: npt.NDArray[np.int64], features: Features, ends: Sequence[int]) -> None:
        """Raise RowIndexError for the first bad id."""
        begin = 0
        for name, number, end in zip(*features, ends, strict=True):
            own, rows = ids[begin:end], int(self.rows[number])
            bad = np.flatnonzero((own < 0) | (own >= rows))
            if bad.size:
                raise RowIndexError(
                    f"id {own[bad[0]]} at position {bad[0]} of feature {name!r} is outside table "
                    f"{self.tables[number].name!r}, which has rows 0 to {rows - 1}"
                )
            begin = end

    def lease_and_read(
        self, ids: Tensor, features: Features, lengths: Sequence[int], field: str
    ) -> tuple[Lease, Any]:
        """Lease the rows of ids on the device, and return a field of them; see `in_space`."""
        access = self._device_access
        found = self._feature_ids(features, tuple(lengths))
        return access.lease_and_read(access.torch_ids(ids), field, found)

    def lease(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Lease:
        """Lease the rows of ids on the device; see `in_space`."""
        access = self._device_access
        found = self._feature_ids(features, tuple(lengths))
        return access.lease(access.torch_ids(ids), found)

    def has(self, ids: Tensor) -> bool:
        """Whether ids are on the device of a GPU tier."""
        return self._on_device is not None and ids.device.type == self._device_type

    def _checked_on_device(
        self, ids: Tensor, features: Features, lengths: tuple[int, ...]
    ) -> Tensor:
        """Check without waiting: a bad id becomes a number that encodes feature and id."""
        import torch

        access = self._device_access
        ids = access.torch_ids(ids).rows  # raises for those on another device
        rows: Tensor = torch.empty_like(ids)
        if ids.shape[0]:
            found = self._feature_ids(features, lengths)
            with access.using():
                access.gpu.in_space(ids, rows, found, access.stream("torch"))
        return rows

    @property
    def _device_access(self) -> DeviceAccess:
        if self._on_device is None:
            raise RuntimeError("ids are checked on a device where there is a GPU tier")
        return self._on_device

    def _feature_ids(self, features: Features, lengths: tuple[int, ...]) -> FeatureIds:
        """Return how ids of features become rows, kept for the next batch of as many."""
        last = self._last
        if last is not None and last[0] is features and last[1] == lengths:
            return last[2]
        found = self._ids.get((features, lengths))
        if found is None:
            while len(self._ids) >= _REMEMBERED:
                del self._ids[next(iter(self._ids))]
            access = self._device_access
            with access.using():
                stream, bounds = access.stream("torch"), self._bounds.get(features)
                if bounds is None:
                    bounds = access.device.upload(self._bounds_of(features), stream)
                    self._bounds[features] = bounds
                found = FeatureIds(access.device, lengths, bounds, stream)
            self._ids[features, lengths] = found
        self._last = features, lengths, found
        return found

    def _bounds_of(self, features: Features) -> Rows:
        """Return start, rows and number of each feature, `(3, features)`."""
        gpu, told = self.together.space.gpu, []
        for name, number in zip(*features, strict=True):
            known = (name, self.tables[number].name, int(self.rows[number]))
            if gpu is not None:
                if known not in gpu.features and len(gpu.features) >= MOST_FEATURES:
                    raise InvalidInputError(f"a GPU tier tells {MOST_FEATURES} features apart")
                told.append(gpu.features.setdefault(known, len(gpu.features)))
        tables = np.array(features.tables, np.intp)
        return np.stack([self.starts[tables], self.rows[tables], np.array(told, np.int64)])

    @cached_property
    def _torch_device(self) -> Any:
        import torch

        gpu = self.together.space.gpu
        return torch.device("cpu" if gpu is None else gpu.device.torch_name)

    # -- and back

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The starts, ascending, on the device, the table of each, and the starts by table."""
        import torch

        arrays = self.starts[self._order], self._order.astype(np.int64), self.starts
        first, second, third = (torch.from_numpy(each).to(self._torch_device) for each in arrays)
        return first, second, third

    def tables_of(self, rows: Tensor) -> Tensor:
        """Return the number of the table of each row, int64 `(n,)`; undefined for non-rows."""
        import torch

        ascending, numbers, _ = self._sorted
        if len(ascending) == 1:
            return torch.zeros_like(rows)
        return numbers[(torch.searchsorted(ascending, rows, right=True) - 1).clamp_(min=0)]

    def own(self, rows: Tensor) -> Tensor:
        """Return rows of the space as ids of their own tables."""
        return rows - self._sorted[2][self.tables_of(rows)]


class JointTable:
    """Tables of one space and one layout as one, by rows of the space.

    It has the interface of a table that layers and optimizers need. Rows are valid for one
    location: `renumbered` converts those of an older one to the present one.

    Attributes:
        tables: in the order of their numbers.
        name: their name in messages.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Join tables that are `alike`; raises InvalidInputError for a table by key."""
        for table in tables:
            if table.by_row is not table:
                raise InvalidInputError(
                    f"table {table.name!r} is by key, and tables that are looked up as one go by "
                    "row: join its by_row"
                )
        self.tables: tuple[Table, ...] = tuple(tables)
        self.name: str = _listed(tables)
        self._location = Location(self.tables)

    @property
    def location(self) -> Location:
        """Where the tables are now; raises InvalidInputError if they were separated."""
        now = self._location.together
        if now.space.closed or now.space.nearest.rows != now.space_rows:
            self._location = Location(self.tables)
        return self._location

    def in_space(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Tensor:
        """Return the rows of the ids of some features, int64 `(n,)`.

        Args:
            ids: int64 `(n,)`, contiguous, those of all features in sequence.
            features: the features.
            lengths: how many ids each has.

        On the host raises RowIndexError for an id that is not in the table of its feature. On a GPU
        such an id becomes a row that no space has: it reads NaN, is not written, and the next call
        that waits raises.
        """
        return self.location.in_space(ids, features, lengths)

    def renumbered(self, rows: Tensor, before: Location) -> Tensor:
        """Return rows of an earlier location as those of the present one."""
        now = self.location
        if before is now:
            return rows
        import torch

        # On the host: the order of the tables is all that both locations share.
        given = torch.from_numpy(on_host(rows))
        order = torch.from_numpy(before.starts[before._order])
        found = torch.searchsorted(order, given, right=True) - 1
        numbers = torch.from_numpy(before._order)[found.clamp_(min=0)]
        moved = torch.from_numpy(now.starts - before.starts)[numbers]
        return torch.where(given < 0, given, given + moved).to(rows.device)

    def _renamed_since(self, names: Sequence[int], touched: Iterable[int] | None = None) -> str:
        """Return why rows of tables `touched`, of any if None, may mean something else by now.

        See `Epoch.renamed_since`; `names` are those that `Location.names` returns.
        """
        every = range(len(self.tables)) if touched is None else touched
        return renamed(self.tables, names, every)

    def lease(self, rows: Tensor, touched: Iterable[int] = ()) -> Lease:
        """Pin the distinct rows of a batch, of the tables `touched`; see `Table.lease`."""
        access = self.location.access
        try:
            batch = access.ids(rows)
            self._record(rows, touched)
            return access.lease(batch)
        except INTERNAL as error:
            raise internal_error(error) from error

    def checks_late(self, ids: Tensor) -> bool:
        """Whether `lease_features` checks ids in the launches of the lease."""
        return self.location.has(ids)

    def lease_features(
        self, ids: Tensor, features: Features, lengths: Sequence[int], touched: frozenset[int]
    ) -> Lease:
        """Lease ids instead of rows; raises as `in_space` does."""
        location = self.location
        try:
            if location.has(ids) and not recorded(self.tables, touched):
                return location.lease(ids, features, lengths)
            return self.lease(location.in_space(ids, features, lengths), touched)
        except INTERNAL as error:
            raise internal_error(error) from error

    def lease_and_read(
        self,
        ids: Tensor,
        features: Features,
        lengths: Sequence[int],
        field: str,
        touched: frozenset[int],
    ) -> tuple[Lease, Any]:
        """Lease ids; return the lease and one field of the row of each id, `(n, dim)`.

        Raises as `in_space` does.
        """
        location = self.location
        try:
            if location.has(ids) and not recorded(self.tables, touched):
                return location.lease_and_read(ids, features, lengths, field)
            rows = location.in_space(ids, features, lengths)
            self._record(rows, touched)
            return location.access.lease_and_read(location.access.ids(rows), field)
        except INTERNAL as error:
            raise internal_error(error) from error

    def read(self, rows: Tensor, field: str | Sequence[str], touched: Iterable[int] = ()) -> Any:
        """Return a field of rows, `(n, dim)`, or a dict of several; see `Table.read`."""
        location = self.location
        access, layout = location.access, self.spec.layout
        try:
            batch = access.ids(rows)
            self._record(rows, touched)
            names = [field] if isinstance(field, str) else field
            spans = [layout.span(name) for name in names]
            lo, hi = min(lo for lo, _ in spans), max(hi for _, hi in spans)
            data = access.read(batch, lo, hi, admit=True)
            found = {
                name: access.to_array(data[:, begin - lo : end - lo], layout.field(name), batch)
                for name, (begin, end) in zip(names, spans, strict=True)
            }
        except INTERNAL as error:
            raise internal_error(error) from error
        return found[field] if isinstance(field, str) else found

    def write(self, rows: Tensor, values: Any, field: str) -> None:
        """Write a field of rows, `(n, dim)`; see `Table.write`."""
        access, layout = self.location.access, self.spec.layout
        self._owner.door.check(write=True)
        try:
            batch = access.ids(rows)
            data = access.to_bytes(values, layout.field(field), batch, field)
            access.write(batch, [(*layout.span(field), data)])
        except INTERNAL as error:
            raise internal_error(error) from error

    def prefetch(self, rows: Tensor, *, window: int = 16) -> None:
        """Start bringing rows nearer; see `Table.prefetch`."""
        with internal_errors():
            self._owner.door.check()
            self.location.access.prefetch(rows, window, self._owner.prefetcher)

    def _together(self) -> AbstractContextManager[Any]:
        """Enter the store once for several calls of this thread; see `Access.together`."""
        return self.location.access.together()

    def _record(self, rows: Tensor, touched: Iterable[int]) -> None:
        """Add a batch to the open recordings of its tables, each with its own ids."""
        numbers = recorded(self.tables, touched)
        if not numbers:
            return
        location, every = self.location, on_host(rows) if is_torch(rows) else rows
        for number in numbers:
            self.tables[number]._record(every - location.starts[number])

    # -- common to all tables

    @property
    def spec(self) -> TableSpec:
        """The spec of the tables; the number of rows is that of the first."""
        return self.tables[0].spec

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of a record, in order."""
        return self.tables[0].fields

    @property
    def device(self) -> str:
        """Where the nearest tier is."""
        return self.tables[0].device

    @property
    def store(self) -> Store:
        """The store of the tables."""
        return self.tables[0].store

    @property
    def _owner(self) -> Owner:
        return self.tables[0]._owner

    def __deepcopy__(self, memo: dict[int, Any]) -> JointTable:
        """Return the joint table itself."""
        return self


def _listed(tables: Sequence[Table]) -> str:
    """Return the names of tables, or of some where there are many."""
    names = ", ".join(table.name for table in tables[:_SHOWN])
    more = len(tables) - _SHOWN
    return names if more <= 0 else f"{names} and {more} more"
