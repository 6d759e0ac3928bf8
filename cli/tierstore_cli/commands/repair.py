"""Copy the intact rows of a damaged store, and list the others."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection
from pathlib import Path

import click

import tierstore
from tierstore.errors import FilledRowsWarning, counted
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import FILE, FILL, READ_STORE, VERSION, Filling, Place, full_name
from tierstore_cli.stores import makes

DAMAGE = 4


@click.command(cls=Command)
@READ_STORE
@click.argument("dest", type=FILE)
@VERSION
@click.option(
    "--fill",
    "fills",
    type=FILL,
    multiple=True,
    help="How to fill damaged rows; repeatable, tried in order. Default: version, then zeros.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    metavar="S",
    help="Seed of an initializer in --fill.",
)
@click.option(
    "--list",
    "listed",
    type=FILE,
    metavar="FILE",
    help="Path of the list of rows; default: DEST.rows.csv.",
)
@click.option(
    "--adopt",
    is_flag=True,
    help="Copy also what is newer than every manifest, if it is proven to be a whole version.",
)
def repair(
    out: Output,
    store: Place,
    dest: Path,
    version: int | str | None,
    fills: tuple[Filling, ...],
    seed: int,
    listed: Path | None,
    adopt: bool,
) -> None:
    """Copy every intact row of STORE to a new store DEST, and list the others.

    Only reads STORE, which need not be openable: its newest manifest, STORE.json, tables and deltas
    may be damaged or missing. A row is intact if its checksum matches. --fill names what replaces a
    damaged row: "version" (its newest intact older value), "zeros", "nan", or an initializer of the
    first field, such as "normal(0,0.01)".

    The list is CSV: runs of rows that are older, with their version, or filled. "unknown" counts
    rows that may be older because a delta is missing or its ids are damaged. Of a table by key, it
    lists keys. Intact keys and payload are copied. DEST appears complete or not at all.

    --adopt also takes the files that verify lists as newer than the newest manifest: a version
    whose commit did not end, or whose manifest was removed. They are taken only if each is intact
    and they are proven to be a whole version; else it says why not.

    Rows without any intact value become zeros if there is no --fill, and the exit code is then 4:
    DEST is complete, and lacks them.

    \b
    Examples:
      tierstore repair emb.tier repaired.tier
      tierstore repair emb.tier repaired.tier --fill nan
      tierstore repair emb.tier repaired.tier --fill version --fill "normal(0,0.01)" --seed 1
      tierstore repair emb.tier repaired.tier --version 812 --list lost.csv
      tierstore repair emb.tier repaired.tier --adopt
    """
    fill = [each if isinstance(each, str) else each(seed) for each in fills]
    makes(dest)
    with Progress("repairing") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", FilledRowsWarning)  # it is the failure at the end
        report = tierstore.repair(
            store,
            dest,
            version=version,
            fill=fill or None,
            listed=listed,
            adopt=adopt,
            progress=progress,
        )
    tables = {name: dataclasses.asdict(each) for name, each in report.tables.items()}
    data = {"store": full_name(store), "dest": full_name(dest), "list": str(report.listed)}
    told = ("version", "complete", "filled", "left_out", "adopted")
    data |= {name: getattr(report, name) for name in told} | {"tables": tables}
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
    if report.adopted:
        versions = ", ".join(map(str, report.adopted))
        out.note(f"adopted: version {versions}, which no manifest names")
    for each in report.left_out:
        out.note(f"Warning: omitted: {each}")
    if found := _counts(tables.values()):
        out.note(f"Warning: {found}; {report.listed} lists them")
    if report.filled and not fills:
        raise Failure(
            f"{counted(report.filled, 'row has', 'rows have')} no intact value, and became zeros; "
            "to choose what they become, repair to another DEST with --fill version and --fill "
            'zeros, nan or an initializer such as "normal(0,0.01)"',
            DAMAGE,
        )


def _counts(tables: Collection[dict[str, int]]) -> str:
    """Say how many rows are not their newest image; nothing if all are."""
    kinds = {"older": "older", "filled": "filled", "unknown": "perhaps older"}
    totals = {what: sum(each[kind] for each in tables) for kind, what in kinds.items()}
    found = [f"{count:,} {what}" for what, count in totals.items() if count]
    return f"of the rows {', '.join(found)}" if found else ""
