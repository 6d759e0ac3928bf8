"""Changing what a table is made of: another spec, more fields, more rows, other keys.

The records are streamed into a new generation beside the old one, which lives on while a kept
version names it; one commit makes the new one the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore.disk import generation as generations
from tierstore.disk.base import Progress
from tierstore.disk.keys import write_keys
from tierstore.errors import ExistsError, InvalidInputError
from tierstore.laws import Law
from tierstore.spec import Field, TableSpec
from tierstore.strictjson import json_values
from tierstore.table import Table

if TYPE_CHECKING:
    from tierstore.store.session import Session

__all__ = ["add_fields", "grow", "replace", "set_keys"]

Blocks = Iterator[npt.NDArray[np.uint8]]


def replace(
    session: Session,
    name: str,
    spec: TableSpec,
    blocks: Iterable[npt.NDArray[np.uint8]] | None,
    *,
    scalars: Mapping[str, Any],
    keys: Sequence[Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Stream a new generation of a table, new or not, and commit it; the table object stays.

    External keys stay where none are given and the number of rows is the same.
    """
    with session.alone("change a table"):
        _replace(session, name, spec, blocks, scalars, keys, progress)


def _replace(
    session: Session,
    name: str,
    spec: TableSpec,
    blocks: Iterable[npt.NDArray[np.uint8]] | None,
    scalars: Mapping[str, Any],
    keys: Sequence[Any] | None,
    progress: Progress | None,
) -> None:
    session.check_clean("change a table")
    if not session.directory.exists(name):
        session.directory.make_directory(name).close()
    old = session.tables.get(name)
    if keys is None and old is not None and old.keys is not None and old.rows == spec.rows:
        keys = old.keys[:]
    with session.directory.directory(name) as table:
        info = generations.create(table, spec, session.manifest.seq + 1, blocks, progress)
        if keys is not None:
            with table.directory(info.generation) as generation:
                written = write_keys(generation, keys, spec.rows)
            info = dataclasses.replace(info, keys=written)
    session.directory.sync()
    info = dataclasses.replace(info, scalars=json_values(scalars))
    with session.unbroken():
        session.commit_tables({name: info})
        session.reopen(name, info)
    session.tidy()


def add_fields(
    session: Session, name: str, fields: Mapping[str, Field], progress: Progress | None = None
) -> None:
    """Add fields to every record of a table, with their first values."""
    table = session.tables[name]
    for field in fields:
        if field in table.fields:
            raise ExistsError(f"table {name!r} has a field {field!r}")
    every = {**table.fields, **fields}
    spec = dataclasses.replace(table.spec, fields=every, sparse=False, chunk_rows=None)
    blocks = _widened(table, spec)
    replace(session, name, spec, blocks, scalars=table.scalars, progress=progress)


def grow(
    session: Session,
    name: str,
    rows: int,
    init: Law | None = None,
    keys: Sequence[Any] | None = None,
) -> None:
    """Append rows to a table; new ones follow `init`, or are zero."""
    table = session.tables[name]
    if rows < table.rows:
        raise InvalidInputError(f"a table cannot shrink: {table.rows} rows to {rows}")
    if table.keys is not None and (keys is None or len(keys) != rows - table.rows):
        raise InvalidInputError(
            f"the rows of table {name!r} have keys: give keys= for the {rows - table.rows} new ones"
        )
    fields = {field: dataclasses.replace(item, init=None) for field, item in table.fields.items()}
    spec = dataclasses.replace(table.spec, rows=rows, fields=fields, init=init, chunk_rows=None)
    every = None if table.keys is None else [*table.keys[:].tolist(), *(keys or ())]
    replace(session, name, spec, _lengthened(table, spec), scalars=table.scalars, keys=every)


def set_keys(session: Session, name: str, keys: Sequence[Any]) -> None:
    """Give a table's rows external keys."""
    with session.alone("set keys"):
        session.check_clean("set keys")
        table = session.tables[name]
        generation = table.generation
        written = write_keys(generation.directory, keys, table.rows)
        session.commit_tables({name: dataclasses.replace(generation.info, keys=written)})
        table.forget_keys()
        session.tidy()


def _widened(table: Table, spec: TableSpec) -> Blocks:
    """Yield the records of a table with the fields that `spec` adds, in the new layout."""
    new = generations.initial_records(spec)
    fresh = np.empty((0, spec.layout.record_bytes), np.uint8)
    for block in table.records():
        while len(fresh) < len(block):
            fresh = np.concatenate([fresh, next(new)])
        records, fresh = fresh[: len(block)], fresh[len(block) :]
        for name in table.fields:
            lo, hi = table.spec.layout.span(name)
            begin, end = spec.layout.span(name)
            records[:, begin:end] = block[:, lo:hi]
        yield records


def _lengthened(table: Table, spec: TableSpec) -> Blocks:
    """Yield the records of a table, then the first records of the rows that `spec` adds."""
    yield from table.records()
    yield from generations.initial_records(spec, table.rows)
