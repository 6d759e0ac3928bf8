"""Copies a version of a store to a new store."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.key_log import write_keys_of
from tierstore._disk.keys import as_stored
from tierstore._disk.manifest import (
    Identity,
    KeysInfo,
    Manifest,
    Origin,
    Parent,
    PayloadInfo,
    TableInfo,
    unique_name,
)
from tierstore._html import brief
from tierstore._progress import Overall, Progress
from tierstore._store.ledger import write_skeleton
from tierstore._store.payload import Payload, copy_payload
from tierstore._store.versions import STORE, check_free
from tierstore._table.table import Table, records_in
from tierstore._tiers import memory
from tierstore.errors import CorruptStoreError, ExistsError, InvalidInputError
from tierstore.spec import BACKENDS, TableSpec


@dataclass
class Skipped:
    """Damaged data that a copy omits.

    Attributes:
        rows: the ascending rows that are zeros in the copy, by table.
        tables: omitted tables.
        keys: tables with omitted keys.
        payload: names of omitted values.
    """

    __repr__ = brief

    rows: dict[str, list[int]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    payload: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything is omitted."""
        return bool(self.rows or self.tables or self.keys or self.payload)


def save_store(
    tables: Mapping[str, Table],
    payload: Mapping[str, Payload],
    manifest: Manifest,
    where: Path | _io.Objects,
    progress: Progress | None = None,
    backend: str | None = None,
    *,
    skipped: Skipped | None = None,
) -> Skipped:
    """Write a version to a new, folded store, with another `backend` if one is given.

    Every record and payload is verified as it is read, so damage is never copied: it raises, or if
    `skipped` is given, is recorded there and omitted. Returns `skipped`. Raises InvalidInputError
    for a backend that no object store holds.
    """
    specs = {name: _copied(table.spec, where, backend) for name, table in tables.items()}
    report = Overall(progress, sum(table.rows for table in tables.values()))
    with _new_directory(where) as directory:
        infos: dict[str, TableInfo] = {}
        for name, table in tables.items():
            infos[name] = _copy_table(directory, table, specs[name], report, skipped)
            report.passed(table.rows)
        report.finish()
        files: dict[str, PayloadInfo] = {}
        for name, value in payload.items():
            try:
                files[name] = copy_payload(value, directory, unique_name("payload-", 1))
            except CorruptStoreError:
                if skipped is None:
                    raise
                skipped.payload.append(name)
        write_copy(directory, manifest, infos, files, is_whole=not skipped)
    memory.give_back()
    return skipped or Skipped()


def write_copy(
    directory: _io.Directory,
    manifest: Manifest,
    tables: Mapping[str, TableInfo],
    payload: Mapping[str, PayloadInfo],
    *,
    is_whole: bool = False,
    partitions: tuple[tuple[int, str], ...] = (),
) -> None:
    """Turn a directory with complete tables and payload into a store of one version.

    If it is a whole copy, without omissions, later versions of the original can be brought to it.
    `partitions` are the versions and marks of those that the directory has.
    """
    identity = Identity(
        uuid.uuid4().hex, Parent(manifest.uuid, manifest.version, manifest.previous)
    )
    copied = Manifest(
        uuid=identity.uuid,
        seq=1,
        version=manifest.version,
        tables=dict(tables),
        step=manifest.step,
        confirmed=manifest.version,
        keep=manifest.keep,
        payload=dict(payload),
        previous=manifest.previous,
        skipped=manifest.skipped,
        mark=manifest.mark,
        payload_mark=manifest.payload_mark,
        origin=Origin(manifest.uuid, manifest.version) if is_whole else None,
        partitions=partitions,
    )
    write_skeleton(directory, identity, copied.counted())


@contextlib.contextmanager
def _new_directory(where: Path | _io.Objects) -> Iterator[_io.Directory]:
    """Yield a directory for the body to fill, which appears complete or not at all.

    Objects appear one by one; only the last one, a manifest, turns them into a store. Raises
    ExistsError.
    """
    if not isinstance(where, _io.Objects):
        check_free(where, "bring a copy up to date (update_copy, --incremental)")
        with _io.publish_directory(where) as directory:
            yield directory
        return
    directory = where.open(write=True)
    if names := directory.names():
        raise ExistsError(
            f"{where} is not empty; choose another name"
            if STORE in names
            else f"{where} is not empty, though it has no store: if it is what a copy left that "
            "was killed, remove it; else choose another name",
            filename=str(where),
        )
    try:
        yield directory
    except BaseException:
        directory.clear()
        raise


def _copied(spec: TableSpec, where: Path | _io.Objects, backend: str | None) -> TableSpec:
    """Return the spec of the copy of a table, on a disk or as objects."""
    own = BACKENDS[spec.backend]
    kind = own if backend is None else BACKENDS.find(backend)
    if not isinstance(where, Path):
        if backend is not None and kind.on_objects != backend:
            raise InvalidInputError(
                f"{where}: tables are stored as {kind.on_objects} there; leave backend= out "
                "(--backend)"
            )
        return dataclasses.replace(spec, backend=kind.on_objects, grows=False)
    if kind is own:
        return spec
    compression = spec.compression if spec.compression in kind.compressions else None
    return dataclasses.replace(
        spec, backend=backend or spec.backend, compression=compression, chunk_rows=None, grows=False
    )


def _copy_table(
    directory: _io.Directory,
    table: Table,
    spec: TableSpec,
    report: Progress,
    skipped: Skipped | None,
) -> TableInfo:
    with directory.make_directory(table.name) as target:
        bad: list[int] | None = None if skipped is None else []
        info = generations.create(target, spec, 1, records_in(table, bad), report)
        if skipped is not None and bad:
            skipped.rows[table.name] = bad
        with target.directory(info.generation) as generation:
            keys = _copy_keys(generation, table, skipped)
    return dataclasses.replace(info, scalars=dict(table.scalars), keys=keys)


def _copy_keys(generation: _io.Directory, table: Table, skipped: Skipped | None) -> KeysInfo | None:
    try:
        keys = as_stored(table.keys)
    except CorruptStoreError:
        if skipped is None:
            raise
        skipped.keys.append(table.name)
        return None
    return write_keys_of(generation, table.spec, keys)
