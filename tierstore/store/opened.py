"""An open store from the inside: locks, manifest, tables, and how a version is published.

It knows nothing of what versions are made for: committing, folding, reshaping are floors above.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tierstore import io
from tierstore.disk.delta import Delta
from tierstore.disk.generation import Generation
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    CorruptStoreError,
    InvalidInputError,
    StoreIOError,
    TierStoreError,
)
from tierstore.guard import Guard, interrupts_deferred
from tierstore.manifest import FORMAT, Manifest, TableInfo, new_mark
from tierstore.policy import choose
from tierstore.store import lifetime
from tierstore.store.history import History, open_directory, read_identity
from tierstore.store.ledger import Ledger
from tierstore.store.locking import ReaderLock, WriterLock
from tierstore.store.options import Options
from tierstore.store.payload import Payload
from tierstore.table import Table
from tierstore.table.placement import place
from tierstore.table.prefetch import Prefetcher
from tierstore.table.tiers import Tiers

__all__ = ["Opened"]


@dataclasses.dataclass
class _Opening:
    """Tables that were opened for a manifest, and the deltas of those that follow it, by name."""

    new: dict[str, tuple[Generation, Tiers]] = dataclasses.field(default_factory=dict)
    deltas: dict[str, list[Delta]] = dataclasses.field(default_factory=dict)


class Opened(abc.ABC):
    """What is open of a store; its methods expect to be called inside the guard."""

    def __init__(self, options: Options) -> None:
        """Open a store, and as its writer remove what no version names."""
        self.guard = Guard(str(options.path), writable=options.writable)
        self.prefetcher = Prefetcher()
        self.tables: dict[str, Table] = {}
        self._held: dict[str, Payload] = {}
        self._doing = ""
        self.locks: list[WriterLock | ReaderLock] = []
        self._forget: Callable[[], object] | None = None
        self._floor = 0  # versions up to it a fold may be merging into the base
        self.sync_checks = options.check_ids == "sync"
        self._options = options
        within = options.within
        self.directory = open_directory(options.path) if within is None else within.again()
        try:
            self.identity = read_identity(self.directory)
            self.history = History(self.directory, self.identity.uuid)
            if options.writable:
                self.writer = WriterLock(self.directory, allow_network=options.allow_network)
                self.locks.append(self.writer)
            else:
                self.reader = ReaderLock(self.directory)
                self.locks.append(self.reader)
            self._start(options.version)
        except BaseException:
            self.release()
            raise
        self._forget = lifetime.watch(self, str(options.path), self.locks)

    def _start(self, version: int | None) -> None:
        self.manifest = self._find(version)
        if self.guard.writable:
            self.directory.sync()  # what a killed writer published may not be durable yet
            self.ledger = Ledger(self.directory, self.history)
            if version is not None:
                self._go_back(self.manifest)
            self.sweep(self.keep)
            self.ledger.sweep_leftovers(self.manifest, self.writer.reads_other_than)
        if self._options.mark not in (None, self.manifest.mark):
            raise StoreIOError(
                f"version {self.manifest.version} of {self._options.path} is not the one that was "
                "meant: another copy of the store lies there by now; open it again"
            )
        self._attach(self._open_all(version).new)
        self._hold_only_what_is_open()

    def _find(self, version: int | None) -> Manifest:
        """Return the manifest of a version, or of the newest.

        For a reader it is one that folds leave alone from now on: one that began before the version
        was held is seen by looking again.
        """
        while True:
            found = self.history.newest() if version is None else self.history.version(version)
            if self.guard.writable or found.version in self.reader.held:
                self._floor = self.history.floor()
                return found
            self.reader.hold(found.version, keeps_old_programs_away=found.format == 1)

    def _hold_only_what_is_open(self) -> None:
        if not self.guard.writable:
            is_old = self.manifest.format == 1
            self.reader.hold_only(self.manifest.version, keeps_old_programs_away=is_old)

    def _go_back(self, older: Manifest) -> None:
        """Publish an older version anew, so that those after it are no more."""
        ledger = self.ledger
        if older.seq != ledger.seq:
            self.publish(floor=ledger.floor, confirmed=min(older.version, ledger.confirmed))
            ledger.forget_damaged(after=older.seq)

    def sweep(self, keep: int) -> None:
        """Remove the versions that need not be kept, and what only they need."""
        self.ledger.sweep(keep, self.manifest.confirmed, self.writer.reads_other_than)

    def oldest_reader(self) -> str:
        """Return which version older than this one is being read, for messages."""
        oldest = self.writer.oldest_reader(self.manifest.version)
        return f"version {oldest}" if oldest else "an older version"

    def _open_all(self, version: int | None) -> _Opening:
        """Open what the manifest names and is not open yet, for all tables or for none.

        Where a writer publishes and removes files while they are opened, the same `version` is
        opened as it is now, or, for None, the newest.
        """
        while True:
            seen = self.manifest.seq, self._floor
            opened = _Opening()
            try:
                for name, info in self.manifest.tables.items():
                    table = self.tables.get(name)
                    if table is not None and table.can_follow(info):
                        opened.deltas[name] = table.generation.open_deltas(info)
                    else:
                        opened.new[name] = self._open_tiers(name, info)
                self._hold_payload()
                return opened
            except BaseException as error:
                for generation, tiers in opened.new.values():
                    tiers.close()
                    generation.close()
                if self.guard.writable or not isinstance(error, CorruptStoreError):
                    raise
                self.manifest = self._find(version)
                if (self.manifest.seq, self._floor) == seen:
                    raise

    def _hold_payload(self) -> None:
        """Open, for a reader, the payload of the manifest, which a writer may sweep away."""
        if not self.guard.writable:
            self._held = {
                name: Payload(self.directory, info, hold=True)
                for name, info in self.manifest.payload.items()
            }

    @property
    def payload(self) -> dict[str, Payload]:
        """The values that were committed with the version that is open, by name."""
        if not self.guard.writable:
            return dict(self._held)
        return {name: Payload(self.directory, info) for name, info in self.manifest.payload.items()}

    def _attach(self, opened: Mapping[str, tuple[Generation, Tiers]]) -> None:
        """Let the tables use what was opened, in place of what they used."""
        for name, (generation, tiers) in opened.items():
            if name in self.tables:
                self.tables[name].close()
                self.tables[name].attach(generation, tiers)
            else:
                self.tables[name] = self.new_table(name, generation, tiers)

    @abc.abstractmethod
    def close(self) -> None:
        """Bring everything to a good end, and release it."""

    @abc.abstractmethod
    def new_table(self, name: str, generation: Generation, tiers: Tiers) -> Table:
        """Return a table made of what was opened, which asks this store for what it needs."""

    @property
    def keep(self) -> int:
        """How many versions are kept."""
        return self._options.keep or self.manifest.keep

    def _open_tiers(self, name: str, info: TableInfo) -> tuple[Generation, Tiers]:
        seq = self.ledger.seq + 1 if self.guard.writable else None
        try:
            with self.directory.directory(name) as table:
                generation = Generation(table, info, store=self.identity.uuid, seq=seq)
        except FileNotFoundError:
            raise CorruptStoreError(
                f"{self.directory.join(name)}, the directory of a table, is missing; "
                "restore it from a copy"
            ) from None
        total = sum(each.spec.nbytes for each in self.manifest.tables.values())
        try:
            if not isinstance(self._options.path, io.Objects):
                generation.check_base(self._floor)
            share = info.spec.nbytes / total
            return generation, place(
                generation.tier,
                name,
                self._options.budget,
                share=share,
                device=self._options.device,
                policy=choose(self._options.policy, name),
            )
        except BaseException:
            generation.close()
            raise

    def publish(self, settle: Callable[[], object] = lambda: None, **changes: Any) -> None:
        """Publish the manifest with changes, and let every table take what it says.

        `settle` makes durable what it names and is not so yet.
        """
        manifest = dataclasses.replace(
            self.manifest,
            seq=self.ledger.seq + 1,
            keep=self.keep,
            last_version=self.ledger.last_version,
            format=FORMAT,
            **changes,
        )

        def complete() -> None:
            settle()
            self.writer.check()

        with self.unbroken():
            self.ledger.publish(manifest, complete)
            self._check_alone()
            self._settle(manifest)

    def _check_alone(self) -> None:
        """Raise ConcurrentWriterError if what was just published may be another writer's loss.

        It is published, so no other error may make it look as if it were not.
        """
        try:
            self.writer.check()
            self.ledger.check_newest()
        except ConcurrentWriterError:
            raise
        except (TierStoreError, OSError):
            pass

    def publish_version(self, settle: Callable[[], object] = lambda: None, **changes: Any) -> None:
        """Publish a new version, of a number that none has had before; see `publish`."""
        version = self.ledger.last_version + 1
        changes = {"confirmed": version, **changes}
        self.publish(
            settle, version=version, previous=self.manifest.version, mark=new_mark(), **changes
        )

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Refuse what would publish a version from within a callback of what will publish one.

        That would sweep up files which no version names yet.
        """
        if self._doing:
            raise InvalidInputError(
                f"cannot {what} from within a call that is about to {self._doing}; "
                "do it when that is done"
            )
        self._doing = what
        try:
            yield
        finally:
            self._doing = ""

    @contextlib.contextmanager
    def unless_published(self, remove: Callable[[], object]) -> Iterator[None]:
        """Call `remove` where the body fails and surely has published nothing.

        For files that no version names then.
        """
        before = self.ledger.seq
        try:
            yield
        except BaseException as error:
            is_unknown = isinstance(error, CommitFailedError | ConcurrentWriterError)
            if self.ledger.seq == before and not is_unknown and not self.guard.closed:
                with contextlib.suppress(TierStoreError, OSError):
                    remove()
            raise

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Hold interrupts back; where the body is broken off all the same, close for good.

        For what must not stop between the disk and the memory that goes with it.
        """
        with interrupts_deferred():
            try:
                yield
            except TierStoreError:
                raise
            except BaseException:
                self.guard.close("it was interrupted in the middle of a commit")
                raise

    def _settle(self, manifest: Manifest) -> None:
        """Let every table take what a published manifest says."""
        try:
            for name, table in self.tables.items():
                info = manifest.tables[name]
                if info.generation == table.generation.info.generation:
                    table.generation.committed(info, manifest.seq + 1)
        except (TierStoreError, OSError, MemoryError) as error:
            raise CommitFailedError(
                f"version {manifest.version} is committed, but it could not be opened ({error}); "
                "open the store again"
            ) from error
        self.manifest = manifest

    def commit_tables(self, tables: Mapping[str, TableInfo]) -> None:
        """Publish a version in which some tables are others, and nothing else has changed."""
        self.publish_version(tables={**self.manifest.tables, **tables})

    def uncommitted_rows(self) -> int:
        """Return the number of rows written since the last commit."""
        return sum(table.tiers.uncommitted().size for table in self.tables.values())

    def check_clean(self, what: str) -> None:
        """Raise InvalidInputError if anything is not committed."""
        count = self.uncommitted_rows()
        if count:
            raise InvalidInputError(
                f"{count} rows are not committed; commit or roll back before you {what}"
            )

    def reopen(self, name: str, info: TableInfo) -> None:
        """Open a table's new generation in place of the old one, whose memory goes first."""
        if name in self.tables:
            self.tables[name].close()
        try:
            self._attach({name: self._open_tiers(name, info)})
        except (TierStoreError, OSError, MemoryError) as error:
            raise CommitFailedError(
                f"version {self.manifest.version} is committed, but table {name!r} could not be "
                f"opened in its new shape ({error}); open the store again"
            ) from error

    def refresh(self) -> bool:
        """Let a reader see the newest version; return whether that is another one.

        What is new is opened for all tables before the first of them is changed, so an error leaves
        what was open. It costs what has changed: a table whose base is the same keeps that, its
        deltas, and what it has in host memory of other rows.
        """
        if self.guard.writable:
            return False
        before = self.manifest
        try:
            self.manifest = self._find(None)
            if self.manifest.seq == before.seq:
                return False
            opened = self._open_all(None)
        except BaseException:
            self.manifest = before
            self._hold_only_what_is_open()
            raise
        with interrupts_deferred():
            try:
                self._follow(opened)
            except BaseException as error:
                self.guard.close(f"a refresh broke off in the middle ({error}); open it again")
                raise
        self._hold_only_what_is_open()
        return True

    def _follow(self, opened: _Opening) -> None:
        """Let the tables show what was opened for the manifest."""
        for name in self.tables.keys() - self.manifest.tables.keys():  # a writer went back
            self.tables.pop(name).close()
        for name, deltas in opened.deltas.items():
            self.tables[name].follow(self.manifest.tables[name], deltas, self.manifest.floor)
        self._attach(opened.new)

    def release(self) -> None:
        """Give back memory, files and locks, whatever the state; no file is removed."""
        self.guard.close()
        for table in self.tables.values():
            table.close()
        for value in self._held.values():
            value.close()
        for lock in self.locks:
            lock.close()
        self.directory.close()
        if self._forget is not None:
            self._forget()
