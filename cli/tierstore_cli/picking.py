"""Choose rows of a table by id and by key."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from tierstore import KeyedTable, Table
from tierstore.budget import DEFAULT_MEMORY, Size
from tierstore.errors import InvalidInputError
from tierstore.importing import read_keys
from tierstore_cli.params import IDS, IDS_FROM, KEY, KEYS_FROM
from tierstore_cli.pipes import as_file, is_stream

Ids = npt.NDArray[np.int64]
Keys = Ids | npt.NDArray[np.uint64] | Sequence[str]


def picking_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose rows; `picked_ids` takes their values."""
    for option in (KEYS_FROM, IDS_FROM, KEY, IDS):
        function = option(function)
    return function


def picked_ids(
    table: Table,
    by_id: Sequence[int] = (),
    by_key: Sequence[str] = (),
    ids_from: str | None = None,
    keys_from: str | None = None,
) -> Ids:
    """Return the ids that are named, then those of keys, of a file of ids and of a file of keys.

    Raises UnknownNameError for a key that no row has.
    """
    parts = [np.array(by_id, np.int64)]
    if by_key:
        parts.append(table.lookup(typed_keys(table, by_key)))
    if ids_from is not None:
        parts.append(ids_in(ids_from))
    if keys_from is not None:
        parts.append(table.lookup(_keys_for(table, keys_from)))
    return np.concatenate(parts)


def one_row(by_id: Sequence[int], by_key: Sequence[str]) -> None:
    """Refuse other than one row by id or by key."""
    if len(by_id) + len(by_key) != 1:
        raise click.UsageError("which row? Give --id or --key, once")


def add_key(table: Table, key: str, field: str) -> None:
    """Give a key of a table by key its first row if it has none; commit it later."""
    if isinstance(table, KeyedTable):
        keys = typed_keys(table, [key])
        if not table.contains(keys).all():
            table.write(keys, table.read(keys, field), field)


def keys_in(file: str, memory: Size = DEFAULT_MEMORY) -> Keys:
    """Return the keys in a file, .txt, .npy or FILE.parquet:COLUMN; of a stream, one a line."""
    with as_file(file, "txt" if is_stream(file) else None) as place:
        return read_keys(place, memory=memory)


def ids_in(file: str) -> Ids:
    """Return the ids in a file, .txt, .npy or FILE.parquet:COLUMN; raises InvalidInputError."""
    ids = keys_in(file)
    if not isinstance(ids, np.ndarray):
        raise InvalidInputError(f"{file} holds {ids[0]!r:.100}, which is no id of a row")
    if ids.dtype != np.int64:
        raise InvalidInputError(f"{file} holds {ids.max()}, which is no id of a row")
    return ids.astype(np.int64)


def distinct_keys(table: Table, keys: Sequence[str], file: str | None) -> list[str] | list[int]:
    """Return the keys that are named and those in a file, each once."""
    every: list[Any] = list(typed_keys(table, keys))
    if file is not None:
        every += np.asarray(_keys_for(table, file), object).tolist()
    return list(dict.fromkeys(every))


def _keys_for(table: Table, file: str) -> Keys:
    """Return the keys in a file; numbers as texts, where those of the table are texts."""
    keys = keys_in(file)
    if isinstance(keys, np.ndarray) and table.keys is not None and table.keys.kind == "str":
        return [str(key) for key in keys.tolist()]
    if not isinstance(keys, np.ndarray) and table.keys is not None and table.keys.kind != "str":
        return np.array(typed_keys(table, keys), np.int64)  # which names those that are no numbers
    return keys


def typed_keys(table: Table, keys: Sequence[str]) -> list[str] | list[int]:
    """Return keys as whole numbers where those of the table are."""
    if table.keys is None or table.keys.kind == "str":
        return list(keys)
    wrong = [key for key in keys if not re.fullmatch(r"[+-]?\d+", key, re.ASCII)]
    if wrong:
        more = f" and {len(wrong) - 3:,} more" if len(wrong) > 3 else ""
        words = ", ".join(map(repr, wrong[:3]))
        raise click.UsageError(f"keys of {table.name} are whole numbers, not {words}{more}")
    return list(map(int, keys))
