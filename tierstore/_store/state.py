"""The state of an open store: directory, locks, manifest, tables, and switching manifests.

Commits, folds and schema changes are implemented in modules above this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._closing import call_each
from tierstore._disk.behind import Behind
from tierstore._disk.generation import initial_records
from tierstore._disk.keys import as_stored, remove_keys
from tierstore._disk.manifest import Identity, Manifest, TableInfo, Written, new_mark
from tierstore._door import Door, Use, interrupts_deferred
from tierstore._garbage import search_put_off
from tierstore._progress import Progress
from tierstore._store.coordinator import ALONE, Coordinator
from tierstore._store.ledger import Ledger
from tierstore._store.locking import WriterLock
from tierstore._store.options import Options
from tierstore._store.payload import Payload, Payloads
from tierstore._store.pointed import MOST, claimed, living
from tierstore._store.tables import Opener, Opening, Spaces
from tierstore._store.versions import History, open_directory, read_identity
from tierstore._table.backing import Backing
from tierstore._table.home import StoreOfTable, Touched
from tierstore._table.missing import Missing, checked
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table, records_in
from tierstore._tiers.base import OPENED_ANEW, REPLACED, RESTORED, ROLLED_BACK
from tierstore.errors import (
    CommitFailedError,
    ConcurrentWriterError,
    CorruptStoreError,
    FormatError,
    InvalidInputError,
    StoreIOError,
    TierStoreError,
    counted,
    named,
    warn,
)
from tierstore.initializers import Initializer
from tierstore.spec import Field, TableSpec

_LOG = logging.getLogger("tierstore")

Draft = TypeVar("Draft")
Rows = npt.NDArray[np.int64]


def _nothing() -> None:
    """Do nothing."""


@dataclass
class Coming:
    """A version being committed; `is_named` is set once a state in its payload points to it."""

    version: int
    mark: str
    is_named: bool = False


class State:
    """The state of a store that is open for writing; its methods must be called within `Door.use`.

    Attributes:
        coming: the version that is being committed, while its payload is put together.
        store: the public store; its tables answer by it.
        door, prefetcher, sync_checks, missing, touched: what the tables share.
        manifest: the version that is open.
        tables: the tables that are whole, by name.
        backings: what they stand on: files, tiers and scalars.
        spaces: the tiers of these tables.
        damaged: the errors of the tables that could not be opened.
        writer, ledger: of a writer only.
        ranks: who else writes the store.
        is_root: whether the rows are in partitions, which have writers of their own.
        whose: "of" what part of the store it is, for messages.
    """

    ranks: Coordinator = ALONE
    is_root = False
    whose = ""

    def __init__(
        self, options: Options, store: StoreOfTable, lock: WriterLock | None = None
    ) -> None:
        """Open a store; a writer also removes files that no version names.

        `lock` is that of the writer if it has it already.
        """
        self.store: StoreOfTable = store
        self.door: Door = Door(str(options.path), writable=options.writable)
        self.prefetcher: Prefetcher = Prefetcher(self.door)
        self.sync_checks: bool = options.check_ids == "sync"
        self.missing: Missing = checked(options.missing, writable=options.writable)
        self.touched: Touched = Touched()
        self.tables: dict[str, Table] = {}
        self.backings: dict[str, Backing] = {}
        self.spaces: Spaces = Spaces(self.tables, self.backings, options)
        self.damaged: dict[str, CorruptStoreError] = {}
        self.locks: list[Any] = []
        self._held: dict[str, Payload] = {}
        self._behind = Behind()
        self._doing = ""
        self.coming: Coming | None = None
        self._warned_of_states = False
        self._floor = 0  # a fold may be merging versions up to this one into the base
        self._options = options
        self.directory: _io.Directory = self._directory()
        try:
            with search_put_off():
                self._open(lock)
        except BaseException:
            self.release()
            raise
        _LOG.info(
            "%s: opened version %d for %s",
            self.directory.path,
            self.manifest.version,
            "writing" if options.writable else "reading",
        )

    def _directory(self) -> _io.Directory:
        """Open the directory of the store."""
        within = self._options.within
        return open_directory(self._options.path) if within is None else within.again()

    def _open(self, lock: WriterLock | None) -> None:
        """Take the lock unless it is there, and open the version that the options name."""
        self._identify()
        self._lock(lock)
        self._start(self._options.version)

    def _identify(self) -> None:
        """Read which store it is."""
        self.identity: Identity = read_identity(self.directory)
        self.history: History = History(self.directory, self.identity.uuid)
        self._opener = Opener(
            self.directory, self.history, self._options, self.touched, self.locks, self._behind
        )

    def _lock(self, lock: WriterLock | None = None) -> None:
        """Become the only writer."""
        self.writer: WriterLock = (
            WriterLock(self.directory, allow_untested=self._options.allow_untested)
            if lock is None
            else lock.within(self.directory)
        )
        self.locks.append(self.writer)

    def _start(self, version: int | str | None) -> None:
        self.manifest: Manifest = self._find(version)
        self._begin(version)
        with contextlib.closing(self._open_all(self.manifest, version)) as opening:
            self.manifest, self._held = opening.manifest, opening.take_payload()
            self.damaged = self._explained(opening)
            self._tidy()
            if self._options.mark not in (None, self.manifest.mark):
                raise StoreIOError(
                    f"version {self.manifest.version} of {self._options.path} is not the expected "
                    "one: the path now has another copy of the store; open it again"
                )
            self._attach(opening, OPENED_ANEW)
        self._hold_only_what_is_open()

    def _begin(self, version: int | str | None) -> None:
        """Begin to write where the open version ends."""
        if self.manifest.partitions and not self.is_root:
            raise InvalidInputError(
                f"{self.directory.path} has partitions: tierstore.distributed.open(path, 'r+') "
                "opens it for writing, on one rank or many"
            )
        self.directory.sync()  # a manifest published by a killed writer may not be durable yet
        self.ledger: Ledger = Ledger(self.directory, self.history)
        if version is not None:
            self._go_on_from(version)

    def _tidy(self) -> None:
        """Remove files that no version names, unless a table is damaged."""
        self.sweep(self.keep)
        if not self.damaged:
            self.ledger.sweep_leftovers(self.writer.reads_other_than)

    # -- finding the version to open

    def _find(self, version: int | str | None) -> Manifest:
        """Return the manifest of a version, or of the newest."""
        manifest = self._wanted(version)
        self._floor = manifest.floor if version is None else self.history.floor()
        return manifest

    def _wanted(self, version: int | str | None) -> Manifest:
        return self.history.newest() if version is None else self.history.version(version)

    def _hold_only_what_is_open(self) -> None:
        self._opener.hold_only(self.manifest)

    def _found_again(self, before: Manifest, version: int | str | None) -> Manifest | None:
        """Return a manifest that a writer published meanwhile, whose files are to be opened then.

        No other writes where this one does.
        """
        return None

    def _go_on_from(self, version: int | str) -> None:
        """Drop the versions after the one that is open; raise first if a table of it is damaged."""
        opening = self._open_all(self.manifest, version)
        opening.close()
        for error in self._explained(opening).values():
            raise CorruptStoreError(
                f"version {self.manifest.version} is damaged, newer ones were kept: {error}"
            )
        self._go_back(self.manifest)

    def check_whole(self, manifest: Manifest) -> None:
        """Raise CorruptStoreError unless the tables of a manifest can be opened."""
        for name in manifest.tables:
            try:
                self._opener.check(manifest, name, self.ledger.floor)
            except (CorruptStoreError, FormatError) as error:
                raise CorruptStoreError(
                    f"version {manifest.version} is damaged, nothing was changed: "
                    f"{self._opener.explain(manifest, name, error)}"
                ) from None

    def _go_back(self, older: Manifest) -> None:
        """Publish an older version again, which drops the versions after it."""
        if older.seq != self.ledger.seq:
            now = self._as_now(older)
            self.change(floor=now.floor, confirmed=now.confirmed, names=now.names)
            self.ledger.forget_damaged(after=older.seq)

    def _as_now(self, older: Manifest) -> Manifest:
        """Return a manifest of an older version with what holds for the store today."""
        ledger, version = self.ledger, older.version
        if older.seq == ledger.seq:
            return older
        return dataclasses.replace(
            older,
            floor=ledger.floor,
            confirmed=min(version, ledger.confirmed),
            names={name: each for name, each in ledger.names.items() if each <= version},
        )

    # -- opening tables and payload

    def _open_all(self, manifest: Manifest, version: int | str | None) -> Opening:
        """Open the files of a manifest that are not open yet; record the damaged tables.

        If a writer publishes and removes files meanwhile, the current manifest of the same
        `version`, or the newest for None, is used instead. Raises CorruptStoreError or FormatError
        if no table is intact.
        """
        while True:
            opening = Opening(manifest)
            try:
                self._opener.open_all(
                    opening, self.backings, next_seq=self._next_seq, floor=self._floor
                )
                if self._lacks_payload(opening) or opening.errors:
                    found = self._found_again(manifest, version)
                    if found is not None:
                        opening.close()
                        manifest = found
                        continue
                if opening.errors and not opening:
                    name, first = next(reversed(opening.errors.items()))
                    raise (
                        first if isinstance(first, FormatError) else self._explained(opening)[name]
                    )
            except BaseException:
                opening.close()
                raise
            return opening

    @property
    def _next_seq(self) -> Callable[[], int] | None:
        """Returns the number of the next manifest; None where nothing is written."""
        return self.ledger.next_number

    def examine(self, name: str) -> None:
        """Examine what opening left of a table until its first use.

        A writer may have folded the table meanwhile, and replaced its digest. Raises
        CorruptStoreError, also the next time.
        """
        on, floor, is_bound = self.backings[name], self._floor, True
        while not (generation := on.generation).examined and not self.door.closed:
            info = generation.info
            try:
                self._opener.examine(generation, floor, is_bound=is_bound)
            except (CorruptStoreError, FormatError, StoreIOError) as error:
                known, floor = floor, self.history.floor()
                if floor != known or generation.info is not info or self.door.closed:
                    continue
                if generation is not on.generation:  # it was closed by a refresh
                    continue
                if is_bound and self._has_replaced_digest(name, info):
                    is_bound = False
                    continue
                if isinstance(error, StoreIOError):
                    raise
                raise self._opener.explain(self.manifest, name, error) from None

    def _has_replaced_digest(self, name: str, info: TableInfo) -> bool:
        """Whether a writer has replaced or removed the digest of a table by now."""
        with contextlib.suppress(FormatError):
            newest = self.history.newest().tables.get(name)
            return newest is None or newest.digest != info.digest
        return False

    def examine_all(self) -> dict[str, CorruptStoreError]:
        """Examine what opening left of any table; return the errors of damaged ones."""
        errors: dict[str, CorruptStoreError] = {}
        for name, on in self.backings.items():
            if not on.generation.examined:
                try:
                    self.examine(name)
                except CorruptStoreError as error:
                    errors[name] = error
        return errors

    def _explained(self, opening: Opening) -> dict[str, CorruptStoreError]:
        return {
            name: self._opener.explain(opening.manifest, name, error)
            for name, error in opening.errors.items()
        }

    def _lacks_payload(self, opening: Opening) -> bool:
        """Whether files of values of the manifest are missing; those of a writer stay."""
        return False

    @property
    def payload(self) -> Payloads:
        """The values committed with the open version, by name."""
        infos = self.manifest.payload.items()
        return Payloads({name: Payload(self.directory, info) for name, info in infos})

    @property
    def own_tables(self) -> Mapping[str, Backing]:
        """The tables whose deltas are in files of this directory, where they are folded."""
        return self.backings

    # -- what all ranks do that write the store; here there is one

    def lead(self, what: str, work: Callable[[], object]) -> None:
        """Have each leader change what is kept of the store."""
        work()

    def commit_all(
        self, use: Use, begin: Callable[[], Draft], commit: Callable[[Draft], object]
    ) -> None:
        """Commit what is written, as the version that leaders `begin`; one rank by `commit`."""
        commit(begin())

    def fold_all(self, fold: Callable[[Progress | None], None], progress: Progress | None) -> None:
        """Merge all deltas; `fold` does what is to be done in the directory of the store."""
        fold(progress)

    def roll_back(self) -> None:
        """Drop everything written since the last commit, on all ranks."""
        self.discard()

    def interruptible(self, use: Use) -> contextlib.AbstractContextManager[object]:
        """Let interrupts through, but where other ranks would wait for this one."""
        return use.interruptible()

    def or_discard(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Drop what is written if the body fails, and certainly has published nothing."""
        return self.unless_published(self.discard)

    # -- tables of which ranks may have parts, as changes of tables see them

    def whole(self, name: str) -> TableSpec:
        """Return the spec of a table with the rows of all ranks."""
        return self.tables[name].spec

    def keys_of(self, name: str) -> Any:
        """Return all keys of a table, to write them to another; None if it has none."""
        return as_stored(self.tables[name].keys)

    def own_rows(self, name: str, ids: Rows) -> tuple[Any, Rows]:
        """Return which ids of a table are of rows on this rank, and their numbers here."""
        return slice(None), ids

    def records(self, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the records of the rows of a table that are on this rank."""
        return records_in(self.tables[name])

    def own(
        self, start: int, blocks: Iterator[npt.NDArray[np.uint8]]
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield, of the records of all rows from `start` on, those that are on this rank."""
        return blocks

    def first_records(self, table: Table, spec: TableSpec) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield the first records of the rows of a table on this rank, as a spec draws them."""
        return initial_records(spec)

    def same_spec(self, name: str, spec: Any) -> Any:
        """Return the spec of a table of this name, whose first values all ranks draw alike."""
        return spec.bound(name) if isinstance(spec, TableSpec) else spec

    def same_values(self, init: Initializer) -> Initializer:
        """Return an initializer that draws the same on all ranks."""
        return init

    def check_given(self, name: str, spec: TableSpec) -> None:
        """Raise InvalidInputError where a table cannot be written from records that are given."""

    def check_added(self, name: str, fields: Mapping[str, Field]) -> None:
        """Raise InvalidInputError where fields cannot start with the values that they are to."""

    def check_same(self, name: str, rows: Any) -> None:
        """Raise InvalidInputError unless all ranks give the same rows."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes that the files take on a disk."""
        path = self._options.path
        return _io.allocated_bytes(path.resolve()) if isinstance(path, Path) else None

    def _attach(self, opening: Opening, renamed: str, kept: Collection[str] = ()) -> None:
        """Switch the tables to the opened files, which are the tables' own from now on.

        `renamed` is why rows may mean something else than before, but those of `kept` tables.
        """
        opened, opening.new = opening.new, {}
        self.spaces.place(self, opened, self._specs(), renamed=renamed, kept=kept)
        for name in opened:
            self.damaged.pop(name, None)

    def _specs(self) -> dict[str, TableSpec]:
        return {name: info.spec for name, info in self.manifest.tables.items()}

    def check_fit(self, changed: Mapping[str, TableSpec]) -> None:
        """Check that new or altered tables can be opened, before they are written.

        Raises CapacityError, and the errors of a policy that does not fit a table.
        """
        self.spaces.check_fit({**self._specs(), **changed})

    def grow_rows(self, name: str, rows: int) -> None:
        """Add rows to a table that grows; they are part of the next commit."""
        self.spaces.grow(self, name, rows, self._present_specs)

    def end_leases(self, name: str) -> None:
        """End the leases of a table whose rows are about to move."""
        self.spaces.end_leases(self, name, self._present_specs)

    def keys_before(self, name: str) -> int | None:
        """Return the number of keys of a table in the previous version; None if unknown."""
        before = self.history.versions().get(self.manifest.previous)
        if before is not None and before.partitions:
            return None  # their manifests know
        info = None if before is None else before.tables.get(name)
        return None if info is None else 0 if info.keys is None else info.keys.count

    def _present_specs(self) -> dict[str, TableSpec]:
        """Return the specs of all tables, with the rows that they have grown to."""
        return self._specs() | {each.name: each.spec for each in self.tables.values()}

    def reopen(
        self, names: Collection[str], *, renamed: str = REPLACED, kept: Collection[str] = ()
    ) -> None:
        """Open new generations of tables after releasing the memory of the old ones.

        Tables that shared tiers with a dropped table get new tiers too. `renamed` is why rows may
        mean something else than before, but those of `kept` tables.
        """
        try:
            self.spaces.vacate(names)
            call_each(*(self.backings[name].close for name in names if name in self.tables))
            with contextlib.closing(Opening(self.manifest)) as opening:
                for name in names:
                    opening.new[name] = self._opener.open(
                        self.manifest, name, self.ledger.next_number, self.ledger.floor
                    )
                self._attach(opening, renamed, kept)
        except (TierStoreError, OSError, MemoryError) as error:
            raise CommitFailedError(
                f"version {self.manifest.version} is committed, but a table could not "
                f"be opened in its new shape ({error}); open the store again"
            ) from error

    def keep_tables(self, before: State) -> None:
        """Have the tables of another state of the store show the files of this one."""
        for name in self.tables.keys() & before.tables.keys():
            self.backings[name] = before.backings[name].moved_to(self.backings[name])
            self.tables[name] = before.tables[name]

    # -- another manifest

    def publish(
        self,
        complete: Callable[[], object] = _nothing,
        replaced: Sequence[str] | None = None,
        commits: int | None = None,
        rewritten: Mapping[str, int] = MappingProxyType({}),
        **changes: Any,
    ) -> Manifest:
        """Publish the manifest with changes and return it; `adopt` must follow, in `unbroken`.

        `complete` makes the remaining files of the manifest durable. `replaced` are the tables
        that differ, if the caller knows that all others are the same. `commits` is the number of
        versions in the history, itself included; a new version adds one by default. `rewritten` is
        how many rows of tables that were written anew changed. A new version is also what makes the
        number of versions to keep that of the store. Raises ClosedError if a callback has closed
        the store.
        """
        self.door.check_open(write=True)
        before = self.manifest
        version = changes.get("version", before.version)
        is_new = version > before.version
        if commits is None:
            commits = before.version - before.skipped + is_new
        if is_new and self._options.keep is not None:
            changes["keep"] = self._options.keep
        if is_new and "written" not in changes:
            tables = changes["tables"]
            names = tables if replaced is None else replaced
            changes["written"] = Written.between(before.tables, tables, names, rewritten)
        manifest = dataclasses.replace(
            before,
            seq=self.ledger.next_number(),
            last_version=self.ledger.last_version,
            skipped=version - commits,
            **changes,
        )
        if replaced is not None:
            manifest.note_changed(before, replaced)

        def make_durable() -> None:
            complete()
            self.writer.check()

        self.ledger.publish(manifest, make_durable)
        self._check_alone()
        return manifest

    def _check_alone(self) -> None:
        """Raise ConcurrentWriterError if the publication may have overwritten another writer's.

        No other error may be raised, since that would suggest that nothing was published.
        """
        try:
            self.writer.check()
            self.ledger.check_newest()
        except ConcurrentWriterError:
            raise
        except (TierStoreError, OSError):
            pass

    def adopt(self, manifest: Manifest) -> None:
        """Switch every table to a published manifest.

        Raises CommitFailedError: a second attempt to commit would publish the same deltas twice.
        """
        difference = manifest.difference(self.manifest)
        try:
            for name in difference.gone:
                self.damaged.pop(name, None)
                if name in self.tables:
                    self.spaces.drop(name)
            for name in difference.changed:
                info, on = manifest.tables[name], self.backings.get(name)
                if on is None:
                    continue  # it is to be opened yet
                if info.generation == on.generation.info.generation:
                    on.generation.committed(info)
        except (TierStoreError, OSError, MemoryError) as error:
            raise CommitFailedError(
                f"version {manifest.version} is committed, but it could not be opened ({error}); "
                "open the store again"
            ) from error
        self.manifest = manifest

    def change(self, **changes: Any) -> None:
        """Publish the manifest with changes that are already durable, and adopt it."""
        with self.unbroken():
            self.adopt(self.publish(**changes))

    def check_restorable(self, older: Manifest) -> None:
        """Raise unless the tables of an older version can be opened, and fit the budget."""
        self.check_whole(older)
        self.spaces.check_fit({name: info.spec for name, info in older.tables.items()})

    def restore_all(self, older: Manifest, changes: Callable[[int], dict[str, Any]]) -> None:
        """Publish the contents of an older version as a new one, and switch every table to it.

        `changes` returns what else its manifest has, given its number. Uncommitted rows are
        dropped, and tables that differ reopened.
        """
        with self.unbroken():
            self._show(self.publish_again(older, changes(self.ledger.last_version + 1)))

    def publish_again(self, older: Manifest, changes: dict[str, Any]) -> Manifest:
        """Publish the contents of an older version with changes; return the manifest."""
        return self.publish(
            **({"tables": older.tables, "step": older.step, "payload": older.payload} | changes)
        )

    def _show(self, manifest: Manifest) -> None:
        """Drop uncommitted rows, and switch every table to a manifest; reopen those that differ."""
        self.discard()
        for name in self.tables.keys() - manifest.tables.keys():
            self.spaces.drop(name)
        self.damaged = {}
        others = set(manifest.tables)
        for name, on in self.backings.items():
            info = manifest.tables[name]
            if on.generation.info == info:
                on.generation.committed(info)
                others.remove(name)
        self.manifest = manifest
        self.reopen(sorted(others), renamed=RESTORED)

    def next_version(self) -> dict[str, Any]:
        """Return the manifest changes for a new version with an unused number."""
        version = self.ledger.last_version + 1
        return {
            "version": version,
            "previous": self.manifest.version,
            "mark": new_mark(),
            "payload_mark": self.payload_mark if self.manifest.payload else "",
            "confirmed": version,
            "origin": None,
        }

    @property
    def payload_mark(self) -> str:
        """The mark of the version with which the payload was committed."""
        return self.manifest.payload_mark or self.manifest.mark

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Defer interrupts; close the store permanently if the body is interrupted nevertheless.

        For operations that must change the disk and the corresponding memory together.
        """
        with interrupts_deferred():
            try:
                yield
            except TierStoreError:
                raise
            except BaseException:
                self.door.close("it was interrupted in the middle of a commit")
                raise

    @contextlib.contextmanager
    def unless_published(self, remove: Callable[[], object]) -> Iterator[None]:
        """Call `remove` if the body fails and certainly has published nothing.

        For files that no version then names.
        """
        before = self.ledger.seq
        try:
            yield
        except BaseException as error:
            is_unknown = isinstance(error, CommitFailedError | ConcurrentWriterError)
            if self.ledger.seq == before and not is_unknown and not self.door.closed:
                with contextlib.suppress(TierStoreError, OSError):
                    if not self.ledger.has_next():
                        remove()
            raise

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Prevent publishing a version from a callback of an operation that will publish one.

        This would remove files that no version names yet.
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

    def prepare(self, version: int | str | None) -> Opening | None:
        """Open and read what is needed to switch to a version; nothing, as a writer never does."""
        return None

    def switch(self, opening: Opening) -> bool:
        """Switch every table to what `prepare` returned."""
        return False

    # -- what is kept, read and uncommitted

    @property
    def keep(self) -> int:
        """How many versions are kept; fewer than before only once this writer has committed."""
        return max(self._options.keep or 0, self.manifest.keep)

    def sweep(self, keep: int) -> None:
        """Remove versions that need not be kept, and files that only they need.

        While a table is damaged, nothing is removed, since a repair may need it.
        """
        if self.damaged:
            return
        self._keep_newest(keep)
        self.ledger.sweep(self.writer.reads_other_than)

    def _keep_newest(self, keep: int) -> None:
        """Let the ledger drop what need not be kept; warn of states that point to such a version.

        It does so where there are more of them than `MOST`, once while the store is open.
        """
        versions = claimed(self.identity.uuid) if self.identity.uuid in living else []
        dropped = self.ledger.keep_newest(keep, self.manifest.confirmed, versions[:MOST])
        lost = sorted(dropped.intersection(number for number, _ in versions[MOST:]))
        if lost and not self._warned_of_states:
            self._warned_of_states = True
            warn(
                f"states in memory point to more than {MOST} versions of {self.directory.path}, "
                f"and version {lost[0]}, to which no later state points, is no longer kept: keep "
                'those that are to be loaded with store.commit(keep="best") or a larger keep='
            )

    @property
    def commits(self) -> int:
        """Number of versions in the history of the open one, by which uses of keys are dated."""
        return self.manifest.commits

    @property
    def unconfirmed(self) -> int:
        """How many versions the trainer has not confirmed."""
        return self.ledger.unconfirmed()

    def oldest_reader(self) -> str:
        """Name the older version that is being read, for messages."""
        oldest = next(iter(self.writer.readers(self.manifest.version)), 0)
        return f"version {oldest}" if oldest else "an older version"

    def uncommitted_rows(self) -> int:
        """Return the number of rows written, or removed with their keys, since the last commit."""
        return sum(space.uncommitted_rows() for space in self.spaces.open)

    def check_clean(self, what: str) -> None:
        """Raise InvalidInputError if anything is not committed."""
        count, keys = self.uncommitted_rows(), self.touched.keys
        if not (count or keys):
            return
        if count:
            found = counted(count, "row is", "rows are")
            where = f", of {named('table', self._uncommitted_tables())}"
        else:
            found, where = f"the keys of {named('table', keys)} are", ""
        raise InvalidInputError(
            f"{found} not committed{where}; call store.commit() or store.rollback() before you "
            f"{what}"
        )

    def _uncommitted_tables(self) -> dict[str, None]:
        """Return the tables of which rows were written, or removed with their keys."""
        return dict.fromkeys(
            extent.table
            for space in self.spaces.open
            for extent in space.extents
            if space.uncommitted(extent).size
        )

    def discard(self) -> None:
        """Drop everything written since the last commit."""
        self.prefetcher.wait_for_advice()
        self.spaces.end_epochs(ROLLED_BACK)
        for on in self.backings.values():  # first: who takes new epochs finds no other keys
            on.generation.drop_new_keys()
        self.spaces.discard()
        for name in self.touched.scalars.keys() & self.tables.keys():
            self.backings[name].reset_scalars()
        for name in list(self.touched.keys):
            self.drop_coming_keys(name)

    def drop_coming_keys(self, name: str) -> None:
        """Remove the keys that the next commit would add to a table."""
        info, on = self.touched.keys.pop(name, None), self.backings.get(name)
        if on is not None:
            on.forget_keys()
        if on is not None and info is not None:
            with (
                contextlib.suppress(TierStoreError, OSError),  # the next writer removes them
                on.generation.directory.use() as directory,
            ):
                remove_keys(directory, info)

    def let_go(self) -> None:
        """Drop what is in memory alone, before the store closes."""
        self.discard()

    def release(self) -> None:
        """Release memory, files and locks in any state; no file is removed.

        Releases all even if some raise: a remaining lock would block the next writer.
        """
        call_each(
            self.door.close,
            self.prefetcher.wait_for_advice,
            self.spaces.close,
            *(on.close for on in reversed(self.backings.values())),
            self._behind.close,
            *(held.close for held in reversed((*self.locks, *self._held.values()))),
            self.directory.close,
            self.directory.end_mappings,
        )
