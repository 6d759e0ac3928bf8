"""A partitioned store that the ranks of a process group write together.

Each rank has some of the partitions open, as their one writer, under tiers of its own: the rows of
a table that are in them are its shard. A version is one of all ranks or none, whether rows changed
or the tables: every rank commits its partitions, all agree, and a leader publishes the root's
manifest, which names a version of each partition. Only that confirms them: a partition goes back to
what the root names without writing anything, and removes no version that some root names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self, TypeVar, cast

from tierstore import _io
from tierstore._closing import Closing, call_each
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import FORMAT, Manifest, TableInfo
from tierstore._disk.partitioned_keys import KeyedPartitionedGeneration
from tierstore._disk.partitioning import Shard
from tierstore._door import Door, Use, interrupts_deferred
from tierstore._store import closing, keeping, locking
from tierstore._store.commit import CommitDraft
from tierstore._store.options import Options, whole_number
from tierstore._store.partitions import WholeKeys, list_versions
from tierstore._store.payload import Payload, Payloads
from tierstore._store.pointer import make_pointer, pointer_to
from tierstore._store.store import Store
from tierstore._store.tables import Spaces
from tierstore._strictjson import canonical
from tierstore._table.keyed import KeyedTable
from tierstore._table.missing import Missing, checked
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table, Touched, scalars_to_write
from tierstore._tiers.base import OPENED_ANEW, REMOVED, ROLLED_BACK
from tierstore._tiers.memory import available_bytes
from tierstore.distributed.keyed import DistributedKeyedTable
from tierstore.distributed.parts import Parts
from tierstore.distributed.prepared import Prepared, agreed
from tierstore.distributed.ranks import Ranks
from tierstore.distributed.root import Root
from tierstore.distributed.table import DistributedTable
from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    ConcurrentWriterError,
    InvalidInputError,
    InvalidTypeError,
    TierStoreError,
    UncommittedRowsWarning,
    UnknownNameError,
    UpkeepWarning,
    counted,
    warn,
)
from tierstore.spec import TableSpec, check_name
from tierstore.stats import StoreInfo, Version

T = TypeVar("T")
R = TypeVar("R")


class Committing(Closing, Mapping[str, Any]):
    """What `DistributedStore` is without its changes of tables and its older versions."""

    def __init__(self, options: Options, ranks: Ranks, *, average: bool = True) -> None:
        """Open it; `tierstore.distributed.open` is the way to."""
        self.path: Path = cast(Path, options.path)
        self.mode: str = options.mode
        self._options = options
        self._ranks = ranks
        self.average: bool = average
        """Whether gradients of rows are divided by the number of ranks."""
        self.door: Door = Door(str(options.path), writable=True)
        self._door = self.door
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        self.sync_checks: bool = options.check_ids == "sync"
        self.missing: Missing = checked(options.missing, writable=True)
        self.touched: Touched = Touched()
        self._tables: dict[str, Table] = {}
        self._shared: dict[str, DistributedTable | DistributedKeyedTable] = {}
        self._spaces = Spaces(self._tables, options)
        self._root = Root(options, ranks)
        self._parts = Parts(options)
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        for each in self._opened:
            closing.leave_to_owner(each)
        locks = [lock for each in self._opened for lock in each._state.locks]
        closing.watch(self, str(self.path), locks)

    # -- opening

    @property
    def _opened(self) -> list[Store]:
        """The stores of the root and of partitions that this rank writes."""
        return [*self._parts.stores, *self._root.stores()]

    def _open(self) -> None:
        ranks = self._ranks
        self._spaces = Spaces(self._tables, within_share(self._options, ranks))
        self._root.open()
        count = len(self._manifest.partitions)
        if ranks.count > count:
            raise InvalidInputError(
                f"{self.path} has {count} partitions, and {ranks.count} ranks need at least one "
                f"each; open it on {count} ranks at most, or make one with more partitions"
            )
        ranks.together(
            "open its partitions",
            lambda: self._parts.open(self._manifest, ranks.rank, ranks.count),
        )
        ranks.together("place its tables", self._place)
        self._settle()

    @property
    def _manifest(self) -> Manifest:
        return self._root.manifest

    def _place(self, renamed: str = OPENED_ANEW) -> None:
        """Put tiers over the partitions, for all tables that have none.

        Keys are numbered as they are loaded then, unlike before; `renamed` is why. Rows by id keep
        their numbers, of more rows too.
        """
        for name in self._tables.keys() - self._manifest.tables.keys():
            self._spaces.drop(name)
            if (shared := self._shared.pop(name, None)) is not None:
                shared.end()
            self.touched.scalars.pop(name, None)
        opened: dict[str, Generation] = {}
        specs: dict[str, TableSpec] = {}
        for name, info in self._manifest.tables.items():
            if isinstance(shared := self._shared.get(name), DistributedTable):
                shared.resize(self.shard_of(info.spec))
            keys = WholeKeys(self._root.directory, name, self._info_of(name))
            generation = self._parts.generation(name, info, keys)
            table = self._tables.get(name)
            if table is not None and generation.is_over(table._generation):
                specs[name] = table._generation.spec
                continue
            specs[name] = generation.spec
            opened[name] = cast(Generation, generation)
        kept = [name for name in opened if specs[name].keys is None]
        self._spaces.place(self, opened, specs, renamed=renamed, kept=kept)
        for name, table in self._tables.items() if self._ranks.count > 1 else ():
            if name not in self._shared or self._shared[name].shard is not table:
                self._shared[name] = self._over(table)

    @contextlib.contextmanager
    def _committed(self) -> Iterator[None]:
        """Show a version that was just published, on every rank.

        Raises CommitFailedError, and RanksError where ranks cannot talk any longer.
        """
        try:
            yield
        except TierStoreError as error:
            if self._ranks.broken:
                error.add_note(f"version {self.version} is committed")
                raise
            raise CommitFailedError(
                f"version {self.version} is committed, but its tables could not be opened "
                f"({error}); open the store again"
            ) from error

    def _info_of(self, name: str) -> Callable[[], TableInfo]:
        return lambda: self._manifest.tables[name]

    def _over(self, shard: Table) -> DistributedTable | DistributedKeyedTable:
        """Return a table of all ranks over the shard of this one."""
        if isinstance(shard, KeyedTable):
            count = len(self._manifest.partitions)
            return DistributedKeyedTable(shard, count, self._ranks, average=self.average)
        place = self.shard_of(self._manifest.tables[shard.name].spec)
        return DistributedTable(shard, place, self._ranks, average=self.average)

    def _count_keys(self, work: Callable[[], object], what: str) -> None:
        """Do something on every rank, and tell tables by key how many keys all have then."""

        def counted() -> dict[str, int]:
            work()
            return {name: len(generation.key_map) for name, generation in self._keyed()}

        found = self._ranks.together(what, counted)
        for name, shared in self._shared.items():
            if isinstance(shared, DistributedKeyedTable):
                shared.rows = sum(each[name] for each in found)

    # -- what tables by key call; each rank grows its own

    def grow_rows(self, name: str, rows: int) -> None:
        """Make room for more keys in a table of this rank, while no other thread is in a call."""
        self._spaces.grow(self, name, rows, self._present_specs)

    def end_leases(self, name: str) -> None:
        """End the leases of a table whose rows are about to get other numbers, likewise.

        Nothing of it stays in memory.
        """
        self._spaces.flush_and_vacate(name, REMOVED)
        self._spaces.place(self, {}, self._present_specs())

    def keys_before(self, name: str) -> int | None:
        """Return None: the partitions know how many keys the version before had."""
        return None

    def _present_specs(self) -> dict[str, TableSpec]:
        return {name: table._generation.spec for name, table in self._tables.items()}

    def _keyed(self) -> Iterator[tuple[str, KeyedPartitionedGeneration]]:
        """Yield the tables by key with what stands for their generations."""
        for name, table in self._tables.items():
            generation: object = table._generation
            if isinstance(generation, KeyedPartitionedGeneration):
                yield name, generation

    def ids_of(self, rows: Any) -> Any:
        """Return the ids of rows of this rank's shard of a table, whichever it is."""
        return self._parts.shard(1).ids_of(rows)

    def shard_of(self, spec: TableSpec) -> Shard:
        """Return which rows of a table are on this rank."""
        return self._parts.shard(spec.rows)

    # -- the tables

    @property
    def store(self) -> Store:
        """The store itself, for its tables."""
        return cast(Store, self)

    def __getitem__(self, name: str) -> Any:
        """Return a table; raises UnknownNameError, a KeyError.

        One rank alone has a Table; each of several has a DistributedTable, with its own shard, or
        a DistributedKeyedTable.
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
        closed = ", closed" if self._door.closed else ""
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
    def uuid(self) -> str:
        """What distinguishes this store from all others, 32 hexadecimal digits."""
        return self._root.uuid

    @property
    def version(self) -> int:
        """Number of the version that is open; reads also show what was written since."""
        return self._manifest.version

    @property
    def commits(self) -> int:
        """Number of versions in the history of the open one, by which uses of keys are dated."""
        return self._manifest.commits

    @property
    def step(self) -> int | None:
        """The step that was committed with this version."""
        return self._manifest.step

    @property
    def payload(self) -> Mapping[str, Payload]:
        """The values that were committed with this version, by name."""
        self._door.check()
        place = self._root.directory
        return MappingProxyType(
            Payloads({name: Payload(place, info) for name, info in self._manifest.payload.items()})
        )

    @property
    def closed(self) -> bool:
        """Whether the store is closed and its locks are free, as `Store.closed`."""
        return self._door.closed and all(each.closed for each in self._opened)

    def info(self) -> StoreInfo:
        """Return what this rank's share of the store is made of, and the memory of its tiers."""
        with self._door.use():
            known, spaces = self._spaces.information()
        return StoreInfo(
            store=str(self.path),
            format=FORMAT,
            uuid=self.uuid,
            version=self.version,
            step=self.step,
            folded=not any(table.delta_rows for table in known.values()),
            tables=tuple(known.values()),
            spaces=spaces,
            keep=self._manifest.keep,
            names=tuple(self._manifest.names),
            payload=tuple(self.payload),
            writer=locking.writer_of(self.path),
            allocated_bytes=sum(_io.allocated_bytes(str(each.path)) for each in self._parts.stores),
        )

    def versions(self) -> list[Version]:
        """Return the versions that can be opened, oldest first."""
        with self._door.use():
            return list_versions(self._root.directory, self._root.history)

    def uncommitted_rows(self) -> int:
        """Return the number of rows of this rank written, or removed, since the last commit."""
        with self._door.use():
            return self._uncommitted()

    def _uncommitted(self) -> int:
        written = sum(space.uncommitted_rows() for space in self._spaces.open)
        return written + sum(generation.removed_keys for _, generation in self._keyed())

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
        again, or roll back. After RanksError, no rank can know what the others did: end all ranks
        and open the store again: it is at the version before, or at this one.
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
            self._commit(use, lambda: self._root.draft(step, payload, keep=keep))
            return self.version

    def _commit(self, use: Use, begun: Callable[[], CommitDraft | None]) -> None:
        """Commit what is written, as the version that a leader has begun."""
        draft: CommitDraft | None = None

        def put_together() -> None:
            nonlocal draft
            draft = begun()

        try:
            with use.interruptible():  # it turns the caller's values into bytes
                self._ranks.together("put the payload together", put_together)
            prepared = self._ranks.together(
                "commit its partitions", lambda: self._commit_parts(draft)
            )
            changed = agreed(prepared)
        except BaseException:
            if draft is not None:
                with contextlib.suppress(TierStoreError, OSError):
                    draft.drop()
            raise
        self._publish(changed, draft)
        self._published(changed)

    def _commit_parts(self, draft: CommitDraft | None) -> Prepared:
        """Commit the partitions of this rank where rows were written."""
        tables = {}
        for name in list(self.touched.scalars):
            info, scalars = self._manifest.tables[name], scalars_to_write(self._tables[name])
            if canonical(scalars) != canonical(info.scalars):
                tables[name] = dataclasses.replace(info, scalars=scalars)
        for space in self._spaces.open:
            space.flush()
        self._parts.commit()
        return self._prepared(tables, draft)

    def _prepared(self, tables: dict[str, TableInfo], draft: CommitDraft | None) -> Prepared:
        """Return what the next version names of this rank."""
        mark = "" if draft is None else draft.numbers["mark"]
        written = self._parts.written_since(self._manifest)
        return Prepared(self._parts.versions(), tables, self._root.last_version, mark, written)

    def _publish(
        self, prepared: Prepared, draft: CommitDraft | None, drop: Collection[str] = ()
    ) -> None:
        """Publish a version that all ranks have ready; it lacks the tables to `drop`."""
        version = prepared.last_version + 1
        kept = {name: info for name, info in self._manifest.tables.items() if name not in drop}
        changes = {
            "version": version,
            "confirmed": version,
            "mark": prepared.mark,
            "tables": {**kept, **prepared.tables},
            "partitions": prepared.in_order(),
            "written": prepared.written,
        }
        self._root.publish(changes, draft)

    def _published(
        self,
        prepared: Prepared,
        drop: Collection[str] = (),
        place: Callable[[], object] | None = None,
    ) -> None:
        """Have tables show the version that was published, and partitions keep what roots name.

        `place` puts tiers over the partitions where tables have others by now: before their keys
        are counted.
        """
        for name in prepared.tables.keys() & self._tables.keys():
            generation = self._tables[name]._generation
            scalars = self._manifest.tables[name].scalars
            generation.info = dataclasses.replace(generation.info, scalars=scalars)
            self._tables[name]._forget_keys()
        for name, by_key in self._keyed():
            if name not in drop:
                by_key.keys_committed()
        with self._committed():
            if place is not None:
                self._ranks.together("place its tables", place)
            self._settle()

    @contextlib.contextmanager
    def _or_back(
        self, what: str, undo: Callable[[], object] | None = None, *, drop_rows: bool = False
    ) -> Iterator[None]:
        """Go back on every rank if the body, which changes partitions, publishes no version.

        With `drop_rows` also to the rows of the last commit. `undo` removes what no version will
        name. After CommitFailedError the outcome is unknown, and the door closes; so it does where
        a rank is interrupted while others wait for it, or cannot go back.
        """
        before = self._manifest
        try:
            yield
        except (CommitFailedError, ConcurrentWriterError):
            raise
        except BaseException as error:
            if self.ranks > 1 and not isinstance(error, Exception):
                with self._ranks.midway(what):
                    raise
            if self._manifest is before and not self._ranks.broken:
                self._go_back(self._discard if drop_rows else self._show_root)
                if undo is not None:
                    undo()
            raise

    def _go_back(self, show: Callable[[], object]) -> None:
        """Have every rank show what the root names, and remove what came of the partitions."""
        try:
            self._count_keys(show, "go back")
            self._settle()
        except Exception as error:
            self._door.close(f"it could not go back to version {self.version} ({error})")

    def _settle(self) -> None:
        """Have partitions remove what no root names that a leader keeps. Collective."""
        roots = self._root.settled()

        def settle() -> None:
            try:
                self._parts.keep_only(self._root.named() if roots is None else roots)
            except (TierStoreError, OSError, MemoryError) as error:
                warn(
                    f"version {self.version} is committed; removing older ones from the "
                    f"partitions of rank {self.rank} is put off: {error}",
                    UpkeepWarning,
                )

        self._count_keys(settle, "confirm the version")

    def keep(self, version: int | str, name: str) -> int:
        """Keep a version by a name until `release`; return its number. Collective.

        As `Store.keep` does.
        """
        self._agree("keep a version", {"version": version, "name": name})
        keeping.check_version_name(name)
        self._rename("keep the version", lambda root: root.keep(version, name))
        return self._manifest.names[name]

    def release(self, name: str) -> None:
        """Release the version that is kept by a name, as `Store.release` does. Collective."""
        self._agree("release a version", {"name": name})
        self._rename("release the version", lambda root: root.release(name))

    def _rename(self, what: str, change: Callable[[Store], object]) -> None:
        with self._door.use(write=True), self._closed_when_broken():
            self._root.rename(what, change)
            self._settle()

    def rollback(self) -> None:
        """Drop everything that any rank wrote since the last commit. Collective."""
        self._agree("roll back", {}, after_fault=True)
        with self._door.use(write=True) as use, self._closed_when_broken():
            with use.interruptible():
                self.prefetcher.wait_for_advice()
            self._count_keys(self._discard, "roll back")
            self._ranks.fault = ""
            self._settle()

    def _discard(self) -> None:
        self._spaces.discard()
        if self._parts.ahead(self._manifest):
            for _, generation in self._keyed():  # load all: those ahead have keys that are to go
                generation.note_moved_keys()
        for part in self._parts.stores:
            part.rollback()
        for name, generation in self._keyed():
            if generation.has_moved_keys:  # rows in memory go by numbers of their own
                self._spaces.vacate([name])
            generation.drop_new_keys()
        for space in self._spaces.open:  # rows found for keys that are gone are found anew
            space.end_epochs(ROLLED_BACK, renamed=None)
            space.begin_epochs()
        self._show_root(ROLLED_BACK)
        for table in self._tables.values():
            table._reset_scalars()

    def _show_root(self, renamed: str = OPENED_ANEW) -> None:
        """Show what the root names, also in partitions that are ahead of it. Writes nothing."""
        if self._parts.ahead(self._manifest):
            self._spaces.vacate(list(self._tables))
            self._parts.show(self._manifest)
        self._place(renamed)

    def _take_scalars(self) -> None:
        """Have tables show the scalars of the version that is open, and its keys."""
        for name, table in self._tables.items():
            generation, scalars = table._generation, self._manifest.tables[name].scalars
            generation.info = dataclasses.replace(generation.info, scalars=scalars)
            table._reset_scalars()
            table._forget_keys()

    def _check_clean(self, what: str) -> None:
        """Raise InvalidInputError where rows of this rank are not committed."""
        rows = self._uncommitted()
        if rows or self._parts.ahead(self._manifest):
            raise InvalidInputError(
                f"{counted(rows, 'row is', 'rows are')} not committed on rank {self.rank}; call "
                f"store.commit() or store.rollback() before you {what}"
            )

    # -- pointers, for states that hold no rows

    def state_dict(self) -> dict[str, Any]:
        """Return a pointer to the version that is open, as `Store.state_dict` does."""
        for root in self._root.stores():
            if root._state.coming is not None:
                return make_pointer(root._state)
        rows = 0 if self._door.closed else self.uncommitted_rows()
        if rows:
            raise InvalidInputError(
                f"{counted(rows, 'row is', 'rows are')} not committed in {self.path}, and a state "
                "would point to a version without them: call store.commit() before state_dict(), "
                "or store.commit(keep='best') if the state is to outlive this process"
            )
        return pointer_to(self._manifest, self.path)

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

    def _agree(self, what: str, values: Mapping[str, object], *, after_fault: bool = False) -> None:
        """Check that the store is open, and that all ranks are at the same version and call."""
        self._door.check(write=True)
        with self._closed_when_broken():
            told = {"version": self.version, **values}
            self._ranks.agree(what, told, after_fault=after_fault)

    @contextlib.contextmanager
    def _closed_when_broken(self) -> Iterator[None]:
        """Close the store for good where the ranks can no longer communicate."""
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
        if os.getpid() != self._door.pid:
            return
        lost = 0
        try:
            self.prefetcher.close()
            with contextlib.suppress(ClosedError), self._door.use():
                lost = self._uncommitted()
                self._spaces.discard()
                self._door.close()
        finally:
            with interrupts_deferred():
                self._release()
        if lost:
            warn(
                f"{self.path} was closed; it dropped {counted(lost, 'uncommitted row')} of rank "
                f"{self.rank}: call commit() to keep what was written",
                UncommittedRowsWarning,
            )

    def _release(self) -> None:
        """Give back memory, files, locks and the group, whatever the state."""
        call_each(
            self._door.close,
            self.prefetcher.wait_for_advice,
            self._spaces.close,
            self._parts.close,
            self._root.close,
            self._ranks.close,
        )

    def _open_again(self) -> None:
        """Do nothing in a forked child: a writer is the parent's alone."""


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


def sharing(table: Any) -> Committing | None:
    """Return the store whose ranks share the rows of a table, or of several looked up as one.

    None where one process has all of them.
    """
    owner = table._owner
    return owner if isinstance(owner, Committing) and owner._ranks.count > 1 else None


def fail_on_every_rank(tables: Iterable[Any], what: str, error: Exception) -> None:
    """Raise an error on all ranks that share the rows of any of these tables."""
    for store in {sharing(table) for table in tables}:
        if store is not None:
            store._ranks.fail(what, error)
