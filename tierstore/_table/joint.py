"""Tables of one space and one layout as one: a call on all of them is one lookup.

    joint = JointTable([store["user"], store["item"]])
    features = Features(("user", "item", "bought"), (0, 1, 1))
    rows = joint.in_space(ids, features, lengths)        # ids of all features in sequence
    with joint.lease(rows) as lease: ...

Its rows are those of the space. `in_space` turns ids of tables into such rows, and only it checks
them; all other methods of a joint table take rows that it returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore._door import INTERNAL, internal_error
from tierstore._table.access import Access, Lease
from tierstore._table.address import on_host
from tierstore._table.backing import Backing, access_to
from tierstore._table.gpu import DeviceAccess
from tierstore._table.home import Home
from tierstore._table.table import Table, extent_of, in_present_tiers, shape_of
from tierstore._table.trace import Recording
from tierstore._tiers.base import Epoch, Rows
from tierstore._tiers.gpu.link import FeatureIds
from tierstore._tiers.gpu.memory import MOST_FEATURES
from tierstore._tiers.space import Space, WholeSpace
from tierstore.errors import InvalidInputError, RowIndexError
from tierstore.spec import TableSpec

if TYPE_CHECKING:
    from torch import Tensor

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
        space: the tiers that they share.
        space_rows: how many rows the space has then; it may grow.
        access: to all of its rows.
        tables: the tables.
        starts, rows: of each table, its first row in the space and the number of its rows, int64.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Look the tables up. Raises InvalidInputError if they no longer share a space."""
        first = tables[0]._backing
        space: Space = first.space
        if space.whole is not None:
            raise InvalidInputError(
                f"table {first.name!r} is open with gpu_whole, and a collection takes whole records"
            )
        records = shape_of(tables[0])
        for table in tables:
            if table._backing.space is not space or shape_of(table) != records:
                raise InvalidInputError(
                    f"tables {first.name!r} and {table.name!r} no longer share tiers, or their "
                    "records differ by now: make the collection anew"
                )
        self.space: Space = space
        self.space_rows: int = space.nearest.rows
        self.tables: tuple[Table, ...] = tuple(tables)
        self.starts: Rows = np.array([extent_of(table).start for table in tables], np.int64)
        self.rows: Rows = np.array([table.rows for table in tables], np.int64)
        self.access: Access = access_to(
            space, WholeSpace(space, _listed(tables)), first.layout, first.home
        )
        self._on_device = self.access if isinstance(self.access, DeviceAccess) else None
        self._device_type = "" if self._on_device is None else self._on_device.torch_device.type
        self._order = np.argsort(self.starts)
        self._numbers: dict[Features, Rows] = {}
        self._bounds: dict[Features, Any] = {}
        self._ids: dict[tuple[Features, tuple[int, ...]], FeatureIds] = {}
        self._last: tuple[Features, tuple[int, ...], FeatureIds] | None = None
        self._named = self._names_now()

    def names(self) -> tuple[int, ...]:
        """Return the number of names of each table; see `Epoch`. Their epochs end together."""
        if self._named[0] is not extent_of(self.tables[0]).epoch:
            self._named = self._names_now()
        return self._named[1]

    def _names_now(self) -> tuple[Epoch, tuple[int, ...]]:
        first = extent_of(self.tables[0]).epoch  # before the others: a later one is looked at again
        return first, tuple(extent_of(table).epoch.names for table in self.tables)

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
        gpu, told = self.space.gpu, []
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

        return torch.device(self.access.place)

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


class Joined(Backing):
    """What tables stand on that are looked up as one; see `JointTable`.

    Attributes:
        tables: in the order of their numbers.
        present: where they are, or were before other tables came, grew or changed.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        """Look the tables up; raises as `Location` does."""
        self.tables: tuple[Table, ...] = tuple(tables)
        self.name = _listed(tables)
        self.on_host = None
        self._locate()

    def _locate(self) -> None:
        self.present, first = Location(self.tables), self.tables[0]._backing
        self.space, self.layout, self.spans = first.space, first.layout, first.spans

    @property
    def location(self) -> Location:
        """Where the tables are now; raises InvalidInputError if they were separated."""
        now = self.present
        if now.space.closed or now.space.nearest.rows != now.space_rows:
            self._locate()
        return self.present

    @property
    def access(self) -> Access:  # type: ignore[override]
        """Access to all of their rows."""
        now = self.present  # as `location` does, whose call counts in a step
        if now.space.closed or now.space.nearest.rows != now.space_rows:
            self._locate()
        return self.present.access

    @property
    def home(self) -> Home:  # type: ignore[override]
        """The home of the tables."""
        return self.tables[0]._backing.home

    def renamed_since(self, names: Any, touched: Any = None) -> str:
        """Return why rows of tables `touched`, of any if None, may mean something else by now.

        See `Epoch.renamed_since`; `names` are those that `Location.names` returns.
        """
        every = range(len(self.tables)) if touched is None else touched
        whys = (extent_of(self.tables[each]).epoch.renamed_since(names[each]) for each in every)
        return next(filter(None, whys), "")

    @property
    def recording(self) -> Recording | None:  # type: ignore[override]
        """A recording of any of the tables."""
        # In C for each table: a step asks.
        return next(filter(None, map(attrgetter("_backing.recording"), self.tables)), None)


class JointTable(Table):
    """Tables of one space and one layout as one: a table over all rows of the space.

    Rows are valid for one location: `renumbered` converts those of an older one to the present one.
    What goes by a table alone, such as its scalars, counters and scans, is asked of `tables`.

    Attributes:
        tables: in the order of their numbers.
        name: their name in messages.
    """

    _backing: Joined

    def __init__(self, tables: Sequence[Table]) -> None:
        """Join tables that are `alike`; raises InvalidInputError for a table by key."""
        for table in tables:
            if table.by_row is not table:
                raise InvalidInputError(
                    f"table {table.name!r} is by key, and tables that are looked up as one go by "
                    "row: join its by_row"
                )
        super().__init__(Joined(tables))
        self.tables: tuple[Table, ...] = self._backing.tables

    @property
    def location(self) -> Location:
        """Where the tables are now; raises InvalidInputError if they were separated."""
        return self._backing.location

    @property
    def spec(self) -> TableSpec:
        """The spec of the tables; the number of rows is that of the first."""
        return self.tables[0].spec

    @property
    def rows(self) -> int:
        """Number of rows of the space."""
        return self.location.space_rows

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

    @in_present_tiers
    def lease_features(self, ids: Tensor, features: Features, lengths: Sequence[int]) -> Lease:
        """Lease ids instead of rows; raises as `in_space` does."""
        location = self._backing.present  # the present one: `in_present_tiers` has just looked
        if not location.has(ids) or (Table.any_recorded and self._backing.recording):
            return self.lease(location.in_space(ids, features, lengths))
        try:
            return location.lease(ids, features, lengths)
        except INTERNAL as error:
            raise internal_error(error) from error

    @in_present_tiers
    def lease_and_read(
        self, ids: Tensor, features: Features, lengths: Sequence[int], field: str
    ) -> tuple[Lease, Any]:
        """Lease ids; return the lease and one field of the row of each id, `(n, dim)`.

        Raises as `in_space` does.
        """
        location = self._backing.present
        if not location.has(ids) or (Table.any_recorded and self._backing.recording):
            return self._lease_and_read(location.in_space(ids, features, lengths), field)
        try:
            return location.lease_and_read(ids, features, lengths, field)
        except INTERNAL as error:
            raise internal_error(error) from error

    def _record(self, rows: Rows) -> None:
        """Add a batch to the recordings of its tables, each with its own ids."""
        location = self.location
        for table, start, count in zip(self.tables, location.starts, location.rows, strict=True):
            own = rows - start
            if table._backing.recording is not None and ((own >= 0) & (own < count)).any():
                table._record(own)

    def __reduce__(self) -> Any:
        """Pickle the tables."""
        return JointTable, (self.tables,)


def _listed(tables: Sequence[Table]) -> str:
    """Return the names of tables, or of some where there are many."""
    names = ", ".join(table.name for table in tables[:_SHOWN])
    more = len(tables) - _SHOWN
    return names if more <= 0 else f"{names} and {more} more"
