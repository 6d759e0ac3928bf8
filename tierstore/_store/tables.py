"""The open tables of a store: opened one by one from a manifest, and placed in spaces.

Damage to one table leaves the others usable.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._closing import call_each
from tierstore._disk.behind import Behind
from tierstore._disk.generation import Generation, Later
from tierstore._disk.manifest import Manifest, TableInfo
from tierstore._store.options import Options
from tierstore._store.partitions import PartitionReaders
from tierstore._store.payload import Payload
from tierstore._store.versions import History
from tierstore._table.backing import Backing
from tierstore._table.home import Home, Touched
from tierstore._table.keyed import table_on
from tierstore._table.table import Table
from tierstore._tiers.base import GONE, REFRESHED, REMOVED, REPLACED, Renewed
from tierstore._tiers.space import Space
from tierstore.errors import CorruptStoreError, FormatError, TierStoreError
from tierstore.spec import TableSpec
from tierstore.stats import SpaceInformation, TableInformation

_NO_ROWS = np.empty(0, np.int64)
_EXAMINED_TABLES = 64
"""Most tables whose bases a reader examines when it opens a store, not at their first use."""


@dataclass
class Opening:
    """The tables opened for a manifest, by name, and what else a reader needs to switch to it.

    Attributes:
        manifest: which.
        new: tables that were not open before.
        same: tables that are unchanged in the manifest.
        later: open tables that can switch to the manifest.
        errors: the errors of the other tables.
        renewed: of each space, what records in memory become with the manifest.
        payload: the values committed with it, which a reader holds open.
        damaged: the errors, explained.
        before: the manifest that was open meanwhile.
    """

    manifest: Manifest
    new: dict[str, Generation] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    later: dict[str, Later] = field(default_factory=dict)
    errors: dict[str, CorruptStoreError | FormatError] = field(default_factory=dict)
    renewed: dict[Space, Renewed] = field(default_factory=dict)
    payload: dict[str, Payload] = field(default_factory=dict)
    damaged: dict[str, CorruptStoreError] = field(default_factory=dict)
    before: Manifest | None = None

    def __bool__(self) -> bool:
        """Whether any table was opened."""
        return bool(self.new or self.same or self.later)

    def take_payload(self) -> dict[str, Payload]:
        """Return the payload, which the caller holds open from now on."""
        payload, self.payload = self.payload, {}
        return payload

    def close(self) -> None:
        """Close the opened tables and payload that were not taken."""
        new, self.new = self.new, {}
        payload = self.take_payload()
        call_each(
            *(generation.close for generation in new.values()),
            *(each.close for each in payload.values()),
        )


class Opener:
    """Opens the files of tables."""

    def __init__(
        self,
        directory: _io.Directory,
        history: History,
        options: Options,
        touched: Touched,
        locks: list[Any],
        behind: Behind,
    ) -> None:
        """Open nothing yet.

        Tables that are written to are noted in `touched`; `behind` writes rows that are handed
        down. `locks` are those of the store, to which those of partitions are added.
        """
        self._behind = behind
        self._touched = touched
        self._locks = locks
        self._partitions: dict[int, PartitionReaders] = {}
        self._directory = directory
        self._history = history
        self._options = options

    def open_all(
        self,
        opening: Opening,
        tables: Mapping[str, Backing],
        *,
        next_seq: Callable[[], int] | None,
        floor: int,
    ) -> None:
        """Open the tables of a manifest, or only the new deltas if a table is open with the same
        base.

        Damaged tables are recorded in `opening.errors`. A reader of many tables leaves their bases
        to `examine`. A writer does not: it removes no
        older version while a table is damaged.
        """
        manifest = opening.manifest
        examined = next_seq is not None or len(manifest.tables) <= _EXAMINED_TABLES
        for name, info in manifest.tables.items():
            table = tables.get(name)
            try:
                shown = None if table is None else table.generation.info
                if manifest.partitions:
                    opening.new[name] = self.open(manifest, name, next_seq, floor)
                elif table is not None and shown is info and table.space.gpu is None:
                    opening.same.append(name)
                elif table is not None and table.can_follow(info):
                    opening.later[name] = table.generation.later(info, manifest.floor)
                else:
                    opening.new[name] = self.open(
                        manifest, name, next_seq, floor, examined=examined
                    )
            except (CorruptStoreError, FormatError) as error:
                opening.errors[name] = error

    def open(
        self,
        manifest: Manifest,
        name: str,
        next_seq: Callable[[], int] | None,
        floor: int,
        *,
        examined: bool = True,
    ) -> Generation:
        """Open the files of a table of a manifest.

        `next_seq` returns the number of the next manifest, for a writer; `floor` is the version up
        to which a fold may be merging deltas into the base. Unless `examined`, the base is left to
        `examine`. Raises CorruptStoreError, FormatError.
        """
        info = manifest.tables[name]
        if manifest.partitions:
            return cast(Generation, self._readers_of(manifest).open(manifest, name))
        generation: Generation | None = None
        try:
            try:
                with self._directory.directory(name) as table:
                    generation = Generation(
                        table,
                        info,
                        store=manifest.uuid,
                        next_seq=next_seq,
                        on_write=functools.partial(self._touched.rows.setdefault, name),
                        examined=examined,
                        behind=self._behind,
                    )
            except FileNotFoundError:
                raise CorruptStoreError(
                    f"{self._directory.join(name)}, the directory of a table, is missing; "
                    "restore it from a copy"
                ) from None
            if examined and not isinstance(self._options.path, _io.Objects):
                generation.check_base(floor)
        except BaseException:
            if generation is not None:
                generation.close()
            raise
        return generation

    def examine(self, generation: Generation, floor: int, *, is_bound: bool) -> None:
        """Examine the base that opening left for later; raises as `open` does.

        Unless `is_bound`, it may belong to a different time than the manifest.
        """
        is_on_disk = not isinstance(self._options.path, _io.Objects)
        generation.examine(floor if is_on_disk and is_bound else None)

    def _readers_of(self, manifest: Manifest) -> PartitionReaders:
        if manifest.seq not in self._partitions:
            readers = PartitionReaders(self._directory, manifest, self._locks)
            self._partitions[manifest.seq] = readers
        return self._partitions[manifest.seq]

    def has_moved(self, manifest: Manifest) -> bool:
        """Whether partitions have published since they were opened for a manifest.

        They are opened anew then.
        """
        readers = self._partitions.get(manifest.seq)
        if readers is None or not readers.have_moved():
            return False
        self._partitions.pop(manifest.seq).close()
        return True

    def hold_only(self, manifest: Manifest) -> None:
        """Release partitions that only other manifests than this one named."""
        for seq in self._partitions.keys() - {manifest.seq}:
            self._partitions.pop(seq).close()

    def check(self, manifest: Manifest, name: str, floor: int) -> None:
        """Raise CorruptStoreError or FormatError unless a table of a manifest can be opened."""
        self.open(manifest, name, None, floor).close()

    def explain(self, manifest: Manifest, name: str, error: Exception) -> CorruptStoreError:
        """Return the error of a damaged table, with the remedy."""
        older = self._version_with(manifest, name)
        hint = "" if older is None else f", and version {older} of the table opens"
        path = shlex.quote(self._directory.path)
        return CorruptStoreError(
            f"table {name!r} is damaged: {error}; `tierstore verify {path}` lists all damage, "
            f"`tierstore repair {path} DEST` copies what is intact{hint}"
        )

    def _version_with(self, manifest: Manifest, name: str) -> int | None:
        """Return the newest other version in which a table can be opened, if any."""
        for number, other in reversed(self._history.versions().items()):
            if number != manifest.version and name in other.tables:
                with (
                    contextlib.suppress(CorruptStoreError, FormatError, FileNotFoundError),
                    self._directory.directory(name) as table,
                ):
                    info: TableInfo = other.tables[name]
                    Generation(table, info, store=manifest.uuid, next_seq=None).close()
                    return number
        return None


def _changed(space: Space, later: Mapping[str, Later]) -> npt.NDArray[np.int64]:
    """Return the ascending rows of a space that change when tables switch."""
    parts = [_NO_ROWS]
    for extent in space.extents:
        if extent.table in later:
            rows = later[extent.table].changed
            parts.append(extent.in_space(rows[: np.searchsorted(rows, extent.rows)]))
    return np.concatenate(parts)


class Spaces:
    """Assigns tables to spaces of shared tiers, and their memory.

    A space is placed as a whole: if a table is added, removed or changed, the cached rows of the
    other tables of its space are dropped, after their changed rows were written to files.

    Attributes:
        open: the spaces, in placement order.
    """

    def __init__(
        self, tables: dict[str, Table], backings: dict[str, Backing], options: Options
    ) -> None:
        """Set up without placing.

        Placed tables are added to `tables` of the store, and what they stand on to `backings`.
        """
        self._tables = tables
        self._backings = backings
        self._placement = options.placement()
        self.open: dict[Space, None] = {}
        self._of: dict[str, Space] = {}

    def check_fit(self, specs: Mapping[str, TableSpec]) -> None:
        """Check that tables with these specs can be placed together, before they are written.

        Raises CapacityError, and the errors of a policy that does not fit a table.
        """
        self._placement.check(specs)

    def place(
        self,
        home: Home,
        new: Mapping[str, Generation],
        specs: Mapping[str, TableSpec],
        *,
        renamed: str = REPLACED,
        kept: Collection[str] = (),
    ) -> None:
        """Switch tables to the opened files, with new memory.

        `specs` are those of all tables of the store. `renamed` is why rows of the `new` tables may
        mean something else than before; those of tables that are `kept` do not. After an error,
        unused tables of `new` are closed. Raises CapacityError.
        """
        coming = dict(new)
        try:
            if not coming and self._backings.keys() == self._of.keys():
                return
            self.vacate(coming)
            known = {name: each.generation for name, each in self._backings.items()} | coming
            # All are planned before the first takes memory.
            for part in self._placement.plan({name: specs[name] for name in known}):
                if self._stands(part.tables):
                    continue
                self.vacate(part.tables)
                tiers = {name: known[name].tier for name in part.tables}
                space = self._placement.place(part, tiers)
                self.open[space] = None
                for extent in space.extents:
                    self._of[extent.table] = space
                    name, generation = extent.table, coming.pop(extent.table, None)
                    on = self._backings.get(name)
                    if generation is None:
                        self._backings[name].move(space, extent)
                    elif on is not None and on.suits(generation.info.spec):
                        on.attach(generation, space, extent, "" if name in kept else renamed)
                    else:
                        self._tables[name], self._backings[name] = table_on(
                            home, name, generation, space, extent
                        )
        except BaseException:
            for generation in coming.values():
                generation.close()
            raise

    def information(self) -> tuple[dict[str, TableInformation], tuple[SpaceInformation, ...]]:
        """Describe the tables, by name, and those that share tiers together."""
        tiers = {space: space.information() for space in self.open}
        known = {name: on.information(tiers[on.space]) for name, on in self._backings.items()}
        spaces = [[known[extent.table] for extent in space.extents] for space in tiers]
        return known, tuple(map(SpaceInformation.of, spaces))

    def _stands(self, group: Iterable[str]) -> bool:
        """Whether an open space holds exactly these tables."""
        names = set(group)
        space = self._of.get(next(iter(names)))
        return space is not None and {extent.table for extent in space.extents} == names

    def grow(
        self, home: Home, name: str, rows: int, specs: Callable[[], Mapping[str, TableSpec]]
    ) -> None:
        """Add rows to a table; its uncommitted rows stay.

        Its leases and cached rows stay too, but where it has a GPU tier. `specs` returns those of
        all tables of the store then.
        """
        on, space = self._backings[name], self._of[name]
        if space.can_grow:
            on.disk.grow(rows)
            space.grow(rows)
            on.move(space, on.extent)
            return
        space.flush()
        on.disk.grow(rows)
        self.vacate([name])
        self.place(home, {}, specs())

    def end_leases(
        self, home: Home, name: str, specs: Callable[[], Mapping[str, TableSpec]]
    ) -> None:
        """End the leases of a table and those that it shares tiers with, before its rows move.

        Rows of the other tables stay as they are.
        """
        space = self._of[name]
        if space.gpu is None:
            space.end_leases(REMOVED, [name])
            return
        self.flush_and_vacate(name, REMOVED)
        self.place(home, {}, specs())

    def flush_and_vacate(self, name: str, renamed: str) -> None:
        """Close the tiers of a table after writing all their changes; its rows get new meanings."""
        self._of[name].flush()
        self._backings[name].extent.epoch.end(renamed, names=True)
        self.vacate([name])

    def vacate(self, names: Iterable[str]) -> None:
        """Close the spaces of tables, after writing changed rows of other tables to their files."""
        going = set(names)
        for space in dict.fromkeys(self._of[name] for name in names if name in self._of):
            tables = {extent.table for extent in space.extents}
            if tables - going:
                space.flush()
            del self.open[space]
            for table in tables:
                del self._of[table]
            space.close()

    def drop(self, name: str) -> None:
        """Close a table that was removed from the store, and end its leases."""
        on = self._backings.pop(name)
        del self._tables[name]
        on.extent.epoch.ended = GONE  # whatever has ended it before
        on.extent.epoch.end(GONE, names=True)
        self.vacate([name])
        on.close()

    def read_ahead(self, later: Mapping[str, Later]) -> dict[Space, Renewed]:
        """Read the new values of records in memory before tables switch; nothing changes yet.

        What cannot be read is left out: who asks for it is told.
        """
        renewed: dict[Space, Renewed] = {}
        for space in self.open:
            if space.host is None:
                continue
            changed = _changed(space, later)
            rows = space.host.renewable(changed)
            records = np.empty((rows.size, space.host.record_bytes), np.uint8)
            known = np.zeros(rows.size, np.bool_)
            for extent in space.extents:
                part = slice(*np.searchsorted(rows, [extent.start, extent.start + extent.rows]))
                if part.start < part.stop:
                    with contextlib.suppress(TierStoreError, OSError):
                        known[part] = self._backings[extent.table].disk.read_ahead(
                            later[extent.table].deltas, extent.own(rows[part]), records[part]
                        )
            if not known.all():
                rows, records = rows[known], records[known]
            renewed[space] = Renewed(changed, rows, records)
        return renewed

    def follow(self, later: Mapping[str, Later], renewed: Mapping[Space, Renewed]) -> None:
        """Switch a reader's tables to a later manifest; reads nothing from the disk.

        Ends every lease, those of tables that show what they did too.
        """
        keyed = {name for name in later if later[name].info.spec.keys is not None}
        for space in self.open:  # before the first key or row is another
            space.end_epochs(REFRESHED, renamed=keyed)
        for name, each in later.items():
            self._backings[name].follow(each)
        for space in self.open:  # those of a table that was dropped went, with all in them
            space.forget(renewed.get(space))

    def end_epochs(self, reason: str) -> None:
        """End every lease, and what every row means, before rows or their keys change."""
        for space in self.open:
            space.end_epochs(reason, renamed=None)

    def discard(self) -> None:
        """Drop uncommitted rows, and end every lease; new leases are possible afterwards."""
        for space in self.open:
            space.discard()

    def close(self) -> None:
        """Release all memory."""
        self._of.clear()
        while self.open:
            self.open.popitem()[0].close()
