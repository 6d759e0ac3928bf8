"""A partitioned store that the ranks of a process group write together.

Each rank has some of the partitions open, as their one writer, under tiers of its own: the rows of
a table that are in them are its shard. A commit is one version of all ranks or none: every rank
commits its partitions without confirming that, all agree, a leader publishes the root's manifest,
which names a version of each partition, and every rank confirms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar, cast

from tierstore import _io
from tierstore._disk.base import Progress
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import Manifest, TableInfo
from tierstore._disk.partitioned import PartitionedGeneration
from tierstore._disk.partitioning import PARTITIONS, Shard, partition_name
from tierstore._door import Door
from tierstore._store import closing, keeping
from tierstore._store.commit import CommitDraft, clean_up
from tierstore._store.copy import Overall
from tierstore._store.options import Options, whole_number
from tierstore._store.partitions import check_part, missing_partition
from tierstore._store.payload import Payload
from tierstore._store.pointer import make_pointer
from tierstore._store.store import Store
from tierstore._store.tables import Spaces
from tierstore._store.versions import History, open_directory, read_identity
from tierstore._strictjson import json_values
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table
from tierstore._tiers.memory import available_bytes
from tierstore.budget import Budget
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.table import DistributedTable
from tierstore.errors import (
    CommitFailedError,
    InvalidInputError,
    InvalidTypeError,
    NotAStoreError,
    RanksError,
    TierStoreError,
    UncommittedRowsWarning,
    UnknownNameError,
    UpkeepWarning,
    VersionError,
)
from tierstore.initializers import Constant
from tierstore.spec import Field, TableSpec, check_name
from tierstore.stats import StoreInfo, Version

__all__ = ["DistributedStore"]

T = TypeVar("T")
R = TypeVar("R")

_NOTHING = Budget(host=0, gpu=0)
_THREADS = 8
"""Partitions of a rank that sync their files at a time."""


class _Seen(NamedTuple):
    """Which versions a leader sees: the store's uuid, marks by version, versions by name."""

    uuid: str
    marks: dict[int, str]
    names: dict[str, int]


class _Prepared(NamedTuple):
    """What a rank has ready for a version.

    Attributes:
        partitions: by number, the version and mark that the version is to name.
        tables: what its manifest is to say of the tables.
        last_version: the highest version a leader's root ever had; 0 for the other ranks.
        mark: that of the coming version, of which the first rank's counts.
    """

    partitions: dict[int, tuple[int, str]]
    tables: dict[str, TableInfo]
    last_version: int
    mark: str


class DistributedStore(Mapping[str, Any]):
    """A store of which every rank writes some partitions; `tierstore.distributed.open` gives one.

    `commit`, `rollback`, `alter_tables`, `add_fields` and `drop_fields` are collective: every rank
    calls them, in the same order and with the same arguments, and an error on one rank is raised on
    all. On one rank alone its tables are those of any store.
    """

    def __init__(self, options: Options, ranks: Ranks, *, average: bool = True) -> None:
        """Open it; `tierstore.distributed.open` is the way to."""
        self.path: Path = cast(Path, options.path)
        self.mode: str = options.mode
        self._options = options
        self._ranks = ranks
        self.average = average
        """Whether gradients of rows are divided by the number of ranks."""
        self._door = self.door = Door(str(options.path), writable=True)
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        self.sync_checks: bool = options.check_ids == "sync"
        self._tables: dict[str, Table] = {}
        self._shared: dict[str, DistributedTable] = {}
        self._spaces = Spaces(self._tables, options)
        self._root: Store | None = None
        self._parts: list[Store] = []
        self._directory: _io.Directory | None = None
        self._forget: Callable[[], object] = lambda: None
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        owned = [*self._parts, *([] if self._root is None else [self._root])]
        for each in owned:
            each._forget()
            closing.leave_to_owner(each)
        locks = [lock for each in owned for lock in each._state.locks]
        self._forget = closing.watch(self, str(self.path), locks)

    # -- opening

    def _open(self) -> None:
        ranks = self._ranks
        hosts = ranks.gather("count the ranks of each host", socket.gethostname())
        options = _within_share(self._options, hosts.count(hosts[ranks.rank]))
        self._spaces = Spaces(self._tables, options)
        ranks.together("open the directory of the store", self._open_directory)
        leaders = ranks.leaders(self.path)
        self._leader: int = leaders[ranks.rank]
        self._leads: bool = self._leader == ranks.rank
        seen = ranks.together("read the versions of the store", self._read_versions)
        chosen = self._chosen([each for each in seen if each is not None])
        found = ranks.together("open the root of the store", lambda: self._open_root(chosen))
        self._manifest: Manifest = self._of_leader(found)
        count = len(self._manifest.partitions)
        if ranks.count > count:
            raise InvalidInputError(
                f"{self.path} has {count} partitions, and {ranks.count} ranks need at least one "
                f"each; open it on {count} ranks at most, or make one with more partitions"
            )
        self._numbers = Shard.of_rank(1, count, ranks.rank, ranks.count)
        ranks.together("open its partitions", self._open_parts)
        ranks.together("place its tables", self._place)
        ranks.together("name the kept versions", self._follow_names)

    def _of_leader(self, found: Sequence[Manifest | None]) -> Manifest:
        """Return what the leader of this rank returned: other hosts have other files."""
        return cast(Manifest, found[self._leader])

    def _open_directory(self) -> None:
        self._directory = open_directory(self.path)
        self.uuid: str = read_identity(self._directory).uuid
        """What tells this store from all others, 32 hexadecimal digits."""

    @property
    def _place_of_root(self) -> _io.Directory:
        if self._directory is None:
            self._door.check()
            raise NotAStoreError(f"{self.path} is not open")
        return self._directory

    def _read_versions(self) -> _Seen | None:
        """Return, as a leader, which versions of the store can be opened."""
        if not self._leads:
            return None
        history = History(self._place_of_root, self.uuid)
        newest = history.newest()
        if not newest.partitions:
            raise InvalidInputError(
                f"{self.path} has no partitions, so one process writes it, with "
                "tierstore.open(path, 'r+'); tierstore.distributed.create makes a store for ranks"
            )
        marks = {number: each.mark for number, each in history.versions().items()}
        return _Seen(self.uuid, marks, dict(newest.names))

    def _chosen(self, seen: Sequence[_Seen]) -> int:
        """Return the version to open: the one asked for, or the newest that all leaders have.

        Raises InvalidInputError and VersionError.
        """
        uuids = {each.uuid for each in seen}
        if len(uuids) > 1:
            raise InvalidInputError(
                f"the ranks see different stores at their paths: {', '.join(sorted(uuids))}; each "
                "host needs the same store, or a share of it"
            )
        common = dict(set.intersection(*({*each.marks.items()} for each in seen)))
        if not common:
            raise InvalidInputError(
                f"the copies of the root of {self.path} have no version in common; copy the newest "
                "one to every host"
            )
        wanted = self._options.version
        if wanted is None:
            return max(common)
        number = seen[0].names.get(wanted) if isinstance(wanted, str) else wanted
        if number not in common:
            listed = ", ".join(map(str, sorted(common)))
            raise VersionError(
                f"version {wanted!r} of {self.path} is not kept; there are: {listed}"
            )
        return number

    def _open_root(self, chosen: int) -> Manifest | None:
        """Open the root as its writer, as a leader, and go back to a version where it is ahead."""
        if not self._leads:
            return None
        ahead = History(self._place_of_root, self.uuid).newest().version != chosen
        back: dict[str, Any] = {"version": chosen if ahead else None, "discard_newer": ahead}
        self._root = Store(
            dataclasses.replace(
                self._options, budget=_NOTHING, policy=None, device=None, root_only=True, **back
            )
        )
        return self._root._state.manifest

    def _open_parts(self) -> None:
        """Open the partitions of this rank at the version of the root; newer ones are dropped."""
        first, end = self._numbers.first, self._numbers.first + self._numbers.count
        calls = _side_by_side(self._open_part, range(first, end))
        self._parts = [call.result() for call in calls if call.exception() is None]
        for call in calls:
            call.result()

    def _open_part(self, number: int) -> Store:
        version, mark = self._manifest.partitions[number]
        path = self.path / PARTITIONS / partition_name(number)
        options = Options(
            path=path,
            mode="r+",
            budget=_NOTHING,
            version=version,
            discard_newer=True,
            mark=mark,
            keep=max(2, self._options.keep or self._manifest.keep),
            allow_untested=self._options.allow_untested,
        )
        try:
            return Store(options)
        except NotAStoreError:
            raise missing_partition(str(path), number) from None
        except VersionError as error:
            raise VersionError(
                f"{path} lacks the version that the store's root names: {error}. Partitions belong "
                "together: restore all from one copy, or, where each host has its own disk, open "
                "the store with as many ranks as before"
            ) from None

    def _place(self) -> None:
        """Put tiers over the partitions, for all tables that have none."""
        opened: dict[str, Generation] = {}
        for name, info in self._manifest.tables.items():
            shard = self.shard_of(info.spec)
            parts = [part[name]._generation for part in self._parts]
            for part in parts:
                check_part(part, shard, info.spec.layout.record_bytes)
            own = dataclasses.replace(info, spec=dataclasses.replace(info.spec, rows=len(shard)))
            generation = cast(Generation, PartitionedGeneration(own, shard, parts))
            table = self._tables.get(name)
            same = table is not None and table._generation.tier.tiers == generation.tier.tiers  # type: ignore[attr-defined]
            if not same:
                opened[name] = generation
        specs = {
            name: dataclasses.replace(info.spec, rows=len(self.shard_of(info.spec)))
            for name, info in self._manifest.tables.items()
        }
        self._spaces.place(self, opened, specs)
        if self._ranks.count > 1:
            for name in self._tables.keys() - self._shared.keys():
                spec = self._manifest.tables[name].spec
                self._shared[name] = DistributedTable(
                    self._tables[name],
                    self.shard_of(spec),
                    spec.rows,
                    self._ranks,
                    average=self.average,
                )

    def shard_of(self, spec: TableSpec) -> Shard:
        """Return where the rows of a table lie that are on this rank."""
        partitions = len(self._manifest.partitions)
        return Shard(spec.rows, partitions, self._numbers.first, self._numbers.count)

    # -- the tables

    @property
    def store(self) -> Store:
        """The store itself, for its tables."""
        return cast(Store, self)

    def __getitem__(self, name: str) -> Any:
        """Return a table; raises UnknownNameError, a KeyError.

        One rank alone has a Table; each of several has a DistributedTable, with its own shard.
        """
        try:
            shared = self._shared.get(name)
            return self._tables[name] if shared is None else shared
        except (KeyError, TypeError):
            known = ", ".join(self._tables) or "none"
            raise UnknownNameError(
                f"no table {name!r} in {self.path}; there are: {known}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the tables."""
        return iter(list(self._manifest.tables))

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._manifest.tables)

    def __bool__(self) -> bool:
        """A store is true, even without tables."""
        return True

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object."""
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Name the store, its version, its tables and this rank."""
        closed = ", closed" if self.closed else ""
        return (
            f"DistributedStore({str(self.path)!r}, version={self.version}, tables={list(self)}, "
            f"rank={self.rank} of {self.ranks}{closed})"
        )

    # -- what it is

    @property
    def rank(self) -> int:
        """Which rank this is."""
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        """How many ranks write the store."""
        return self._ranks.count

    @property
    def version(self) -> int:
        """Number of the version that is open; reads also show what was written since."""
        return self._manifest.version

    @property
    def step(self) -> int | None:
        """The step that was committed with this version."""
        return self._manifest.step

    @property
    def payload(self) -> Mapping[str, Payload]:
        """The values that were committed with this version, by name."""
        place = self._place_of_root
        return MappingProxyType(
            {name: Payload(place, info) for name, info in self._manifest.payload.items()}
        )

    @property
    def closed(self) -> bool:
        """Whether the store can no longer be used."""
        return self._door.closed

    def info(self) -> StoreInfo:
        """Return what this rank's share of the store is made of, and the memory of its tiers."""
        with self._door.use():
            tables = tuple(table._information() for table in self._tables.values())
        return StoreInfo(
            store=str(self.path),
            format=self._manifest.format,
            uuid=self.uuid,
            version=self.version,
            step=self.step,
            folded=not any(table.delta_rows for table in tables),
            tables=tables,
        )

    def versions(self) -> list[Version]:
        """Return the versions that can be opened, oldest first."""
        with self._door.use():
            kept = History(self._place_of_root, self.uuid).versions()
            names = max(kept.values(), key=lambda manifest: manifest.seq).names
            return [Version.of(each, names) for each in kept.values()]

    def uncommitted_rows(self) -> int:
        """Return the number of rows of this rank written since the last commit."""
        with self._door.use():
            return self._uncommitted()

    def _uncommitted(self) -> int:
        return sum(table._uncommitted().size for table in self._tables.values())

    # -- versions

    def commit(
        self,
        step: int | None = None,
        *,
        payload: Mapping[str, object] | None = None,
        keep: str | None = None,
    ) -> int:
        """Make everything that any rank wrote durable as one new version; return its number.

        Collective. The arguments are those of `Store.commit`. Ranks must give the same step, keep
        and names of a payload, whose values are those of the first rank of each file system.

        After an error that is raised on every rank nothing is published and nothing is lost: commit
        again, or roll back. After RanksError, with which no rank can know what the others did, end
        all ranks and open the store again: it is at the version before, or at this one.
        """
        step = None if step is None else whole_number("step", step)
        if payload is not None and not isinstance(payload, Mapping):
            raise InvalidTypeError(f"a payload is a dict from name to value, not {payload!r}")
        for name in payload or ():
            check_name(name, "payload")
        if keep is not None:
            keeping.check_version_name(keep)
        names = None if payload is None else sorted(payload)
        self._agree("commit", {"step": step, "payload": names, "keep": keep})
        with self._door.use(write=True) as use, self._closed_when_broken():
            draft: CommitDraft | None = None

            def put_together() -> None:
                nonlocal draft
                if self._root is not None:
                    state = self._root._state
                    draft = CommitDraft(state, step, payload, confirm=True, keep=keep)

            def drop() -> None:
                if draft is not None:
                    with contextlib.suppress(TierStoreError, OSError):
                        draft.drop()

            try:
                with use.interruptible():  # it turns the caller's values into bytes
                    self._ranks.together("put the payload together", put_together)
                prepared = self._ranks.together(
                    "commit its partitions", lambda: self._commit_parts(draft)
                )
                version = _agreed(prepared)
            except BaseException:
                drop()
                raise
            self._publish(version, draft)
            return self.version

    def _commit_parts(self, draft: CommitDraft | None) -> _Prepared:
        """Commit the partitions of this rank, not confirmed, where rows were written."""
        tables = dict(self._manifest.tables)
        for name, table in self._tables.items():
            scalars = json_values(table.scalars)
            if scalars != tables[name].scalars:
                tables[name] = dataclasses.replace(tables[name], scalars=scalars)
        for space in self._spaces.open:
            space.flush()

        def commit(part: Store) -> None:
            if part.uncommitted_rows():
                part.commit(confirm=False)

        self._each_part(commit)
        return self._prepared(tables, "" if draft is None else draft.numbers["mark"])

    def _prepared(self, tables: dict[str, TableInfo], mark: str) -> _Prepared:
        """Return what the next version names of this rank."""
        found = {
            number: (part.version, part._state.manifest.mark)
            for number, part in enumerate(self._parts, self._numbers.first)
        }
        last = 0 if self._root is None else self._root._state.ledger.last_version
        return _Prepared(found, tables, last, mark)

    def _each_part(self, work: Callable[[Store], object]) -> None:
        """Do something to every partition of this rank, several at a time, and raise after all."""
        for call in _side_by_side(work, self._parts):
            call.result()

    def _publish(self, changes: dict[str, Any], draft: CommitDraft | None) -> None:
        """Publish a version of the root, and confirm it to the partitions."""
        found = self._ranks.together(
            "publish the version", lambda: self._publish_root(changes, draft)
        )
        self._manifest = self._of_leader(found)
        for name, table in self._tables.items():
            info = self._manifest.tables[name]
            table._generation.info = dataclasses.replace(
                table._generation.info, scalars=info.scalars
            )
        self._ranks.together("confirm the version", self._confirm)

    def _publish_root(self, changes: dict[str, Any], draft: CommitDraft | None) -> Manifest | None:
        """Publish a manifest of the root, as a leader."""
        if self._root is None or draft is None:
            return None
        state = draft.state
        with self._root._door.use(write=True) as use, state.alone("commit"):
            numbers = {**draft.numbers, **changes, "previous": state.manifest.version}
            if draft.keep is not None:
                numbers["names"] = {**state.manifest.names, draft.keep: changes["version"]}
            with state.unless_published(draft.drop), state.unbroken():
                manifest = state.publish(**numbers, step=draft.step, payload=draft.payload)
                state.adopt(manifest)
            with use.interruptible():
                clean_up(state, self._root._folder)
        return manifest

    def _confirm(self) -> None:
        """Have the partitions keep what versions of the root name, and no more."""
        try:
            kept = History(self._place_of_root, self.uuid).versions()
            self._follow_names()

            named = set(self._manifest.names.values()) - {self.version}

            def confirm(item: tuple[int, Store]) -> None:
                number, part = item
                oldest = min(
                    each.partitions[number][0]
                    for version, each in kept.items()
                    if version not in named
                )
                if oldest > part._state.manifest.confirmed:
                    part.confirm(oldest)

            numbered = list(enumerate(self._parts, self._numbers.first))
            for call in _side_by_side(confirm, numbered):
                call.result()
        except (TierStoreError, OSError, MemoryError) as error:
            warnings.warn(
                f"version {self.version} is committed; confirming it to the partitions of rank "
                f"{self.rank} is put off: {error}",
                UpkeepWarning,
                stacklevel=6,
            )

    def _follow_names(self) -> None:
        """Keep in each partition what the root keeps by name."""
        kept = History(self._place_of_root, self.uuid).versions()
        for number, part in enumerate(self._parts, self._numbers.first):
            wanted = {
                name: kept[version].partitions[number][0]
                for name, version in self._manifest.names.items()
                if version in kept
            }
            there = part._state.manifest.names
            for name in there.keys() - wanted.keys():
                part.release(name)
            for name, version in wanted.items():
                if there.get(name) != version:
                    part.keep(version, name)

    def keep(self, version: int | str, name: str) -> int:
        """Keep a version by a name until `release`; return its number. Collective.

        As `Store.keep` does.
        """
        self._agree("keep a version", {"version": version, "name": name})
        keeping.check_version_name(name)
        self._rename("keep the version", lambda root: root.keep(version, name))
        return self._manifest.names[name]

    def release(self, name: str) -> None:
        """Let the version that is kept by a name go, as `Store.release` does. Collective."""
        self._agree("release a version", {"name": name})
        self._rename("release the version", lambda root: root.release(name))

    def _rename(self, what: str, change: Callable[[Store], object]) -> None:
        def work() -> Manifest | None:
            if self._root is None:
                return None
            change(self._root)
            return self._root._state.manifest

        with self._door.use(write=True), self._closed_when_broken():
            self._manifest = self._of_leader(self._ranks.together(what, work))
            self._ranks.together("name the kept versions", self._follow_names)

    def rollback(self) -> None:
        """Drop everything that any rank wrote since the last commit. Collective."""
        self._agree("roll back", {})
        with self._door.use(write=True) as use, self._closed_when_broken():
            with use.interruptible():
                self.prefetcher.wait_for_advice()
            self._ranks.together("roll back", self._discard)

    def _discard(self) -> None:
        self._spaces.discard()
        for part in self._parts:
            part.rollback()
        self._restore_parts()
        for table in self._tables.values():
            table._reset_scalars()

    def _restore_parts(self) -> None:
        """Bring partitions back that are ahead of the root, after an error on some rank."""
        for number, part in enumerate(self._parts, self._numbers.first):
            version, mark = self._manifest.partitions[number]
            if part._state.manifest.mark != mark:
                self._spaces.vacate(list(self._tables))
                part.restore(version)
        self._place()

    # -- what tables are made of

    def add_fields(
        self, name: str, fields: Mapping[str, Field], *, progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table; a commit of its own. Collective."""
        self.alter_tables({name: {"add": fields}}, progress=progress)

    def drop_fields(
        self, name: str, fields: Iterable[str], *, progress: Progress | None = None
    ) -> None:
        """Remove fields from every record of a table; a commit of its own. Collective."""
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
                if item.init is not None and not isinstance(item.init, Constant):
                    raise InvalidInputError(
                        f"field {field!r} of table {table.name!r}: fields that are added to a "
                        "partitioned store start from a constant; write other values afterwards"
                    )
        with self._door.use(write=True), self._closed_when_broken():
            self._ranks.together(
                "check that its tables can be altered", lambda: self._check_altered(changes, added)
            )
            try:
                prepared = self._ranks.together(
                    "alter its partitions", lambda: self._alter_parts(changes, added, progress)
                )
            except RanksError:
                raise
            except TierStoreError:
                self._ranks.together("go back", self._restore_parts)
                raise
            draft = None
            if self._root is not None:
                draft = CommitDraft(self._root._state, None, None, confirm=True)
            self._publish(_agreed(prepared), draft)
            try:
                self._ranks.together("place its tables", self._place)
            except TierStoreError as error:
                raise CommitFailedError(
                    f"version {self.version} is committed, but its tables could not be opened in "
                    f"their new shape ({error}); open the store again"
                ) from error

    def _check_altered(
        self,
        changes: Mapping[str, Mapping[str, Any]],
        added: Mapping[str, Mapping[str, Field]],
    ) -> None:
        """Raise InvalidInputError unless all is committed, CapacityError for too small a budget."""
        rows = self._uncommitted()
        ahead = any(
            part._state.manifest.mark != self._manifest.partitions[number][1]
            for number, part in enumerate(self._parts, self._numbers.first)
        )
        if rows or ahead:
            raise InvalidInputError(
                f"{rows} rows of rank {self.rank} are not committed; commit or roll back before "
                "you alter tables"
            )
        specs = {name: table.spec for name, table in self._tables.items()}
        for name, change in changes.items():
            fields = {**specs[name].fields, **added[name]}
            kept = {
                each: item for each, item in fields.items() if each not in change.get("drop", ())
            }
            if kept:
                specs[name] = dataclasses.replace(specs[name], fields=kept, init=None)
        self._spaces.check_fit(specs)

    def _alter_parts(
        self,
        changes: Mapping[str, Mapping[str, Any]],
        added: Mapping[str, Mapping[str, Field]],
        progress: Progress | None,
    ) -> _Prepared:
        self._spaces.vacate([name for name in changes if name in self._tables])
        total = len(self._parts) * sum(self._parts[0][name].rows for name in changes)
        report = Overall(progress, total)
        for part in self._parts:
            part.alter_tables(changes, progress=report)
            report.passed(sum(part[name].rows for name in changes))
        tables = dict(self._manifest.tables)
        for name in changes:
            before, now = tables[name].spec, self._parts[0][name].spec
            known = {**before.fields, **added[name]}
            fields = {
                each: dataclasses.replace(item, init=known[each].init)
                for each, item in now.fields.items()
            }
            spec = dataclasses.replace(now, rows=before.rows, fields=fields)
            tables[name] = dataclasses.replace(tables[name], spec=spec)
        mark = "" if self._root is None else self._root._state.next_version()["mark"]
        return self._prepared(tables, mark)

    # -- pointers, for states that hold no rows

    def state_dict(self) -> dict[str, Any]:
        """Return a pointer to the version that is open, as `Store.state_dict` does."""
        if self._root is not None and self._root._state.coming is not None:
            return make_pointer(self._root._state)
        rows = 0 if self.closed else self.uncommitted_rows()
        if rows:
            raise InvalidInputError(
                f"{rows} rows of {self.path} are not committed, and a state would point to a "
                "version without them: commit before state_dict()"
            )
        where = {"path": str(self.path), "uuid": self.uuid}
        return {**where, "version": self.version, "mark": self._manifest.mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a pointer names the version that is open; raises InvalidInputError if not."""
        found = {key: state.get(key) for key in ("uuid", "mark")}
        marks = (self._manifest.mark, self._manifest.payload_mark)
        if found["uuid"] != self.uuid or found["mark"] not in marks:
            raise InvalidInputError(
                f"this state is of version {state.get('version')} of the store {found['uuid']}; "
                f"{self.path} is {self.uuid} at version {self.version}: open that version"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the store itself."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled."""
        raise InvalidTypeError(
            f"the writer of {self.path} cannot be pickled; in a worker open it for reading: "
            "tierstore.open(path)"
        )

    # -- between ranks

    def _agree(self, what: str, values: Mapping[str, object]) -> None:
        """Check that the store is open, and that all ranks are at the same version and call."""
        self._door.check(write=True)
        with self._closed_when_broken():
            self._ranks.agree(what, {"version": self.version, **values})

    @contextlib.contextmanager
    def _closed_when_broken(self) -> Iterator[None]:
        """Close the store for good where the ranks cannot talk any more."""
        try:
            yield
        finally:
            if self._ranks.broken:
                self._door.close(self._ranks.broken)

    # -- closing

    def close(self) -> None:
        """Close the store; what was not committed is dropped, with a warning that counts it.

        Waits for no other rank: each closes its own share.
        """
        lost = 0
        if not self.closed:
            self.prefetcher.close()
            with self._door.use():
                lost = self._uncommitted()
                self._spaces.discard()
                self._door.close()
        self._release()
        if lost:
            warnings.warn(
                f"{self.path} was closed with {lost} uncommitted rows of rank {self.rank}, which "
                "were dropped; call commit() to keep them",
                UncommittedRowsWarning,
                stacklevel=2,
            )

    def _release(self) -> None:
        """Give back memory, files, locks and the group, whatever the state."""
        self._door.close()
        with contextlib.ExitStack() as ending:  # from the last to the first
            ending.callback(self._ranks.close)
            if self._directory is not None:
                ending.callback(self._directory.close)
            ending.callback(self._forget)
            if self._root is not None:
                ending.callback(self._root.close)
            if self._parts:
                ending.callback(self._each_part, Store.close)
            ending.callback(self._spaces.close)
            ending.callback(self.prefetcher.wait_for_advice)

    def _open_again(self) -> None:
        """Do nothing in a forked child: a writer is the parent's alone."""

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store."""
        self.close()


def _within_share(options: Options, ranks: int) -> Options:
    """Return options whose host tier takes this rank's part of what one process would by itself."""
    budget = options.budget
    if ranks == 1 or not (budget.host is None and budget.host_rows is None):
        return options
    share = available_bytes() // 4 // ranks
    return dataclasses.replace(options, budget=dataclasses.replace(budget, host=share))


def _agreed(prepared: Sequence[_Prepared]) -> dict[str, Any]:
    """Return what a manifest says of the version that all ranks have ready.

    Raises InvalidInputError where they differ in what the tables are.
    """
    partitions: dict[int, tuple[int, str]] = {}
    for rank, each in enumerate(prepared):
        partitions |= each.partitions
        if each.tables != prepared[0].tables:
            raise InvalidInputError(
                f"ranks disagree on what the tables are: the scalars or fields of rank {rank} are "
                "not those of rank 0; every rank takes every step"
            )
    version = 1 + max(each.last_version for each in prepared)
    return {
        "version": version,
        "confirmed": version,
        "mark": prepared[0].mark,
        "tables": prepared[0].tables,
        "partitions": tuple(partitions[number] for number in sorted(partitions)),
    }


def _side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[Future[R]]:
    """Call `work` with each item, several at a time, and return the calls when all have ended.

    One after the other where the program is ending, which starts no thread any more.
    """
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return [pool.submit(work, item) for item in items]
    except RuntimeError:
        return [_ended(work, item) for item in items]


def _ended(work: Callable[[T], R], item: T) -> Future[R]:
    call: Future[R] = Future()
    try:
        call.set_result(work(item))
    except Exception as error:
        call.set_exception(error)
    return call
