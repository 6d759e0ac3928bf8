"""An open store from the inside: locks, manifest, tables, and how a version is published.

It knows nothing of what versions are made for: committing, folding, reshaping are floors above.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tierstore import _io
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._disk.manifest import FORMAT, Manifest, TableInfo, new_mark
from tierstore._door import Door, interrupts_deferred
from tierstore._store import lifetime
from tierstore._store.ledger import Ledger
from tierstore._store.locking import ReaderLock, WriterLock
from tierstore._store.options import Options
from tierstore._store.payload import Payload
from tierstore._store.versions import History, open_directory, read_identity
from tierstore._table.placement import check_fit, place
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table
from tierstore._table.tiers import Tiers
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    CorruptStoreError,
    FormatError,
    InvalidInputError,
    StoreIOError,
    TierStoreError,
)
from tierstore.policy import choose
from tierstore.spec import TableSpec

__all__ = ["Opened"]

_MOST_HELD = 64
"""Values of a version that a reader holds open; others can be read until they are swept away."""


@dataclasses.dataclass
class _Opening:
    """Tables that were opened for a manifest, by name.

    Attributes:
        new: those that were not open before.
        deltas: the deltas of those that were, and follow the manifest.
        damaged: why others could not be opened.
    """

    new: dict[str, tuple[Generation, Tiers]] = dataclasses.field(default_factory=dict)
    deltas: dict[str, list[Delta]] = dataclasses.field(default_factory=dict)
    damaged: dict[str, CorruptStoreError] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether any table was opened."""
        return bool(self.new or self.deltas)

    def close(self) -> None:
        """Close what was opened."""
        for generation, tiers in self.new.values():
            tiers.close()
            generation.close()


class Opened(abc.ABC):
    """What is open of a store; its methods expect to be called inside the guard."""

    def __init__(self, options: Options) -> None:
        """Open a store, and as its writer remove what no version names."""
        self.guard = Door(str(options.path), writable=options.writable)
        self.prefetcher = Prefetcher(self.guard)
        self.tables: dict[str, Table] = {}
        self.damaged: dict[str, CorruptStoreError] = {}
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
                self.writer = WriterLock(self.directory, allow_untested=options.allow_untested)
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
                self._check_whole(version)
                self._go_back(self.manifest)
        opened = self._open_all(version)
        self.damaged = opened.damaged
        if self.guard.writable:
            self.sweep(self.keep)
            if not self.damaged:
                self.ledger.sweep_leftovers(self.manifest, self.writer.reads_other_than)
        if self._options.mark not in (None, self.manifest.mark):
            opened.close()
            raise StoreIOError(
                f"version {self.manifest.version} of {self._options.path} is not the one that was "
                "meant: another copy of the store lies there by now; open it again"
            )
        self._attach(opened.new)
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

    def _check_whole(self, version: int) -> None:
        """Raise if a table is damaged, before newer versions go for one that is not better."""
        opened = self._open_all(version)
        opened.close()
        for error in opened.damaged.values():
            raise CorruptStoreError(
                f"version {self.manifest.version} is not whole, newer ones were kept: {error}"
            )

    def _go_back(self, older: Manifest) -> None:
        """Publish an older version anew, so that those after it are no more."""
        ledger = self.ledger
        if older.seq != ledger.seq:
            self.publish(floor=ledger.floor, confirmed=min(older.version, ledger.confirmed))
            ledger.forget_damaged(after=older.seq)

    def sweep(self, keep: int) -> None:
        """Remove the versions that need not be kept, and what only they need.

        While a table is damaged everything stays: it may be what a repair needs.
        """
        if not self.damaged:
            self.ledger.sweep(keep, self.manifest.confirmed, self.writer.reads_other_than)

    def oldest_reader(self) -> str:
        """Return which version older than this one is being read, for messages."""
        oldest = self.writer.oldest_reader(self.manifest.version)
        return f"version {oldest}" if oldest else "an older version"

    def _open_all(self, version: int | None) -> _Opening:
        """Open what the manifest names and is not open yet; note the tables that are damaged.

        Where a writer publishes and removes files while they are opened, the same `version` is
        opened as it is now, or, for None, the newest. Raises CorruptStoreError or FormatError where
        no table is whole.
        """
        while True:
            opened = _Opening()
            errors: dict[str, CorruptStoreError | FormatError] = {}
            try:
                for name, info in self.manifest.tables.items():
                    try:
                        self._open_table(name, info, opened)
                    except (CorruptStoreError, FormatError) as error:
                        errors[name] = error
                missing = self._hold_payload()
                if (errors or missing) and self._has_moved(version):
                    opened.close()
                    continue
                opened.damaged = {name: self._explained(name, errors[name]) for name in errors}
                if errors and not opened:
                    name, first = errors.popitem()
                    raise first if isinstance(first, FormatError) else opened.damaged[name]
            except BaseException:
                opened.close()
                raise
            return opened

    def _open_table(self, name: str, info: TableInfo, opened: _Opening) -> None:
        table = self.tables.get(name)
        if table is not None and table._can_follow(info):
            opened.deltas[name] = table._generation.open_deltas(info)
        else:
            opened.new[name] = self._open_tiers(name, info)

    def _has_moved(self, version: int | None) -> bool:
        """Whether a writer published meanwhile, so that what is missing may be no damage."""
        if self.guard.writable:
            return False
        seen = self.manifest.seq, self._floor
        self.manifest = self._find(version)
        return (self.manifest.seq, self._floor) != seen

    def _explained(self, name: str, error: Exception) -> CorruptStoreError:
        """Return the error of a table that is damaged, with what helps."""
        older = self._version_with(name)
        hint = "" if older is None else f", and version {older} of the table opens"
        path = self.directory.path
        return CorruptStoreError(
            f"table {name!r} is damaged: {error}; 'tierstore verify {path}' lists all damage, "
            f"'tierstore repair {path} DEST' copies what is whole{hint}"
        )

    def _version_with(self, name: str) -> int | None:
        """Return the newest other version in which a table opens, if there is one."""
        for number, manifest in reversed(self.history.versions().items()):
            if number != self.manifest.version and name in manifest.tables:
                info = manifest.tables[name]
                with (
                    contextlib.suppress(CorruptStoreError, FormatError, FileNotFoundError),
                    self.directory.directory(name) as table,
                ):
                    Generation(table, info, store=self.identity.uuid, seq=None).close()
                    return number
        return None

    def _hold_payload(self) -> bool:
        """Open, for a reader, the payload of the manifest, which a writer may sweep away.

        Returns whether a file is missing: reading the value says so then.
        """
        missing = False
        self._held = {}
        if self.guard.writable:
            return missing
        for name, info in self.manifest.payload.items():
            try:
                hold = len(self._held) < _MOST_HELD
                self._held[name] = Payload(self.directory, info, hold=hold)
            except CorruptStoreError:
                self._held[name] = Payload(self.directory, info)
                missing = True
        return missing

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
                self.tables[name]._close()
                self.tables[name]._attach(generation, tiers)
            else:
                self.tables[name] = self.new_table(name, generation, tiers)
            self.damaged.pop(name, None)

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
            if not isinstance(self._options.path, _io.Objects):
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

    def check_fit(self, name: str, spec: TableSpec) -> None:
        """Check that a table, new or of another shape, can be opened, before it is written.

        Raises CapacityError, and what a policy raises that does not go with it.
        """
        specs = {other: info.spec for other, info in self.manifest.tables.items()}
        options = self._options
        check_fit({**specs, name: spec}, options.budget, options.policy, options.device)

    def publish(self, settle: Callable[[], object] = lambda: None, **changes: Any) -> None:
        """Publish the manifest with changes, and let every table take what it says.

        `settle` makes durable what it names and is not so yet. Raises ClosedError if a callback has
        closed the store.
        """
        self.guard.check(write=True)
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
                if info.generation == table._generation.info.generation:
                    table._generation.committed(info, manifest.seq + 1)
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
        return sum(table._tiers.uncommitted().size for table in self.tables.values())

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
            self.tables[name]._close()
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
        before, held = self.manifest, self._held
        try:
            self.manifest = self._find(None)
            if self.manifest.seq == before.seq:
                return False
            opened = self._open_all(None)
            for name in opened.damaged.keys() & self.tables.keys():
                opened.close()
                raise opened.damaged[name]
        except BaseException:
            self.manifest, self._held = before, held
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
            self.tables.pop(name)._close()
        for name, deltas in opened.deltas.items():
            self.tables[name]._follow(self.manifest.tables[name], deltas, self.manifest.floor)
        self._attach(opened.new)
        self.damaged = opened.damaged

    def release(self) -> None:
        """Give back memory, files and locks, whatever the state; no file is removed."""
        self.guard.close()
        for table in self.tables.values():
            table._close()
        for value in self._held.values():
            value.close()
        for lock in self.locks:
            lock.close()
        self.directory.close()
        if self._forget is not None:
            self._forget()
