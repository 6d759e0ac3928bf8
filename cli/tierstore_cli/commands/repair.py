"""Copy the intact rows of a damaged store, and list the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

import tierstore
from tierstore_cli.command import Command
from tierstore_cli.opening import makes
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import READ_STORE, VERSION, Filling, FillType, Place, full_name
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@READ_STORE
@click.argument("dest", type=click.Path(path_type=Path, readable=False))
@VERSION
@click.option(
    "--fill",
    "fills",
    type=FillType(),
    multiple=True,
    help="How to fill damaged rows; repeatable, tried in order. Default: version, then zeros.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="Seed of an initializer in --fill.",
)
@click.option(
    "--list",
    "listed",
    type=click.Path(path_type=Path, readable=False),
    metavar="FILE",
    help="Path of the list of rows; default: DEST.rows.csv.",
)
def repair(
    out: Output,
    store: Place,
    dest: Path,
    version: int | str | None,
    fills: tuple[Filling, ...],
    seed: int,
    listed: Path | None,
) -> None:
    """Copy every intact row of STORE to a new store DEST, and list the others.

    Only reads STORE, which need not be openable: its newest manifest, STORE.json, tables and deltas
    may be damaged or missing. A row is intact if its checksum matches. --fill names what replaces a
    damaged row: "version" (its newest intact older value), "zeros", "nan", or an initializer of the
    first field, such as "normal(0,0.01)".

    The list is CSV: runs of rows that are older, with their version, or filled. "unknown" counts
    rows that may be older because a delta is missing or its ids are damaged. Intact keys and
    payload are copied. DEST appears complete or not at all.

    \b
    Examples:
      tierstore repair emb.tier repaired.tier
      tierstore repair emb.tier repaired.tier --fill nan
      tierstore repair emb.tier repaired.tier --fill version --fill "normal(0,0.01)" --seed 1
      tierstore repair emb.tier repaired.tier --version 812 --list lost.csv
    """
    fill = [each if isinstance(each, str) else each(seed) for each in fills]
    makes(dest)
    with Progress("repairing") as progress:
        report = tierstore.repair(
            store,
            dest,
            version=version,
            fill=fill or ("version", "zeros"),
            listed=listed,
            progress=progress,
        )
    data = {
        "store": full_name(store),
        "dest": full_name(dest),
        "version": report.version,
        "complete": report.complete,
        "tables": {name: dataclasses.asdict(each) for name, each in report.tables.items()},
        "left_out": report.left_out,
        "list": str(report.listed),
    }
    rows = [
        (name, f"{each.rows:,}", f"{each.older:,}", f"{each.filled:,}", f"{each.unknown:,}")
        for name, each in report.tables.items()
    ]
    headers = ("TABLE", "ROWS", "OLDER", "FILLED", "UNKNOWN")
    out.show(
        data,
        f"copied version {report.version} of {store} to {dest}",
        Grid(headers, rows, right=frozenset({1, 2, 3, 4})),
    )
    for each in report.left_out:
        out.note(f"Warning: omitted: {each}")
    if not report.complete:
        out.note(f"Warning: some rows are older or filled; {report.listed} lists the rows")
    if not (fills or report.complete):
        out.note(
            "no --fill was given: damaged rows have their newest intact older value, else zeros; "
            "to choose, repair to another DEST with --fill version, zeros, nan or an initializer "
            'such as "normal(0,0.01)"'
        )
