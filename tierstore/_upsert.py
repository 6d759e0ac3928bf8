"""Writes the rows of a file over those with the same keys, and appends the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore._disk.generation import initial_records
from tierstore._dtypes import ELEMENT_TYPES, Converter
from tierstore._formats.base import SelectedSource, Source, block_rows_for
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._keys.given import joined
from tierstore._keys.strings import Strings
from tierstore._progress import Progress, report_nothing
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import records_in
from tierstore.budget import Allowance, Size
from tierstore.errors import (
    ClosedError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    counted,
)
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:
    from tierstore._store.store import Store
    from tierstore._table.table import Table

_KEYS = 1 << 16

Records = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class Incoming:
    """The rows of a file for some fields of a table, in order.

    Attributes:
        sources: where the rows of each field are; all have as many.
        converters: of each field, from the type in the file to that in the table.
        rows: how many there are.
        path: the file.
    """

    def __init__(self, sources: Mapping[str, Source], fields: Mapping[str, Field]) -> None:
        """Read `sources` for `fields` of the same names; raises FormatError for other rows."""
        first = next(iter(sources.values()))
        for name, each in sources.items():
            if each.rows != first.rows:
                raise FormatError(
                    f"{each.path}: {counted(each.rows, 'row')} of {name!r}, but "
                    f"{first.rows:,} of {next(iter(sources))!r}"
                )
        self.sources = sources
        self.converters = {
            name: Converter(ELEMENT_TYPES[each.dtype], fields[name].element)
            for name, each in sources.items()
        }
        self.rows, self.path = first.rows, first.path

    def check_dims(self, table: Table) -> None:
        """Raise InvalidInputError for rows of other lengths than the fields have."""
        for name, each in self.sources.items():
            if each.dim != (dim := table.fields[name].dim):
                raise InvalidInputError(
                    f"{self.path} holds rows of {each.dim}, and field {name!r} of table "
                    f"{table.name!r} has {dim}"
                )

    def only(self, chosen: npt.NDArray[np.bool_]) -> Incoming:
        """Return some of the rows."""
        part = copy(self)
        part.sources = {n: SelectedSource(each, chosen) for n, each in self.sources.items()}
        part.rows = int(chosen.sum())
        return part

    def taking(self) -> Callable[[int], dict[str, npt.NDArray[Any]]]:
        """Return what takes the next rows, so many, of each field as the table stores them."""
        blocks = {name: each.blocks() for name, each in self.sources.items()}
        rest = {name: next(each, np.empty(0)) for name, each in blocks.items()}

        def column(name: str, count: int) -> npt.NDArray[Any]:
            parts = []
            while count and len(rest[name]):
                parts.append(self.converters[name](rest[name][:count]))
                count, rest[name] = count - len(parts[-1]), rest[name][len(parts[-1]) :]
                if not len(rest[name]):  # the end is where a source says that there are more
                    rest[name] = next(blocks[name], rest[name])
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return lambda count: {name: column(name, count) for name in blocks}


def upsert_rows(
    store: Store,
    table: Table,
    incoming: Incoming,
    keys: Keys | None,
    *,
    memory: Size,
    progress: Progress | None,
) -> int:
    """Write incoming rows over those of their keys, and commit; return how many are new.

    A table by key gives new keys rows as far as it has room. Another table is rewritten with them
    appended. The keys of a table without keys are row ids. `keys` are distinct. No rows change
    nothing, and are no version.
    """
    if store.uncommitted_rows():
        raise InvalidInputError("the store has uncommitted rows; commit or roll back first")
    incoming.check_dims(table)
    if not incoming.rows:
        report_nothing(progress)
        return 0
    if keys is None:
        raise InvalidInputError(
            f"{incoming.path} holds no keys, by which rows are found: name their column "
            "(--key-column, key_column=), or give them (--keys, keys=)"
        )
    if isinstance(table, KeyedTable):
        before = table.rows
        _write(store, table, incoming, _fitting(table, keys), progress)
        return table.rows - before
    ids = _ids_of(table, keys)
    new = ids < 0
    if new.any():
        _append(store, table, incoming, ids, keys, memory, progress)
    else:
        _write(store, table, incoming, ids, progress)
    return int(new.sum())


def _fitting(table: Table, keys: Keys) -> Keys:
    """Return keys as strings where those of the table are."""
    if table.keys is None or table.keys.kind != "str" or not isinstance(keys, np.ndarray):
        return keys
    return Strings(map(str, keys.tolist()))


def _ids_of(table: Table, keys: Keys) -> Ids:
    """Return the row of each key, -1 for those that no row has."""
    if table.keys is not None:
        if table.keys.kind != "str" and not isinstance(keys, np.ndarray):
            raise InvalidTypeError(
                f"table {table.name!r} has keys {table.keys.kind}, and not strings such as "
                f"{keys[0]!r}"
            )
        fitting = _fitting(table, keys)
        parts = [
            table.lookup(fitting[start : start + _KEYS], missing=-1)
            for start in range(0, len(keys), _KEYS)
        ]
        return np.concatenate(parts)
    if not isinstance(keys, np.ndarray):
        raise InvalidInputError(
            f"table {table.name!r} has no keys, so that rows go by their ids, not by {keys[0]!r}; "
            "give it keys first (Store.set_keys, tierstore keys set)"
        )
    outside = (keys < 0) | (keys >= table.rows)
    if outside.any():
        raise RowIndexError(
            f"row {keys[outside][0]} is outside table {table.name!r}, which has "
            f"{counted(table.rows, 'row')} and no keys; grow it first (Store.grow, tierstore grow)"
        )
    return keys.astype(np.int64, copy=False)


def _write(
    store: Store, table: Table, incoming: Incoming, at: Keys, progress: Progress | None
) -> None:
    """Write blocks of rows at their ids or keys and commit; roll back if a block fails."""
    take, step = incoming.taking(), _step(table.spec)
    try:
        for start in range(0, incoming.rows, step):
            stop = min(start + step, incoming.rows)
            rows = {
                name: table.fields[name].element.decode(values)
                for name, values in take(stop - start).items()
            }
            table.write(at[start:stop], rows)
            if progress is not None:
                progress(stop, incoming.rows)
    except BaseException:
        with contextlib.suppress(ClosedError):  # by the error, which dropped the rows
            store.rollback()
        raise
    store.commit()


def _append(
    store: Store,
    table: Table,
    incoming: Incoming,
    ids: Ids,
    keys: Keys,
    memory: Size,
    progress: Progress | None,
) -> None:
    """Rewrite the table with the replaced rows, which are held in memory, and the new ones."""
    new = ids < 0
    nbytes = int((~new).sum()) * sum(table.fields[name].nbytes for name in incoming.sources)
    Allowance(incoming.path, memory).check(nbytes, "the rows to replace")
    spec = dataclasses.replace(
        table.spec, rows=table.rows + int(new.sum()), chunk_rows=None, sparse=False
    )

    def records() -> Iterator[Records]:
        known = incoming.only(~new)
        yield from _replaced(table, ids[~new], known.taking()(known.rows) if known.rows else {})
        yield from merged(initial_records(spec, table.rows), spec, incoming.only(new))

    every = _joined(table, KeyColumn(_fitting(table, keys), len(keys)), np.flatnonzero(new))
    store.replace_table(
        table.name, spec, blocks=records(), keys=every, changed=len(keys), progress=progress
    )


def _replaced(table: Table, ids: Ids, values: Mapping[str, npt.NDArray[Any]]) -> Iterator[Records]:
    """Yield the table's records, those of `ids` with the values of some fields."""
    order = np.argsort(ids)
    ids, first = ids[order], 0
    for records in records_in(table):
        low, high = np.searchsorted(ids, [first, first + len(records)])
        for name, each in values.items():
            at = ids[low:high] - first
            table.spec.layout.view(records, name)[at] = each[order[low:high]]
        first += len(records)
        yield records


def merged(blocks: Iterator[Records], spec: TableSpec, incoming: Incoming) -> Iterator[Records]:
    """Yield records of a table with the incoming fields in place of theirs, row for row."""
    take = incoming.taking()
    for records in blocks:
        for name, values in take(len(records)).items():
            spec.layout.view(records, name)[:] = values
        yield records


def new_records(spec: TableSpec, incoming: Incoming) -> Iterator[Records]:
    """Yield records of the incoming fields alone."""
    step = _step(spec)
    counts = (min(step, incoming.rows - start) for start in range(0, incoming.rows, step))
    empty = (np.zeros((count, spec.layout.record_bytes), np.uint8) for count in counts)
    return merged(empty, spec, incoming)


def _step(spec: TableSpec) -> int:
    """Return the rows of a block of records."""
    return block_rows_for(spec.layout.record_bytes)


def _joined(table: Table, keys: KeyColumn, chosen: npt.NDArray[np.intp]) -> Any:
    """Return the keys of a table, then the chosen ones of others."""
    own: Any = table.keys
    if own.kind == "str":
        every = Strings(own)
        for start in range(0, len(keys), _KEYS):
            block = keys.string_block(start, min(start + _KEYS, len(keys)))
            low, high = np.searchsorted(chosen, [start, start + _KEYS])
            for at in chosen[low:high].tolist():
                every.append(block[at - start])
        return every
    more = keys.integer_block(0, len(keys))[chosen]
    return joined(own[:], more)
