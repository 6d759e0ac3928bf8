"""The state of a store in partitions, as one of the ranks that write it has it open.

Each rank has some of the partitions, as their one writer, under tiers of its own: the rows of a
table that are in them are its shard. Of the ranks that see the same directory one, their leader,
publishes the manifests of the root; the others take from it what it publishes. A version is one of
all ranks or none: every rank commits its partitions, all agree, and the leaders publish a manifest
that names a version of each partition. Only that confirms them: a partition goes back to what the
root names without writing anything, and removes no version that some root names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._closing import call_each
from tierstore._disk.generation import Generation, initial_records, remove_generation
from tierstore._disk.keys import write_keys
from tierstore._disk.manifest import KeysInfo, Manifest, Partitions, TableInfo, Written
from tierstore._disk.partitioned_keys import KeyedPartitionedGeneration
from tierstore._disk.partitioning import Shard
from tierstore._door import Use
from tierstore._progress import Progress
from tierstore._store.alter import Records, records_of
from tierstore._store.commit import CommitDraft, clean_up
from tierstore._store.compaction import Folder
from tierstore._store.locking import WriterLock
from tierstore._store.options import Options
from tierstore._store.partitions import WholeKeys
from tierstore._store.state import State
from tierstore._store.tables import Opening
from tierstore._strictjson import canonical, json_values
from tierstore._table.backing import Backing
from tierstore._table.home import StoreOfTable
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import Table, home_of
from tierstore._tiers.base import OPENED_ANEW, REMOVED, RESTORED, ROLLED_BACK
from tierstore._tiers.memory import available_bytes
from tierstore.distributed.creating import same_seeds
from tierstore.distributed.parts import Parts
from tierstore.distributed.prepared import Prepared, agreed
from tierstore.distributed.ranks import Ranks
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    InvalidInputError,
    TierStoreError,
    UpkeepWarning,
    VersionError,
    counted,
    warn,
)
from tierstore.initializers import Constant, Initializer
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:  # one rank alone needs no torch
    from tierstore.distributed.keyed import DistributedKeyedTable
    from tierstore.distributed.table import DistributedTable

FILLED = 256
"""Partitions that can be filled from rows which come once: each has files open meanwhile."""


class _Seen(NamedTuple):
    """Which versions a leader sees: the store's uuid, marks by version, versions by name."""

    uuid: str
    marks: dict[int, str]
    names: dict[str, int]


class Apart(State):
    """The state of a store of which each rank writes some partitions; see `State`.

    Attributes:
        ranks: who else writes it.
        parts: the partitions of this rank.
        shared: the tables of all ranks over those of this one, where there are several ranks.
        average: whether gradients of rows are divided by the number of ranks.
    """

    is_root = True

    def __init__(
        self, options: Options, store: StoreOfTable, ranks: Ranks, *, average: bool
    ) -> None:
        """Open the requested version, or the newest that all leaders have. Collective."""
        self.ranks: Ranks = ranks
        self.average: bool = average
        self.parts: Parts = Parts(options)
        self.shared: dict[str, DistributedTable | DistributedKeyedTable] = {}
        self.whose: str = f" of rank {ranks.rank}"
        self.folder: Folder = Folder(self)
        self._named: list[Partitions] = []
        super().__init__(within_share(options, ranks), store)

    # -- opening

    def _directory(self) -> _io.Directory:
        """Open the directory of the store on every rank."""
        opened = super()._directory
        with contextlib.ExitStack() as unless_all:
            directories = self.ranks.each(
                "open the directory of the store", lambda: unless_all.enter_context(opened())
            )
            unless_all.pop_all()
        return directories

    def _open(self, lock: WriterLock | None) -> None:
        """Open the root at what all leaders have, and the partitions that it names."""
        ranks, path = self.ranks, cast(Path, self._options.path)
        ranks.together("read which store it is", self._identify)
        ranks.find_leaders(path)
        seen = ranks.together("read the versions of the store", self._read_versions)
        chosen = self._chosen([each for each in seen if each is not None])
        self._follow("open the root of the store", lambda: self._open_root(chosen))
        count = len(self.manifest.partitions)
        if ranks.count > count:
            raise InvalidInputError(
                f"{path} has {count} partitions, and {ranks.count} ranks need at least one "
                f"each; open it on {count} ranks at most, or make one with more partitions"
            )
        ranks.together(
            "open its partitions",
            lambda: self.parts.open(self.manifest, ranks.rank, ranks.count, self.store),
        )
        for part in self.parts.own:
            self.locks.extend(part.locks)
        ranks.together("place its tables", self.place)
        self.settle()

    def _read_versions(self) -> _Seen | None:
        """Return, as a leader, which versions of the store can be opened."""
        if not self.ranks.leads:
            return None
        newest = self.history.newest()
        if not newest.partitions:
            raise InvalidInputError(
                f"{self._options.path} has no partitions, so one process writes it, with "
                "tierstore.open(path, 'r+'); tierstore.distributed.create makes a store for ranks"
            )
        marks = {number: each.mark for number, each in self.history.versions().items()}
        return _Seen(self.identity.uuid, marks, dict(newest.names))

    def _chosen(self, seen: Sequence[_Seen]) -> int:
        """Return the version to open: the requested one, or the newest that all leaders have.

        Raises InvalidInputError and VersionError.
        """
        path, wanted = self._options.path, self._options.version
        uuids = {each.uuid for each in seen}
        if len(uuids) > 1:
            raise InvalidInputError(
                f"the ranks see different stores at their paths: {', '.join(sorted(uuids))}; each "
                "host needs the same store, or a share of it"
            )
        common = dict(set.intersection(*({*each.marks.items()} for each in seen)))
        if not common:
            raise InvalidInputError(
                f"the copies of the root of {path} have no version in common; copy the "
                "newest one to every host"
            )
        if wanted is None:
            return max(common)
        number = seen[0].names.get(wanted) if isinstance(wanted, str) else wanted
        if number not in common:
            listed = ", ".join(map(str, sorted(common)))
            raise VersionError(f"version {wanted!r} of {path} is not kept; there are: {listed}")
        return number

    def _open_root(self, chosen: int) -> None:
        """Open the root as its writer, and go back to a version where it is ahead."""
        self._lock()
        self._start(None if self.history.newest().version == chosen else chosen)

    def _open_all(self, manifest: Manifest, version: int | str | None) -> Opening:
        """Open nothing: the rows are in partitions."""
        return Opening(manifest)

    def _follow(self, what: str, work: Callable[[], object]) -> None:
        """Do something as a leader that may publish, and take the manifest of one's own leader.

        It goes from rank to rank as the bytes of its file, so that tables that stay are shared;
        with it what all manifests that are kept name.
        """

        def publish() -> tuple[bytes, list[Partitions]]:
            work()
            data = bytes(self.manifest.encode()) if self.ranks.count > 1 else b""
            return data, self.ledger.named

        data, self._named = self.ranks.lead(what, publish)
        if not self.ranks.leads:
            like = getattr(self, "manifest", None)
            self.manifest: Manifest = Manifest.decode(data, str(self._options.path), like)

    # -- tables

    def place(self, renamed: str = OPENED_ANEW) -> None:
        """Put tiers over the partitions, for all tables that have none.

        Keys are numbered as they are loaded then, unlike before; `renamed` is why. Rows by id keep
        their numbers, of more rows too.
        """
        for name in self.tables.keys() - self.manifest.tables.keys():
            self.spaces.drop(name)
            if (shared := self.shared.pop(name, None)) is not None:
                shared.end()
            self.touched.scalars.pop(name, None)
        opened: dict[str, Generation] = {}
        specs: dict[str, TableSpec] = {}
        for name, info in self.manifest.tables.items():
            if info.spec.keys is None and (shared := self.shared.get(name)) is not None:
                cast("DistributedTable", shared).resize(self.parts.shard(info.spec.rows))
            keys = WholeKeys(self.directory, name, self._info_of(name))
            generation = self.parts.generation(name, info, keys)
            on = self.backings.get(name)
            if on is not None and generation.is_over(on.generation):
                specs[name] = on.spec
                continue
            specs[name] = generation.spec
            opened[name] = cast(Generation, generation)
        kept = [name for name in opened if specs[name].keys is None]
        self.spaces.place(self, opened, specs, renamed=renamed, kept=kept)
        for name, table in self.tables.items() if self.ranks.count > 1 else ():
            if name not in self.shared or self.shared[name].shard is not table:
                self.shared[name] = self._over(table)

    def _info_of(self, name: str) -> Callable[[], TableInfo]:
        return lambda: self.manifest.tables[name]

    def _over(self, shard: Table) -> DistributedTable | DistributedKeyedTable:
        """Return a table of all ranks over the shard of this one."""
        from tierstore.distributed.keyed import DistributedKeyedTable
        from tierstore.distributed.table import DistributedTable

        if isinstance(shard, KeyedTable):
            count = len(self.manifest.partitions)
            return DistributedKeyedTable(shard, count, self.ranks, average=self.average)
        place = self.shard_of(self.manifest.tables[shard.name].spec)
        return DistributedTable(shard, place, self.ranks, average=self.average)

    def _specs(self) -> dict[str, TableSpec]:
        """Return the specs of the tables of this rank."""
        return {name: on.spec for name, on in self.backings.items()}

    def _present_specs(self) -> dict[str, TableSpec]:
        return self._specs()

    def end_leases(self, name: str) -> None:
        """End the leases of a table whose rows are about to move; nothing of it stays in memory."""
        self.spaces.flush_and_vacate(name, REMOVED)
        self.spaces.place(self, {}, self._specs())

    def ids_of(self, rows: Any) -> Any:
        """Return the ids of rows of this rank's shard of a table, whichever it is."""
        return self.parts.shard(1).ids_of(rows)

    def shard_of(self, spec: TableSpec) -> Shard:
        """Return which rows of a table are on this rank."""
        return self.parts.shard(spec.rows)

    def keyed(self) -> Iterator[tuple[str, KeyedPartitionedGeneration]]:
        """Yield the tables by key with what stands for their generations."""
        for name, on in self.backings.items():
            generation: object = on.generation
            if isinstance(generation, KeyedPartitionedGeneration):
                yield name, generation

    def count_keys(self, work: Callable[[], object], what: str) -> None:
        """Do something on every rank, and tell tables by key how many keys all have then."""

        def counted() -> dict[str, int]:
            work()
            return {name: len(generation.key_map) for name, generation in self.keyed()}

        found = self.ranks.together(what, counted)
        for name, shared in self.shared.items():
            if name in found[0]:
                cast("DistributedKeyedTable", shared).rows = sum(each[name] for each in found)

    @property
    def own_tables(self) -> Mapping[str, Backing]:
        """None: each partition folds by itself."""
        return {}

    def allocated_bytes(self) -> int:
        """Return the bytes that the partitions of this rank take."""
        return sum(_io.allocated_bytes(each.directory.path) for each in self.parts.own)

    # -- tables as changes of them see them

    def whole(self, name: str) -> TableSpec:
        """Return the spec of a table with the rows of all ranks."""
        return self.manifest.tables[name].spec

    def keys_of(self, name: str) -> Any:
        """Return all keys of a table, the same object until it has others; None if it has none.

        Those of a table by key come with its partitions.
        """
        generation: Any = self.backings[name].generation
        return generation.keys_of_whole()

    def own_rows(self, name: str, ids: npt.NDArray[np.int64]) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return which ids of a table are of rows on this rank, and their numbers here."""
        own = self._is_own(ids)
        return own, self.shard_of(self.whole(name)).rows_of(ids[own])

    def records(self, name: str) -> Iterator[Records]:
        """Yield the records of the rows of a table that are on this rank."""
        none = self.whole(name).keys is None and self.shard_of(self.whole(name)).ids == 0
        return iter(()) if none else super().records(name)

    def own(self, start: int, blocks: Iterator[Records]) -> Iterator[Records]:
        """Yield, of the records of all rows from `start` on, those that are on this rank."""
        for records in blocks:
            yield records[self._is_own(np.arange(start, start + len(records)))]
            start += len(records)

    def _is_own(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which ids are of rows on this rank."""
        shard = self.parts.shard(1)
        number = shard.partition_of(ids) - shard.first
        return cast(npt.NDArray[np.bool_], (number >= 0) & (number < shard.count))

    def first_records(self, table: Table, spec: TableSpec) -> Iterator[Records]:
        """Yield the first records of the rows of this rank, which are all alike."""
        return initial_records(dataclasses.replace(spec, rows=len(self.shard_of(spec))))

    def same_spec(self, name: str, spec: Any) -> Any:
        """Return the spec of a table of this name, with the first values that rank 0 draws."""
        bound = super().same_spec(name, spec)
        return same_seeds(self.ranks, {name: bound})[name] if bound is not spec else spec

    def same_values(self, init: Initializer) -> Initializer:
        """Return the initializer of rank 0, or an array, which every rank has."""
        return self.ranks.gather("draw the same values", init)[0] if init.text else init

    def check_given(self, name: str, spec: TableSpec) -> None:
        """Raise InvalidInputError where a table cannot be written from records that are given."""
        known = self.manifest.tables.get(name)
        if spec.keys is not None or (known is not None and known.spec.keys is not None):
            raise InvalidInputError(
                f"table {name!r} is by key: write its rows, store[{name!r}].write(keys, rows)"
            )
        if self.ranks.count > 1 or len(self.parts.own) > FILLED:
            raise InvalidInputError(
                f"rows that come once are written by one process, to {FILLED} partitions at most; "
                f"these are {self.ranks.count} ranks and {len(self.manifest.partitions)} "
                "partitions: load a plain store, then copy it with tierstore.distributed.save"
            )

    def check_added(self, name: str, fields: Mapping[str, Field]) -> None:
        """Raise InvalidInputError for fields whose first values differ from row to row."""
        for field, item in fields.items():
            if item.init is not None and not isinstance(item.init, Constant):
                raise InvalidInputError(
                    f"field {field!r} of table {name!r}: fields that are added to a "
                    "partitioned store start from a constant; write other values afterwards"
                )

    def check_same(self, name: str, rows: Any) -> None:
        """Raise InvalidInputError unless all ranks give the same rows."""
        table = self.tables[name]

        def read() -> str:
            return hashlib.blake2b(records_of(table, rows).tobytes()).hexdigest()

        self.ranks.check_same("read the rows", f"the rows to append to table {name!r}", read)

    # -- versions

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Prevent other versions meanwhile; close the store where the ranks lose each other."""
        with self.closed_when_broken(), super().alone(what):
            yield

    def interruptible(self, use: Use) -> contextlib.AbstractContextManager[object]:
        """Let no interrupt through: other ranks would wait for this one."""
        return contextlib.nullcontext()

    def or_discard(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Drop on all ranks what is written if the body fails, and publishes nothing."""
        return self.or_back(what, drop_rows=True)

    @contextlib.contextmanager
    def closed_when_broken(self) -> Iterator[None]:
        """Close the store for good where the ranks can no longer communicate."""
        try:
            yield
        finally:
            if self.ranks.broken:
                self.door.close(self.ranks.broken)

    def draft(self) -> CommitDraft | None:
        """Begin a version without a payload of its own, as a leader; see `CommitDraft`."""
        return CommitDraft(self, None, None, confirm=True) if self.ranks.leads else None

    def commit_all(
        self, use: Use, begin: Callable[[], Any], commit: Callable[[Any], object] | None = None
    ) -> None:
        """Commit what is written, as the version that leaders begin; see `State.commit_all`."""
        draft: CommitDraft | None = None

        def put_together() -> None:
            nonlocal draft
            draft = begin() if self.ranks.leads else None

        try:
            with use.interruptible():  # it turns the caller's values into bytes
                self.ranks.together("put the payload together", put_together)
            prepared = self.ranks.together(
                "commit its partitions", lambda: self._commit_parts(draft)
            )
            changed = agreed(prepared)
        except BaseException:
            if draft is not None:
                with contextlib.suppress(TierStoreError, OSError):
                    draft.drop()
            raise
        self.publish_all(changed, draft)
        self.published(changed)

    def _commit_parts(self, draft: CommitDraft | None) -> Prepared:
        """Commit the partitions of this rank where rows were written."""
        tables = {}
        for name in list(self.touched.scalars):
            info, scalars = self.manifest.tables[name], json_values(self.backings[name].scalars)
            if canonical(scalars) != canonical(info.scalars):
                tables[name] = dataclasses.replace(info, scalars=scalars)
        for space in self.spaces.open:
            space.flush()
        self.parts.commit()
        return self.prepared(tables, draft)

    def prepared(self, tables: dict[str, TableInfo], draft: CommitDraft | None) -> Prepared:
        """Return what the next version names of this rank."""
        mark = "" if draft is None else draft.numbers["mark"]
        last = self.ledger.last_version if self.ranks.leads else 0
        written, before = self.parts.written_since(self.manifest), self.manifest.tables
        counts = dict(written.tables)
        for name, info in tables.items():
            if info != before.get(name):
                counts.setdefault(name, 0)
        written = Written(written.rows, written.bytes, counts)
        return Prepared(self.parts.versions(), tables, last, mark, written)

    def publish_all(
        self, prepared: Prepared, draft: CommitDraft | None, drop: Collection[str] = ()
    ) -> None:
        """Publish a version that all ranks have ready; it lacks the tables to `drop`.

        An error other than CommitFailedError and RanksError means that no leader has published.
        """
        version = prepared.last_version + 1
        kept = {name: info for name, info in self.manifest.tables.items() if name not in drop}
        changes = {
            "version": version,
            "confirmed": version,
            "mark": prepared.mark,
            "tables": {**kept, **prepared.tables},
            "partitions": prepared.in_order(),
            "written": prepared.written,
        }

        def publish() -> None:
            if draft is None:
                return
            numbers = {**draft.numbers, **changes, "previous": self.manifest.version}
            if draft.keep is not None:
                numbers["names"] = {**self.manifest.names, draft.keep: version}
            with self.unless_published(draft.drop), self.unbroken():
                self.adopt(self.publish(**numbers, step=draft.step, payload=draft.payload))

        self._publish("publish the version", publish)

    def check_restorable(self, older: Manifest) -> None:
        """Raise unless the partitions of an older version can be opened, and fit the budget."""
        self.parts.check_whole(older)
        self.spaces.check_fit(
            {name: self._own_spec(name, info.spec) for name, info in older.tables.items()}
        )

    def _own_spec(self, name: str, spec: TableSpec) -> TableSpec:
        """Return the spec of a table of an older version on this rank."""
        if spec.keys is None:
            return spec.with_rows(len(self.shard_of(spec)))
        return self.tables[name].spec if name in self.tables else spec

    def restore_all(self, older: Manifest, changes: Callable[[int], dict[str, Any]]) -> None:
        """Publish an older version again under a new number, once all partitions have it."""

        def restored() -> Prepared:
            self.spaces.vacate(list(self.tables))
            self.parts.restore(older)
            return self.prepared({}, None)

        def publish() -> None:
            named = {"partitions": prepared.in_order()}
            with self.unbroken():
                more = changes(prepared.last_version + 1) | named
                self.adopt(self.publish_again(older, more))

        self.roll_back()
        with self.or_back("restore a version"):
            prepared = agreed(self.ranks.together("restore its partitions", restored))
            self._publish("restore the version", publish)
        with self.committed():
            self.ranks.together("place its tables", lambda: self.place(RESTORED))
            self.take_scalars()
            self.settle()

    def fold_all(self, fold: Callable[[Progress | None], None], progress: Progress | None) -> None:
        """Merge all deltas of all partitions; `progress` counts those of this rank."""
        self.lead("drop older versions", lambda: fold(None))
        self.ranks.together("fold its partitions", lambda: self.parts.fold(progress))

    def adopt(self, manifest: Manifest) -> None:
        """Take a published manifest; `place` has the tables show it, on every rank."""
        self.manifest = manifest

    def _publish(self, what: str, work: Callable[[], None]) -> None:
        """Have each leader publish a version, and remove older ones once all have.

        One leader alone does both at once. If one of several fails where another has published,
        the store cannot be used on: that is CommitFailedError, and opening takes what all have.
        """
        before, ranks = self._seq, self.ranks

        def publish() -> None:
            work()
            if not ranks.several:
                self.clean_up()

        try:
            self._follow(what, publish)
        except Exception as error:
            if ranks.several and not ranks.broken:
                told = ranks.gather("tell what was published", self._seq != before)
                if any(told):
                    raise CommitFailedError(
                        f"some hosts have published the version and others have not ({error}); "
                        "open the store again on every rank, at what all have"
                    ) from error
            raise

    @property
    def _seq(self) -> int:
        return self.ledger.seq if self.ranks.leads else 0

    def clean_up(self) -> None:
        """Remove versions of the root that are not kept, as a leader."""
        clean_up(self, self.folder)

    def published(
        self,
        prepared: Prepared,
        drop: Collection[str] = (),
        place: Callable[[], object] | None = None,
    ) -> None:
        """Have tables show the version that was published, and partitions keep what roots name.

        `place` puts tiers over the partitions where tables have others by now: before their keys
        are counted.
        """
        for name in prepared.tables.keys() & self.tables.keys():
            self._show_info(name)
            self.backings[name].forget_keys()
        for name, by_key in self.keyed():
            if name not in drop:
                by_key.keys_committed()
        with self.committed():
            if place is not None:
                self.ranks.together("place its tables", place)
            self.settle()

    @contextlib.contextmanager
    def committed(self) -> Iterator[None]:
        """Show a version that was just published, on every rank.

        Raises CommitFailedError, and RanksError where ranks cannot talk any longer.
        """
        version = self.manifest.version
        try:
            yield
        except TierStoreError as error:
            if self.ranks.broken:
                error.add_note(f"version {version} is committed")
                raise
            raise CommitFailedError(
                f"version {version} is committed, but its tables could not be opened "
                f"({error}); open the store again"
            ) from error

    def _show_info(self, name: str) -> None:
        """Have a table show the scalars that the root states."""
        generation, scalars = self.backings[name].generation, self.manifest.tables[name].scalars
        generation.info = dataclasses.replace(generation.info, scalars=scalars)

    def take_scalars(self) -> None:
        """Have tables show the scalars of the version that is open, and its keys."""
        for name, on in self.backings.items():
            self._show_info(name)
            on.reset_scalars()
            on.forget_keys()

    def settle(self) -> None:
        """Have partitions remove what no root names that a leader keeps. Collective.

        Several leaders remove older versions here, when all have published. One alone has told what
        it keeps with what it published.
        """
        if self.ranks.several:

            def settled() -> list[Partitions]:
                if not self.ranks.leads:
                    return []
                self.clean_up()
                return self.ledger.named

            every = self.ranks.together("remove older versions", settled)
            self._named = [each for found in every for each in found]

        def settle() -> None:
            try:
                self.parts.keep_only(self._named)
            except (TierStoreError, OSError, MemoryError) as error:
                warn(
                    f"version {self.manifest.version} is committed; removing older ones from the "
                    f"partitions of rank {self.ranks.rank} is put off: {error}",
                    UpkeepWarning,
                )

        self.count_keys(settle, "confirm the version")

    def lead(self, what: str, work: Callable[[], object]) -> None:
        """Have each leader change what is kept of the root, and partitions follow. Collective."""
        self._follow(what, work)
        self.settle()

    def roll_back(self) -> None:
        """Drop everything that any rank wrote since the last commit. Collective."""
        with self.closed_when_broken():
            self.count_keys(self.discard, "roll back")
            self.ranks.fault = ""
            self.settle()

    # -- going back

    @contextlib.contextmanager
    def or_back(
        self, what: str, undo: Callable[[], object] | None = None, *, drop_rows: bool = False
    ) -> Iterator[None]:
        """Go back on every rank if the body, which changes partitions, publishes no version.

        With `drop_rows` also to the rows of the last commit. `undo` removes what no version will
        name. After CommitFailedError the outcome is unknown, and the door closes; so it does where
        a rank is interrupted while others wait for it, or cannot go back.
        """
        before = self.manifest
        try:
            yield
        except (CommitFailedError, ConcurrentWriterError):
            raise
        except BaseException as error:
            if self.ranks.count > 1 and not isinstance(error, Exception):
                with self.ranks.midway(what):
                    raise
            if self.manifest is before and not self.ranks.broken:
                self._take_back(self.discard if drop_rows else self._show_root)
                if undo is not None:
                    undo()
            raise

    def _take_back(self, show: Callable[[], object]) -> None:
        """Have every rank show what the root names, and remove what came of the partitions."""
        try:
            self.count_keys(show, "go back")
            self.settle()
        except Exception as error:
            self.door.close(f"it could not go back to version {self.manifest.version} ({error})")

    def discard(self) -> None:
        """Drop everything that this rank wrote since the last commit, also in its partitions."""
        self.spaces.discard()
        if self.parts.ahead(self.manifest):
            for _, generation in self.keyed():  # load all: those ahead have keys that are to go
                generation.note_moved_keys()
        for part in self.parts.own:
            part.rollback()
        for name, generation in self.keyed():
            if generation.has_moved_keys:  # rows in memory go by numbers of their own
                self.spaces.vacate([name])
            generation.drop_new_keys()
        for space in self.spaces.open:  # rows found for keys that are gone are found anew
            space.end_epochs(ROLLED_BACK, renamed=None)
            space.begin_epochs()
        self._show_root(ROLLED_BACK)
        for on in self.backings.values():
            on.reset_scalars()

    def _show_root(self, renamed: str = OPENED_ANEW) -> None:
        """Show what the root names, also in partitions that are ahead of it. Writes nothing."""
        if self.parts.ahead(self.manifest):
            self.spaces.vacate(list(self.tables))
            self.parts.show(self.manifest)
        self.place(renamed)

    def uncommitted_rows(self) -> int:
        """Return the number of rows of this rank written, or removed, since the last commit."""
        gone = sum(generation.removed_keys for _, generation in self.keyed())
        return super().uncommitted_rows() + gone

    def check_clean(self, what: str) -> None:
        """Raise InvalidInputError where rows of this rank are not committed."""
        rows = self.uncommitted_rows()
        if rows or self.parts.ahead(self.manifest):
            raise InvalidInputError(
                f"{counted(rows, 'row is', 'rows are')} not committed on rank {self.ranks.rank}; "
                f"call store.commit() or store.rollback() before you {what}"
            )

    # -- keys of the whole, in the root

    def write_keys(
        self, name: str, generation: str, stem: str, keys: Sequence[Any], rows: int
    ) -> KeysInfo:
        """Write the external keys of a table to a generation of the root, durable on return."""
        if not self.directory.exists(name):
            self.directory.make_directory(name).close()
        with (
            self.directory.directory(name) as table,
            table.make_directory(generation) as place,
        ):
            info = write_keys(place, keys, rows, stem)
            table.sync()
        self.directory.sync()
        return info

    def remove_keys(self, name: str, generation: str) -> None:
        """Remove a generation of keys that no version will name, as a leader."""
        if self.ranks.leads:
            with (
                contextlib.suppress(TierStoreError, OSError),
                self.directory.directory(name) as table,
            ):
                remove_generation(table, generation)

    # -- closing

    def let_go(self) -> None:
        """Drop what is in memory alone, before the store closes."""
        self.spaces.discard()

    def release(self) -> None:
        """Give back memory, files, locks and the group, whatever the state."""
        call_each(
            self.door.close,
            self.prefetcher.wait_for_advice,
            self.spaces.close,
            self.parts.close,
            super().release,
            self.ranks.close,
        )


def within_share(options: Options, ranks: Ranks) -> Options:
    """Return options whose host tier takes this rank's part of what one process would by itself.

    Collective.
    """
    hosts = ranks.gather("count the ranks of each host", socket.gethostname())
    here = hosts.count(hosts[ranks.rank])
    budget = options.budget
    if here == 1 or not (budget.host is None and budget.host_rows is None):
        return options
    share = available_bytes() // 4 // here
    return dataclasses.replace(options, budget=dataclasses.replace(budget, host=share))


def sharing(table: Any) -> Apart | None:
    """Return the state that ranks share of a table, or of several looked up as one.

    None where one process has all of their rows.
    """
    home: object = home_of(table)
    return home if isinstance(home, Apart) and home.ranks.count > 1 else None


def fail_on_every_rank(tables: Iterable[Any], what: str, error: Exception) -> None:
    """Raise an error on all ranks that share the rows of any of these tables."""
    for state in {sharing(table) for table in tables}:
        if state is not None:
            state.ranks.fail(what, error)
