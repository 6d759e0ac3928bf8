"""Versions with contents from elsewhere: those of a version that is kept, or of a patch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from tierstore._disk.manifest import Manifest
from tierstore._progress import Progress
from tierstore._store import keeping
from tierstore._store.patching import Change, Patch, PatchInfo, open_patch
from tierstore._table.table import write_records
from tierstore._tiers.base import RESTORED
from tierstore.distributed.apart import Apart
from tierstore.distributed.prepared import Prepared, agreed
from tierstore.errors import FormatError, InvalidInputError
from tierstore.spec import TableSpec


def restore(state: Apart, version: int | str) -> None:
    """Restore a kept version in place, as a version of all ranks; drop what is not committed.

    Raises VersionError for a version that is not kept, CorruptStoreError where a partition of it is
    damaged; the store is then unchanged.
    """
    ranks, older = state.ranks, state.manifest

    def find() -> str:
        """Choose what is to be restored, which can be opened, and return its mark."""
        nonlocal older
        if version not in (older.version, older.restored):
            older = state.history.version(version)
            state.parts.check_whole(older)
            state.spaces.check_fit(_specs(state, older))
        return older.mark

    def change() -> Prepared:
        state.spaces.vacate(list(state.tables))
        state.parts.restore(older)
        return state.prepared({}, None)

    with state.door.use(write=True), state.closed_when_broken(), state.alone("restore a version"):
        ranks.together("find the version", find)
        state.count_keys(state.discard, "roll back")
        if older.mark == state.manifest.mark:
            return
        with state.or_back("restore a version"):
            ready = agreed(ranks.together("restore its partitions", change))
            state.restore_all(older, ready)
        with state.committed():
            ranks.together("place its tables", lambda: state.place(RESTORED))
            state.take_scalars()
            state.settle()


def apply_patch(state: Apart, path: str | os.PathLike[str]) -> PatchInfo:
    """Apply a patch of another store to this copy of it, which may be in partitions or not.

    Every rank reads the file, and writes what is in its partitions. Raises InvalidInputError for
    rows of a table by key, which a patch names by numbers of another store.
    """
    ranks = state.ranks
    with (
        contextlib.ExitStack() as stack,
        state.door.use(write=True) as use,
        state.closed_when_broken(),
        state.alone("apply a patch"),
    ):
        patch: Patch

        def check() -> PatchInfo:
            nonlocal patch
            patch = stack.enter_context(open_patch(path))
            state.check_clean("apply a patch")
            patch.check_order(state.manifest, state.directory.path)
            for change in patch.changes:
                _check_table(state, patch, change)
            return dataclasses.replace(patch.info(), path=Path())

        told = ranks.together("read the patch", check)
        if len(set(map(repr, told))) > 1:
            raise InvalidInputError(f"ranks have different patches at {path}; copy one to each")
        with state.or_back("apply a patch", drop_rows=True):
            ranks.together("write the rows", lambda: _write(state, patch))
            state.commit(use, lambda: state.draft_of(patch))
        return patch.info()


def fold(
    state: Apart, fold_root: Callable[[], None], progress: Progress | None = None
) -> list[int]:
    """Merge all deltas into the bases of all partitions, and drop all versions but the newest.

    Returns the dropped versions. `progress(done, total)` counts the partitions of this rank. What
    is folded when an error is raised stays readable.
    """
    manifest = state.manifest

    def check() -> set[int]:
        state.check_clean("fold")
        keeping.check_foldable(manifest.names, manifest.version)
        return set(state.history.versions())

    with state.door.use(write=True), state.closed_when_broken(), state.alone("fold"):
        before = set.union(*state.ranks.together("check that it can fold", check))
        state.lead("drop older versions", fold_root)
        state.ranks.together("fold its partitions", lambda: state.parts.fold(progress))
    return sorted(before - {manifest.version})


def _specs(state: Apart, older: Manifest) -> dict[str, TableSpec]:
    """Return the specs of the tables of an older version on this rank."""

    def own(name: str, spec: TableSpec) -> TableSpec:
        if spec.keys is None:
            return dataclasses.replace(spec, rows=len(state.shard_of(spec)))
        return state.tables[name].spec if name in state.tables else spec

    return {name: own(name, info.spec) for name, info in older.tables.items()}


def _check_table(state: Apart, patch: Patch, change: Change) -> None:
    """Raise unless the change of a table can be made here."""
    info = state.manifest.tables.get(change.name)
    if info is None:
        raise FormatError(
            f"{patch.name} changes table {change.name!r}, which {state.directory.path} lacks"
        )
    if info.spec.keys is None:
        patch.check_table(change, info.spec, info.spec.rows)
    elif change.changed:
        raise InvalidInputError(
            f"{patch.name} changes rows of table {change.name!r}, which is by key: in a store "
            "with partitions they have other numbers; save a new copy instead"
        )


def _write(state: Apart, patch: Patch) -> None:
    """Write the scalars of a patch, and its rows that are on this rank."""
    for change in patch.changes:
        table = state.tables[change.name]
        shard = state.shard_of(state.manifest.tables[change.name].spec)
        for ids, records in patch.read(change):
            partitions = shard.partition_of(ids)
            own = (shard.first <= partitions) & (partitions < shard.first + shard.count)
            write_records(table, shard.rows_of(ids[own]), records[own])
        table.scalars.clear()
        table.scalars.update(change.scalars)
