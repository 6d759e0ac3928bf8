"""Making a store: all of it, or nothing."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from tierstore import io
from tierstore.disk import generation as generations
from tierstore.disk.base import Progress
from tierstore.errors import InvalidTypeError
from tierstore.manifest import Identity, Manifest, TableInfo, new_mark
from tierstore.spec import TableSpec, check_name
from tierstore.store.publishing import write_skeleton

__all__ = ["create_store"]


def create_store(
    path: str | Path, tables: Mapping[str, TableSpec], progress: Progress | None = None
) -> None:
    """Write a store with these tables beside `path` and give it that name when it is complete."""
    _check_tables(tables)
    total = sum(spec.rows for spec in tables.values())
    identity = Identity(uuid.uuid4().hex)
    infos: dict[str, TableInfo] = {}
    before = 0

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(before + done, total)

    with io.publish(path) as temporary, io.Directory.make(temporary) as directory:
        for name, spec in tables.items():
            with directory.make_directory(name) as table:
                infos[name] = generations.create(table, spec, 1, progress=report)
            before += spec.rows
        first = Manifest(identity.uuid, 1, 1, infos, confirmed=1, mark=new_mark())
        write_skeleton(directory, identity, first)


def _check_tables(tables: Mapping[str, TableSpec]) -> None:
    for name, spec in tables.items():
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
