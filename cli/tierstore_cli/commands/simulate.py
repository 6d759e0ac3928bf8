"""Replay a trace through policies and sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore import plot, policy
from tierstore.budget import format_bytes
from tierstore.errors import counted
from tierstore.sizing import POLICIES, SIZES, Simulation, load_stream
from tierstore.sizing import simulate as run
from tierstore_cli import replaying
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command, given_here
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import COUNT_OF, FILE, TABLE, Place, PlaceType, full_name
from tierstore_cli.printing import percent, sparkline
from tierstore_cli.stores import choose_table, open_to_read


@click.command(
    cls=Command,
    was={
        "--size": "--slots",
        "--no-optimum": "leave the column `optimum` out of what reads the table",
        "--depth": "4 batches are announced ahead",
    },
)
@click.argument("trace", type=FILE)
@replaying.stream_options
@click.option(
    "--rows",
    type=COUNT_OF,
    help="Number of rows of the table; default: that of the trace.",
)
@click.option(
    "--of",
    "store",
    type=PlaceType(),
    metavar="STORE|FILE",
    help="A store or a file in place, FILE or FILE::NAME, whose table has the rows.",
)
@TABLE
@click.option(
    "--policy",
    "policies",
    type=click.Choice(policy.NAMES),
    multiple=True,
    help="A policy; repeatable. Default: lru and lfu.",
)
@click.option(
    "--slots",
    "sizes",
    type=replaying.TIER_SIZE,
    multiple=True,
    help="A size of the tier; repeatable. Default: 1 to 50 %.",
)
@replaying.use_option(training=False)
@click.option("--no-optimum", is_flag=True, help="Omit the optimal policy.")
@replaying.DEPTH
@replaying.MEASURED
@replaying.PLOT
def simulate(
    out: Output,
    trace: Path,
    rows: int | None,
    store: Place | None,
    table: str | None,
    policies: tuple[str, ...],
    sizes: tuple[int | float, ...],
    no_optimum: bool,
    picture: Path | None,
    **replay: Any,
) -> None:
    """Replay the ids of TRACE through policies and sizes, and print their hit rates.

    TRACE is a recording by `table.record(path)`, or ids in .npy, .npz or .parquet. Rates are over
    the distinct rows of each batch, which determine how many bytes move. `optimum` keeps the rows
    that are used soonest, which no policy can beat. With --of, RECORDS is what the rows of a size
    take of memory.

    \b
    Examples:
      tierstore simulate run.trace
      tierstore simulate run.trace --slots 200000 --slots 1000000 --policy lfu
      tierstore simulate run.trace --plot curve.svg
      tierstore simulate clicks.parquet --column item --batch 4096 --epochs 4 --shuffle
      tierstore simulate run.trace --of model.safetensors::embed.weight
    """
    if store is None and given_here("table"):
        raise click.UsageError("--table is a table of the store or file of --of: give that too")
    if store is not None and rows is not None:
        raise click.UsageError("--of says how many rows there are; leave --rows out")
    of = None if store is None else _of(store, table)
    with Progress("replaying") as progress:
        stream = load_stream(
            trace,
            rows=rows if of is None else of["rows"],
            **replaying.for_stream(replay),
        )
        found = run(
            stream,
            policies=policies or POLICIES,
            sizes=sizes or SIZES,
            with_optimum=not no_optimum,
            leases=replay.pop("training"),
            progress=progress,
            **replay,
        )
    if picture is not None:
        plot.miss_ratios(found, picture)
    lines: list[str | Grid] = [
        _head(found),
        _grid(found, None if of is None else of["record_bytes"]),
        _FLOOR.format(percent(found.first_touch_rate)),
    ]
    curves = _curves(found)
    lines += ["", *curves] if curves else []
    out.show(found.to_dict() | ({} if of is None else {"of": of}), *lines)


def _of(store: Place, name: str | None) -> dict[str, Any]:
    with open_to_read(store) as opened:
        table = choose_table(opened, name)
        return {
            "store": full_name(store),
            "table": table.name,
            "rows": table.rows,
            "record_bytes": table.spec.layout.record_bytes,
        }


_FLOOR = "{} of the distinct rows are asked for the first time: no tier has those"


def _head(found: Simulation) -> str:
    return (
        f"{counted(found.rows, 'row')}, {counted(found.batches, 'batch', 'batches')} of "
        f"{found.ids_per_batch:,.0f} ids, {found.unique_per_batch:,.0f} distinct in each; "
        f"{found.measured_batches:,} are measured"
    )


def _grid(found: Simulation, record_bytes: int | None) -> Grid:
    """Return a line for each size; with the bytes of its records, if those of one are known."""
    records = [] if record_bytes is None else ["RECORDS"]
    headers = ("SLOTS", "PART", *records, *(name.upper() for name in found.policies))
    columns = [found.curve(name) for name in found.policies]
    rows = [
        (
            f"{points[0].slots:,}",
            percent(points[0].share),
            *([] if record_bytes is None else [format_bytes(points[0].slots * record_bytes)]),
            *(percent(point.unique_hit_rate) for point in points),
        )
        for points in zip(*columns, strict=True)
    ]
    return Grid(headers, rows, frozenset(range(len(headers))))


def _curves(found: Simulation) -> list[str]:
    """Return the misses of each policy, by size, as block characters; none of a single size."""
    if len(found.curve(found.policies[0])) < 2:
        return []
    width = max(map(len, found.policies))
    return [
        f"missed by {name.ljust(width)}  "
        + sparkline([1 - point.unique_hit_rate for point in found.curve(name)])
        for name in found.policies
    ]
