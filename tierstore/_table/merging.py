"""Rows of one table by key taken into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore._progress import Progress, report_nothing
from tierstore._table.table import Table
from tierstore.errors import InvalidInputError
from tierstore.spec import USES

Conflict: TypeAlias = Literal["newest", "mean", "keep"]
"""What becomes of a key that both tables have."""
Rows: TypeAlias = npt.NDArray[Any]

_BLOCK_ROWS = 1 << 16


def check(table: Table, other: Table, on_conflict: str) -> None:
    """Raise InvalidInputError if `other` cannot be merged into a table so."""
    if on_conflict not in ("newest", "mean", "keep"):
        raise InvalidInputError(f"on_conflict is 'newest', 'mean' or 'keep', not {on_conflict!r}")
    if other.spec.keys != table.spec.keys:
        raise InvalidInputError(
            f"table {other.name!r} has {other.spec.keys} keys, and {table.name!r} {table.spec.keys}"
        )
    if other.fields != table.fields:
        raise InvalidInputError(
            f"table {other.name!r} has {_described(other)}, and {table.name!r} "
            f"{_described(table)}: fields must be equal, those of an optimizer's state among them"
        )
    if other.by_row is table.by_row:
        raise InvalidInputError(f"table {table.name!r} cannot be merged with itself")


def _described(table: Table) -> str:
    """Return the fields of a table for people."""
    return ", ".join(f"{name} ({each.dim} {each.dtype})" for name, each in table.fields.items())


def merge(
    table: Table,
    other: Table,
    others: Any,
    on_conflict: str,
    later: int,
    progress: Progress | None = None,
    is_wanted: Callable[[Rows], npt.NDArray[np.bool_]] | None = None,
) -> int:
    """Take the rows of another table, checked, as `KeyedTable.merge` does; return the new keys.

    `others` are the `SettledKeys` of the other table; `later` is by how many versions the history
    of the table is the longer one, by which uses are dated. `is_wanted` tells which keys to take;
    None takes all.
    """
    before = table.rows
    joined = list(other.fields) if on_conflict == "mean" else list({USES} & {*other.fields})
    for start in range(0, len(others), _BLOCK_ROWS):
        rows = np.arange(start, min(start + _BLOCK_ROWS, len(others)))
        keys = others[rows]
        if is_wanted is not None:
            wanted = is_wanted(keys)
            rows, keys = rows[wanted], keys[wanted]
        values = other.by_row.read(rows, list(other.fields), cache=False)
        others.check_settled()
        if USES in values:
            values[USES][:, 1] += later
        known = table.contains(keys)
        if on_conflict == "keep":
            keys = keys[~known]
            values = {name: each[~known] for name, each in values.items()}
        elif joined and known.any():
            own = table.read(keys[known], joined)
            for name in joined:
                values[name][known] = _mean(name, values[name][known], own[name])
        table.write(keys, values)
        if progress is not None:
            progress(min(start + _BLOCK_ROWS, len(others)), len(others))
    if not len(others):
        report_nothing(progress)
    return table.rows - before


def _mean(name: str, one: Rows, other: Rows) -> Any:
    """Return the mean of the rows of a field, of uses the larger ones."""
    if name == USES:
        return np.maximum(one, other)
    if one.dtype.kind in "iu":  # whose sum would wrap
        return np.rint((one + other.astype(np.float32)) / 2)
    return ((one + other.astype(np.float64)) / 2).astype(one.dtype)  # which may not hold the sum
