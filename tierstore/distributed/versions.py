"""Versions with contents from elsewhere: those of a version that is kept, or of a patch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierstore._disk.manifest import Manifest
from tierstore._progress import Progress
from tierstore._store import keeping
from tierstore._store.options import version_or_name
from tierstore._store.patching import Change, Patch, PatchInfo, open_patch
from tierstore._store.pointer import wanted_version
from tierstore._store.versions import read_identity
from tierstore._table.table import write_records
from tierstore._tiers.base import RESTORED
from tierstore.distributed.committing import Committing
from tierstore.distributed.prepared import Prepared, agreed
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import TableSpec


class Versions(Committing):
    """The methods of `DistributedStore` that take contents from elsewhere, or only move them."""

    def restore(self, version: int | str) -> int:
        """Restore a kept version in place, as `Store.restore` does; return the resulting number.

        Collective. Uncommitted rows of all ranks are dropped. Raises VersionError for a version
        that is not kept, CorruptStoreError where a partition of it is damaged; the store is then
        unchanged.
        """
        version = version_or_name(version)
        self._agree("restore a version", {"wanted": version})
        ranks, root = self._ranks, self._root

        older = self._manifest

        def find() -> str:
            """Choose what is to be restored, which can be opened, and return its mark."""
            nonlocal older
            if version not in (older.version, older.restored):
                older = root.version(version)
                self._parts.check_whole(older)
                self._spaces.check_fit(self._specs(older))
            return older.mark

        def change() -> Prepared:
            self._spaces.vacate(list(self._tables))
            self._parts.restore(older)
            return self._prepared({}, None)

        with self._door.use(write=True), self._closed_when_broken():
            ranks.together("find the version", find)
            self._count_keys(self._discard, "roll back")
            if older.mark == self._manifest.mark:
                return self.version
            with self._or_back("restore a version"):
                ready = agreed(ranks.together("restore its partitions", change))
                root.restore(older, ready.last_version + 1, ready.in_order())
            with self._committed():
                ranks.together("place its tables", lambda: self._place(RESTORED))
                self._take_scalars()
                self._settle()
            return self.version

    def apply_patch(self, path: str | os.PathLike[str]) -> PatchInfo:
        """Apply a patch of another store to this copy of it, as `Store.apply_patch` does.

        Collective: every rank reads the file, and writes what is in its partitions. The copy may be
        in partitions where the original is not, and the other way round. Raises InvalidInputError
        for rows of a table by key, which a patch names by numbers of another store.
        """
        self._agree("apply a patch", {})
        ranks, root = self._ranks, self._root
        with (
            contextlib.ExitStack() as stack,
            self._door.use(write=True) as use,
            self._closed_when_broken(),
        ):
            patch: Patch

            def check() -> PatchInfo:
                nonlocal patch
                patch = stack.enter_context(open_patch(path))
                self._check_clean("apply a patch")
                patch.check_order(self._manifest, str(self.path))
                for change in patch.changes:
                    self._check_table(patch, change)
                return dataclasses.replace(patch.info(), path=Path())

            told = ranks.together("read the patch", check)
            if len(set(map(repr, told))) > 1:
                raise InvalidInputError(f"ranks have different patches at {path}; copy one to each")
            with self._or_back("apply a patch", drop_rows=True):
                ranks.together("write the rows", lambda: self._write(patch))
                self._commit(use, lambda: root.draft_of(patch))
            return patch.info()

    def fold(self, *, progress: Progress | None = None) -> list[int]:
        """Merge all deltas into the bases of all partitions, and drop all versions but the newest.

        Collective. Returns the dropped versions. `progress(done, total)` counts the partitions of
        this rank. Raises what `Store.fold` does, on all ranks; what is folded by then stays
        readable.
        """
        self._agree("fold", {})
        manifest, ranks = self._root.manifest, self._ranks

        def check() -> set[int]:
            self._check_clean("fold")
            keeping.check_foldable(manifest.names, manifest.version)
            return set(self._root.versions())

        with self._door.use(write=True), self._closed_when_broken():
            before = set.union(*ranks.together("check that it can fold", check))
            self._root.fold()
            self._settle()
            ranks.together("fold its partitions", lambda: self._parts.fold(progress))
        return sorted(before - {manifest.version})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the version that a pointer names, as `Store.load_state_dict` does. Collective.

        What is not committed on any rank is dropped. Raises InvalidInputError for a pointer to
        another store, or to a version that is not kept.
        """

        def look() -> tuple[int | None, int]:
            root = self._root
            identity = read_identity(root.directory)
            wanted = wanted_version(state, self._manifest, root.versions, identity, self.path)
            return wanted, self.uncommitted_rows()

        found = self._ranks.together("load a state", look)
        wanted, _ = found[self._ranks.rank]
        if wanted is not None or any(rows for _, rows in found):
            self.restore(self.version if wanted is None else wanted)

    def _specs(self, older: Manifest) -> dict[str, TableSpec]:
        """Return the specs of the tables of an older version on this rank."""

        def own(name: str, spec: TableSpec) -> TableSpec:
            if spec.keys is None:
                return dataclasses.replace(spec, rows=len(self.shard_of(spec)))
            return self._tables[name].spec if name in self._tables else spec

        return {name: own(name, info.spec) for name, info in older.tables.items()}

    def _check_table(self, patch: Patch, change: Change) -> None:
        """Raise unless the change of a table can be made here."""
        info = self._manifest.tables.get(change.name)
        if info is None:
            raise FormatError(
                f"{patch.name} changes table {change.name!r}, which {self.path} lacks"
            )
        if info.spec.keys is None:
            patch.check_table(change, info.spec, info.spec.rows)
        elif change.changed:
            raise InvalidInputError(
                f"{patch.name} changes rows of table {change.name!r}, which is by key: in a store "
                "with partitions they have other numbers; save a new copy instead"
            )

    def _write(self, patch: Patch) -> None:
        """Write the scalars of a patch, and its rows that are on this rank."""
        for change in patch.changes:
            table = self._tables[change.name]
            shard = self.shard_of(self._manifest.tables[change.name].spec)
            for ids, records in patch.read(change):
                partitions = shard.partition_of(ids)
                own = (shard.first <= partitions) & (partitions < shard.first + shard.count)
                write_records(table, shard.rows_of(ids[own]), records[own])
            table.scalars.clear()
            table.scalars.update(change.scalars)
