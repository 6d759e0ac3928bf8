"""A partition of a store, as its one writer has it open.

It makes nothing final by itself: a version of it counts once a root names its number and mark, so
it confirms none, goes back without writing, and removes only what no root names that is kept. What
its deltas are folded into is its own business: the root need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

from tierstore._disk.generation import Generation
from tierstore._disk.manifest import Manifest
from tierstore._store import alter, closing, keeping
from tierstore._store.commit import begun, commit, flush
from tierstore._store.compaction import Folder
from tierstore._store.options import Options
from tierstore._store.state import State
from tierstore._store.versions import number_in_part
from tierstore._table.home import StoreOfTable
from tierstore.budget import Budget
from tierstore.errors import CorruptStoreError
from tierstore.spec import EXTENT_ROWS

_NOTHING = Budget(host=0, gpu=0)
"""The budget of a partition, which has no tiers of its own."""


class Part(State):
    """The state of a partition at what a root names of it, whatever newer versions there are.

    Attributes:
        folder: merges its deltas.
    """

    def __init__(
        self, path: Path, named: tuple[int, str], store: StoreOfTable, *, allow_untested: bool
    ) -> None:
        """Open the version and mark that a root of `store` names, as the only writer.

        Raises what opening a store does, and VersionError where there is no such version.
        """
        version, mark = named
        options = Options(
            path=path,
            mode="r+",
            budget=_NOTHING,
            version=version,
            discard_newer=True,
            mark=mark,
            allow_untested=allow_untested,
        )
        super().__init__(options, store)
        self.folder: Folder = Folder(self)

    def _wanted(self, version: int | str | None) -> Manifest:
        return self.history.part(cast(int, version), cast(str, self._options.mark))

    def _go_on_from(self, version: int | str) -> None:
        """Go on from the version that is open; the next one follows it."""
        self.manifest = self._as_now(self.manifest)

    # -- what the root decides

    def publish(self, *args: Any, **changes: Any) -> Manifest:
        """Publish a manifest, which confirms nothing; see `State.publish`."""
        return super().publish(*args, **(changes | {"confirmed": self.manifest.confirmed}))

    def _keep_newest(self, keep: int) -> None:
        """Drop nothing: `keep_only` does."""

    @property
    def unconfirmed(self) -> int:
        """None: it waits for no trainer."""
        return 0

    def keep_only(self, named: Collection[tuple[int, str]]) -> None:
        """Remove the versions that no root names, but the open one.

        `named` are the version and mark that each root names that a leader keeps, once all leaders
        have published: a partition removes nothing else, so whatever a root names can be opened.
        Where the newest manifest is one of a version that the store went back from, that of the
        open version is published again, to be the newest.
        """
        with self.door.use(write=True), self.alone("confirm a version"):
            if self.damaged:
                return
            marks, open_one = self.ledger.marks, self.manifest.version
            wanted = {open_one, *(number_in_part(marks, *each) for each in named)} & marks.keys()
            names = {name: each for name, each in self.manifest.names.items() if each in wanted}
            if open_one == max(wanted) < self.ledger.newest or names != self.manifest.names:
                self.change(names=names)
            self.ledger.keep_only(wanted)
            self.sweep(self.keep)

    def show(self, version: int, mark: str) -> None:
        """Go back to what a root names: nothing later is there any more.

        Writes nothing, so that no full disk prevents it: the next version follows that one, and
        `keep_only` removes what was in between. Uncommitted rows are dropped.
        """
        with self.door.use(write=True):
            self.folder.stop()
            older = self._as_now(self.history.part(version, mark))
            with self.unbroken():
                self._show(older)

    # -- what all ranks do in their partitions

    def generation(self, name: str) -> Generation:
        """Return the files of a table; raises CorruptStoreError where these are damaged."""
        if name not in self.tables:
            raise self.damaged.get(name) or CorruptStoreError(
                f"{self.directory.path} has no table {name!r}; restore all partitions from one copy"
            )
        return self.backings[name].generation

    @property
    def is_changed(self) -> bool:
        """Whether rows or keys were written since the last commit."""
        files = map(self.generation, self.tables)
        return bool(self.uncommitted_rows()) or any(each.has_new_keys for each in files)

    def commit(self) -> None:
        """Commit what was written."""
        with self.door.use(write=True) as use, self.alone("commit"):
            commit(begun(self, self.folder), self.folder, use, flush)

    def rewrite(
        self,
        change: str,
        tables: Callable[[State], Sequence[alter.Rewrite]],
        drop: Collection[str],
    ) -> None:
        """Write tables, and remove those in `drop`; see `alter.rewrite`."""
        alter.rewrite(change, self, self.folder, tables, drop=drop)

    def restore(self, version: int, mark: str) -> None:
        """Make a version of what an older root names."""
        keeping.restore(self, self.folder, self.history.part(version, mark).version)

    def check_named(self, version: int, mark: str) -> None:
        """Raise CorruptStoreError unless what a root names can be opened."""
        if self.manifest.mark != mark:
            self.check_whole(self.history.part(version, mark))

    def rollback(self) -> None:
        """Drop what was written since the last commit."""
        with self.door.use(write=True):
            self.discard()

    def fold(self) -> None:
        """Merge all deltas, and keep no version but the newest."""
        keeping.fold(self, self.folder)

    def grow(self, name: str, rows: int) -> None:
        """Grow a table by key to at least so many rows, by an eighth at least."""
        present = self.backings[name].spec.rows
        if rows > present:
            with self.door.use(write=True):
                self.grow_rows(name, max(rows, present + max(present // 8, EXTENT_ROWS)))

    def close(self) -> None:
        """Close it; drop what was not committed with a warning."""
        closing.close(self, self.folder)
