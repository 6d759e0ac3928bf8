"""Rows of a table, as JSON and as a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore_cli.output import Grid

ELEMENTS_SHOWN = 8
_BLOCK = 65536


def rows_data(table: Table, field: str, ids: Sequence[int]) -> dict[str, Any]:
    """Return rows with their ids, keys and values. NaN and infinities, which JSON lacks, are text.

    Raises RowIndexError for ids outside the table.
    """
    values = table.by_row.read(ids, field, cache=False)
    keys = [None] * len(ids) if table.keys is None else map(_key, table.keys[np.asarray(ids)])
    return {
        "table": table.name,
        "field": field,
        "rows": [
            {
                "id": row,
                "key": key,
                "values": [x if math.isfinite(x) else str(x) for x in vector.tolist()],
            }
            for row, key, vector in zip(ids, keys, values, strict=True)
        ],
    }


def _key(key: Any) -> str | int:
    return key if isinstance(key, str) else int(key)


def rows_grid(data: dict[str, Any]) -> Grid:
    """Return one line a row, of its first elements, for the result of `rows_data`."""
    keyed = any(row["key"] is not None for row in data["rows"])
    dim = len(data["rows"][0]["values"])
    count = min(dim, ELEMENTS_SHOWN)
    more = [f"… {dim}"] if dim > count else []
    headers = ["ROW", *(["KEY"] if keyed else []), *map(str, range(count)), *more]
    rows = [
        [
            row["id"],
            *([row["key"]] if keyed else []),
            *(_number(x) for x in row["values"][:count]),
            *("…" for _ in more),
        ]
        for row in data["rows"]
    ]
    first = 2 if keyed else 1
    return Grid(headers, rows, right=frozenset({0, *range(first, first + count)}))


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def id_lines(table: Table, rows: npt.NDArray[np.int64]) -> Iterator[list[object]]:
    """Yield the cells of a line for each row: the table, the id, and the key if there is one."""
    for start in range(0, rows.size, _BLOCK):
        ids = rows[start : start + _BLOCK]
        if table.keys is None:
            yield from ([table.name, row] for row in ids.tolist())
        else:
            keys = table.keys[ids]
            yield from ([table.name, row, key] for row, key in zip(ids.tolist(), keys, strict=True))


def ids_and_keys(table: Table, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the ids of rows, with their keys if there are any."""
    found: dict[str, Any] = {"ids": rows.tolist()}
    if table.keys is not None:
        found["keys"] = np.asarray(table.keys[rows]).tolist()
    return found
