"""Rows of a table, as JSON and as a grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import Store, Table
from tierstore_cli.output import Grid, Output

ELEMENTS_SHOWN = 8
_SHOWN_TOGETHER = 1024
_NUMBER_WIDTH = len("-1.23457e-05")
_KEY_WIDTH = 20
_BLOCK = 65536


def rows_data(table: Table, fields: Sequence[str], ids: Sequence[int]) -> dict[str, Any]:
    """Return rows with their ids, keys and values, read in blocks as they are wanted.

    Values of one field are a list, of several a list by field. Raises RowIndexError for ids outside
    the table, and what reading the first block raises.
    """
    for row in (min(ids), max(ids)) if len(ids) else ():
        table.by_row.read([row], fields[0], cache=False)
    rows = _rows(table, fields, ids)
    first = list(islice(rows, _SHOWN_TOGETHER))
    named = {"field": fields[0]} if len(fields) == 1 else {"fields": list(fields)}
    return {"table": table.name, **named, "rows": chain(first, rows)}


def _rows(table: Table, fields: Sequence[str], ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(ids), _SHOWN_TOGETHER):
        some = ids[start : start + _SHOWN_TOGETHER]
        read = table.by_row.read(some, list(fields), cache=False)
        columns = [read[field].tolist() for field in fields]
        for row, key, *vectors in zip(some, keys_of(table, some), *columns, strict=True):
            values = vectors[0] if len(fields) == 1 else dict(zip(fields, vectors, strict=True))
            yield {"id": row, "key": key, "values": values}


def keys_of(table: Table, ids: Any) -> list[Any]:
    """Return the keys of rows, each None if the table has none."""
    every = table.keys
    return [None] * len(ids) if every is None else np.asarray(every[np.asarray(ids)]).tolist()


def rows_grids(table: Table, field: str, ids: range) -> Iterator[Grid]:
    """Yield one line a row, of its first elements, in blocks that are read as they are wanted.

    The first block comes also without rows, for its headers.
    """
    wide = [len(str(ids.stop - 1)), *([_KEY_WIDTH] if table.keys is not None else [])]
    for start in range(0, max(1, len(ids)), _SHOWN_TOGETHER):
        grid = _grid(table, field, ids[start : start + _SHOWN_TOGETHER])
        if len(ids) <= _SHOWN_TOGETHER:
            yield grid
        else:
            numbers = [_NUMBER_WIDTH] * (len(grid.headers) - len(wide))
            yield dataclasses.replace(grid, least=[*wide, *numbers])


def _grid(table: Table, field: str, ids: range) -> Grid:
    values = table.by_row.read(ids, field, cache=False)
    dim = values.shape[1]
    count = min(dim, ELEMENTS_SHOWN)
    more = ["…"] if dim > count else []
    keys = [] if table.keys is None else [keys_of(table, np.asarray(ids, np.int64))]
    head = ["ROW", "KEY"] if keys else ["ROW"]
    lines = [
        [*named, *(f"{x:.6g}" for x in vector), *more]
        for *named, vector in zip(ids, *keys, values[:, :count].tolist(), strict=True)
    ]
    headers = [*head, *map(str, range(count)), *(f"… {dim}" for _ in more)]
    return Grid(headers, lines, right=frozenset({0, *range(len(head), len(head) + count)}))


def shown_lines(
    out: Output,
    data: dict[str, Any],
    store: Store,
    changed: Mapping[str, npt.NDArray[np.int64]] | None,
    gone: Removed | None,
    head: Sequence[object] = (),
) -> bool:
    """Add ids of rows that changed, and keys that are gone, to an object that is to be printed.

    Without --json, print a line for each instead, after `head`; whether lines were printed.
    """
    if out.as_json:
        if gone is not None:
            data["removed"] = by_table(gone)
        if changed is not None:
            data["rows"] = {name: ids_and_keys(store[name], each) for name, each in changed.items()}
        return False
    for name, keys in gone or ():
        for key in keys:
            out.cells([*head, name, key])
    for name, rows in (changed or {}).items():
        for cells in id_lines(store[name], rows):
            out.cells([*head, *cells])
    return gone is not None or changed is not None


def id_lines(table: Table, rows: npt.NDArray[np.int64]) -> Iterator[list[object]]:
    """Yield the cells of a line for each row: the table, the id, and the key if there is one."""
    for start in range(0, rows.size, _BLOCK):
        ids = rows[start : start + _BLOCK]
        if table.keys is None:
            yield from ([table.name, row] for row in ids.tolist())
        else:
            keys = table.keys[ids]
            yield from ([table.name, row, key] for row, key in zip(ids.tolist(), keys, strict=True))


def keys_by_table(store: Store) -> dict[str, Any]:
    """Return the keys of the tables that have some."""
    return {name: table.keys for name, table in store.items() if table.keys is not None}


Removed = Iterator[tuple[str, list[str | int]]]


def removed_keys(old: Mapping[str, Any], store: Store) -> Removed:
    """Yield keys by table that a store no longer has, in blocks; also of tables that it lacks."""
    for name, keys in old.items():
        table = store.get(name)
        is_text = len(keys) > 0 and isinstance(keys[0], str)
        for start in range(0, len(keys), _BLOCK):
            some = keys[start : start + _BLOCK]
            gone: Any = np.ones(len(some), bool)
            if (
                table is not None
                and table.keys is not None
                and (table.keys.kind == "str") == is_text
            ):
                gone = table.lookup(some, missing=-1) < 0
            if gone.any():
                yield name, np.asarray(some)[gone].tolist()


def by_table(removed: Removed) -> dict[str, list[str | int]]:
    """Return all of them."""
    names: dict[str, list[str | int]] = {}
    for name, keys in removed:
        names.setdefault(name, []).extend(keys)
    return names


def ids_and_keys(table: Table, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the ids of rows, with their keys, or None where the table has none."""
    return {"ids": rows.tolist(), "keys": None if table.keys is None else keys_of(table, rows)}
