"""The spaces of the tables that are open, placed anew when tables come, go or change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tierstore._disk.generation import Generation
from tierstore._store.options import Options
from tierstore._table.table import Owner, Table
from tierstore._tiers.base import GONE
from tierstore._tiers.placement import Placement
from tierstore._tiers.space import Space
from tierstore.spec import TableSpec

__all__ = ["Spaces"]

_NO_ROWS = np.empty(0, np.int64)


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
