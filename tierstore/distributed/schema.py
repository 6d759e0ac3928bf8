"""Changes to the tables of a partitioned store: each is a version of all ranks, or none."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore._disk.generation import (
    as_kept,
    create_partitions,
    initial_records,
    of_partition,
    remove_generation,
)
from tierstore._disk.keys import as_stored
from tierstore._disk.manifest import KeysInfo, TableInfo, unique_name
from tierstore._disk.partitioning import Shard
from tierstore._keys.given import given
from tierstore._keys.text import Texts
from tierstore._progress import Overall, Progress
from tierstore._store.alter import Rewrite, more_keys, records_of
from tierstore._store.options import whole_number
from tierstore._store.store import Store
from tierstore._table.table import Table, records_in
from tierstore._tiers.base import REPLACED
from tierstore.distributed.committing import Committing
from tierstore.distributed.creating import same_seeds, shape_of
from tierstore.distributed.keyed import DistributedKeyedTable
from tierstore.distributed.prepared import agreed
from tierstore.distributed.table import DistributedTable
from tierstore.errors import (
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    TierStoreError,
    counted,
    named,
)
from tierstore.initializers import Constant, Initializer, as_initializer
from tierstore.spec import Field, TableSpec, check_name

_HELD_BYTES = 256 << 20
"""Records of new rows that a rank holds at a time."""
_FILLED = 256
"""Partitions that can be filled from rows which come once: each has files open meanwhile."""


T = TypeVar("T")

Rows = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]


class Schema(Committing):
    """The methods of `DistributedStore` that change its tables, each a commit of its own."""

    def create_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Table | DistributedTable | DistributedKeyedTable:
        """Add a table and return it, as `Store.create_table` does; a commit of its own. Collective.

        First values are those of a plain store with the same seeds, to the bit; without a seed,
        that of the first rank counts. `progress` is called with what this rank has done and has to
        do. In one process `blocks` may be all records, and `keys` those of the rows; see
        `replace_table`. Raises ExistsError if there is one of that name.
        """
        if blocks is None and keys is None:
            self._created(name, spec, progress)
        elif blocks is None:
            raise InvalidInputError("keys come with the rows, blocks=; see set_keys for others")
        else:
            self._check_free(name)
            self.replace_table(name, spec, blocks=blocks, keys=keys, progress=progress)
        table: Table | DistributedTable | DistributedKeyedTable = self[name]
        return table

    def _created(self, name: str, spec: TableSpec, progress: Progress | None) -> None:
        """Add a table whose rows its initializers draw."""
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
        self._agree("create a table", {"name": name, "spec": shape_of(spec)})
        self._check_free(name)
        spec = same_seeds(self._ranks, {name: spec.bound(name)})[name]
        shard = self._parts.shard(spec.rows)
        of_part = of_partition(spec, shard)

        def create() -> dict[str, TableInfo]:
            report = Overall(progress, len(self._parts.stores) * shard.blocks)
            if spec.sparse:
                for part in self._parts.stores:
                    part.create_table(name, of_part)
                report.finish()
                return {name: TableInfo(as_kept(spec), "")}
            for part, at, records in self._new_in_parts(spec, 0, lambda: initial_records(spec)):
                rest = np.zeros((shard.blocks - at.size, records.shape[1]), np.uint8)
                part.create_table(name, of_part, blocks=[records, rest], progress=report)
                report.passed(shard.blocks)
            report.finish()
            return {name: TableInfo(as_kept(spec), "")}

        own, new = {name: dataclasses.replace(of_part, rows=len(shard))}, 0
        if spec.keys is None and self.rank == 0:
            new = spec.rows
        self._change("create", own, create, lambda: new)

    def replace_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]],
        keys: Sequence[Any] | None = None,
        changed: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write a table anew from its records, or make it; a commit of its own, in one process.

        Args:
            name: of the table, which is by id.
            spec: what it is made of; `rows` and fields may be others than before.
            blocks: all records in the order of ids, uint8 `(n, record_bytes)` each.
            keys: the external key of each row; None keeps those there are, if the rows are as many.
            changed: how many rows are new or others than before, for `versions()`; None is all.
            progress: called with the rows done and their number.

        Scalars stay. Raises InvalidInputError on several ranks.
        """
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
        known, parts = self._manifest.tables.get(name), self._parts.stores
        if spec.keys is not None or (known is not None and known.spec.keys is not None):
            raise InvalidInputError(
                f"table {name!r} is by key: write its rows, store[{name!r}].write(keys, rows)"
            )
        if self.ranks > 1 or len(parts) > _FILLED:
            raise InvalidInputError(
                f"rows that come once are written by one process, to {_FILLED} partitions at most; "
                f"these are {self.ranks} ranks and {len(self._manifest.partitions)} partitions: "
                "load a plain store, then copy it with tierstore.distributed.save"
            )
        spec = dataclasses.replace(spec.bound(name), sparse=False)
        shard = self._parts.shard(spec.rows)
        of_part = of_partition(spec, shard)
        scalars = {} if known is None else known.scalars
        stays = known is not None and keys is None and known.spec.rows == spec.rows
        of_whole = known if known is not None and stays else TableInfo(spec, "")
        written = None if keys is None else _Keys(self, name, keys, spec.rows)
        report = Overall(progress, spec.rows)
        made = _Made(self, name, (shard, spec, blocks, report), written)

        def replace() -> dict[str, TableInfo]:
            made.adopt()
            report.finish()
            if name in self._tables:
                self._tables[name]._extent.epoch.end(REPLACED, names=True)
            info = dataclasses.replace(of_whole, spec=as_kept(spec), scalars=scalars)
            return {name: info if written is None else written.named_by(info)}

        own = dataclasses.replace(of_part, rows=len(shard))
        rows = spec.rows if changed is None else changed
        self._change("replace" if known else "create", {name: own}, replace, lambda: rows, made)

    def add_fields(
        self, name: str, fields: Mapping[str, Field], *, progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table, as `Store.add_fields` does. Collective.

        A commit of its own. `progress` is called with what this rank has done and has to do. Raises
        ExistsError for a field that already exists.
        """
        self.alter_tables({name: {"add": fields}}, progress=progress)

    def drop_fields(
        self, name: str, fields: Iterable[str], *, progress: Progress | None = None
    ) -> None:
        """Remove fields from every record of a table, as `Store.drop_fields` does. Collective.

        A commit of its own. Raises UnknownNameError for a field that does not exist.
        """
        self.alter_tables({name: {"drop": list(fields)}}, progress=progress)

    def alter_tables(
        self, changes: Mapping[str, Mapping[str, Any]], *, progress: Progress | None = None
    ) -> None:
        """Alter several tables in one commit, as `Store.alter_tables` does. Collective.

        The first values of fields that are added must be constant.
        """
        self._agree("alter tables", {"changes": repr({k: dict(v) for k, v in changes.items()})})
        added = {name: dict(change.get("add", {})) for name, change in changes.items()}
        for name, fields in added.items():
            table = self[name]
            for field, item in fields.items():
                if field in table.fields:
                    raise ExistsError(f"table {table.name!r} already has a field {field!r}")
                if item.init is not None and not isinstance(item.init, Constant):
                    raise InvalidInputError(
                        f"field {field!r} of table {table.name!r}: fields that are added to a "
                        "partitioned store start from a constant; write other values afterwards"
                    )

        def alter() -> dict[str, TableInfo]:
            parts = self._parts.stores
            report = Overall(progress, len(parts) * sum(parts[0][name].rows for name in changes))
            for part in parts:
                part.alter_tables(changes, progress=report)
                report.passed(sum(part[name].rows for name in changes))
            report.finish()
            return {
                name: _with_fields(self._manifest.tables[name], parts[0][name].spec, added[name])
                for name in changes
            }

        specs = {
            name: _altered(self._tables[name].spec, changes[name], added[name]) for name in added
        }

        def rows() -> int:
            return sum(self._rows_here(name) for name in changes)

        self._change("alter", specs, alter, rows)

    def grow(
        self,
        name: str,
        rows: int,
        *,
        init: Initializer | float | None = None,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Grow a table to `rows` rows, as `Store.grow` does; a commit of its own. Collective.

        New rows are those that a plain store would have, to the bit; without a seed, that of the
        first rank counts. Where rows have external keys, every rank gives the same `keys` for the
        new ones.
        """
        rows = whole_number("rows", rows)
        init = as_initializer(init)
        self._agree("grow a table", {"name": name, "rows": rows, "init": init and init.text})
        self[name]
        info = self._manifest.tables[name]
        if rows < info.spec.rows:
            raise InvalidInputError(
                f"a table cannot shrink: {counted(info.spec.rows, 'row')} to {rows}"
            )
        spec = dataclasses.replace(info.spec, rows=rows, chunk_rows=None)
        if init is not None:
            first, item = next(iter(spec.fields.items()))
            bound = init.bound(name, (rows, item.dim))
            if init.text:  # one seed for all ranks
                bound = self._ranks.gather("draw the same values", bound)[0]
            fields = {**spec.fields, first: dataclasses.replace(item, init=bound)}
            spec = dataclasses.replace(spec, fields=fields, init=None)
        self._extend_all(name, spec, lambda: initial_records(spec, info.spec.rows), keys, progress)

    def append(
        self,
        name: str,
        rows: Any,
        *,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> range:
        """Append rows with values to a table and return their ids, as `Store.append` does.

        Collective, and a commit of its own. Every rank gives the same rows, and the same `keys`
        where rows have external keys.
        """
        self._agree("append rows", {"name": name})
        table, ranks = self._tables[self[name].name], self._ranks
        records = np.empty((0, table.spec.layout.record_bytes), np.uint8)

        def read() -> str:
            nonlocal records
            records = records_of(table, rows)
            return hashlib.blake2b(records.tobytes()).hexdigest()

        if len(set(ranks.together("read the rows", read))) > 1:
            raise InvalidInputError(
                f"ranks disagree on the rows to append to table {name!r}: every rank gives the same"
            )
        spec = self._manifest.tables[name].spec
        ids = range(spec.rows, spec.rows + len(records))
        larger = dataclasses.replace(spec, rows=ids.stop, chunk_rows=None)
        self._extend_all(name, larger, lambda: iter([records]), keys, progress)
        return ids

    def rename(
        self, name: str, new: str, *, progress: Progress | None = None
    ) -> Table | DistributedTable | DistributedKeyedTable:
        """Rename a table and return it, as `Store.rename` does; a commit of its own. Collective.

        The rows are copied. Table objects of the old name are closed.
        """
        check_name(new)
        self._agree("rename a table", {"name": name, "new": new})
        table, info = self[name], self._manifest.tables[name]
        self._check_free(new)
        keys = None
        if info.spec.keys is None:
            keys = self._keys_here(lambda: as_stored(table.keys))
        written = None if keys is None else _Keys(self, new, keys, info.spec.rows)

        def renamed() -> dict[str, TableInfo]:
            parts = self._parts.stores
            report = Overall(progress, sum(part[name].spec.rows for part in parts))
            for part in parts:
                rows = part[name].spec.rows
                part.rename(name, new, progress=report)
                report.passed(rows)
            report.finish()
            moved = dataclasses.replace(info, spec=dataclasses.replace(info.spec, sparse=False))
            return {new: moved if written is None else written.named_by(moved)}

        own = dataclasses.replace(self._tables[name].spec, sparse=False)
        self._change("rename", {new: own}, renamed, _none, written, drop=[name])
        found: Table | DistributedTable | DistributedKeyedTable = self[new]
        return found

    def drop(self, name: str) -> None:
        """Remove a table, as `Store.drop` does; a commit of its own. Collective.

        Older versions keep it.
        """
        self._agree("drop a table", {"name": name})
        self[name]

        def dropped() -> dict[str, TableInfo]:
            for part in self._parts.stores:
                part.drop(name)
            return {}

        self._change("drop", {}, dropped, _none, drop=[name])

    def set_keys(
        self, name: str, keys: Sequence[Any] | None, *, progress: Progress | None = None
    ) -> None:
        """Set external keys for all rows of a table, as `Store.set_keys` does, or remove them.

        Collective, and a commit of its own. Every rank gives the same keys. `progress(done, total)`
        is called when they are written.
        """
        self._agree("set keys", {"name": name, "count": None if keys is None else len(keys)})
        self[name]
        info, ranks = self._manifest.tables[name], self._ranks
        if info.spec.keys is not None:
            raise InvalidInputError(f"table {name!r} is by key: its keys come with their rows")
        written = _Keys(self, name, keys, info.spec.rows)
        with self._door.use(write=True), self._closed_when_broken():
            ranks.together("check that it can set keys", lambda: self._check_clean("set keys"))
            draft = self._root.draft()
            with self._or_back("set keys", written.remove):
                written.write(progress)
                named = self._prepared({name: written.named_by(info)}, draft)
                prepared = agreed(ranks.gather("set keys", named))
                self._publish(prepared, draft)
            self._published(prepared)

    def _check_free(self, name: str) -> None:
        if name in self:
            raise ExistsError(f"{self.path} already has a table {name!r}; choose another name")

    def _keys_here(self, read: Callable[[], T]) -> T:
        """Read keys on every rank, and return those that were read here."""
        found: list[T] = []
        with self._closed_when_broken():
            self._ranks.together("read the keys", lambda: found.append(read()))
        return found[0]

    def _extend_all(
        self,
        name: str,
        spec: TableSpec,
        blocks: Callable[[], Iterator[Records]],
        keys: Sequence[Any] | None,
        progress: Progress | None,
    ) -> None:
        """Make a table match a spec; `blocks` yields the records of the rows that it lacks.

        `keys` are theirs, where the rows of the table have keys.
        """
        info, rows = self._manifest.tables[name], spec.rows
        if info.spec.keys is not None:
            raise InvalidInputError(f"table {name!r} is by key: write the rows of new keys")
        more = rows - info.spec.rows
        every = self._keys_here(lambda: more_keys(self[name], more, keys))
        written = None if every is None else _Keys(self, name, every, rows)

        def grown() -> dict[str, TableInfo]:
            report = Overall(progress, len(self._parts.stores) * self._parts.shard(rows).blocks)
            for part, at, records in self._new_in_parts(spec, info.spec.rows, blocks):
                _extend(part, name, self._parts.shard(rows).blocks, at, records, report)
                report.passed(self._parts.shard(rows).blocks)
            report.finish()
            larger = dataclasses.replace(info, spec=as_kept(spec))
            return {name: larger if written is None else written.named_by(larger)}

        own = dataclasses.replace(self._tables[name].spec, rows=len(self._parts.shard(rows)))
        self._change("grow", {name: own}, grown, lambda: more if self.rank == 0 else 0, written)

    def _new_in_parts(
        self,
        spec: TableSpec,
        start: int,
        blocks: Callable[[], Iterator[Records]],
    ) -> Iterator[tuple[Store, Rows, Records]]:
        """Yield each partition of this rank, its rows from the id `start` on, and their records.

        Records of some partitions are held at a time, and all records are made for these.
        """
        parts, shard = self._parts.numbered(), self._parts.shard(spec.rows)
        new = shard.blocks - start // shard.partitions
        some = max(1, _HELD_BYTES // max(1, new * spec.layout.record_bytes))
        for first in range(0, len(parts), some):
            held = parts[first : first + some]
            of = _new_records(spec, start, blocks(), shard, [number for number, _ in held])
            for number, part in held:
                yield part, *of.pop(number)

    def _rows_here(self, name: str) -> int:
        """Return the rows of a table, counted on this rank so that all ranks add them up to."""
        spec = self._manifest.tables[name].spec
        if spec.keys is None:
            return spec.rows if self.rank == 0 else 0
        return sum(part[name].rows for part in self._parts.stores)

    def _change(
        self,
        what: str,
        specs: Mapping[str, TableSpec],
        work: Callable[[], dict[str, TableInfo]],
        rows: Callable[[], int],
        ahead: _Ahead | None = None,
        drop: Collection[str] = (),
    ) -> None:
        """Have every rank change its partitions, and publish what `work` returns of the tables.

        `rows` counts after it the rows that are new or others, which the ranks add up. `ahead` is
        written before the tables change. `specs` are those of the changed tables on this rank,
        without those to `drop`. Raises InvalidInputError unless all is committed, CapacityError for
        too small a budget; then nothing was changed.
        """
        ranks = self._ranks

        def check() -> None:
            self._check_clean(f"{what} {named('table', [*(drop or specs)])}")
            before = {name: each.spec for name, each in self._tables.items() if name not in drop}
            self._spaces.check_fit({**before, **specs})

        with self._door.use(write=True), self._closed_when_broken():
            ranks.together(f"check that it can {what} its tables", check)
            draft = self._root.draft()

            def change() -> Any:
                self._spaces.vacate([*specs, *drop])
                prepared = self._prepared(work(), draft)
                return prepared._replace(written=prepared.written._replace(rows=rows()))

            with self._or_back(f"{what} its tables", ahead.remove if ahead else None):
                if ahead is not None:
                    ahead.write()
                prepared = agreed(ranks.together(f"{what} its partitions", change))
                self._publish(prepared, draft, drop)
            self._published(prepared, drop, self._place)


class _Ahead(Protocol):
    """What is written before the tables of a store change."""

    def write(self) -> None:
        """Write it, durable on return. Collective."""

    def remove(self) -> None:
        """Remove it where no version will name it."""


class _Made:
    """The records of a table in all partitions, each in a generation that a version is to name."""

    def __init__(
        self,
        store: Committing,
        name: str,
        what: tuple[Shard, TableSpec, Iterable[Records], Progress | None],
        keys: _Keys | None,
    ) -> None:
        """Prepare to write them, with the keys of the rows."""
        self._store, self._name, self._what, self._keys = store, name, what, keys
        self._left: list[tuple[Store, TableInfo]] = []

    def write(self) -> None:
        """See `_Ahead`."""
        if self._keys is not None:
            self._keys.write()
        self._store._ranks.together("write the rows", self._fill)

    def _fill(self) -> None:
        parts, name = self._store._parts.stores, self._name
        with contextlib.ExitStack() as stack:
            places = []
            for part in parts:
                directory = part._state.directory
                if not directory.exists(name):
                    directory.make_directory(name).close()
                places.append(stack.enter_context(directory.directory(name)))
            self._left = list(zip(parts, create_partitions(places, *self._what), strict=True))

    def adopt(self) -> None:
        """Have a version of each partition name what was written there."""
        while self._left:
            part, info = self._left[0]
            tables = [Rewrite(self._name, info.spec, made=info)]
            part._rewrite(f"write table {self._name!r}", functools.partial(list, tables))
            self._left.pop(0)

    def remove(self) -> None:
        """See `_Ahead`."""
        for part, info in self._left:
            with (
                contextlib.suppress(TierStoreError, OSError),  # swept when the store is opened
                part._state.directory.directory(self._name) as place,
            ):
                remove_generation(place, info.generation)
        if self._keys is not None:
            self._keys.remove()


class _Keys:
    """External keys of all rows of a table, in a generation that a coming version names."""

    def __init__(self, store: Committing, name: str, keys: Sequence[Any] | None, rows: int) -> None:
        """Prepare to write keys for so many rows; raises where ranks have others. Collective."""
        ranks = store._ranks
        if len(set(ranks.together("read the keys", lambda: _digest(keys)))) > 1:
            raise InvalidInputError(
                f"ranks disagree on the keys of table {name!r}: every rank gives the same"
            )
        self._store, self._name, self._keys, self._rows = store, name, keys, rows
        drawn = unique_name("g", 1), uuid.uuid4().hex[:8]
        self._generation, self._stem = ranks.gather("name the keys", drawn)[0]
        self._info: KeysInfo | None = None

    def write(self, progress: Progress | None = None) -> None:
        """Write them, durable on return, and report that they are. Collective."""
        root, keys = self._store._root, self._keys

        def write() -> KeysInfo | None:
            info = None
            if keys is not None:
                info = root.write_keys(self._name, self._generation, self._stem, keys, self._rows)
            Overall(progress, self._rows).finish()
            return info

        self._info = self._store._ranks.together("write the keys", write)[0]

    def named_by(self, info: TableInfo) -> TableInfo:
        """Return what the root states of a table that has these keys, or none any more."""
        generation = "" if self._info is None else self._generation
        return dataclasses.replace(info, generation=generation, keys=self._info)

    def remove(self) -> None:
        """Remove them, if no version will name them."""
        self._store._root.remove_keys(self._name, self._generation)


def _digest(keys: Sequence[Any] | None) -> str:
    """Return what distinguishes keys from others."""
    if keys is None:
        return ""
    values = given(keys)
    parts = (values.offsets, values.blob) if isinstance(values, Texts) else (values,)
    return hashlib.blake2b(b"".join(each.tobytes() for each in parts)).hexdigest()


def _new_records(
    spec: TableSpec,
    start: int,
    blocks: Iterator[Records],
    shard: Shard,
    numbers: Sequence[int],
) -> dict[int, tuple[Rows, Records]]:
    """Return the records of rows from `start` on, with their rows, of some partitions."""
    found: dict[int, list[tuple[Rows, Records]]] = {number: [] for number in numbers}
    for records in blocks:
        ids = np.arange(start, start + len(records))
        partitions = shard.partition_of(ids)
        for number in numbers:
            which = partitions == number
            found[number].append((ids[which] // shard.partitions, records[which]))
        start += len(records)
    none = np.empty(0, np.int64), np.empty((0, spec.layout.record_bytes), np.uint8)
    return {
        number: (
            np.concatenate([none[0], *(rows for rows, _ in each)]),
            np.concatenate([none[1], *(records for _, records in each)]),
        )
        for number, each in found.items()
    }


def _extend(
    part: Store, name: str, rows: int, at: Rows, records: Records, progress: Progress
) -> None:
    """Write a table of a partition anew, with so many rows, and these records at some of the last.

    The last row that it had may stand for no id until now; those after the records stand for none.
    """
    table = part[name]
    if not at.size and rows == table.rows:
        return

    def blocks() -> Iterator[Records]:
        done = 0
        for block in records_in(table):
            own = (at >= done) & (at < done + len(block))
            block[at[own] - done] = records[own]
            yield block
            done += len(block)
        rest = np.zeros((rows - done, records.shape[1]), np.uint8)
        rest[at[at >= done] - done] = records[at >= done]
        yield rest

    spec = dataclasses.replace(table.spec, rows=rows, chunk_rows=None)
    part._rewrite(
        f"grow table {name!r}",
        lambda: [Rewrite(name, spec, blocks(), table.scalars)],
        progress,
    )


def _none() -> int:
    return 0


def _altered(spec: TableSpec, change: Mapping[str, Any], added: Mapping[str, Field]) -> TableSpec:
    """Return the spec of a changed table, as far as its size in memory depends on it."""
    fields = {**spec.fields, **added}
    kept = {name: item for name, item in fields.items() if name not in change.get("drop", ())}
    if not kept:
        return spec
    # The first field, which these three are of, may be another one now.
    return dataclasses.replace(spec, fields=kept, dim=None, dtype=None, init=None)


def _with_fields(info: TableInfo, now: TableSpec, added: Mapping[str, Field]) -> TableInfo:
    """Return what the root states of a table whose partitions have other fields now."""
    known = {**info.spec.fields, **added}
    fields = {
        name: dataclasses.replace(item, init=known[name].init) for name, item in now.fields.items()
    }
    return dataclasses.replace(
        info, spec=dataclasses.replace(now, rows=info.spec.rows, fields=fields)
    )
