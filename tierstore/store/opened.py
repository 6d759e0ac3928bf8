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
from tierstore.disk.generation import Generation
from tierstore.errors import (
    CommitFailedError,
    CorruptStoreError,
    InvalidInputError,
    TierStoreError,
)
from tierstore.guard import Guard, interrupts_deferred
from tierstore.manifest import Manifest, TableInfo
from tierstore.policy import choose
from tierstore.store import lifetime
from tierstore.store.history import History, open_directory, read_identity
from tierstore.store.locking import Unread, become_writer, keep_folds_away
from tierstore.store.options import Options
from tierstore.store.payload import Payload
from tierstore.table import Table
from tierstore.table.placement import place
from tierstore.table.prefetch import Prefetcher
from tierstore.table.tiers import Tiers

__all__ = ["Opened"]


class Opened(abc.ABC):
    """What is open of a store; its methods expect to be called inside the guard."""

    def __init__(self, options: Options) -> None:
        """Open a store, and as its writer remove what no version names."""
        self.guard = Guard(str(options.path), writable=options.writable)
        self.prefetcher = Prefetcher()
        self.tables: dict[str, Table] = {}
        self._held: dict[str, Payload] = {}
        self._doing = ""
        self.drafted: set[str] = set()  # payload files of a version to come
        self.locks: list[io.File] = []
        self._forget: Callable[[], object] | None = None
        self.sync_checks = options.check_ids == "sync"
        self._options = options
        self.directory = open_directory(options.path)
        try:
            self.identity = read_identity(self.directory)
            self.history = History(self.directory, self.identity.uuid)
            if options.writable:
                allow_untested = options.allow_untested
                self.locks.append(become_writer(self.directory, allow_untested=allow_untested))
            else:
                lock = keep_folds_away(self.directory)
                self.locks += [] if lock is None else [lock]
            self._start(options.version)
        except BaseException:
            self.release()
            raise
        self._forget = lifetime.watch(self, str(options.path), self.locks)

    def _start(self, version: int | None) -> None:
        self.manifest = self.history.newest() if version is None else self.history.version(version)
        if self.guard.writable:
            self.directory.sync()  # what a killed writer published may not be durable yet
            if version is not None:
                self._go_back(self.manifest)
            self.sweep(self.keep)
        self._attach(self._open_all(follow=version is None))

    def _go_back(self, older: Manifest) -> None:
        """Publish an older version anew, so that those after it are no more."""
        last = self.history.last()
        if older.seq == last:
            return
        known = self.history.manifests()
        self.manifest = dataclasses.replace(older, seq=last)
        self.publish(
            floor=max(manifest.floor for manifest in known),
            confirmed=min(older.version, max(manifest.confirmed for manifest in known)),
        )
        self.history.discard(older.seq, self.manifest.seq)

    def sweep(self, keep: int, *, unread: bool = False) -> None:
        """Remove what neither a kept version nor a table that is open needs.

        `unread` says that the lock of folds is held already.
        """
        live = [table.disk.live for table in self.tables.values()]
        names = {delta.name for delta in live if delta is not None} | self.drafted
        names |= {table.generation.info.generation for table in self.tables.values()}
        with Unread(self.directory, held=unread) as nobody_reads:
            self.history.sweep(keep, names, nobody_reads)

    def _open_all(self, *, follow: bool) -> dict[str, tuple[Generation, Tiers]]:
        """Open every table of the manifest, or none.

        Where a writer publishes and removes files while they are opened, the same version is opened
        as it is now, or, if the reader is to `follow`, the newest.
        """
        while True:
            opened: dict[str, tuple[Generation, Tiers]] = {}
            try:
                for name, info in self.manifest.tables.items():
                    opened[name] = self._open_tiers(name, info)
                self._hold_payload()
                return opened
            except BaseException as error:
                for generation, tiers in opened.values():
                    tiers.close()
                    generation.close()
                if self.guard.writable or not isinstance(error, CorruptStoreError):
                    raise
                number = self.manifest.version
                now = self.history.newest() if follow else self.history.version(number)
                if now.seq == self.manifest.seq:
                    raise
                self.manifest = now

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
        seq = self.manifest.seq + 1 if self.guard.writable else None
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
            self.manifest, seq=self.manifest.seq + 1, keep=self.keep, **changes
        )
        with self.unbroken():
            self.history.publish(manifest, settle)
            self._settle(manifest)

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
        version = self.manifest.version + 1
        self.publish(version=version, confirmed=version, tables={**self.manifest.tables, **tables})

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

        All tables are opened before the first is replaced, so an error leaves what was open.
        """
        newest, before = self.history.newest(), self.manifest
        if self.guard.writable or newest.seq == before.seq:
            return False
        self.manifest = newest
        try:
            opened = self._open_all(follow=True)
        except BaseException:
            self.manifest = before
            raise
        for name in set(self.tables) - set(opened):  # a writer went back to before there were any
            self.tables.pop(name).close()
        self._attach(opened)
        return True

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
