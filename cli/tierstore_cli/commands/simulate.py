"""Replay a trace through policies and sizes."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore import plot, policy
from tierstore.sizing import POLICIES, SIZES, Simulation, load_stream
from tierstore.sizing import simulate as run
from tierstore_cli.command import Command
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import Count
from tierstore_cli.progress import Progress
from tierstore_cli.stream_options import DEPTH, MEASURED, PLOT, TRACE, TierSize, stream_options
from tierstore_cli.text import percent, sparkline


@click.command(cls=Command)
@click.argument("trace", type=TRACE)
@stream_options
@click.option(
    "--rows",
    type=Count(),
    metavar="N",
    help="Number of rows of the table; default: that of the trace.",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice(policy.NAMES),
    multiple=True,
    help="A policy; repeatable. Default: lru and lfu.",
)
@click.option(
    "--size",
    "sizes",
    type=TierSize(),
    multiple=True,
    metavar=TierSize.name,
    help="A size of the tier; repeatable. Default: 1 to 50 %.",
)
@click.option(
    "--training", is_flag=True, help="Lease the batches, as training does, instead of reading them."
)
@click.option("--no-optimum", is_flag=True, help="Omit the optimal policy.")
@DEPTH
@MEASURED
@PLOT
def simulate(
    out: Output,
    trace: Path,
    batch: int | None,
    column: str | None,
    epochs: int,
    shuffle: bool,
    memory: int,
    rows: int | None,
    policies: tuple[str, ...],
    sizes: tuple[int | float, ...],
    training: bool,
    no_optimum: bool,
    depth: int,
    measured: float,
    picture: Path | None,
) -> None:
    """Replay the ids of TRACE through policies and sizes, and print their hit rates.

    TRACE is a recording by `table.record(path)`, or ids in .npy, .npz or .parquet. Rates are over
    the distinct rows of each batch, which determine how many bytes move. `optimum` keeps the rows
    that are used soonest, which no policy can beat.

    \b
    Examples:
      tierstore simulate run.trace
      tierstore simulate run.trace --size 200000 --size 1000000 --policy lfu
      tierstore simulate run.trace --plot curve.svg
      tierstore simulate clicks.parquet --column item --batch 4096 --epochs 4 --shuffle
    """
    with Progress("replaying") as progress:
        stream = load_stream(
            trace,
            batch_size=batch,
            column=column,
            rows=rows,
            epochs=epochs,
            shuffle=shuffle,
            memory=memory,
        )
        found = run(
            stream,
            policies=policies or POLICIES,
            sizes=sizes or SIZES,
            with_optimum=not no_optimum,
            leases=training,
            depth=depth,
            measured=measured,
            progress=progress,
        )
    if picture is not None:
        plot.miss_ratios(found, picture)
    lines: list[str | Grid] = [
        _head(found),
        _grid(found),
        _FLOOR.format(percent(found.first_touch_rate)),
        "",
        *_curves(found),
    ]
    out.show(found.to_dict(), *lines)


_FLOOR = "{} of the distinct rows are asked for the first time: no tier has those"


def _head(found: Simulation) -> str:
    return (
        f"{found.rows:,} rows, {found.batches:,} batches of {found.ids_per_batch:,.0f} ids, "
        f"{found.unique_per_batch:,.0f} of them distinct; {found.measured_batches:,} are measured"
    )


def _grid(found: Simulation) -> Grid:
    headers = ("SLOTS", "PART", *(name.upper() for name in found.policies))
    columns = [found.curve(name) for name in found.policies]
    rows = [
        (
            f"{points[0].slots:,}",
            percent(points[0].share),
            *(percent(point.unique_hit_rate) for point in points),
        )
        for points in zip(*columns, strict=True)
    ]
    return Grid(headers, rows, frozenset(range(len(headers))))


def _curves(found: Simulation) -> list[str]:
    """Return the misses of each policy, by size, as block characters."""
    width = max(map(len, found.policies))
    return [
        f"missed by {name.ljust(width)}  "
        + sparkline([1 - point.unique_hit_rate for point in found.curve(name)])
        for name in found.policies
    ]
