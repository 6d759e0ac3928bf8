"""`tierstore inspect`: show what is in a store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

import tierstore
from tierstore.budget import format_bytes
from tierstore.store import Store
from tierstore.table import Table
from tierstore_cli.command import Command
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import FIELD, STORE, TABLE, RowRange, choose_table
from tierstore_cli.progress import Progress
from tierstore_cli.rowstats import RowStats, row_stats

ELEMENTS_SHOWN = 8


@click.command(cls=Command)
@STORE
@TABLE
@FIELD
@click.option("--stats", is_flag=True, help="Describe the rows: norms, zero, NaN, infinite rows.")
@click.option("--full", is_flag=True, help="With --stats: all rows, not a sample of 100,000.")
@click.option("--rows", "span", type=RowRange(), help="Show rows A up to but without B.")
@click.option("--versions", is_flag=True, help="List the versions that are kept.")
def inspect(
    out: Output,
    store: Path,
    table: str | None,
    field: str,
    stats: bool,
    full: bool,
    span: tuple[int, int | None] | None,
    versions: bool,
) -> None:
    """Show the tables of STORE, how large they are, and how to open them without tierstore.

    STATE lists the fields beside the weight. DELTA is what was committed and not yet folded into
    the base file. A trainer may go on writing meanwhile.

    \b
    Examples:
      tierstore inspect emb.tier
      tierstore inspect emb.tier --table item --stats
      tierstore inspect emb.tier --table item --rows 0:5 --field exp_avg
      tierstore inspect emb.tier --json | jq .version
    """
    with tierstore.open(store) as opened:
        tables = [choose_table(opened, table)] if table else list(opened.tables.values())
        names = {each.name for each in tables}
        data = opened.info().to_dict()
        data["tables"] = [entry for entry in data["tables"] if entry["name"] in names]
        parts: list[str | Grid] = [*_overview(data), *(_how_to_open(opened, t) for t in tables)]

        if versions:
            data["versions"] = [_version(each) for each in opened.versions()]
            parts += ["", _versions_grid(data["versions"])]
        if stats:
            for entry, each in zip(data["tables"], tables, strict=True):
                with Progress(f"reading {each.name}") as progress:
                    found = row_stats(each, field, full=full, progress=progress)
                entry["stats"] = found.to_dict()
                parts += ["", *_stats_lines(each, found)]
        if span is not None:
            shown = choose_table(opened, table)
            data["rows"] = _rows(shown, field, *span)
            parts += ["", _rows_grid(data["rows"])]
    out.show(data, *parts)


def _overview(data: dict[str, Any]) -> list[str | Grid]:
    """Return the first line and the list of tables."""
    disk = sum(entry["disk_bytes"] + entry["delta_bytes"] for entry in data["tables"])
    about = [
        f"format {data['format']}",
        f"version {data['version']}",
        *([f"step {data['step']:,}"] if data["step"] is not None else []),
        "folded" if data["folded"] else "not folded",
        format_bytes(disk),
    ]
    headers = ("TABLE", "ROWS", "DIM", "DTYPE", "STATE", "BACKEND", "ROW", "DISK", "DELTA")
    rows = [
        (
            entry["name"],
            f"{entry['rows']:,}",
            entry["dim"],
            entry["dtype"],
            " ".join(each["name"] for each in entry["fields"][1:]) or "–",
            entry["backend"],
            f"{entry['record_bytes']} B",
            format_bytes(entry["disk_bytes"]),
            f"{entry['delta_rows']:,} rows" if entry["delta_rows"] else "–",
        )
        for entry in data["tables"]
    ]
    return [f"{data['store']}   {' · '.join(about)}", Grid(headers, rows, frozenset({1, 2, 6, 7, 8}))]
