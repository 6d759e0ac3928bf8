"""A store: a directory of tables that are committed together.

After a commit has returned, its data is never lost. Everything after the last commit is discarded
by a crash. Tables, optimizer state and payload of a version always belong together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._closing import call_each
from tierstore._disk.manifest import FORMAT, Manifest
from tierstore._door import Errand, internal_errors
from tierstore._progress import Progress, Shown, report_nothing, shown
from tierstore._store import closing, keeping, locking
from tierstore._store.alter import alone_to
from tierstore._store.changes import changed_rows
from tierstore._store.commit import PendingCommit, begun, clean_up, commit, flush
from tierstore._store.compaction import Folder
from tierstore._store.copy import Skipped, save_store
from tierstore._store.following import DirectoryWatch, NewVersion, union
from tierstore._store.options import Options, version_or_name, whole_number
from tierstore._store.partitions import list_versions
from tierstore._store.patching import PatchInfo, Source, apply_patch, write_patch
from tierstore._store.payload import Payload
from tierstore._store.pointer import make_pointer, wanted_version
from tierstore._store.reading import Reading
from tierstore._store.repair import mend_rows
from tierstore._store.schema import SchemaChanges
from tierstore._store.state import State
from tierstore._store.updating import CopyUpdate, check_copy, lacking, update, whole_copy
from tierstore._store.verify import VerifyReport, verify_open
from tierstore._table.table import Table
from tierstore.budget import Budget
from tierstore.errors import (
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    UnknownNameError,
    VersionError,
)
from tierstore.spec import BackendName, check_name
from tierstore.stats import LISTED, Counters, StoreInfo, TierStats, Version, Versions, tally

_NOTHING = Budget(host=0, gpu=0)


class Store(SchemaChanges):
    """An open store, a mapping from name to table; returned by `tierstore.open` and `create`.

    Use it as a context manager: leaving it closes the store and drops uncommitted rows, with a
    warning that counts them. A store is always true, and is equal only to itself.

    >>> with tierstore.create(path, {"item": tierstore.TableSpec(rows=1000, dim=16)}) as store:
    ...     store["item"].write([3, 5], np.ones((2, 16), np.float32))
    ...     store.commit(step=1)
    2
    """

    def __init__(self, options: Options, lock: locking.WriterLock | None = None) -> None:
        """Open the store, of which a creator has the lock; use `tierstore.open` instead."""
        self.path: Path | _io.Objects = options.path
        self.mode: str = options.mode
        self._options = options
        self._pending: PendingCommit | None = None
        self._state = self._opened(options, lock)
        self._folder = Folder(self._state)
        self._door = self._state.door
        closing.watch(self, str(options.path), self._state.locks)

    def _opened(self, options: Options, lock: locking.WriterLock | None) -> State:
        return (State if options.writable else Reading)(options, self, lock)

    # -- the tables

    def __getitem__(self, name: str) -> Table:
        """Return a table; raises UnknownNameError, a KeyError, or CorruptStoreError."""
        self._door.check_open(write=False)
        if name in self._state.damaged:
            raise self._state.damaged[name]
        try:
            table = self._state.tables[name]
        except (KeyError, TypeError):
            known = ", ".join(self._state.tables) or "none"
            raise UnknownNameError(
                f"no table {name!r} in {self.path}; there are: {known}"
            ) from None
        if not self._state.backings[name].generation.examined:
            self._state.examine(name)
        return table

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the tables, including damaged ones."""
        return iter(list(self._state.manifest.tables))

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._state.manifest.tables)

    def __contains__(self, name: object) -> bool:
        """Whether a table of this name exists, damaged or not."""
        return name in self._state.manifest.tables

    def __bool__(self) -> bool:
        """Return True, even without tables."""
        return True

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object; stores are not compared by value."""
        return self is other

    __hash__ = object.__hash__

    @property
    def damaged(self) -> Mapping[str, CorruptStoreError]:
        """The tables that could not be opened, with their errors; other tables can be used.

        Commits do not touch the files of these tables. Nothing is folded and no older version is
        removed until `replace_table` has rewritten them. A reader of more than 64 tables examines
        here the bases of those that were not used yet.
        """
        return MappingProxyType({**self._state.damaged, **self._state.examine_all()})

    def __repr__(self) -> str:
        """Name the store, its version and its tables."""
        closed = ", closed" if self._door.closed else ""
        names = list(self)
        tables = f"tables={names}" if len(names) <= LISTED else f"{len(names):,} tables"
        return f"Store({str(self.path)!r}, version={self.version}, {tables}{closed})"

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names that complete `store["`."""
        return list(self)

    def _repr_html_(self) -> str:
        """Return the HTML of `info` for notebooks."""
        return html.escape(repr(self)) if self._door.closed else self.info()._repr_html_()

    # -- what it is

    @property
    def uuid(self) -> str:
        """The unique id of this store, 32 hexadecimal digits."""
        return self._state.identity.uuid

    @property
    def parent(self) -> tuple[str, int] | None:
        """For a copy, the uuid of the original, and its version that was copied last."""
        parent = self._state.manifest.origin or self._state.identity.parent
        return None if parent is None else (parent.uuid, parent.version)

    @property
    def version(self) -> int:
        """Number of the open version; reads also show rows written since."""
        return self._state.manifest.version

    @property
    def step(self) -> int | None:
        """The step that was committed with this version."""
        return self._state.manifest.step

    @property
    def payload(self) -> Mapping[str, Payload]:
        """The values committed with this version, by name; UnknownNameError for another name."""
        return MappingProxyType(self._state.payload)

    @property
    def closed(self) -> bool:
        """Whether the store is closed and its lock is free: another may write it.

        After a failure that ends the store each call raises ClosedError, but it holds its lock, and
        is not closed, until `close` has been called. So is one whose `close` was interrupted; the
        next `close` does the rest. In a forked child a store that the parent has open is not.
        """
        return self._door.closed and not any(lock.locked for lock in self._state.locks)

    def info(self) -> StoreInfo:
        """Return information about the tables, files and tiers of the store."""
        with self._door.use():
            known, spaces = self._state.spaces.information()
        return StoreInfo(
            store=str(self.path),
            format=FORMAT,
            uuid=self.uuid,
            version=self.version,
            step=self.step,
            folded=not any(table.delta_rows for table in known.values())
            and not any(info.deltas for info in self._state.manifest.tables.values()),
            tables=tuple(known.values()),
            spaces=spaces,
            keep=self._state.manifest.keep,
            names=tuple(self._state.manifest.names),
            payload=tuple(self._state.payload),
            writer=locking.writer_of(self.path) if isinstance(self.path, Path) else None,
            allocated_bytes=self._state.allocated_bytes(),
        )

    def stats(self, tables: Iterable[str] | None = None) -> dict[str, TierStats]:
        """Return the counters of each tier, the nearest first, added up over tables.

        Of all of them, or of some: those that share tiers are in `info().spaces`. Each table has
        its own in `table.stats()`. Raises UnknownNameError.
        """
        total = Counters()
        known = self._state.tables
        for table in known.values() if tables is None else [self[name] for name in tables]:
            for tier, counters in table.stats().items():
                total.setdefault(tier, TierStats())
                tally(total[tier], **vars(counters))
        return total

    def versions(self) -> list[Version]:
        """Return the versions that can be opened, oldest first."""
        with self._door.use():
            return Versions(list_versions(self._state.directory, self._state.history))

    # -- versions

    def commit(
        self,
        step: int | None = None,
        *,
        payload: Mapping[str, object] | None = None,
        confirm: bool = True,
        keep: str | None = None,
    ) -> int:
        """Make everything written so far durable, in all tables at once, as one new version.

        Args:
            step: a number chosen by the caller, returned as `store.step`; None keeps the previous
                one.
            payload: values to commit with the tables, returned as `store.payload`: bytes, a `Path`
                whose file is copied, dicts and lists of tensors, arrays and JSON scalars, or an
                object with a `state_dict`, such as a module, whose state then points to this
                version. A str is a string, never a file name. The payload belongs to a step: None
                keeps the previous payload if the step does not change, `{}` commits none.
            confirm: False keeps older versions until `confirm` is called, for trainers that save
                their model in a separate file.
            keep: a name such as "best" under which the version is kept until `release`, regardless
                of later versions. Any other version loses this name.

        A version without a name is also kept while this process holds a state that points to it:
        one that `state_dict()` of a layer, a model, an optimizer or the store returned, or a copy,
        or the last one that was pickled, as by `torch.save`. Of a store there are at most
        8 such versions, the latest ones of which a state was taken; a warning tells of the first
        that goes, once. `fold` drops them.

        Returns the version's number once the version survives a power failure. After StoreFullError
        nothing is lost: free space and commit again. After CommitFailedError the store must be
        opened again; the previous version is intact.
        """
        step = self._checked(step, payload, keep)
        with self._door.use(write=True) as use, self._state.alone("commit"):
            with use.interruptible():  # this serializes values of the caller
                draft = begun(self._state, self._folder, step, payload, confirm=confirm, keep=keep)
            return commit(draft, self._folder, use, flush)

    def commit_async(
        self,
        step: int | None = None,
        *,
        payload: Mapping[str, object] | None = None,
        confirm: bool = True,
        keep: str | None = None,
    ) -> PendingCommit:
        """Commit, and return as soon as every changed row and the payload are in their files.

        A thread syncs and publishes them. The next call of the store waits for that, so later
        writes belong to the next version. The arguments are those of `commit`.

        Returns a `concurrent.futures.Future`: `result()` returns the version's number once the
        version survives a power failure, or raises the errors of `commit`. An error that was not
        retrieved is raised by the next commit, or when the store is closed. Errors before the
        thread starts are raised at once.
        """
        with internal_errors():
            step = self._checked(step, payload, keep)
            pending = PendingCommit()
            try:
                pending.start(self._state, self._folder, step, payload, confirm=confirm, keep=keep)
            except BaseException:
                if not pending.seen:
                    self._pending = pending
                del pending  # the error that it may keep would refer to it by this frame
                raise
            self._pending = pending
        return pending

    def _checked(
        self, step: int | None, payload: Mapping[str, object] | None, keep: str | None
    ) -> int | None:
        """Validate the arguments of a commit, raise earlier errors, and return the step."""
        if keep is not None:
            keeping.check_version_name(keep)
        if step is not None and type(step) is not int:
            step = whole_number("step", step)
        if payload is not None and not isinstance(payload, Mapping):
            raise InvalidTypeError(f"a payload is a dict from name to value, not {payload!r}")
        for name in payload or ():
            check_name(name, "payload")
        self._raise_unseen()
        return step

    def _raise_unseen(self) -> None:
        """Raise the error of a background commit that was not retrieved."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.seen and os.getpid() == self._door.pid:
            try:
                pending.result()
            finally:
                del pending

    def confirm(self, version: int) -> None:
        """Confirm that training can resume from `version`, so that older ones may be removed."""
        version = whole_number("version", version)
        with self._door.use(write=True), self._state.alone("confirm a version"):
            if version not in self._state.ledger.versions:
                raise InvalidInputError(f"version {version} is not kept and cannot be confirmed")
            self._state.change(confirmed=version)
            clean_up(self._state, self._folder)

    def rollback(self) -> None:
        """Drop everything written since the last commit, in all tables."""
        self._agree("roll back", {}, after_fault=True)
        with self._door.use(write=True) as use:
            with use.interruptible():
                self._state.prefetcher.wait_for_advice()
            self._state.roll_back()

    def keep(self, version: int | str, name: str) -> int:
        """Keep a version under a name until `release`, and return its number.

        `version` is a number or another name. Any other version loses the new name. Deltas written
        since the oldest kept version cannot be folded. Raises VersionError.
        """
        version = version_or_name(version)
        self._agree("keep a version", {"version": version, "name": name})
        keeping.check_version_name(name)
        self._alone("keep a version", lambda: keeping.give(self._state, version, name))
        return self._state.manifest.names[name]

    def release(self, name: str) -> None:
        """Remove a name from its version, which may then be removed unless it is kept otherwise.

        Raises UnknownNameError, a KeyError.
        """
        self._agree("release a version", {"name": name})
        self._alone("release a version", lambda: keeping.take(self._state, name))

    def restore(self, version: int | str) -> int:
        """Restore a kept version in place; return the resulting version number.

        Tables, optimizer state, scalars, keys, step and payload are restored to that version, given
        by its number or name. Uncommitted rows, leases and pending gradients are dropped; tables,
        layers and optimizers stay valid. A writer publishes the contents as a new version: later
        versions remain according to `keep` and names, and nothing is copied. A reader switches to
        the version itself.

        Raises VersionError if the version is not kept, CorruptStoreError if it is damaged; the
        store is then unchanged.
        """
        version = version_or_name(version)
        self._agree("restore a version", {"wanted": version})
        if not self._door.writable:
            self._show(version)
        else:
            self._raise_unseen()
            keeping.restore(self._state, self._folder, version)
        return self.version

    def _alone(self, what: str, work: Callable[[], None]) -> None:
        """Change what is kept of the store, as a commit of its own."""
        state = self._state

        def change() -> None:
            work()
            clean_up(state, self._folder)

        alone_to(what, state, self._folder, lambda _: state.lead(what, change))

    def refresh(self) -> bool:
        """Switch a reader to the newest version; return whether the version changed.

        A fold, such as a trainer does on closing, replaces the files and keeps the version: the
        reader then opens them, and the answer is False.
        """
        return self._show(None)

    def _show(self, version: int | str | None) -> bool:
        """Switch a reader to a version, or the newest; return whether the version changed.

        Rows are read as before until all that comes from the disk is there; no call is in progress
        only while the tables switch.
        """
        while True:
            with Errand(self._door):
                opening = self._state.prepare(version)
            if opening is None:
                return False
            with contextlib.closing(opening), self._door.use():
                before = self.version
                if self._state.switch(opening):
                    return self.version != before

    def follow(self, *, timeout: float | None = None, every: float = 0.5) -> Iterator[NewVersion]:
        """Yield each version that a writer commits, after switching this reader to it.

        The reader is at the yielded version, and `rows` are the ids, by table, of the rows that
        changed since the one before; tables without changes are left out. Rows that changed twice
        and are as before may be among them. Versions that are committed between two looks, or while
        the loop is busy, come as one.

        Args:
            timeout: end when no version comes for so many seconds; None waits for ever. 0 yields
                what is there already.
            every: seconds between two looks, each of which is one `fstat` of the directory as long
                as nothing is committed.

        Ctrl-C ends the wait. Raises InvalidInputError for a writer and for a copy of objects, which
        never changes.

        >>> with tierstore.open(store.path) as reader:
        ...     for new in reader.follow(timeout=0):
        ...         ids = new.rows.get("item")  # None: no row of the table changed
        ...         changed = None if ids is None else reader["item"].read(ids)
        """
        self._door.check()
        if self._door.writable or not self._state.directory.removable:
            raise InvalidInputError(
                f"only readers of a store on a disk follow it: open {self.path} for reading"
            )
        if not (every > 0 and (timeout is None or timeout >= 0)):
            raise InvalidInputError(
                f"every must be above 0 and timeout at least 0, not {every!r} and {timeout!r}"
            )
        return self._follow(timeout, every)

    def _follow(self, timeout: float | None, every: float) -> Iterator[NewVersion]:
        self._door.check()
        with self._reader(None) as ahead:
            watch = DirectoryWatch(ahead._state.directory, timeout, every)
            while True:
                watch.may_have_changed()
                ahead.refresh()
                self._door.check()
                if ahead.version == self.version:
                    if not watch.wait():
                        return
                    continue
                with internal_errors():
                    since, rows = self.version, changed_rows(self, ahead)
                    self.refresh()
                    if self.version != ahead.version:  # a commit came in between
                        rows = union(rows, changed_rows(ahead, self))
                yield NewVersion(self.version, self.step, since, rows)
                watch.restart()

    def fold(self, *, progress: Shown = None) -> list[int]:
        """Merge all deltas into the base files and drop all versions but the newest.

        Afterwards the base files alone contain the tables, readable with NumPy or zarr. Returns the
        dropped versions. `progress(done, total)` counts the rows of tables that have deltas, twice:
        they are written, then verified; without deltas it is called once, with 1 of 1. An error
        that it raises ends the fold, which a later one repeats. Raises LockedError while an older
        version is open for reading, and InvalidInputError if there are uncommitted rows or an older
        version is kept under a name.
        """
        self._agree("fold", {})
        return keeping.fold(self._state, self._folder, shown(progress))

    def uncommitted_rows(self) -> int:
        """Return the number of rows written, or removed with their keys, since the last commit."""
        with self._door.use():
            return self._state.uncommitted_rows()

    # -- copies and checks

    def save(
        self,
        path: Any,
        *,
        version: int | str | None = None,
        backend: BackendName | None = None,
        damaged: Literal["raise", "skip"] = "raise",
        progress: Shown = None,
    ) -> Skipped:
        """Copy the committed store, or a kept version of it, to `path`, which must not exist.

        `version` is a number or the name under which the version is kept.

        The copy is folded, appears complete and durable, has its own uuid, and records this store
        and version as its `parent`. This store may be written meanwhile.

        `path` may also be an unused URL for fsspec, such as "s3://bucket/emb.tier", or an empty
        zarr store: the files become objects of the same names, and tables are stored as zarr. This
        takes memory for one chunk and four bytes per row of a table at a time. `tierstore.open`
        reads such copies directly, and `save` copies them back to a disk, with `backend="memmap"`
        as memory-mapped tables; None keeps the backend of each. `progress(done, total)` is called
        with numbers of rows.

        Damage is never copied: it raises, or with `damaged="skip"` damaged rows are zeros in the
        copy, and tables that do not open, damaged keys and damaged payload values are omitted.
        Returns what was skipped. `tierstore.repair` recovers more.
        """
        progress = shown(progress)
        if damaged not in ("raise", "skip"):
            raise InvalidInputError(f"damaged must be 'raise' or 'skip', not {damaged!r}")
        self._door.check()
        with internal_errors():
            where, skip = _io.locate(path), damaged == "skip"
            wanted = self.version if version is None else version_or_name(version)
            if not self._door.writable and wanted == self.version:
                return self._save(where, backend, skip=skip, progress=progress)
            with self._reader(wanted) as source:
                return source._save(where, backend, skip=skip, progress=progress)

    def update_copy(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | str | None = None,
        dry_run: bool = False,
        allow_untested: bool = False,
        progress: Shown = None,
    ) -> CopyUpdate:
        """Bring a copy that `save` made to the committed version, or another kept one.

        Only what the copy lacks is written: rows and keys that differ, other scalars and payload,
        and whole tables that are new or have other fields, numbers of rows or backends, as one
        version of the copy. A kill or a power failure leaves the copy at its old version or at the
        new one; readers of the copy switch with `refresh`. If there is no copy, this makes it.

        The cost depends on the rows that were written between the versions if this store still
        keeps the version of the copy, see `keep`; otherwise all rows of both are read and compared.
        `dry_run` writes nothing, and returns what would be written.

        Raises InvalidInputError if `path` is not a copy of this store, VersionError if the copy has
        own changes or is newer, LockedError if it is open for writing, and the errors of `open`.
        `allow_untested` is that of `tierstore.open`.
        """
        progress = shown(progress)
        self._door.check()
        with internal_errors(), contextlib.ExitStack() as opened:
            where = _io.locate(path)
            if isinstance(where, _io.Objects):
                raise InvalidInputError(
                    f"{where} is not on a disk, and objects never change: save a new copy there"
                )
            wanted = self.version if version is None else version_or_name(version)
            new = self
            if self._door.writable or wanted != self.version:
                new = opened.enter_context(self._reader(wanted))
            source = new._source()
            if not os.path.lexists(where):
                if not dry_run:
                    new._save(where, None, skip=False, progress=progress)
                return whole_copy(where, source)
            options = Options(path=where, budget=_NOTHING)
            with Store(options) as copy:  # a writer would tidy up what may be another store
                if not check_copy(where, copy._state, source.manifest):
                    report_nothing(progress)
                    return CopyUpdate(where, new.version, new.version)
                if dry_run:
                    return lacking(copy._state, source, self._like(copy, opened), progress)
            options = dataclasses.replace(options, mode="r+", allow_untested=allow_untested)
            with Store(options) as copy:
                if not check_copy(where, copy._state, source.manifest):
                    report_nothing(progress)
                    return CopyUpdate(where, new.version, new.version)
                base = self._like(copy, opened)
                return update(copy._state, copy._folder, source, base, progress)

    def _like(self, copy: Store, opened: contextlib.ExitStack) -> Mapping[str, Table]:
        """Open the version that a copy is equal to; return its tables, or none if not kept."""
        mark = copy._state.manifest.mark
        for manifest in self._state.history.versions().values():
            if manifest.mark == mark:
                with contextlib.suppress(VersionError):  # removed meanwhile
                    return dict(opened.enter_context(self._reader(manifest.version)))
        return {}

    def _reader(self, version: int | str | None) -> Store:
        """Open a kept version, or the newest, for reading, without caches."""
        options = Options(
            path=self._options.path,
            within=self._state.directory,
            version=version,
            budget=_NOTHING,
        )
        return Store(options)

    def _save(
        self, where: Any, backend: str | None, *, skip: bool, progress: Progress | None
    ) -> Skipped:
        skipped = Skipped(tables=list(self.damaged)) if skip else None
        left_out = () if skipped is None else skipped.tables
        tables = {name: self[name] for name in self if name not in left_out}
        return save_store(
            tables, self.payload, self._state.manifest, where, progress, backend, skipped=skipped
        )

    def changed(
        self, from_version: int | str, to_version: int | str | None = None
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return the rows that differ between two kept versions: ascending ids, by table.

        Versions are numbers or names; `to_version` is the open version if None. Rows that were
        added or have other keys count; all rows of a table that is new or has other fields do.
        Tables without such rows are left out, but for those that have fewer rows, such as tables by
        key of which keys were removed: their ids may be none. Uncommitted rows are not seen.

        Of a table by key these are row numbers, which its calls refuse in place of keys:
        `table.keys_of(rows)` returns the keys, and `table.by_row.read(rows)` the rows.

        The cost depends on the rows that were written between the versions, unless the table was
        rewritten, as by `grow`: then it is read once per version. Raises VersionError.
        """
        with internal_errors(), self._two(from_version, to_version) as (old, new):
            return changed_rows(old, new)

    def write_patch(
        self,
        path: str | os.PathLike[str],
        from_version: int | str,
        to_version: int | str | None = None,
        *,
        force: bool = False,
    ) -> PatchInfo:
        """Write what changed between two kept versions to a file, for `apply_patch` of a copy.

        The file contains the rows that differ, the scalars of their tables, the step, and the
        payload if it is another one, all with checksums. It appears complete or not at all; `force`
        replaces an existing file.

        Raises VersionError for a version that is not kept, and InvalidInputError if tables, fields,
        numbers of rows or keys differ: these need a new copy.
        """
        with internal_errors(), self._two(from_version, to_version) as (old, new):
            return write_patch(path, old._source(), new._source(), force=force)

    def apply_patch(self, path: str | os.PathLike[str]) -> PatchInfo:
        """Apply a patch of another store to this copy of it, as a new version.

        The open version must be the one that the patch follows, in a copy that nothing else has
        changed; the new one has the contents of the version that it leads to. After an error the
        store is as before.

        Raises VersionError if the patch follows another version or was applied before, FormatError
        for a damaged patch, and InvalidInputError if there are uncommitted rows.
        """
        self._agree("apply a patch", {})
        self._raise_unseen()
        with internal_errors():
            return apply_patch(self._state, self._folder, path)

    @contextlib.contextmanager
    def _two(self, one: int | str, other: int | str | None) -> Iterator[tuple[Store, Store]]:
        """Open two kept versions for reading; None is the open one."""
        self._door.check()
        other = self.version if other is None else version_or_name(other)
        with self._reader(version_or_name(one)) as old, self._reader(other) as new:
            yield old, new

    def _source(self) -> Source:
        return Source(self._state.manifest, dict(self), self.payload)

    def verify(
        self,
        *,
        sample: int | None = None,
        mend: bool = False,
        progress: Shown = None,
    ) -> VerifyReport:
        """Check all committed rows, or `sample` random ones per table, and files by checksums.

        Continues after damage and reports all of it; cached rows are not changed. With `mend`, a
        writer rewrites damaged rows whose newest image is intact elsewhere, in the host tier or in
        a delta that an older version still names: they are part of the next commit, and the next
        fold replaces the damaged ones. `progress(done, total)` is called with numbers of rows.
        `tierstore.verify` checks a store that does not open. Raises InvalidInputError, before it
        checks anything, if rows in partitions are to be mended.
        """
        state = self._state
        if mend and state.is_root:
            raise InvalidInputError(
                f"{self.path} is in partitions, whose rows are not mended in place; "
                f"tierstore.repair({str(self.path)!r}, DEST) copies what is intact to a new store"
            )
        with self._door.use(write=mend) as use:
            with use.interruptible():
                report = verify_open(state, sample, shown(progress))
            if mend:
                mend_rows(state, report)
            return report

    def state_dict(self) -> dict[str, Any]:
        """Return a pointer to the open version: path, uuid, version and its mark.

        For frameworks that save objects with a `state_dict`; no rows are copied. Raises
        InvalidInputError if there are uncommitted rows or keys: commit first, or pass the store or
        module itself to `commit` as a payload.
        """
        if self._door.closed:
            return make_pointer(self._state)
        with self._door.use():
            return make_pointer(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the version that a pointer names; see `restore`.

        The pointer may belong to this store or to the original of which it is a copy. Raises
        InvalidInputError for a pointer to another store, or to a version that is not kept.
        """
        own = self._state

        def look() -> tuple[int | None, bool]:
            with self._door.use():
                wanted = wanted_version(
                    state, own.manifest, own.history.versions, own.identity, own.directory.path
                )
                changed = own.uncommitted_rows() or own.touched.keys
            return wanted, self._door.writable and bool(changed)

        found = own.ranks.together("load a state", look)
        wanted, _ = found[own.ranks.rank]
        if wanted is not None or any(is_changed for _, is_changed in found):
            self.restore(self.version if wanted is None else wanted)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the store itself, since its files have a single writer."""
        return self

    # -- closing

    def close(self) -> None:
        """Close the store; drop uncommitted rows with a warning that counts them.

        A fold in progress is left to a later session. If three times the usual threshold has
        accumulated, this waits for the fold; Ctrl-C ends the wait, as does leaving `with` by an
        error.

        Within another call of the store, such as a progress callback, all further calls are
        rejected, and the store closes when that call has ended.
        """
        self._close()

    def _close(self, *, at_once: bool = False) -> None:
        removals = closing.removals_of(self)
        call_each(
            self._raise_unseen,
            partial(
                closing.close,
                self._state,
                self._folder,
                at_once=at_once,
                kept=not removals,
            ),
            *removals,
        )

    def _open_again(self) -> None:
        """Reopen a reader in a forked child, at the same version; its tables stay valid.

        Only the parent can use a writer, and a child cannot use GPU memory of the parent.
        """
        old = self._state
        if old.door.writable or old.door.closed or self._options.device is not None:
            return
        manifest = old.manifest
        options = dataclasses.replace(
            self._options, version=manifest.version, mark=manifest.mark, within=None
        )
        state = Reading(options, self)
        state.keep_tables(old)
        self._state, self._door, self._folder = state, state.door, Folder(state)
        closing.watch(self, str(options.path), state.locks)

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the store."""
        self._close(at_once=error is not None)

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        """Pickle a reader as the arguments to open it; refuse to pickle a writer."""
        if self._door.writable:
            raise InvalidTypeError(
                f"the writer of {self.path} cannot be pickled; in a worker open it for reading: "
                "tierstore.open(path), or commit and pass the path"
            )
        manifest = self._state.manifest
        options = dataclasses.replace(
            self._options, version=manifest.version, mark=manifest.mark, within=None, device=None
        )
        return Store, (options,)


def manifest_of(store: Store) -> Manifest:
    """Return the manifest of the open version of a store, for a copy in another form."""
    return store._state.manifest


def opened_before(options: Options, locked: LockedError) -> Store:
    """Return the store that this process has open at a path with these options.

    Raises `locked` if there is none, and LockedError that names the options that differ.
    """
    wanted = os.path.realpath(str(options.path))
    for store in closing.opened():
        if not isinstance(store, Store) or store.closed or store.mode != "r+":
            continue
        if store._door.pid != os.getpid() or os.path.realpath(str(store.path)) != wanted:
            continue
        if differing := store._options.differing(options):
            raise LockedError(
                f"{store.path} is open for writing by this very process with {differing}; use the "
                "Store that was opened before, give the same arguments, or close it",
                filename=str(store.path),
            ) from None
        return store
    raise locked
