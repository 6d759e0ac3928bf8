"""A store: a directory of tables that are committed together.

Nothing that a returned commit covered is ever lost, everything after it is cleanly discarded, and
tables, optimizer state and payload of a version always belong together.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._disk.base import Progress
from tierstore._door import internal_errors
from tierstore._info import StoreInfo, Version
from tierstore._store.commit import CommitDraft, PendingCommit
from tierstore._store.copy import Skipped, save_store
from tierstore._store.mending import mend_rows
from tierstore._store.options import Options
from tierstore._store.payload import Payload
from tierstore._store.session import Session
from tierstore._store.survey import Survey
from tierstore._store.verify import VerifyReport, verify_store
from tierstore._table.table import Table
from tierstore.budget import Budget
from tierstore.errors import (
    CorruptStoreError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    UnknownNameError,
)
from tierstore.spec import Field, TableSpec, check_name

__all__ = ["Store"]

_NOTHING = Budget(host=0, gpu=0)


class Store:
    """An open store; `tierstore.open` and `create` give one.

    A context manager: leaving it closes the store, and drops what was not committed with a warning
    that counts the rows.

    >>> with tierstore.create(path, {"item": tierstore.TableSpec(rows=1000, dim=16)}) as store:
    ...     store["item"].write([3, 5], np.ones((2, 16), np.float32))
    ...     store.commit(step=1)
    2
    """

    def __init__(self, options: Options) -> None:
        """Open it; `tierstore.open` is the way to."""
        self.path = options.path
        self.mode = options.mode
        self._options = options
        self._pending: PendingCommit | None = None
        self._session = Session(options)
        self._guard = self._session.guard

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name; one that is damaged raises CorruptStoreError when it is taken."""
        if not self._session.damaged:
            return MappingProxyType(self._session.tables)
        return _Tables(self._session.manifest.tables, self)

    @property
    def damaged(self) -> Mapping[str, CorruptStoreError]:
        """The tables that could not be opened, and why; the others can be used.

        A writer that commits leaves the files of these as they are, folds nothing and removes no
        older version, until `replace_table` has written them anew.
        """
        return MappingProxyType(self._session.damaged)

    def __getitem__(self, name: str) -> Table:
        """Return a table; raises UnknownNameError, a KeyError, or CorruptStoreError."""
        if name in self._session.damaged:
            raise self._session.damaged[name]
        try:
            return self._session.tables[name]
        except KeyError:
            known = ", ".join(self._session.tables) or "none"
            raise UnknownNameError(
                f"no table {name!r} in {self.path}; there are: {known}"
            ) from None

    def __repr__(self) -> str:
        """Name the store, its version and its tables."""
        names = list(self._session.tables)
        return f"Store({str(self.path)!r}, version={self.version}, tables={names})"

    @property
    def uuid(self) -> str:
        """What tells this store from all others, 32 hexadecimal digits."""
        return self._session.identity.uuid

    @property
    def parent(self) -> tuple[str, int] | None:
        """For a copy, the uuid and version it was copied from."""
        parent = self._session.identity.parent
        return None if parent is None else (parent.uuid, parent.version)

    @property
    def version(self) -> int:
        """Number of the version that is open; reads also show what was written since."""
        return self._session.manifest.version

    @property
    def step(self) -> int | None:
        """The step that was committed with this version."""
        return self._session.manifest.step

    @property
    def payload(self) -> Mapping[str, Payload]:
        """The values that were committed with this version, by name."""
        return MappingProxyType(self._session.payload)

    @property
    def closed(self) -> bool:
        """Whether the store can still be used."""
        return self._guard.closed

    def commit(
        self,
        step: int | None = None,
        payload: Mapping[str, object] | None = None,
        *,
        confirm: bool = True,
    ) -> int:
        """Make everything written so far durable, in all tables at once, as one new version.

        Args:
            step: a number of the caller's, given back as `store.step`.
            payload: values to commit along: bytes, a `Path` whose file is copied, or dicts and
                lists of tensors, arrays and JSON scalars; given back as `store.payload`. A str is a
                text, never the name of a file.
            confirm: False keeps older versions until `confirm` is called: for trainers that save
                their model in a file of their own.

        Returns the version's number, once it would survive a power cut. After StoreFullError
        nothing is lost: free space and commit again. After CommitFailedError the store must be
        opened again; the version before is intact.
        """
        self._before_commit(step, payload)
        with self._guard.use(write=True) as use, self._session.alone("commit"):
            with use.interruptible():  # it turns the caller's values into bytes
                draft = CommitDraft(self._session, step, payload or {}, confirm=confirm)
            draft.hand_down()
            version = draft.publish()
            with use.interruptible():
                self._session.tidy()
            return version

    def commit_async(
        self,
        step: int | None = None,
        payload: Mapping[str, object] | None = None,
        *,
        confirm: bool = True,
    ) -> PendingCommit:
        """Commit, and return as soon as every changed row and the payload are in their files.

        Syncing and publishing them runs behind it; the next call of the store waits for that, so
        what is written from now on belongs to the next version. `commit` tells of the arguments.

        Returns a `concurrent.futures.Future`: `result()` returns the version's number once it would
        survive a power cut, or raises what `commit` would. An error that nobody asked for is raised
        by the next commit, or when the store is closed. Errors before that are raised at once.
        """
        self._before_commit(step, payload)
        pending = PendingCommit(self._session)
        try:
            pending.start(step, payload or {}, confirm=confirm)
        finally:
            self._pending = pending
        return pending

    def _before_commit(self, step: int | None, payload: Mapping[str, object] | None) -> None:
        """Check what is to be committed, and raise what went wrong before."""
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise InvalidTypeError(f"step is an int, not {step!r}")
        if payload is not None and not isinstance(payload, Mapping):
            raise InvalidTypeError(f"a payload is a dict from name to value, not {payload!r}")
        for name in payload or ():
            check_name(name, "payload")
        self._raise_unseen()
        self._guard.check(write=True)

    def _raise_unseen(self) -> None:
        """Raise the error of a commit in the background, if nobody has asked for it."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.seen and os.getpid() == self._guard.pid:
            pending.result()

    def confirm(self, version: int) -> None:
        """Say that `version` can be resumed from, so that older ones may go."""
        if isinstance(version, bool) or not isinstance(version, int):
            raise InvalidTypeError(f"a version is an int, not {version!r}")
        with self._guard.use(write=True), self._session.alone("confirm a version"):
            if version not in self._session.ledger.versions:
                raise InvalidInputError(f"version {version} is not kept and cannot be confirmed")
            self._session.publish(confirmed=version)
            self._session.tidy()

    def rollback(self) -> None:
        """Drop everything written since the last commit, in all tables."""
        with self._guard.use(write=True) as use:
            with use.interruptible():
                self._session.prefetcher.settle()
            for table in self._session.tables.values():
                table._discard()

    def fold(self) -> list[int]:
        """Merge all deltas into the base files and drop all versions but the newest.

        Afterwards the base alone is the table, for NumPy or zarr to open. Returns the versions that
        went. Raises LockedError while an older version is open for reading, and InvalidInputError
        if there is anything uncommitted.
        """
        with (
            self._guard.use(write=True) as use,
            self._session.alone("fold"),
            use.interruptible(),
        ):
            self._session.check_clean("fold")
            before = set(self._session.ledger.versions)
            if not self._session.folder.fold(self._session.manifest.version):
                raise LockedError(
                    f"{self._session.oldest_reader()} is open for reading from {self.path}; fold "
                    "when that reader is closed or has called refresh()"
                )
            return sorted(before - set(self._session.ledger.versions))

    def uncommitted_rows(self) -> int:
        """Return the number of rows written since the last commit."""
        with self._guard.use():
            return self._session.uncommitted_rows()

    def create_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Table:
        """Add a table; a commit of its own. Raises ExistsError if there is one of that name.

        `blocks` are its records `(n, record_bytes)` in order; without them the fields'
        initializers decide.
        `keys` are external keys of the rows, all ints or all texts, distinct.
        """
        check_name(name)
        with self._guard.use(write=True) as use, use.interruptible():
            if name in self._session.manifest.tables:
                raise ExistsError(f"{self.path} has a table {name!r}; choose another name")
            self._session.replace(name, spec, blocks, keys=keys, progress=progress)
            return self._session.tables[name]

    def replace_table(
        self,
        name: str,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        *,
        keys: Sequence[Any] | None = None,
        progress: Progress | None = None,
    ) -> Table:
        """Write a table anew, with another spec or other records; a commit of its own.

        `blocks` are all records `(n, record_bytes)` in order; without them the fields'
        initializers decide.
        `keys` are new external keys; without them, those there are stay if the rows are as many.
        Older versions keep the old table. A damaged table is whole again by this, without keys.
        """
        with self._guard.use(write=True) as use, use.interruptible():
            if name not in self._session.damaged:
                self[name]
            self._session.replace(name, spec, blocks, keys=keys, progress=progress)
            return self[name]

    def add_fields(
        self, name: str, fields: Mapping[str, Field], *, progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table, with their first values; a commit of its own."""
        self[name].add_fields(fields, progress=progress)

    def save(
        self,
        path: Any,
        *,
        version: int | None = None,
        damaged: str = "raise",
        progress: Progress | None = None,
    ) -> Skipped:
        """Copy the committed store, or a kept version of it, to `path`, which must not exist.

        The copy is folded, complete and durable when it appears, has a uuid of its own and knows
        this store and version as its `parent`. Writing here may go on meanwhile.

        `path` may also be a URL for fsspec, such as "s3://bucket/emb.tier", or a zarr store, where
        nothing is yet: the files become objects of the same names, tables as zarr, one chunk and
        four bytes a row of a table in memory at a time. `tierstore.open` reads them there, and
        `save` brings them back to a disk.

        Damage is never copied: it raises, or with `damaged="skip"` damaged rows are zeros in the
        copy, and tables that do not open, keys and payload that are damaged are left out.
        Returns what was skipped. `tierstore.repair` saves more.
        """
        if damaged not in ("raise", "skip"):
            raise InvalidInputError(f"damaged is 'raise' or 'skip', not {damaged!r}")
        self._guard.check()
        with internal_errors():
            where, skip = _io.locate(path), damaged == "skip"
            wanted = self.version if version is None else version
            if not self._guard.writable and wanted == self.version:
                return self._save(where, skip=skip, progress=progress)
            options = Options(
                path=self._options.path,
                within=self._session.directory,
                version=wanted,
                budget=_NOTHING,
            )
            with Store(options) as source:
                return source._save(where, skip=skip, progress=progress)

    def _save(self, where: Any, *, skip: bool, progress: Progress | None) -> Skipped:
        skipped = Skipped(tables=list(self.damaged)) if skip else None
        tables = dict(self._session.tables if skip else self.tables)
        return save_store(
            tables, self.payload, self._session.manifest, where, progress, skipped=skipped
        )

    def verify(
        self,
        *,
        sample: int | None = None,
        mend: bool = False,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Check the committed rows, or `sample` random ones a table, and files against checksums.

        Goes on after damage and reports all of it; what the tiers hold in memory is left alone.
        With `mend`, for a writer, damaged rows whose newest image is whole elsewhere, in the host
        tier or in a delta that an older version still names, are written again: they are part of
        the next commit, and the next fold writes them over the damaged ones. `tierstore.verify`
        checks a store that does not open.
        """
        with self._guard.use(write=mend) as use:
            with use.interruptible():
                report = self._verify(sample, progress)
            if mend:
                self._mend(report)
            return report

    def _verify(self, sample: int | None, progress: Progress | None) -> VerifyReport:
        session = self._session
        history = session.history
        return verify_store(
            session.directory,
            Survey(self.uuid, history, history.versions(), history.damaged()),
            opened={name: table._generation for name, table in session.tables.items()},
            manifest=session.manifest,
            payload=session.payload,
            sample=sample,
            progress=progress,
        )

    def _mend(self, report: VerifyReport) -> None:
        """Write damaged rows again, as far as they are whole elsewhere."""
        session = self._session
        newest = session.manifest
        kept = [
            each
            for each in session.history.manifests()
            if each.seq < newest.seq and each.version <= newest.version
        ]
        for name, bad in report.bad_rows.items():
            if bad and name in session.tables:
                table = session.tables[name]
                report.mended[name] = mend_rows(session.directory, table, bad, newest, kept)

    def state_dict(self) -> dict[str, Any]:
        """Return a pointer to this store: path, uuid and version; nothing is read or written.

        For frameworks that save whatever has a `state_dict`; the rows stay where they are.
        """
        return self._session.pointer()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a pointer against this store, which must be the one it is to, or a copy of it.

        Warns if this is another version. Raises InvalidInputError.
        """
        self._session.check_pointer(state)

    def versions(self) -> list[Version]:
        """Return the versions that can be opened, oldest first."""
        with self._guard.use():
            return [Version.of(each) for each in self._session.history.versions().values()]

    def refresh(self) -> bool:
        """Let a reader see the newest version; return whether that is another one."""
        with self._guard.use():
            return self._session.refresh()

    def info(self) -> StoreInfo:
        """Return what the store is made of, and the memory its tiers were given."""
        with self._guard.use():
            tables = tuple(table._information() for table in self._session.tables.values())
        return StoreInfo(
            store=str(self.path),
            format=self._session.manifest.format,
            uuid=self.uuid,
            version=self.version,
            step=self.step,
            folded=not any(info.deltas for info in self._session.manifest.tables.values()),
            tables=tables,
        )

    def close(self) -> None:
        """Close the store; what was not committed is dropped, with a warning that counts it.

        A fold under way is left to a later session. Where three times as much has gathered as lets
        one begin, it is waited for; Ctrl-C gives that up, and so does leaving `with` by an error.

        From within another call of the store, such as a progress callback, this refuses every use
        from then on, and closes when that call has ended.
        """
        self._close()

    def _close(self, *, at_once: bool = False) -> None:
        try:
            self._raise_unseen()
        finally:
            self._session.close(at_once=at_once)

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
        self._close(at_once=error is not None)

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        """Pickle a reader as what it takes to open it; refuse for a writer."""
        if self._guard.writable:
            raise InvalidTypeError(
                f"the writer of {self.path} cannot be pickled; in a worker open it for reading: "
                "tierstore.open(path), or commit and pass the path"
            )
        manifest = self._session.manifest
        options = dataclasses.replace(
            self._options, version=manifest.version, mark=manifest.mark, within=None, device=None
        )
        return Store, (options,)


class _Tables(Mapping[str, Table]):
    """The tables of a store some of which are damaged: those raise when they are taken."""

    def __init__(self, names: Iterable[str], store: Store) -> None:
        self._names = list(names)
        self._store = store

    def __getitem__(self, name: str) -> Table:
        return self._store[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
