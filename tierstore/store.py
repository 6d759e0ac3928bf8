"""A store: a directory of tables that are committed together.

Nothing that a returned commit covered is ever lost, everything after it is cleanly discarded, and
tables, optimizer state and payload of a version always belong together.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import socket
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore import io
from tierstore.budget import Budget
from tierstore.disk import generation as generations
from tierstore.disk.base import Progress
from tierstore.disk.generation import Generation
from tierstore.disk.keys import write_keys
from tierstore.errors import (
    CommitFailedError,
    ExistsError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    NotAStoreError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
    UnknownNameError,
)
from tierstore.folding import fold_tables, wants_fold
from tierstore.guard import Guard
from tierstore.history import FOLD, LOCK, STORE, History, write_skeleton
from tierstore.info import StoreInfo
from tierstore.laws import Law
from tierstore.manifest import FORMAT, Identity, Manifest, PayloadInfo, TableInfo
from tierstore.payload import Payload, write_payload
from tierstore.placing import host_tier
from tierstore.prefetch import Prefetcher
from tierstore.saving import save_store
from tierstore.spec import Field, TableSpec, check_name
from tierstore.strictjson import json_values
from tierstore.table import Table
from tierstore.verify import VerifyReport, verify_store

__all__ = ["Store", "Version", "create", "open"]

DEFAULT_KEEP = 2
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "afs"})
_QUICK_FOLD_BYTES = 64 << 20

_opened: weakref.WeakSet[Store] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Version:
    """A version that can be opened: its number, its step, its manifest's number and its deltas."""

    version: int
    step: int | None
    seq: int
    delta_rows: int
    delta_bytes: int


def create(
    path: str | Path,
    tables: Mapping[str, TableSpec],
    *,
    progress: Progress | None = None,
    budget: Budget | None = None,
    keep: int = DEFAULT_KEEP,
) -> Store:
    """Make a store with these tables at `path`, which must not exist, and open it for writing.

    Every row is written, and disk space for all of them reserved, before the store appears under its
    name: a full disk, a kill or a power cut leaves nothing. `progress(done, total)` is called with
    rows. Raises ExistsError, StoreFullError, InvalidInputError.
    """
    _check_tables(tables)
    total = sum(spec.rows for spec in tables.values())
    with io.publish(path) as temporary:
        os.mkdir(temporary)
        identity = Identity(uuid.uuid4().hex)
        with io.Directory.open(temporary) as directory:
            infos, before = {}, 0
            for name, spec in tables.items():
                with directory.make_directory(name) as table:
                    infos[name] = generations.create(
                        table, spec, 1, progress=_part(progress, before, total)
                    )
                before += spec.rows
            write_skeleton(directory, identity, Manifest(identity.uuid, 1, 1, infos, confirmed=1))
    return Store(path, mode="r+", budget=budget, keep=keep)


def open(  # noqa: A001
    path: str | Path,
    mode: str = "r",
    *,
    budget: Budget | None = None,
    version: int | None = None,
    discard_newer: bool = False,
    keep: int = DEFAULT_KEEP,
    allow_network: bool = False,
) -> Store:
    """Open a store.

    Args:
        path: the store's directory.
        mode: "r" for one of many readers of one version, "r+" for the one writer.
        budget: memory for the tiers; see Budget for the defaults.
        version: a kept version to read, or with "r+" and `discard_newer` to go on from.
        discard_newer: drop the versions after `version`.
        keep: how many versions a writer keeps.
        allow_network: write on a network file system, whose locks and syncs may not hold.

    Raises NotAStoreError, FormatError, CorruptStoreError, LockedError and VersionError.
    """
    return Store(
        path,
        mode,
        budget=budget,
        version=version,
        discard_newer=discard_newer,
        keep=keep,
        allow_network=allow_network,
    )


class Store:
    """An open store; see `tierstore.open` for the arguments.

    A context manager: leaving it closes the store, and drops what was not committed with a warning
    that counts the rows.

    >>> with tierstore.create(path, {"item": tierstore.TableSpec(rows=1000, dim=16)}) as store:
    ...     store["item"].write([3, 5], np.ones((2, 16), np.float32))
    ...     store.commit(step=1)
    2
    """

    def __init__(
        self,
        path: str | Path,
        mode: str = "r",
        *,
        budget: Budget | None = None,
        version: int | None = None,
        discard_newer: bool = False,
        keep: int = DEFAULT_KEEP,
        allow_network: bool = False,
    ) -> None:
        if mode not in ("r", "r+"):
            raise InvalidInputError(f"mode is 'r' or 'r+', not {mode!r}")
        if keep < 1:
            raise InvalidInputError(f"at least one version is kept, not {keep}")
        writable = mode == "r+"
        if writable and version is not None and not discard_newer:
            raise InvalidInputError(
                "to write on from an older version, newer ones must go: give discard_newer=True"
            )
        self.path = Path(os.path.abspath(path))
        self.mode = mode
        self._budget = budget or Budget()
        self._keep = keep
        self._tables: dict[str, Table] = {}
        self.guard = Guard(str(self.path), writable=writable)
        self.prefetcher = Prefetcher()
        self._directory = _open_directory(self.path)
        self._files: list[io.File] = []
        try:
            self._identity = self._read_identity()
            self._history = History(self._directory, self._identity.uuid)
            if writable:
                self._lock(allow_network=allow_network)
            else:
                self._share()
            self._start(version)
        except BaseException:
            self._release()
            raise
        _opened.add(self)
        self._finalizer = weakref.finalize(self, _abandoned, str(self.path), self._files)
        self._finalizer.atexit = False

    def _read_identity(self) -> Identity:
        path = self._directory.join(STORE)
        try:
            return Identity.decode(self._directory.read_file(STORE, 1 << 16), path)
        except FileNotFoundError:
            raise NotAStoreError(
                f"{self.path} is not a store: it has no {STORE}; tierstore.create makes one"
            ) from None

    def _lock(self, *, allow_network: bool) -> None:
        """Become the one writer."""
        kind = io.filesystem(self.path)
        if kind in _NETWORK and not allow_network:
            raise StoreIOError(
                f"{self.path} lies on {kind}, where locks and syncs may not hold; write on a local "
                "disk, or give allow_network=True"
            )
        lock = self._directory.open_file(LOCK, write=True)
        self._files.append(lock)
        if not lock.lock(exclusive=True):
            holder = lock.read(256).decode("utf-8", "replace").strip() or "unknown"
            raise LockedError(
                f"{self.path} is open for writing by another process ({holder!r}); "
                "wait for it, or open for reading"
            )
        note = f"pid {os.getpid()} on {socket.gethostname()}".encode()
        lock.truncate(0)
        lock.write(note, 0)

    def _share(self) -> None:
        """Keep folds away from the versions that are read here."""
        try:
            fold = self._directory.open_file(FOLD)
        except FileNotFoundError:
            return
        self._files.append(fold)
        if not fold.lock(exclusive=False):
            raise LockedError(f"{self.path} is being folded; try again in a moment")

    def _start(self, version: int | None) -> None:
        """Open the tables of a version; a writer first removes what no version names."""
        newest = self._history.newest()
        manifest = newest if version is None else self._history.version(version)
        if self.guard.writable:
            if manifest.seq != newest.seq:
                manifest = dataclasses.replace(
                    manifest,
                    seq=newest.seq + 1,
                    confirmed=min(manifest.confirmed, manifest.version),
                )
                self._history.publish(manifest)
            self._history.sweep(self._keep)
        self._manifest = manifest
        extents = {name: info.extent for name, info in newest.tables.items()}
        for name, info in manifest.tables.items():
            self._tables[name] = self._open_table(name, info, extents.get(name))

    def _open_table(self, name: str, info: TableInfo, extent: int | None = None) -> Table:
        generation, host = self._open_tiers(name, info, extent)
        return Table(self, name, generation, host)

    def _open_tiers(self, name: str, info: TableInfo, extent: int | None = None) -> Any:
        seq = self._manifest.seq + 1 if self.guard.writable else None
        try:
            with self._directory.directory(name) as table:
                generation = Generation(
                    table, info, store=self._identity.uuid, seq=seq, extent=extent
                )
        except FileNotFoundError:
            raise FormatError(
                f"{self._directory.join(name)} is missing, a table's directory"
            ) from None
        total = sum(each.spec.nbytes for each in self._manifest.tables.values()) or 1
        try:
            return generation, host_tier(
                generation.tier, name, self._budget, share=info.spec.nbytes / total
            )
        except BaseException:
            generation.close()
            raise

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name."""
        return MappingProxyType(self._tables)

    def __getitem__(self, name: str) -> Table:
        """Return a table; raises UnknownNameError, a KeyError."""
        try:
            return self._tables[name]
        except KeyError:
            known = ", ".join(self._tables) or "none"
            raise UnknownNameError(
                f"no table {name!r} in {self.path}; there are: {known}"
            ) from None

    def __repr__(self) -> str:
        """Name the store, its version and its tables."""
        return f"Store({str(self.path)!r}, version={self.version}, tables={list(self._tables)})"

    @property
    def uuid(self) -> str:
        """What tells this store from all others, 32 hexadecimal digits."""
        return self._identity.uuid

    @property
    def parent(self) -> tuple[str, int] | None:
        """For a copy, the uuid and version it was copied from."""
        return self._identity.parent

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
        return MappingProxyType(
            {name: Payload(self._directory, info) for name, info in self._manifest.payload.items()}
        )

    @property
    def closed(self) -> bool:
        """Whether the store can still be used."""
        return self.guard.closed

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
            payload: values to commit along: bytes, a path, or dicts and lists of tensors, arrays
                and JSON scalars; given back as `store.payload`.
            confirm: False keeps older versions until `confirm` is called: for trainers that save
                their model in a file of their own.

        Returns the version's number, once it would survive a power cut. After StoreFullError
        nothing is lost: free space and commit again. After CommitFailedError the store must be
        opened again; the version before is intact.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise InvalidTypeError(f"step is an int, not {step!r}")
        if payload is not None:
            for name in payload:
                check_name(name, "payload")
        self.prefetcher.wait()
        with self.guard.use(write=True):
            version = self._manifest.version + 1
            tables = {}
            for name, table in self._tables.items():
                table.flush()
                delta = table.generation.seal(version)
                info = dataclasses.replace(
                    table.generation.info, scalars=json_values(table.scalars)
                )
                deltas = info.deltas if delta is None else (*info.deltas, delta)
                tables[name] = dataclasses.replace(info, deltas=deltas)
            files = self._write_payload(payload or {})
            confirmed = version if confirm else self._manifest.confirmed
            try:
                self._publish(
                    version=version, step=step, tables=tables, payload=files, confirmed=confirmed
                )
            except (StoreIOError, StoreFullError):
                self._remove_payload(files)
                raise
            self._history.sweep(self._keep)
            if any(wants_fold(table) for table in self._tables.values()):
                self._fold(self._oldest_kept())
            return version

    def _write_payload(self, payload: Mapping[str, object]) -> dict[str, PayloadInfo]:
        files: dict[str, PayloadInfo] = {}
        try:
            for name, value in payload.items():
                file = generations.unique_name("payload-", self._manifest.seq + 1)
                files[name] = write_payload(self._directory, file, value)
            self._directory.sync()
        except BaseException:
            self._remove_payload(files)
            raise
        return files

    def _remove_payload(self, files: Mapping[str, PayloadInfo]) -> None:
        for info in files.values():
            self._directory.unlink(info.name)

    def _publish(self, **changes: Any) -> None:
        """Publish the manifest with changes, and let every table take what it says."""
        manifest = dataclasses.replace(self._manifest, seq=self._manifest.seq + 1, **changes)
        self._history.publish(manifest)
        try:
            for name, table in self._tables.items():
                info = manifest.tables[name]
                if info.generation == table.generation.info.generation:
                    table.generation.committed(info, manifest.seq + 1)
        except (TierStoreError, OSError, MemoryError) as error:
            raise CommitFailedError(
                f"version {manifest.version} is committed, but it could not be opened ({error}); "
                "open the store again"
            ) from error
        self._manifest = manifest

    def confirm(self, version: int) -> None:
        """Say that `version` can be resumed from, so that older ones may go."""
        with self.guard.use(write=True):
            if version not in self._history.versions():
                raise InvalidInputError(f"version {version} is not kept and cannot be confirmed")
            self._publish(confirmed=version)
            self._history.sweep(self._keep)

    def rollback(self) -> None:
        """Drop everything written since the last commit, in all tables."""
        self.prefetcher.wait()
        with self.guard.use(write=True):
            for table in self._tables.values():
                table.discard()

    def fold(self) -> list[int]:
        """Merge all deltas into the base files and drop all versions but the newest.

        Afterwards the base alone is the table, for NumPy or zarr to open. Returns the versions that
        went. Raises LockedError while readers have the store open, and InvalidInputError if there
        is anything uncommitted.
        """
        with self.guard.use(write=True):
            self._check_clean("fold")
            before = set(self._history.versions())
            if not self._fold(self._manifest.version):
                raise LockedError(
                    f"{self.path} is open for reading elsewhere; fold when the readers are done"
                )
            return sorted(before - set(self._history.versions()))

    def _oldest_kept(self) -> int:
        return min(self._history.versions())

    def _fold(self, upto: int) -> bool:
        """Fold the deltas of versions up to `upto`; return False where readers prevent it."""
        with self._directory.open_file(FOLD, write=True) as lock:
            if not lock.lock(exclusive=True):
                return False
            newest = upto == self._manifest.version
            confirmed = upto if newest else self._manifest.confirmed
            self._publish(floor=upto, confirmed=confirmed)
            self._history.sweep(1 if newest else self._keep)
            self._publish(tables=fold_tables(self._tables.values(), upto))
            for table in self._tables.values():
                table.disk.drop(upto)
            self._history.sweep(1 if newest else self._keep)
        return True

    def _check_clean(self, what: str) -> None:
        count = self.uncommitted_rows()
        if count:
            raise InvalidInputError(
                f"{count} rows are not committed; commit or roll back before you {what}"
            )

    def uncommitted_rows(self) -> int:
        """Return the number of rows written since the last commit."""
        return sum(table.uncommitted().size for table in self._tables.values())

    def create_table(
        self,
        name: str,
        spec: TableSpec,
        *,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        progress: Progress | None = None,
    ) -> Table:
        """Add a table; a commit of its own. Raises ExistsError if there is one of that name.

        `blocks` are its records `(n, record_bytes)` in order; without them the fields' laws decide.
        """
        check_name(name)
        with self.guard.use(write=True):
            if name in self._tables:
                raise ExistsError(f"{self.path} has a table {name!r}; choose another name")
            self._replace(name, spec, blocks, {}, progress)
            return self._tables[name]

    def replace_table(
        self,
        name: str,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]] | None = None,
        *,
        progress: Progress | None = None,
    ) -> Table:
        """Write a table anew, with another spec or other records; a commit of its own.

        `blocks` are all records `(n, record_bytes)` in order; without them the fields' laws decide.
        Older versions keep the old table.
        """
        with self.guard.use(write=True):
            table = self[name]
            self._replace(name, spec, blocks, table.scalars, progress)
            return table

    def add_fields(
        self, name: str, fields: Mapping[str, Field], *, progress: Progress | None = None
    ) -> None:
        """Add fields to every record of a table, with their first values; a commit of its own."""
        with self.guard.use(write=True):
            table = self[name]
            for field in fields:
                if field in table.fields:
                    raise ExistsError(f"table {name!r} has a field {field!r}")
            spec = dataclasses.replace(
                table.spec, dim=None, dtype=None, fields={**table.fields, **fields}, init=None
            )
            self._replace(name, spec, _widened(table, spec), table.scalars, progress)

    def _replace(
        self,
        name: str,
        spec: TableSpec,
        blocks: Iterable[npt.NDArray[np.uint8]] | None,
        scalars: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        """Stream a new generation of a table and commit it; the table object stays the same."""
        self._check_clean("change a table")
        if not self._directory.exists(name):
            self._directory.make_directory(name).close()
        with self._directory.directory(name) as directory:
            info = generations.create(directory, spec, self._manifest.seq + 1, blocks, progress)
        old = self._tables.get(name)
        keys = None
        if old is not None and old.keys is not None and old.rows == spec.rows:
            with self._directory.directory(name) as table:
                with table.directory(info.generation) as directory:
                    keys = write_keys(directory, old.keys[:], spec.rows)
        info = dataclasses.replace(info, scalars=json_values(scalars), keys=keys)
        self._directory.sync()
        version = self._manifest.version + 1
        self._publish(
            version=version, confirmed=version, tables={**self._manifest.tables, name: info}
        )
        generation, host = self._open_tiers(name, info)
        if old is None:
            self._tables[name] = Table(self, name, generation, host)
        else:
            old.close()
            old.attach(generation, host)
        self._history.sweep(self._keep)

    def grow(self, table: str, rows: int, init: Law | None = None) -> None:
        """Append rows to a table until there are `rows`; new ones follow `init`, or are zero."""
        with self.guard.use(write=True):
            grown = self[table]
            if rows < grown.rows:
                raise InvalidInputError(f"a table cannot shrink: {grown.rows} rows, {rows} asked")
            fields = {
                name: dataclasses.replace(item, init=init if number == 0 else None)
                for number, (name, item) in enumerate(grown.fields.items())
            }
            spec = dataclasses.replace(
                grown.spec, rows=rows, dim=None, dtype=None, init=None, fields=fields,
                chunk_rows=None,
            )  # fmt: skip
            self._replace(table, spec, _lengthened(grown, spec), grown.scalars, None)

    def set_keys(self, table: str, keys: Sequence[Any]) -> None:
        """Give a table's rows external keys, all ints or all texts, distinct; a commit of its own."""
        with self.guard.use(write=True):
            keyed = self[table]
            self._check_clean("set keys")
            info = dataclasses.replace(
                keyed.generation.info,
                keys=write_keys(keyed.generation.directory, keys, keyed.rows),
            )
            version = self._manifest.version + 1
            self._publish(
                version=version, confirmed=version, tables={**self._manifest.tables, table: info}
            )
            keyed.attach(keyed.generation, keyed.host)
            self._history.sweep(self._keep)

    def save(
        self,
        path: str | Path,
        *,
        version: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy the committed store, or a kept version of it, to `path`, which must not exist.

        The copy is folded, complete and durable when it appears, has a uuid of its own and knows
        this store and version as its `parent`. Writing here may go on meanwhile.
        """
        self.guard.check()
        wanted = self.version if version is None else version
        with Store(self.path, version=wanted, budget=Budget(host=0, gpu=0)) as source:
            save_store(source.tables, source.payload, source._manifest, path, progress)

    def verify(
        self, *, sample: int | None = None, progress: Progress | None = None
    ) -> VerifyReport:
        """Check the committed rows, or `sample` random ones a table, and files against checksums.

        Goes on after damage and reports all of it; what the tiers hold in memory is left alone.
        """
        with self.guard.use():
            return verify_store(
                self._tables.values(), self.payload, sample=sample, progress=progress
            )

    def versions(self) -> list[Version]:
        """Return the versions that can be opened, oldest first."""
        with self.guard.use():
            return [
                Version(
                    manifest.version,
                    manifest.step,
                    manifest.seq,
                    sum(d.rows for info in manifest.tables.values() for d in info.deltas),
                    sum(d.size for info in manifest.tables.values() for d in info.deltas),
                )
                for manifest in self._history.versions().values()
            ]

    def refresh(self) -> bool:
        """Let a reader see the newest version; return whether that is another one."""
        with self.guard.use():
            if self.guard.writable:
                return False
            newest = self._history.newest()
            changed = newest.seq != self._manifest.seq
            if changed:
                self._manifest = newest
                for name, info in newest.tables.items():
                    if name in self._tables:
                        generation, host = self._open_tiers(name, info)
                        self._tables[name].close()
                        self._tables[name].attach(generation, host)
                    else:
                        self._tables[name] = self._open_table(name, info)
            return changed

    def info(self) -> StoreInfo:
        """Return what the store is made of, and the memory its tiers were given."""
        with self.guard.use():
            tables = tuple(table.information() for table in self._tables.values())
        return StoreInfo(
            store=str(self.path),
            format=FORMAT,
            uuid=self.uuid,
            version=self.version,
            step=self.step,
            folded=not any(table.delta_rows for table in tables),
            tables=tables,
        )

    def close(self) -> None:
        """Close the store; what was not committed is dropped, with a warning that counts the rows."""
        if os.getpid() != self.guard.pid:
            return
        if self.closed:
            self._release()
            return
        self.prefetcher.close()
        with self.guard.use():
            lost = self.uncommitted_rows() if self.guard.writable else 0
            if self.guard.writable:
                for table in self._tables.values():
                    table.discard()
                if not lost:
                    self._fold_if_quick()
            self.guard.close()
        self._release()
        if lost:
            warnings.warn(
                f"{self.path} was closed with {lost} uncommitted rows, which were dropped; "
                "call commit() to keep them",
                stacklevel=2,
            )

    def _fold_if_quick(self) -> None:
        deltas = [delta for table in self._tables.values() for delta in table.disk.deltas]
        oldest = self._oldest_kept()
        if not any(delta.info.version <= oldest for delta in deltas):
            return
        if sum(delta.info.size for delta in deltas) <= _QUICK_FOLD_BYTES:
            self._fold(oldest)

    def _release(self) -> None:
        """Give back memory, files and locks, whatever the state; no file is removed."""
        self.guard.close()
        for table in self._tables.values():
            table.close()
        for file in self._files:
            file.close()
        self._directory.close()
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()

    def forked(self) -> None:
        """In a forked child: close, without unlocking, the lock that is the parent's."""
        for file in self._files:
            file.close()

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

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        """Pickle a reader as what it takes to open it; refuse for a writer."""
        if self.guard.writable:
            raise InvalidTypeError(
                f"the writer of {self.path} cannot be pickled; in a worker open it for reading: "
                "tierstore.open(path), or commit and pass the path"
            )
        return _reopened, (str(self.path), self._budget, self.version)


def _reopened(path: str, budget: Budget, version: int) -> Store:
    return Store(path, budget=budget, version=version)


def _check_tables(tables: Mapping[str, TableSpec]) -> None:
    for name, spec in tables.items():
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")


def _open_directory(path: Path) -> io.Directory:
    try:
        return io.Directory.open(path)
    except FileNotFoundError:
        raise NotAStoreError(f"{path} does not exist; tierstore.create makes a store") from None
    except NotADirectoryError:
        raise NotAStoreError(f"{path} is a file; a store is a directory") from None
    except OSError as error:
        raise StoreIOError(f"cannot open {path}: {error.strerror}") from error


def _part(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    report = progress
    return lambda done, _: report(before + done, total)


def _widened(table: Table, spec: TableSpec) -> Iterable[npt.NDArray[np.uint8]]:
    """Yield the records of a table with the fields that `spec` adds."""
    start = 0
    new = generations.initial_records(spec)
    pending = np.empty((0, spec.layout.record_bytes), np.uint8)
    for block in table.records():
        while len(pending) < len(block):
            pending = np.concatenate([pending, next(new)])
        records, pending = pending[: len(block)], pending[len(block) :]
        for name in table.fields:
            lo, hi = table.spec.layout.span(name)
            begin, end = spec.layout.span(name)
            records[:, begin:end] = block[:, lo:hi]
        start += len(block)
        yield records


def _lengthened(table: Table, spec: TableSpec) -> Iterable[npt.NDArray[np.uint8]]:
    """Yield the records of a table and then the first records of the rows that `spec` adds."""
    yield from table.records()
    yield from generations.initial_records(spec, table.rows)


def _abandoned(path: str, files: list[io.File]) -> None:
    """Release the locks of a store that was dropped without being closed."""
    for file in files:
        file.close()
    warnings.warn(f"{path} was not closed", ResourceWarning, stacklevel=2)


def _close_all() -> None:
    for store in list(_opened):
        if not store.closed:
            store.close()


def _forked() -> None:
    for store in list(_opened):
        store.forked()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
