"""Watch a store that is being trained."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import click

from tierstore import Store
from tierstore.budget import format_bytes
from tierstore.errors import counted
from tierstore.stats import read_prometheus
from tierstore_cli.command import Command
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import COUNT, FILE, READ_STORE, Place, every_option, full_name
from tierstore_cli.printing import percent
from tierstore_cli.stores import open_store

_SHOWN = ("name", "rows", "disk_bytes", "delta_rows", "delta_bytes")
"""What is shown of a table."""
Figures = dict[tuple[str, str, str], float]


@click.command(cls=Command)
@READ_STORE
@click.option(
    "--metrics",
    metavar="FILE",
    type=FILE,
    help="What the trainer writes with tierstore.stats.write_prometheus.",
)
@every_option(2.0, "Time between two screens.")
@COUNT
def top(out: Output, store: Place, metrics: Path | None, every: float, count: int | None) -> None:
    """Show how STORE changes while it is trained, until Ctrl-C.

    From STORE itself: the newest version, its age, row writes and bytes that are not folded. From
    --metrics, which the trainer writes: hits, rows per second and modified rows of each tier, over
    the time between two screens. Where there is no terminal, screens follow one another, with
    --json one object a line. STORE is only read.

    \b
    Examples:
      tierstore top emb.tier
      tierstore top emb.tier --metrics /run/tierstore.prom --every 5
      tierstore top emb.tier --json --count 1 | jq .age_seconds
      tierstore top emb.tier --json --metrics /run/tierstore.prom --every 60 > hits.jsonl
    """
    before: Figures = {}
    then = time.monotonic()
    with open_store(store) as opened:
        for number in itertools.count():
            if number:
                time.sleep(every)
                opened.refresh()
            figures = {} if metrics is None else read_prometheus(metrics)
            now = time.monotonic()
            data = {"store": full_name(store), "time": int(time.time()), **_of_store(opened)}
            data["tiers"] = _of_tiers(before, figures, now - then)
            if not out.as_json and sys.stdout.isatty():
                click.clear()
            out.show(data, *_screen(data))
            out.flush()
            if number + 1 == count:
                return
            before, then = figures, now


def _of_store(store: Store) -> dict[str, Any]:
    info, newest = store.info(), store.versions()[-1]
    return {
        "version": info.version,
        "step": info.step,
        "age_seconds": None if newest.time is None else max(0, round(time.time() - newest.time)),
        "written_rows": newest.written_rows,
        "tables": [{name: getattr(each, name) for name in _SHOWN} for each in info.tables],
    }


def _of_tiers(before: Figures, now: Figures, seconds: float) -> list[dict[str, Any]]:
    """Return the figures of each tier: rates since `before`, if the counters continued."""
    tiers = []
    for name, table, tier in now:
        if name != "requested_total":
            continue

        def since(counter: str, table: str = table, tier: str = tier) -> float | None:
            where = (f"{counter}_total", table, tier)
            if where not in before or now.get(where, 0.0) < before[where]:  # a new trainer
                return None
            return now.get(where, 0.0) - before[where]

        requested, hits = since("requested"), since("hits")
        tiers.append(
            {
                "table": table,
                "tier": tier,
                "rows_per_second": None if requested is None else requested / seconds,
                "hit_rate": hits / requested if requested and hits is not None else None,
                "used": now.get(("used", table, tier)),
                "slots": now.get(("slots", table, tier)),
                "dirty": now.get(("dirty", table, tier)),
            }
        )
    return tiers


def _screen(data: dict[str, Any]) -> list[str | Grid]:
    age = "" if data["age_seconds"] is None else f" · committed {data['age_seconds']:,.0f} s ago"
    step = "" if data["step"] is None else f" · step {data['step']:,}"
    rows = [
        (
            each["name"],
            f"{each['rows']:,}",
            format_bytes(each["disk_bytes"]),
            f"{each['delta_rows']:,}",
            format_bytes(each["delta_bytes"]),
        )
        for each in data["tables"]
    ]
    wrote = f" · {counted(data['written_rows'], 'row')} in the last commit"
    parts: list[str | Grid] = [f"{data['store']}   version {data['version']}{step}{age}{wrote}"]
    if rows:
        headers = ("TABLE", "ROWS", "DISK", "NOT FOLDED", "BYTES")
        parts.append(Grid(headers, rows, right=frozenset(range(1, 5))))
    tiers = [
        (
            each["table"],
            each["tier"],
            _count(each["rows_per_second"]),
            percent(each["hit_rate"]),
            *(_count(each[name]) for name in ("used", "slots", "dirty")),
        )
        for each in data["tiers"]
    ]
    if tiers:
        columns = ("TABLE", "TIER", "ROWS/S", "HITS", "USED", "SLOTS", "MODIFIED")
        parts += ["", Grid(columns, tiers, right=frozenset(range(2, 7)))]
    return parts


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
