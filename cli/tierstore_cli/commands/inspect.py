"""Show what is in a store."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click
import numpy as np

from tierstore import Table
from tierstore_cli import summary
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_field, choose_rows, choose_table, open_store
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import FIELD, READ_STORE, TABLE, Place, RowRange, Rows
from tierstore_cli.progress import Progress
from tierstore_cli.rowstats import row_stats


@click.command(cls=Command)
@READ_STORE
@TABLE
@FIELD
@click.option("--stats", is_flag=True, help="Describe the rows: norms, zero, NaN, infinite rows.")
@click.option("--full", is_flag=True, help="With --stats: all rows, not a sample of 100,000.")
@click.option("--rows", "span", type=RowRange(), help="Show rows A up to but without B.")
@click.option("--versions", is_flag=True, help="List the versions that are kept.")
def inspect(
    out: Output,
    store: Place,
    table: str | None,
    field: str | None,
    stats: bool,
    full: bool,
    span: Rows | None,
    versions: bool,
) -> None:
    """Show the tables of STORE, how large they are, and how to open them without tierstore.

    STATE lists the fields beside the first; DELTA counts the rows that were committed and not yet
    folded into the base file. A trainer may go on writing meanwhile. Tables that are damaged are
    left out, named under "damaged" in --json, and the exit code is 4.

    \b
    Examples:
      tierstore inspect emb.tier
      tierstore inspect emb.tier --table item --stats
      tierstore inspect emb.tier --table item --rows 0:5 --field exp_avg
      tierstore inspect emb.tier --versions
      tierstore inspect emb.tier --json | jq .version
    """
    with open_store(store) as opened:
        info = opened.info()
        data = info.to_dict()
        parts: list[str | Grid] = [summary.headline(store, data)]

        damaged = dict(opened.damaged) if table is None else {}
        whole = [name for name in opened.tables if name not in opened.damaged]
        tables = [opened[name] for name in (whole if table is None else [table])]
        names = [each.name for each in tables]
        data["tables"] = [entry for entry in data["tables"] if entry["name"] in names]
        bases = {each.name: each.base for each in info.tables}
        lines = [summary.opening_line(each, bases[each.name]) for each in tables]
        parts += [summary.tables(data["tables"]), summary.how_to_open(store, info.folded, lines)]

        if damaged:
            data["damaged"] = {name: str(error) for name, error in damaged.items()}
        if versions:
            data["versions"] = [dataclasses.asdict(each) for each in opened.versions()]
            parts += ["", summary.versions(data["versions"])]
        if stats:
            for entry, each in zip(data["tables"], tables, strict=True):
                with Progress(f"reading {each.name}") as progress:
                    found = row_stats(each, choose_field(each, field), full, progress)
                entry["stats"] = dataclasses.asdict(found)
                parts += ["", summary.stats(each, found)]
        if span is not None:
            shown = choose_table(opened, table)
            data["rows"] = _rows(shown, choose_field(shown, field), *choose_rows(shown, span))
            parts += ["", summary.values(data["rows"])]
    out.show(data, *parts)
    for error in damaged.values():
        raise error


def _rows(table: Table, field: str, start: int, stop: int) -> dict[str, Any]:
    """Return rows with their ids and keys; JSON has no NaN or infinity, so these become text."""
    values = table.read(np.arange(start, stop), field=field, transient=True)
    keys = [None] * (stop - start) if table.keys is None else list(table.keys[start:stop])
    return {
        "table": table.name,
        "field": field,
        "rows": [
            {
                "id": row,
                "key": key if key is None or isinstance(key, str) else int(key),
                "values": [x if math.isfinite(x) else str(x) for x in vector.tolist()],
            }
            for row, key, vector in zip(range(start, stop), keys, values, strict=True)
        ],
    }
