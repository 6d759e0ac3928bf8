"""Print rows by id or key."""

from __future__ import annotations

from collections.abc import Iterator

import click
import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore.errors import InvalidInputError
from tierstore.importing import read_keys
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_field, choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import FIELD, READ_STORE, TABLE, VERSION, Place
from tierstore_cli.rows import rows_data

BLOCK = 1024
"""Rows that are read and printed at a time."""


@click.command(cls=Command)
@READ_STORE
@click.argument("ids", metavar="[ID]...", nargs=-1, type=click.IntRange(min=0))
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A row by its key; repeatable.")
@click.option("--ids", "file", metavar="FILE", help="Ids in a file: .txt, .npy, FILE.parquet:COL.")
@TABLE
@FIELD
@VERSION
def get(
    out: Output,
    store: Place,
    ids: tuple[int, ...],
    keys: tuple[str, ...],
    file: str | None,
    table: str | None,
    field: str | None,
    version: int | str | None,
) -> None:
    """Print rows of a table of STORE: the id, the key if there is one, and all elements.

    A row is a line, its cells divided by tabs, every digit that tells its numbers apart. Lines come
    as rows are read. STORE may be written meanwhile; one version is read.

    \b
    Examples:
      tierstore get emb.tier 0 17 4711
      tierstore get emb.tier --table word --key the --key "of"
      tierstore get emb.tier --table item --ids ids.txt --field exp_avg | cut -f 1,2
    """
    with open_store(store, version=version) as opened:
        chosen = choose_table(opened, table)
        field = choose_field(chosen, field)
        rows = _rows(chosen, ids, keys, file)
        if out.as_json:
            out.show(rows_data(chosen, field, rows.tolist()))
            return
        for cells in _cells(chosen, field, rows):
            out.cells(cells)


def _rows(
    table: Table, ids: tuple[int, ...], keys: tuple[str, ...], file: str | None
) -> npt.NDArray[np.int64]:
    """Return the ids in the order ids, keys, file; raises InvalidInputError where they are none."""
    parts = [np.array(ids, np.int64)]
    if keys:
        parts.append(table.lookup(_typed(table, keys)))
    if file is not None:
        found = read_keys(file)
        if not isinstance(found, np.ndarray):
            raise InvalidInputError(f"{file} holds {found[0]!r:.100}, which is no id of a row")
        parts.append(found)
    rows = np.concatenate(parts)
    if not len(rows):
        raise click.UsageError("which rows? Give ids, --key or --ids")
    return rows


def _typed(table: Table, keys: tuple[str, ...]) -> list[str] | list[int]:
    """Return keys as whole numbers where those of the table are."""
    if table.keys is None or table.keys.kind in ("str", "text"):
        return list(keys)
    try:
        return list(map(int, keys))
    except ValueError:
        raise click.UsageError(f"keys of {table.name} are whole numbers, not {keys}") from None


def _cells(table: Table, field: str, rows: npt.NDArray[np.int64]) -> Iterator[list[object]]:
    digits = ".17g" if table.fields[field].dtype == "float64" else ".9g"
    for start in range(0, len(rows), BLOCK):
        data = rows_data(table, field, rows[start : start + BLOCK].tolist())
        for row in data["rows"]:
            head = [row["id"]] if row["key"] is None else [row["id"], row["key"]]
            cells = [x if isinstance(x, str) else format(x, digits) for x in row["values"]]
            yield [*head, *cells]
