"""Making a store: all of it, or nothing."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk.base import Progress
from tierstore._disk.manifest import Identity, Manifest, TableInfo, new_mark
from tierstore._store.locking import WriterLock
from tierstore._store.publish import write_skeleton
from tierstore.errors import InvalidTypeError, TierStoreError
from tierstore.spec import TableSpec, check_name

__all__ = ["check_tables", "create_store", "discard_store"]


def create_store(
    path: str | Path, tables: Mapping[str, TableSpec], progress: Progress | None = None
) -> None:
    """Write a store with these tables beside `path` and give it that name when it is complete."""
    total = sum(spec.rows for spec in tables.values())
    identity = Identity(uuid.uuid4().hex)
    infos: dict[str, TableInfo] = {}
    before = 0

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(before + done, total)

    with _io.publish(path) as temporary, _io.Directory.make(temporary) as directory:
        for name, spec in tables.items():
            with directory.make_directory(name) as table:
                infos[name] = generations.create(table, spec, 1, progress=report)
            before += spec.rows
        first = Manifest(identity.uuid, 1, 1, infos, confirmed=1, mark=new_mark())
        write_skeleton(directory, identity, first)


def discard_store(path: str | Path, error: BaseException) -> None:
    """Remove a store that was just made and that its maker could not open because of `error`.

    A store that another process writes to by now stays, and so does one that cannot be removed: a
    note of the error says so.
    """
    try:
        with (
            _io.Directory.open(path) as directory,
            contextlib.closing(WriterLock(directory, allow_untested=True)),
        ):
            _io.withdraw(path)
    except (TierStoreError, OSError, MemoryError) as reason:
        error.add_note(f"{path} was made and is still there ({reason}); open it or remove it")


def check_tables(tables: Mapping[str, TableSpec]) -> None:
    """Raise InvalidTypeError or InvalidInputError for what cannot be the tables of a store."""
    if not isinstance(tables, Mapping):
        raise InvalidTypeError(f"tables are a dict from name to TableSpec, not {tables!r}")
    for name, spec in tables.items():
        check_name(name)
        if not isinstance(spec, TableSpec):
            raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
