"""Changes to the tables of a partitioned store: each is a version of all ranks, or none."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tierstore._disk.generation import (
    as_kept,
    create_partitions,
    initial_records,
    of_partition,
    remove_generation,
)
from tierstore._disk.keys import as_stored
from tierstore._disk.manifest import KeysInfo, TableInfo, Written, unique_name
from tierstore._keys.given import given
from tierstore._keys.text import Texts
from tierstore._progress import Overall, Progress
from tierstore._store.alter import Rewrite
from tierstore._store.state import State
from tierstore._strictjson import json_values
from tierstore._tiers.base import REPLACED
from tierstore.distributed.apart import FILLED, Apart
from tierstore.distributed.prepared import Prepared, agreed
from tierstore.errors import InvalidInputError, TierStoreError
from tierstore.spec import EXTENT_ROWS, TableSpec

Tables = Callable[[State], Sequence[Rewrite]]


def rewrite(
    state: Apart, change: str, tables: Tables, drop: Collection[str], progress: Progress | None
) -> None:
    """Write tables and remove those in `drop`, as one version of all ranks; see `alter.rewrite`.

    Of a table by id every rank writes the rows that it has, to all its partitions at once, and the
    leaders write the keys of all rows; of one by key each partition writes what it has. Then each
    partition makes a version of what is written there, and the leaders name these.
    """
    found: list[Rewrite] = []

    def check() -> None:
        found.extend(tables(state))
        state.check_clean(change)
        kept = {name: each.spec for name, each in state.tables.items() if name not in drop}
        own = {each.name: _own_spec(state, each, drop) for each in found}
        state.spaces.check_fit({**kept, **own})

    with state.door.use(write=True), state.alone(change):
        state.ranks.each("check that it can change its tables", check)
        keys = {
            each.name: Keys(state, each.name, each.keys, each.spec.rows)
            for each in found
            if each.spec.keys is None and each.keys is not None and not _keeps_keys(state, each)
        }
        written = _PartitionFiles(state, change, tables, found, progress)
        draft = state.draft()

        def undo() -> None:
            written.remove()
            for each in keys.values():
                each.remove()

        def adopt() -> Prepared:
            for each in found:
                if each.spec.keys is None and each.name in state.tables and not each.keeps_rows:
                    state.backings[each.name].extent.epoch.end(REPLACED, names=True)
            state.spaces.vacate([*(each.name for each in found), *drop])
            written.adopt(drop)
            stated = {each.name: _stated(state, each, keys.get(each.name)) for each in found}
            prepared = state.prepared(stated, draft)
            rows = {each.name: _changed_rows(state, each) for each in found}
            counts = {**dict.fromkeys(drop), **rows}
            every = Written(sum(rows.values()), prepared.written.bytes, counts)
            return prepared._replace(written=every)

        with state.or_back(change, undo):
            for each in keys.values():
                each.write()
            state.ranks.each("write its tables", written.write)
            prepared = agreed(state.ranks.together("change its partitions", adopt))
            state.publish_all(prepared, draft, drop)
        state.published(prepared, drop, state.place)


def set_keys(
    state: Apart, name: str, keys: Sequence[Any] | None, progress: Progress | None
) -> None:
    """Set external keys for all rows of a table, or remove them; a version of all ranks."""
    info = state.manifest.tables[name]
    if info.spec.keys is not None:
        raise InvalidInputError(f"table {name!r} is by key: its keys come with their rows")
    with state.door.use(write=True), state.alone("set keys"):
        written = Keys(state, name, keys, info.spec.rows)
        state.ranks.each("check that it can set keys", lambda: state.check_clean("set keys"))
        draft = state.draft()
        with state.or_back("set keys", written.remove):
            written.write(progress)
            named = state.prepared({name: written.named_by(info)}, draft)
            prepared = agreed(state.ranks.gather("set keys", named))
            state.publish_all(prepared, draft)
        state.published(prepared)


class _PartitionFiles:
    """What a change writes to the partitions of this rank, which a version of each is to name."""

    def __init__(
        self,
        state: Apart,
        change: str,
        tables: Tables,
        found: Sequence[Rewrite],
        progress: Progress | None,
    ) -> None:
        """Prepare to write the tables that were `found`; `tables` returns them once more."""
        self._state, self._change, self._tables, self._found = state, change, tables, found
        self._parts = state.parts.own
        self._made: list[list[Rewrite]] = [[] for _ in self._parts]
        self._by_key = {each.name for each in found if each.spec.keys is not None and each.blocks}
        rounds = -(-len(self._parts) // FILLED)
        whole = [each.spec for each in found if each.name not in self._by_key]
        total = rounds * sum(state.shard_of(spec).ids for spec in whole if spec.keys is None)
        self._report = Overall(progress, total)

    def write(self) -> None:
        """Write the tables by id, and those that are new, to all partitions."""
        for number, each in enumerate(self._found):
            if each.name in self._by_key:
                continue
            for first in range(0, len(self._parts), FILLED):
                again = each if first == 0 else self._tables(self._state)[number]
                self._fill(first, again)
                self._report.passed(self._state.shard_of(each.spec).ids)
        if not self._by_key:
            self._report.finish()

    def _fill(self, first: int, table: Rewrite) -> None:
        """Write a table to some partitions from one on, each of which has files open meanwhile."""
        shard, parts = self._state.shard_of(table.spec), self._parts[first : first + FILLED]
        blocks = table.blocks
        if blocks is None and not table.spec.sparse:
            blocks = self._state.own(0, initial_records(table.spec))
        with contextlib.ExitStack() as stack:
            places = []
            for part in parts:
                directory = part.directory
                if not directory.exists(table.name):
                    directory.make_directory(table.name).close()
                places.append(stack.enter_context(directory.directory(table.name)))
            some = dataclasses.replace(shard, first=shard.first + first, count=len(parts))
            infos = create_partitions(places, some, table.spec, blocks, self._report, shard)
        for made, info in zip(self._made[first:], infos, strict=False):
            made.append(Rewrite(table.name, info.spec, made=info))

    def adopt(self, drop: Collection[str]) -> None:
        """Have a version of each partition name what is written there, or written by itself."""
        for number, part in enumerate(self._parts):

            def tables(own: State, made: Sequence[Rewrite] = self._made[number]) -> list[Rewrite]:
                if not self._by_key:
                    return [*made]
                every = self._tables(own)
                return [*made, *(each for each in every if each.name in self._by_key)]

            part.rewrite(self._change, tables, drop)
            self._made[number] = []
        if self._by_key:
            self._report.finish()

    def remove(self) -> None:
        """Remove what no version of a partition names."""
        for part, made in zip(self._parts, self._made, strict=True):
            for each in made:
                with (
                    contextlib.suppress(TierStoreError, OSError),  # swept when the store is opened
                    part.directory.directory(each.name) as place,
                ):
                    if each.made is not None:
                        remove_generation(place, each.made.generation)


class Keys:
    """External keys of all rows of a table, in a generation that a coming version names."""

    def __init__(self, state: Apart, name: str, keys: Sequence[Any] | None, rows: int) -> None:
        """Prepare to write keys for so many rows; raises where ranks have others. Collective."""
        ranks = state.ranks
        ranks.check_same("read the keys", f"the keys of table {name!r}", lambda: _digest(keys))
        self._state, self._name, self._keys, self._rows = state, name, keys, rows
        drawn = unique_name("g", 1), uuid.uuid4().hex[:8]
        self._generation, self._stem = ranks.gather("name the keys", drawn)[0]
        self._info: KeysInfo | None = None

    def write(self, progress: Progress | None = None) -> None:
        """Write them, durable on return, and report that they are. Collective."""
        state, keys = self._state, as_stored(self._keys)

        def write() -> KeysInfo | None:
            info = None
            if keys is not None and state.ranks.leads:
                info = state.write_keys(self._name, self._generation, self._stem, keys, self._rows)
            Overall(progress, self._rows).finish()
            return info

        self._info = state.ranks.together("write the keys", write)[0]

    def named_by(self, info: TableInfo) -> TableInfo:
        """Return what the root states of a table that has these keys, or none any more."""
        generation = "" if self._info is None else self._generation
        return dataclasses.replace(info, generation=generation, keys=self._info)

    def remove(self) -> None:
        """Remove them, if no version will name them."""
        self._state.remove_keys(self._name, self._generation)


def _own_spec(state: Apart, table: Rewrite, drop: Collection[str]) -> TableSpec:
    """Return the spec of a table on this rank; raises where it cannot be in partitions."""
    shard = state.shard_of(table.spec)
    if table.spec.keys is None:
        return dataclasses.replace(of_partition(table.spec, shard), rows=len(shard))
    if table.blocks is None:
        return of_partition(table.spec, shard)
    known = [state.tables[name] for name in (table.name, *drop) if name in state.tables]
    return dataclasses.replace(table.spec, rows=known[0].spec.rows if known else EXTENT_ROWS)


def _keeps_keys(state: Apart, table: Rewrite) -> bool:
    """Whether the keys of a table are those that it has."""
    return table.name in state.tables and table.keys is state.keys_of(table.name)


def _stated(state: Apart, table: Rewrite, keys: Keys | None) -> TableInfo:
    """Return what the root states of a table that was written."""
    info = TableInfo(as_kept(table.spec), "", scalars=json_values(table.scalars))
    if keys is not None:
        return keys.named_by(info)
    if table.keys is not None and _keeps_keys(state, table):
        known = state.manifest.tables[table.name]
        return dataclasses.replace(info, generation=known.generation, keys=known.keys)
    return info


def _changed_rows(state: Apart, table: Rewrite) -> int:
    """Return how many rows are new or others, counted so that all ranks add them up."""
    if table.spec.keys is not None:
        every = sum(part.tables[table.name].rows for part in state.parts.own)
        return every if table.changed is None else 0
    if state.ranks.rank > 0:
        return 0
    return table.spec.rows if table.changed is None else table.changed


def _digest(keys: Sequence[Any] | None) -> str:
    """Return what distinguishes keys from others."""
    if keys is None:
        return ""
    values = given(as_stored(keys))
    parts = (values.offsets, values.blob) if isinstance(values, Texts) else (values,)
    return hashlib.blake2b(b"".join(each.tobytes() for each in parts)).hexdigest()
