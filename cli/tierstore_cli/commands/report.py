"""Write a page about a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.reporting import write_report
from tierstore.sizing import load_stream, simulate
from tierstore.stats import read_hit_rates
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command, given_here
from tierstore_cli.output import Output
from tierstore_cli.params import FILE, FORCE, IDS, KEY, READ_STORE, TABLE, VERSION, Place, full_name
from tierstore_cli.picking import one_row, picked_ids
from tierstore_cli.stores import choose_table, open_store


@click.command(cls=Command, was={"--hits": "--history"})
@READ_STORE
@click.argument("page", metavar="OUT", type=FILE)
@TABLE
@KEY
@IDS
@click.option("--trace", type=FILE, metavar="FILE", help="Show miss ratios of these row ids.")
@click.option(
    "--history",
    "hits",
    type=click.Path(path_type=Path, exists=True, readable=False, dir_okay=False),
    metavar="FILE",
    help="Show the hit rates of a run: lines of History.save or of top --json.",
)
@VERSION
@FORCE
def report(
    out: Output,
    store: Place,
    page: Path,
    table: str | None,
    by_key: tuple[str, ...],
    by_id: tuple[int, ...],
    trace: Path | None,
    hits: Path | None,
    version: int | str | None,
    force: bool,
) -> None:
    """Write an HTML page about STORE to OUT: tables, versions, norms, and a picture of rows.

    OUT is one file without scripts that loads nothing from a network. The picture is a PCA
    plot, in two dimensions, of at most 2,000 rows a table. --key or --id adds the nearest rows,
    --trace the misses of caches of several sizes, --history the hits of a run. With --table the
    page is about that table alone.

    \b
    Examples:
      tierstore report emb.tier report.html
      tierstore report emb.tier report.html --table word
      tierstore report emb.tier report.html --table word --key paris --force
      tierstore report emb.tier report.html --trace run.trace
      tierstore report emb.tier report.html --history hits.jsonl
    """
    if by_id or by_key:
        one_row(by_id, by_key)
    rates = None if hits is None else read_hit_rates(hits)
    simulation = None
    if trace is not None:
        with Progress("replaying") as progress:
            simulation = simulate(load_stream(trace), progress=progress)
    with open_store(store, version=version) as opened:
        near: tuple[str, Any] | None = None
        tables = [choose_table(opened, table).name] if given_here("table") else None
        if by_id or by_key:
            chosen = choose_table(opened, table)
            near = (chosen.name, int(picked_ids(chosen, by_id, by_key)[0]))
        write_report(
            opened,
            page,
            near=near,
            simulation=simulation,
            hits=rates,
            tables=tables,
            force=force,
        )
        data = {"store": full_name(store), "version": opened.version, "out": full_name(page)}
    data["bytes"] = page.stat().st_size
    out.show(data, f"wrote {page}: {data['bytes']:,} bytes")
