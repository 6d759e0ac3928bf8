"""Which rows differ between two versions, found from the deltas that only one of them has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from tierstore._rowcopy import unique
from tierstore._table.table import Table

__all__ = ["candidates", "changed_rows", "same_fields"]

Rows = npt.NDArray[np.int64]

_BLOCK_BYTES = 4 << 20


def changed_rows(old: Mapping[str, Table], new: Mapping[str, Table]) -> dict[str, Rows]:
    """Return the ascending ids of the rows of each new table that differ from the old one.

    Tables without such rows are left out. Every row of a table with other fields has changed.
    """
    found = {name: _changed(old.get(name), table) for name, table in new.items()}
    return {name: rows for name, rows in found.items() if rows.size}


def same_fields(old: Table, new: Table) -> bool:
    """Whether the records of two tables consist of the same fields."""
    return [(name, item.dim, item.form) for name, item in old.fields.items()] == [
        (name, item.dim, item.form) for name, item in new.fields.items()
    ]


def _changed(old: Table | None, new: Table) -> Rows:
    if old is None or not same_fields(old, new):
        return np.arange(new.rows, dtype=np.int64)
    parts = [np.empty(0, np.int64)]
    for rows in candidates(old, new):
        differ = (old._read_records(rows) != new._read_records(rows)).any(axis=1)
        parts.append(rows[differ])
    return np.concatenate([*parts, np.arange(old.rows, new.rows, dtype=np.int64)])


def candidates(old: Table, new: Table) -> Iterator[Rows]:
    """Yield, in blocks, the rows of both tables that may differ, ascending.

    Two versions with the same base have the same image of a row unless a delta that only one of
    them has contains the row.
    """
    step = max(1, _BLOCK_BYTES // new.spec.layout.record_bytes)
    if old._generation.bases != new._generation.bases:
        rows = min(old.rows, new.rows)
        for start in range(0, rows, step):
            yield np.arange(start, min(start + step, rows), dtype=np.int64)
        return
    before, after = old._generation.delta_rows(), new._generation.delta_rows()
    ids = [{**before, **after}[name] for name in before.keys() ^ after.keys()]
    every = unique(np.concatenate([np.empty(0, np.int64), *ids]))
    every = every[every < min(old.rows, new.rows)]  # a table by key has more rows by now
    for start in range(0, every.size, step):
        yield every[start : start + step]
