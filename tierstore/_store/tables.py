"""The open tables of a store: opened from a manifest one by one, and placed in spaces.

Damage to one leaves the others usable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from tierstore import _io
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import Manifest, TableInfo
from tierstore._store.options import Options
from tierstore._store.partitions import PartitionReaders
from tierstore._store.versions import History
from tierstore._table.table import Owner, Table
from tierstore._tiers.base import GONE
from tierstore._tiers.placement import Placement
from tierstore._tiers.space import Space
from tierstore.errors import CorruptStoreError, FormatError
from tierstore.spec import TableSpec

__all__ = ["Opener", "Opening", "Spaces"]

_NO_ROWS = np.empty(0, np.int64)


@dataclass
class Opening:
    """Tables that were opened for a manifest, by name.

    Attributes:
        new: those that were not open before.
        same: those of which the manifest says what they show.
        deltas: the deltas of the others that were open and follow the manifest.
        errors: what opening the others raised.
    """

    new: dict[str, Generation] = field(default_factory=dict)
    same: list[str] = field(default_factory=list)
    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    errors: dict[str, CorruptStoreError | FormatError] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any table was opened."""
        return bool(self.new or self.same or self.deltas)

    def close(self) -> None:
        """Close what was opened."""
        for generation in self.new.values():
            generation.close()


class Opener:
    """Opens the files of tables."""

    def __init__(
        self, directory: _io.Directory, history: History, options: Options, locks: list[Any]
    ) -> None:
        """Open nothing yet; `locks` are the store's, to which those of partitions are added."""
        self._locks = locks
        self._partitions: dict[int, PartitionReaders] = {}
        self._directory = directory
        self._history = history
        self._options = options

    def open_all(
        self,
        manifest: Manifest,
        tables: Mapping[str, Table],
        opening: Opening,
        *,
        next_seq: Callable[[], int] | None,
        floor: int,
    ) -> None:
        """Open what a manifest names: all of a table, or only the deltas of one that can follow.

        A table that is damaged is noted in `opening.errors`. Of the root of a partitioned store
        that is opened alone there is none.
        """
        if self._options.root_only:
            return
        for name, info in manifest.tables.items():
            table = tables.get(name)
            try:
                shown = None if table is None else table._generation.info
                if manifest.partitions:
                    opening.new[name] = self.open(manifest, name, next_seq, floor)
                elif table is not None and shown is info and table._space.gpu is None:
                    opening.same.append(name)
                elif table is not None and table._can_follow(info):
                    opening.deltas[name] = table._generation.open_deltas(info)
                else:
                    opening.new[name] = self.open(manifest, name, next_seq, floor)
            except (CorruptStoreError, FormatError) as error:
                opening.errors[name] = error

    def open(
        self, manifest: Manifest, name: str, next_seq: Callable[[], int] | None, floor: int
    ) -> Generation:
        """Open the files of a table of a manifest.

        `next_seq` returns the number of the next manifest, for a writer; `floor` is the version up
        to which a fold may be merging deltas into the base. Raises CorruptStoreError, FormatError.
        """
        info = manifest.tables[name]
        if manifest.partitions:
            return cast(Generation, self._readers_of(manifest).open(manifest, name))
        try:
            with self._directory.directory(name) as table:
                generation = Generation(table, info, store=manifest.uuid, next_seq=next_seq)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{self._directory.join(name)}, the directory of a table, is missing; "
                "restore it from a copy"
            ) from None
        try:
            if not isinstance(self._options.path, _io.Objects):
                generation.check_base(floor)
        except BaseException:
            generation.close()
            raise
        return generation

    def _readers_of(self, manifest: Manifest) -> PartitionReaders:
        if manifest.seq not in self._partitions:
            readers = PartitionReaders(self._directory, manifest, self._locks)
            self._partitions[manifest.seq] = readers
        return self._partitions[manifest.seq]

    def hold_only(self, manifest: Manifest) -> None:
        """Let the partitions go that other manifests than this one named."""
        for seq in self._partitions.keys() - {manifest.seq}:
            self._partitions.pop(seq).close()

    def check(self, manifest: Manifest, name: str, floor: int) -> None:
        """Raise CorruptStoreError or FormatError unless a table of a manifest can be opened."""
        self.open(manifest, name, None, floor).close()

    def explain(self, manifest: Manifest, name: str, error: Exception) -> CorruptStoreError:
        """Return the error of a damaged table, with what helps."""
        older = self._version_with(manifest, name)
        hint = "" if older is None else f", and version {older} of the table opens"
        path = self._directory.path
        return CorruptStoreError(
            f"table {name!r} is damaged: {error}; 'tierstore verify {path}' lists all damage, "
            f"'tierstore repair {path} DEST' copies what is whole{hint}"
        )

    def _version_with(self, manifest: Manifest, name: str) -> int | None:
        """Return the newest other version in which a table opens, if there is one."""
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


class Spaces:
    """Which tables share tiers, and the memory of those.

    A space is placed as a whole: where one of its tables comes, goes or changes, what the others
    have in memory goes too, their changed rows to their files first.

    Attributes:
        open: the spaces, in the order in which they were placed.
    """

    def __init__(self, tables: dict[str, Table], options: Options) -> None:
        """Place nothing yet; `tables` are the store's, and are added to."""
        self._tables = tables
        self._placement = Placement(options.budget, options.policy, options.device)
        self.open: dict[Space, None] = {}
        self._of: dict[str, Space] = {}

    def check_fit(self, specs: Mapping[str, TableSpec]) -> None:
        """Check that tables of these specs can be placed together, before they are written.

        Raises CapacityError, and what a policy raises that does not suit one of them.
        """
        self._placement.check_fit(specs)

    def place(
        self, owner: Owner, new: Mapping[str, Generation], specs: Mapping[str, TableSpec]
    ) -> None:
        """Have tables use what was opened, in place of what they used, with memory of their own.

        `specs` are those of all tables of the store. After an error what was given in `new` and is
        not in use is closed. Raises CapacityError.
        """
        coming = dict(new)
        try:
            self.vacate(coming)
            known = {name: table._generation for name, table in self._tables.items()} | coming
            for group in self._placement.groups({name: specs[name] for name in known}):
                if self._stands(group):
                    continue
                self.vacate(group)
                tiers = {name: known[name].tier for name in group}
                space = self._placement.place(tiers, specs)
                self.open[space] = None
                for extent in space.extents:
                    self._of[extent.table] = space
                    name, generation = extent.table, coming.pop(extent.table, None)
                    if generation is None:
                        self._tables[name]._move(space, extent)
                    elif name in self._tables:
                        self._tables[name]._attach(generation, space, extent)
                    else:
                        self._tables[name] = Table(owner, name, generation, space, extent)
        except BaseException:
            for generation in coming.values():
                generation.close()
            raise

    def _stands(self, group: Iterable[str]) -> bool:
        """Whether these tables, and no others, are in an open space."""
        names = set(group)
        space = self._of.get(next(iter(names)))
        return space is not None and {extent.table for extent in space.extents} == names

    def vacate(self, names: Iterable[str]) -> None:
        """Close the spaces of tables; the changed rows of other tables there go to their files."""
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
        """Close a table that the store has no more, and end its leases."""
        table = self._tables.pop(name)
        table._extent.epoch.end(GONE)
        self.vacate([name])
        table._close()

    def end_leases(self) -> None:
        """End every lease of a reader, whose tables may show other rows from now on."""
        for space in self.open:
            space.forget(space.extents[0], _NO_ROWS)

    def discard(self) -> None:
        """Drop what was not committed, and end every lease."""
        for space in self.open:
            space.discard()

    def close(self) -> None:
        """Give all memory back."""
        self._of.clear()
        while self.open:
            self.open.popitem()[0].close()
