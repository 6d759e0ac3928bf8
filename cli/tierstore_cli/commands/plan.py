"""Predict hit rates and step times for a memory budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tierstore import plot
from tierstore import policy as policies
from tierstore.budget import Budget, format_bytes
from tierstore.errors import counted
from tierstore.machine import speeds
from tierstore.sizing import Plan, SpacePlan, host_for_hits, load_stream, plan_budgets, plan_tables
from tierstore.sizing import plan as make_plan
from tierstore.spec import Field, TableSpec
from tierstore.stats import label
from tierstore_cli import params
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.output import Grid, Output
from tierstore_cli.printing import percent
from tierstore_cli.replaying import DEPTH, MEASURED, PLOT, for_stream, stream_options, use_option
from tierstore_cli.stores import choose_table, open_store


@click.command(
    cls=Command,
    was={
        "--depth": "4 batches are announced ahead",
        "--on": "run it in a directory on the disk whose speed counts",
    },
)
@click.argument("store", type=params.PlaceType(), required=False)
@params.TABLE
@click.option("--rows", type=params.COUNT_OF, help="Rows of the table.")
@click.option("--dim", type=params.COUNT_OF, metavar="D", help="Elements of a row.")
@click.option("--dtype", type=params.DTYPE, help="Element type; default: float32.")
@params.state_option("Optimizer state stored with each row, as in `tierstore init`; repeatable.")
@click.option(
    "--host",
    type=params.BYTES,
    help="Memory for the host tier; default: a quarter of the free memory.",
)
@click.option(
    "--hits",
    type=params.HIT_RATE,
    help="Find the memory for the host tier that answers this share of ids; needs --trace.",
)
@click.option(
    "--gpu",
    type=params.BYTES,
    default=0,
    show_default=False,
    help="Memory for the GPU tier; default: no GPU tier.",
)
@click.option(
    "--link",
    type=params.RATE,
    help="Bytes a second to the GPU, such as 25GB/s; default: as measured here.",
)
@click.option(
    "--policy",
    type=click.Choice(policies.NAMES),
    default="lru",
    help="The policy of the host tier.",
)
@click.option("--trace", type=params.FILE, metavar="FILE", help="The row ids that are requested.")
@stream_options
@use_option(training=True)
@DEPTH
@MEASURED
@click.option(
    "--on",
    "directory",
    type=click.Path(exists=True, readable=False, path_type=Path),
    metavar="PATH",
    help="A directory on the disk whose speed counts; default: STORE, or this directory.",
)
@PLOT
def plan(
    out: Output,
    store: params.Place | None,
    table: str | None,
    rows: int | None,
    dim: int | None,
    dtype: str | None,
    state: tuple[list[params.StateField], ...],
    host: int | None,
    hits: float | None,
    gpu: int,
    link: int | None,
    policy: str,
    trace: Path | None,
    directory: Path | None,
    picture: Path | None,
    **replay: Any,
) -> None:
    """Predict the size of a table, the rows that fit each tier, hit rates and the time of a step.

    The table is one of STORE, or as --rows, --dim, --dtype and --state say. Of all tables of STORE,
    without --table and --trace: which share tiers, and the rows of them that fit.

    FIRST TOUCH counts the distinct rows of a batch that no batch before asked for: no memory can
    hold those. Times model the page cache: what is missed comes from memory if it is free for the
    files of the table.

    With --trace and neither --host nor --gpu, a table shows what 1 to 50 % of the rows in memory
    would do.

    Hit rates need --trace, which is replayed: a recording by `table.record(path)`, or ids in .npy,
    .npz or .parquet. Times also need the speeds that `tierstore bench` measures.

    \b
    Examples:
      tierstore plan --rows 10000000 --dim 128 --state adam --host 8GiB --gpu 2GiB
      tierstore plan --rows 2000000 --dim 64 --host 200MB --trace run.trace --policy lfu
      tierstore plan --rows 2000000 --dim 64 --hits 90% --trace run.trace
      tierstore plan emb.tier --host 8GiB
      tierstore plan emb.tier --table item --hits 90% --trace run.trace
    """
    if hits is not None and (trace is None or host is not None or gpu):
        raise click.UsageError("--hits needs --trace, and finds what --host is without --gpu")
    sizes = {"--rows": rows, "--dim": dim, "--dtype": dtype, "--state": state or None}
    given = [name for name, value in sizes.items() if value is not None]
    if store is None:
        if table is not None or rows is None or dim is None:
            raise click.UsageError("give a STORE, or --rows and --dim of a table")
        fields = params.with_state(Field(dim, dtype or "float32"), state)
        spec = TableSpec(rows=rows, fields=fields)
    else:
        if given:
            raise click.UsageError(f"STORE has the sizes of its tables: no {', '.join(given)}")
        with open_store(store) as opened:
            if table is None and trace is None:
                specs = {name: each.spec for name, each in opened.items()}
                spaces = plan_tables(specs, Budget(host=host, gpu=gpu), policy=policy)
                data = {"store": str(store), "spaces": [each.to_dict() for each in spaces]}
                out.show(data, _divided(spaces))
                return
            spec = choose_table(opened, table).spec
    rows = spec.rows
    if directory is None:
        directory = store if isinstance(store, Path) else Path()
    found_speeds = speeds.known_speeds(directory)
    if found_speeds is not None and link is not None:
        found_speeds = replace(
            found_speeds, link_bytes=float(link), gpu_missed=None, gpu_lease_missed=None
        )
    with Progress("replaying") as progress:
        table_size = rows, spec.layout.record_bytes
        options = for_stream(replay)
        stream = None if trace is None else load_stream(trace, rows=rows, **options)
        replay |= {"policy": policies.choose(policy), "progress": progress}
        if hits is not None and stream is not None:
            host = host_for_hits(*table_size, stream, hits, **replay)
        found = make_plan(
            *table_size, host=host, gpu=gpu, stream=stream, speeds=found_speeds, **replay
        )
        budgets = None
        if stream is not None and host is None and not gpu:
            budgets = plan_budgets(*table_size, stream, speeds=found_speeds, **replay)
    if picture is not None:
        plot.step_times(found, picture)
    data = found.to_dict() | {"speeds": None if found_speeds is None else found_speeds.to_dict()}
    lines = _lines(found, trace is not None)
    if budgets is not None:
        data["budgets"] = [each.to_dict() for each in budgets]
        lines += ["", _choices(budgets)]
    if trace is not None and found_speeds is None:
        where = "" if directory == Path() else f" {directory}"
        lines.append(f"for times, measure this machine: tierstore bench{where}")
    out.show(data, *lines)


def _divided(spaces: list[SpacePlan]) -> Grid:
    headers = ("TABLES", "COUNT", "ROWS", "ROW", "TIER", "MEMORY", "SLOTS", "PART")
    rows = []
    for space in spaces:
        who = (
            label(space.tables),
            f"{len(space.tables):,}",
            f"{space.rows:,}",
            f"{space.record_bytes} B",
        )
        tiers = [
            (tier.tier, format_bytes(tier.nbytes), f"{tier.slots:,}", percent(tier.share))
            for tier in space.tiers
        ]
        if tiers:
            tiers.append(("index", format_bytes(space.index_bytes), "–", "–"))
        tiers = tiers or [("disk", format_bytes(space.disk_bytes), f"{space.rows:,}", "–")]
        rows += [(*(who if number == 0 else [""] * 4), *tier) for number, tier in enumerate(tiers)]
    return Grid(headers, rows, frozenset({1, 2, 3, 5, 6, 7}))


def _choices(budgets: list[Plan]) -> Grid:
    """Return what several sizes of the host tier would do."""
    rows = [
        (
            format_bytes(each.tiers[0].nbytes + each.index_bytes),
            f"{each.tiers[0].slots:,}",
            percent(each.tiers[0].share),
            percent(each.tiers[0].hit_rate),
            f"{1000 * each.step_seconds:,.1f}" if each.seconds else "–",
        )
        for each in budgets
    ]
    return Grid(("HOST", "SLOTS", "PART", "HITS", "MS A STEP"), rows, frozenset(range(5)))


def _argument(budget: Budget) -> str:
    """Return the argument of `tierstore.open` for a budget, as Python."""
    if budget.gpu == "0B":
        return f'budget="{budget.host}"'
    return f'budget=tierstore.Budget(host="{budget.host}", gpu="{budget.gpu}")'


def _lines(found: Plan, traced: bool) -> list[str | Grid]:
    headers = (
        "TIER",
        "MEMORY",
        "SLOTS",
        "PART",
        "HITS",
        "DISTINCT HITS",
        "MISSES/BATCH",
        "FIRST TOUCH",
    )
    rows: list[tuple[str, ...]] = [
        (
            tier.tier,
            format_bytes(tier.nbytes),
            f"{tier.slots:,}",
            percent(tier.share),
            percent(tier.hit_rate),
            percent(tier.unique_hit_rate),
            "–" if tier.misses_per_batch is None else f"{tier.misses_per_batch:,.0f}",
            "–" if tier.first_touches_per_batch is None else f"{tier.first_touches_per_batch:,.0f}",
        )
        for tier in found.tiers
    ]
    if found.tiers:
        rows.append(("index", format_bytes(found.index_bytes), *["–"] * 6))
    rows.append(("disk", format_bytes(found.disk_bytes), f"{found.rows:,}", *["–"] * 5))
    size = f"{counted(found.rows, 'row')} of {found.record_bytes} B"
    lines: list[str | Grid] = [
        f"{size}; policy of the host tier: {found.policy}",
        Grid(headers, rows, frozenset(range(1, len(headers)))),
        f"open it with {_argument(found.budget)}",
    ]
    if found.seconds:
        lines += ["", f"moving rows takes {1000 * found.step_seconds:,.1f} ms per step:"]
        times = [
            (plot.WAYS[name], f"{1000 * seconds:,.1f} ms")
            for name, seconds in found.seconds.items()
        ]
        lines.append(Grid((), times, frozenset({1})))
    if found.commit_seconds is not None:
        took = 1000 * found.commit_seconds
        lines.append(f"a commit of 1 % of the rows takes {took:,.1f} ms; a fold writes them again")
    lines += found.notes
    if not traced:
        lines.append("for hit rates add --trace; record one with `table.record(path)`")
    return lines
