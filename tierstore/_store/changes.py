"""Which rows differ between two versions, found from the deltas that only one of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._disk.partitioned import PartitionedGeneration
from tierstore._table.table import Table

__all__ = ["changed_rows", "same_fields"]

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
    return [(name, item.dim, item.dtype) for name, item in old.fields.items()] == [
        (name, item.dim, item.dtype) for name, item in new.fields.items()
    ]


def _changed(old: Table | None, new: Table) -> Rows:
    if old is None or not same_fields(old, new):
        return np.arange(new.rows, dtype=np.int64)
    parts = [np.empty(0, np.int64)]
    for rows in _candidates(old, new):
        differ = (old._read_records(rows) != new._read_records(rows)).any(axis=1)
        parts.append(rows[differ])
    return np.concatenate([*parts, np.arange(old.rows, new.rows, dtype=np.int64)])


def _candidates(old: Table, new: Table) -> Iterator[Rows]:
    """Yield, in blocks, the rows of both tables that may differ, ascending.

    Two versions with the same base have the same image of a row unless a delta that only one of
    them has contains the row.
    """
    step = max(1, _BLOCK_BYTES // new.spec.layout.record_bytes)
    (bases, before), (others, after) = _written(old), _written(new)
    if bases != others:
        rows = min(old.rows, new.rows)
        for start in range(0, rows, step):
            yield np.arange(start, min(start + step, rows), dtype=np.int64)
        return
    ids = [(before.get(name) or after[name])() for name in before.keys() ^ after.keys()]
    every = np.unique(np.concatenate([np.empty(0, np.int64), *ids]))
    for start in range(0, every.size, step):
        yield every[start : start + step]


def _written(table: Table) -> tuple[list[str], dict[tuple[int, str], Callable[[], Rows]]]:
    """Return the bases of a table, and by delta a function that returns the rows it contains.

    There is one base, or one for each partition.
    """
    generation: Any = table._generation
    if not isinstance(generation, PartitionedGeneration):
        deltas = table._disk.deltas
        return [generation.info.generation], {
            (0, delta.info.name): partial(np.asarray, delta.ids) for delta in deltas
        }
    shard = generation.tier.shard
    return [part.info.generation for part in generation.parts], {
        (number, delta.info.name): partial(shard.rows_in, number, delta.ids)
        for number, part in enumerate(generation.parts)
        for delta in part.tier.deltas
    }
