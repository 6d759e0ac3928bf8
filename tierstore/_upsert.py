"""Writes the rows of a file over those with the same keys, and appends the others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierstore._disk.generation import initial_records
from tierstore._dtypes import Converter
from tierstore._formats.base import SelectedSource, Source
from tierstore._formats.keys import KeyColumn, Keys
from tierstore._keys.strings import Strings
from tierstore._progress import Progress, report_nothing
from tierstore._table.keyed import KeyedTable
from tierstore._table.table import records_in
from tierstore.budget import Allowance, Size
from tierstore.errors import (
    ClosedError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    counted,
)

if TYPE_CHECKING:
    from tierstore._store.store import Store
    from tierstore._table.table import Table

_KEYS = 1 << 16

Records = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


def upsert_rows(
    store: Store,
    table: Table,
    field: str,
    source: Source,
    keys: Keys | None,
    converter: Converter,
    *,
    memory: Size,
    progress: Progress | None,
) -> int:
    """Write the rows of `source` over those of their keys, and commit; return how many are new.

    A table by key gives new keys rows as far as it has room. Another table is rewritten with them
    appended. The keys of a table without keys are row ids. `keys` are distinct. No rows change
    nothing, and are no version.
    """
    if store.uncommitted_rows():
        raise InvalidInputError("the store has uncommitted rows; commit or roll back first")
    if source.dim != (dim := table.fields[field].dim):
        raise InvalidInputError(
            f"{source.path} holds rows of {source.dim}, and field {field!r} of table "
            f"{table.name!r} has {dim}"
        )
    if not source.rows:
        report_nothing(progress)
        return 0
    if keys is None:
        raise InvalidInputError(
            f"{source.path} holds no keys, by which rows are found: give them (--keys, keys=)"
        )
    if isinstance(table, KeyedTable):
        before = table.rows
        _write(store, table, field, source, _fitting(table, keys), converter, progress)
        return table.rows - before
    ids = _ids_of(table, keys)
    new = ids < 0
    if new.any():
        _append(store, table, field, source, ids, keys, converter, memory, progress)
    else:
        _write(store, table, field, source, ids, converter, progress)
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
    store: Store,
    table: Table,
    field: str,
    source: Source,
    at: Keys,
    converter: Converter,
    progress: Progress | None,
) -> None:
    """Write blocks of rows at their ids or keys and commit; roll back if a block fails."""
    element, done = table.fields[field].element, 0
    try:
        for block in source.blocks():
            which = at[done : done + len(block)]
            table.write(which, element.decode(converter(block)), field)
            done += len(block)
            if progress is not None:
                progress(done, source.rows)
    except BaseException:
        with contextlib.suppress(ClosedError):  # by the error, which dropped the rows
            store.rollback()
        raise
    store.commit()


def _append(
    store: Store,
    table: Table,
    field: str,
    source: Source,
    ids: Ids,
    keys: Keys,
    converter: Converter,
    memory: Size,
    progress: Progress | None,
) -> None:
    """Rewrite the table with the replaced rows, which are held in memory, and the new ones."""
    new = ids < 0
    nbytes = int((~new).sum()) * table.fields[field].nbytes
    Allowance(source.path, memory).check(nbytes, "the rows to replace")
    spec = dataclasses.replace(
        table.spec, rows=table.rows + int(new.sum()), chunk_rows=None, sparse=False
    )

    def records() -> Iterator[Records]:
        known = SelectedSource(source, ~new).blocks()
        values = [converter(block) for block in known]
        yield from _replaced(table, field, ids[~new], values)
        more = initial_records(spec, table.rows)
        yield from merged(more, table, field, SelectedSource(source, new), converter)

    every = _joined(table, KeyColumn(_fitting(table, keys), len(keys)), np.flatnonzero(new))
    store.replace_table(
        table.name, spec, blocks=records(), keys=every, changed=len(keys), progress=progress
    )


def _replaced(
    table: Table, field: str, ids: Ids, blocks: list[npt.NDArray[Any]]
) -> Iterator[Records]:
    """Yield the table's records, those of `ids` with the values that `blocks` hold."""
    order = np.argsort(ids)
    ids, first = ids[order], 0
    values = np.concatenate(blocks) if blocks else None
    for records in records_in(table):
        low, high = np.searchsorted(ids, [first, first + len(records)])
        if values is not None:
            at = ids[low:high] - first
            table.spec.layout.view(records, field)[at] = values[order[low:high]]
        first += len(records)
        yield records


def merged(
    blocks: Iterator[Records], table: Table, field: str, source: Source, converter: Converter
) -> Iterator[Records]:
    """Yield records of a table with one field replaced from the source, row for row."""
    rows = source.blocks()
    rest = next(rows)
    for records in blocks:
        values = table.spec.layout.view(records, field)
        filled = 0
        while filled < len(values):
            part = rest[: len(values) - filled]
            values[filled : filled + len(part)] = converter(part)
            filled, rest = filled + len(part), rest[len(part) :]
            if not len(rest):
                rest = next(rows, rest)
        yield records


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
    if own.kind != more.dtype.name:  # NumPy would convert both to floats
        return [*own[:].tolist(), *more.tolist()]
    return np.concatenate([own[:], more])
