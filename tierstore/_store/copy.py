"""Copying a version of a store to a store of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.base import Progress
from tierstore._disk.keys import write_keys
from tierstore._disk.manifest import (
    Identity,
    KeysInfo,
    Manifest,
    Parent,
    PayloadInfo,
    TableInfo,
    unique_name,
)
from tierstore._store.ledger import write_skeleton
from tierstore._store.payload import Payload, copy_payload
from tierstore._table.table import Table
from tierstore._tiers import memory
from tierstore.errors import CorruptStoreError, ExistsError

__all__ = ["Skipped", "save_store"]


@dataclass
class Skipped:
    """What a copy lacks because it is damaged.

    Attributes:
        rows: by table, the rows that are zeros in the copy, ascending.
        tables: tables that are left out.
        keys: tables whose keys are left out.
        payload: names of the values that are left out.
    """

    rows: dict[str, list[int]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    payload: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything is lacking."""
        return bool(self.rows or self.tables or self.keys or self.payload)


def save_store(
    tables: Mapping[str, Table],
    payload: Mapping[str, Payload],
    manifest: Manifest,
    where: Path | _io.Objects,
    progress: Progress | None = None,
    *,
    skipped: Skipped | None = None,
) -> Skipped:
    """Write what readers of a version see to a new store, folded.

    Every record and payload is checked as it is read, so damage is never copied: it raises, or
    where there is `skipped`, is noted there and left out. Returns that.
    """
    parent = Parent(manifest.uuid, manifest.version, manifest.previous)
    identity = Identity(uuid.uuid4().hex, parent)
    total = sum(table.rows for table in tables.values())
    done = 0

    def report(count: int) -> None:
        if progress is not None:
            progress(done + count, total)

    with _new_directory(where) as directory:
        infos: dict[str, TableInfo] = {}
        for name, table in tables.items():
            on_disk = isinstance(where, Path)
            infos[name] = _copy_table(directory, table, report, skipped, on_disk=on_disk)
            done += table.rows
        files: dict[str, PayloadInfo] = {}
        for name, value in payload.items():
            try:
                files[name] = copy_payload(value, directory, unique_name("payload-", 1))
            except CorruptStoreError:
                if skipped is None:
                    raise
                skipped.payload.append(name)
        copied = Manifest(
            uuid=identity.uuid,
            seq=1,
            version=manifest.version,
            tables=infos,
            step=manifest.step,
            confirmed=manifest.version,
            payload=files,
            previous=manifest.previous,
            mark=manifest.mark,
        )
        write_skeleton(directory, identity, copied)
    memory.give_back()
    return skipped or Skipped()


@contextlib.contextmanager
def _new_directory(where: Path | _io.Objects) -> Iterator[_io.Directory]:
    """Make what the body fills appear complete or not at all.

    Objects appear one by one, and the last of them, a manifest, makes a store of them. Raises
    ExistsError.
    """
    if not isinstance(where, _io.Objects):
        with _io.publish(where) as temporary, _io.Directory.make(temporary) as directory:
            yield directory
        return
    directory = where.open(write=True)
    if directory.names():
        raise ExistsError(f"{where} holds something; choose another name")
    try:
        yield directory
    except BaseException:
        directory.clear()
        raise


def _copy_table(
    directory: _io.Directory,
    table: Table,
    report: Callable[[int], None],
    skipped: Skipped | None,
    *,
    on_disk: bool,
) -> TableInfo:
    def progress(done: int, _: int) -> None:
        report(done)

    spec = table.spec
    if not on_disk and spec.backend == "memmap":  # an object is sent as a whole, so it has a size
        spec = dataclasses.replace(spec, backend="zarr")
    with directory.make_directory(table.name) as target:
        bad: list[int] | None = None if skipped is None else []
        info = generations.create(target, spec, 1, table.records(bad), progress)
        if skipped is not None and bad:
            skipped.rows[table.name] = bad
        with target.directory(info.generation) as generation:
            keys = _copy_keys(generation, table, skipped)
    return TableInfo(info.spec, info.generation, scalars=dict(table.scalars), keys=keys)


def _copy_keys(generation: _io.Directory, table: Table, skipped: Skipped | None) -> KeysInfo | None:
    try:
        keys = None if table.keys is None else table.keys[:]
    except CorruptStoreError:
        if skipped is None:
            raise
        skipped.keys.append(table.name)
        return None
    return None if keys is None else write_keys(generation, keys, table.rows)
