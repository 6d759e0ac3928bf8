"""Choose rows of a table by id and by key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from tierstore import KeyedTable, Table
from tierstore.budget import DEFAULT_MEMORY, Size
from tierstore.errors import InvalidInputError
from tierstore.importing import read_keys
from tierstore_cli.streams import as_file, is_stream

Ids = npt.NDArray[np.int64]
Keys = Ids | npt.NDArray[np.uint64] | Sequence[str]


def chosen_ids(
    table: Table, ids: Sequence[int], keys: Sequence[str] = (), file: str | None = None
) -> Ids:
    """Return the ids that are given, then those of keys, then those in a file.

    Raises UnknownNameError for a key that no row has.
    """
    parts = [np.array(ids, np.int64)]
    if keys:
        parts.append(table.lookup(typed_keys(table, keys)))
    if file is not None:
        parts.append(ids_in(file))
    return np.concatenate(parts)


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
    found = keys_in(file)
    if not isinstance(found, np.ndarray):
        raise InvalidInputError(f"{file} holds {found[0]!r:.100}, which is no id of a row")
    if found.dtype != np.int64:
        raise InvalidInputError(f"{file} holds {found.max()}, which is no id of a row")
    return found.astype(np.int64)


def ids_of_keys_in(table: Table, file: str) -> Ids:
    """Return the ids of the keys in a file, .txt, .npy or FILE.parquet:COLUMN."""
    return table.lookup(_keys_for(table, file))


def given_keys(table: Table, keys: Sequence[str], file: str | None) -> list[str] | list[int]:
    """Return the keys that are given and those in a file, each once."""
    found: list[Any] = list(typed_keys(table, keys))
    if file is not None:
        found += np.asarray(_keys_for(table, file), object).tolist()
    return list(dict.fromkeys(found))


def _keys_for(table: Table, file: str) -> Keys:
    """Return the keys in a file; numbers as texts, where those of the table are texts."""
    found = keys_in(file)
    if isinstance(found, np.ndarray) and table.keys is not None and table.keys.kind == "str":
        return [str(key) for key in found.tolist()]
    return found


def typed_keys(table: Table, keys: Sequence[str]) -> list[str] | list[int]:
    """Return keys as whole numbers where those of the table are."""
    if table.keys is None or table.keys.kind == "str":
        return list(keys)
    try:
        return list(map(int, keys))
    except ValueError:
        raise click.UsageError(f"keys of {table.name} are whole numbers, not {keys}") from None
