"""Changing what a table is made of: another spec, more fields, more rows, other keys.

The records are streamed into a new generation beside the old one, which lives on while a kept
version names it; one commit makes the new one the table. There must be no fold under way: it writes
to the old one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._disk import generation as generations
from tierstore._disk.base import Progress
from tierstore._disk.keys import remove_keys, write_keys
from tierstore._store.opened import Opened
from tierstore._strictjson import json_values
from tierstore._table.table import Table
from tierstore.errors import ExistsError, InvalidInputError, InvalidTypeError
from tierstore.initializers import Initializer
from tierstore.spec import Field, TableSpec

__all__ = ["add_fields", "grow", "replace", "set_keys"]

Blocks = Iterator[npt.NDArray[np.uint8]]


def replace(
    store: Opened,
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
    if not isinstance(spec, TableSpec):
        raise InvalidTypeError(f"table {name!r} needs a tierstore.TableSpec, not {spec!r}")
    store.check_clean("change a table")
    store.check_fit(name, spec)
    if not store.directory.exists(name):
        store.directory.make_directory(name).close()
    old = store.tables.get(name)
    if keys is None and old is not None and old.keys is not None and old.rows == spec.rows:
        keys = old.keys[:]
    scalars = json_values(scalars)
    with store.directory.directory(name) as table:
        created = generations.create(table, spec, store.ledger.seq + 1, blocks, progress)
        with store.unless_published(
            lambda: generations.remove_generation(table, created.generation)
        ):
            written = None
            if keys is not None:
                with table.directory(created.generation) as generation:
                    written = write_keys(generation, keys, spec.rows)
            info = dataclasses.replace(created, keys=written, scalars=scalars)
            store.directory.sync()
            with store.unbroken():
                store.commit_tables({name: info})
                store.reopen(name, info)


def add_fields(
    store: Opened, name: str, fields: Mapping[str, Field], progress: Progress | None = None
) -> None:
    """Add fields to every record of a table, with their first values."""
    table = store.tables[name]
    for field in fields:
        if field in table.fields:
            raise ExistsError(f"table {name!r} has a field {field!r}")
    every = {**table.fields, **fields}
    spec = dataclasses.replace(table.spec, fields=every, sparse=False, chunk_rows=None)
    blocks = _widened(table, spec)
    replace(store, name, spec, blocks, scalars=table.scalars, progress=progress)


def grow(
    store: Opened,
    name: str,
    rows: int,
    init: Initializer | None = None,
    keys: Sequence[Any] | None = None,
) -> None:
    """Append rows to a table; new ones follow `init`, or are zero."""
    table = store.tables[name]
    if rows < table.rows:
        raise InvalidInputError(f"a table cannot shrink: {table.rows} rows to {rows}")
    if table.keys is not None and (keys is None or len(keys) != rows - table.rows):
        raise InvalidInputError(
            f"the rows of table {name!r} have keys: give keys= for the {rows - table.rows} new ones"
        )
    fields = {field: dataclasses.replace(item, init=None) for field, item in table.fields.items()}
    spec = dataclasses.replace(table.spec, rows=rows, fields=fields, init=init, chunk_rows=None)
    every = None if table.keys is None else [*table.keys[:].tolist(), *(keys or ())]
    replace(store, name, spec, _lengthened(table, spec), scalars=table.scalars, keys=every)


def set_keys(store: Opened, name: str, keys: Sequence[Any]) -> None:
    """Give a table's rows external keys."""
    store.check_clean("set keys")
    table = store.tables[name]
    generation = table._generation
    with generation.directory.use() as directory:
        written = write_keys(directory, keys, table.rows)
        with store.unless_published(lambda: remove_keys(directory, written)):
            store.commit_tables({name: dataclasses.replace(generation.info, keys=written)})
    table._forget_keys()


def _widened(table: Table, spec: TableSpec) -> Blocks:
    """Yield the records of a table with the fields that `spec` adds, in the new layout."""
    new = generations.initial_records(spec)
    fresh = np.empty((0, spec.layout.record_bytes), np.uint8)
    for block in table._records():
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
    yield from table._records()
    yield from generations.initial_records(spec, table.rows)
