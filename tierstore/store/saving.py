"""Copying a version of a store to a store of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tierstore import io, memory
from tierstore.disk import generation as generations
from tierstore.disk.base import Progress
from tierstore.disk.keys import write_keys
from tierstore.errors import ExistsError
from tierstore.manifest import (
    Identity,
    Manifest,
    Parent,
    PayloadInfo,
    TableInfo,
    unique_name,
)
from tierstore.store.payload import Payload, copy_payload
from tierstore.store.publishing import write_skeleton
from tierstore.table import Table

__all__ = ["save_store"]


def save_store(
    tables: Mapping[str, Table],
    payload: Mapping[str, Payload],
    manifest: Manifest,
    where: Path | io.Objects,
    progress: Progress | None = None,
) -> None:
    """Write what readers of a version see to a new store, folded.

    Every record and payload is checked as it is read, so damage is never copied.
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
            infos[name] = _copy_table(directory, table, report, on_disk=isinstance(where, Path))
            done += table.rows
        files: dict[str, PayloadInfo] = {
            name: copy_payload(value, directory, unique_name("payload-", 1))
            for name, value in payload.items()
        }
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


@contextlib.contextmanager
def _new_directory(where: Path | io.Objects) -> Iterator[io.Directory]:
    """Make what the body fills appear complete or not at all.

    Objects appear one by one, and the last of them, a manifest, makes a store of them. Raises
    ExistsError.
    """
    if not isinstance(where, io.Objects):
        with io.publish(where) as temporary, io.Directory.make(temporary) as directory:
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
    directory: io.Directory, table: Table, report: Callable[[int], None], *, on_disk: bool
) -> TableInfo:
    def progress(done: int, _: int) -> None:
        report(done)

    spec = table.spec
    if not on_disk and spec.backend == "memmap":  # an object is sent as a whole, so it has a size
        spec = dataclasses.replace(spec, backend="zarr")
    with directory.make_directory(table.name) as target:
        info = generations.create(target, spec, 1, table.records(), progress)
        keys = None
        if table.keys is not None:
            with target.directory(info.generation) as generation:
                keys = write_keys(generation, table.keys[:], table.rows)
    return TableInfo(info.spec, info.generation, scalars=dict(table.scalars), keys=keys)
