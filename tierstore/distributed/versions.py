"""Versions with contents from elsewhere: those of a version that is kept, or of a patch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore._disk.manifest import Manifest
from tierstore._store.patching import Change, Patch, PatchInfo, open_patch
from tierstore._table.table import write_records
from tierstore._tiers.base import RESTORED
from tierstore.distributed.prepared import Prepared, agreed
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import TableSpec

if TYPE_CHECKING:
    from tierstore.distributed.store import DistributedStore


def restore(store: DistributedStore, version: int | str) -> int:
    """Restore a kept version; see `DistributedStore.restore`."""
    store._agree("restore a version", {"wanted": version})
    ranks, root = store._ranks, store._root

    older = store._manifest

    def find() -> str:
        """Choose what is to be restored, which can be opened, and return its mark."""
        nonlocal older
        if version not in (older.version, older.restored):
            older = root.version(version)
            store._parts.check_whole(older)
            store._spaces.check_fit(_specs(store, older))
        return older.mark

    def change() -> Prepared:
        store._spaces.vacate(list(store._tables))
        store._parts.restore(older)
        return store._prepared({}, None)

    with store._door.use(write=True), store._closed_when_broken():
        ranks.together("find the version", find)
        store._count_keys(store._discard, "roll back")
        if older.mark == store._manifest.mark:
            return store.version
        with store._or_back("restore a version"):
            ready = agreed(ranks.together("restore its partitions", change))
            root.restore(older, ready.last_version + 1, ready.in_order())
        with store._committed():
            ranks.together("place its tables", lambda: store._place(RESTORED))
            store._take_scalars()
            store._settle()
        return store.version


def _specs(store: DistributedStore, older: Manifest) -> dict[str, TableSpec]:
    """Return the specs of the tables of an older version on this rank."""

    def own(name: str, spec: TableSpec) -> TableSpec:
        if spec.keys is None:
            return dataclasses.replace(spec, rows=len(store.shard_of(spec)))
        return store._tables[name].spec if name in store._tables else spec

    return {name: own(name, info.spec) for name, info in older.tables.items()}


def apply_patch(store: DistributedStore, path: str | os.PathLike[str]) -> PatchInfo:
    """Apply a patch; see `DistributedStore.apply_patch`."""
    store._agree("apply a patch", {})
    ranks, root = store._ranks, store._root
    with (
        contextlib.ExitStack() as stack,
        store._door.use(write=True) as use,
        store._closed_when_broken(),
    ):
        patch: Patch

        def check() -> PatchInfo:
            nonlocal patch
            patch = stack.enter_context(open_patch(path))
            store._check_clean("apply a patch")
            patch.check_order(store._manifest, str(store.path))
            for change in patch.changes:
                _check_table(store, patch, change)
            return dataclasses.replace(patch.info(), path=Path())

        told = ranks.together("read the patch", check)
        if len(set(map(repr, told))) > 1:
            raise InvalidInputError(f"ranks have different patches at {path}; copy one to each")
        with store._or_back("apply a patch", drop_rows=True):
            ranks.together("write the rows", lambda: _write(store, patch))
            store._commit(use, lambda: root.draft_of(patch))
        return patch.info()


def _check_table(store: DistributedStore, patch: Patch, change: Change) -> None:
    """Raise unless the change of a table can be made here."""
    info = store._manifest.tables.get(change.name)
    if info is None:
        raise FormatError(f"{patch.name} changes table {change.name!r}, which {store.path} lacks")
    if info.spec.keys is None:
        patch.check_table(change, info.spec, info.spec.rows)
    elif change.changed:
        raise InvalidInputError(
            f"{patch.name} changes rows of table {change.name!r}, which is by key: in a store with "
            "partitions they have other numbers; save a new copy instead"
        )


def _write(store: DistributedStore, patch: Patch) -> None:
    """Write the scalars of a patch, and its rows that are on this rank."""
    for change in patch.changes:
        table = store._tables[change.name]
        shard = store.shard_of(store._manifest.tables[change.name].spec)
        for ids, records in patch.read(change):
            partitions = shard.partition_of(ids)
            own = (shard.first <= partitions) & (partitions < shard.first + shard.count)
            write_records(table, shard.rows_of(ids[own]), records[own])
        table.scalars.clear()
        table.scalars.update(change.scalars)
