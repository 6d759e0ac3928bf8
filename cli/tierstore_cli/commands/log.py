"""List the versions of a store."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import click

from tierstore.budget import format_bytes
from tierstore.stats import Version
from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import READ_STORE, Place, full_name


@click.command(cls=Command)
@READ_STORE
def log(out: Output, store: Place) -> None:
    """List the versions of STORE that can be opened, the newest first.

    ROWS are the rows that the version changed or added, those of a commit as often as they were
    written, and BYTES what was written for them: a table that grows in a new file counts whole. A
    restored version has none. PAYLOAD names the values committed with the rows.

    \b
    Examples:
      tierstore log emb.tier
      tierstore log emb.tier | head -3
      tierstore log emb.tier --json | jq '.versions[0].time'
    """
    with open_store(store) as opened:
        versions = opened.versions()[::-1]
    rows = [
        (
            each.version,
            _time(each),
            "–" if each.step is None else f"{each.step:,}",
            f"{each.written_rows:,}",
            format_bytes(each.written_bytes),
            ", ".join(each.names),
            ", ".join(each.payload),
        )
        for each in versions
    ]
    data = {"store": full_name(store), "versions": [dataclasses.asdict(each) for each in versions]}
    headers = ("VERSION", "TIME (UTC)", "STEP", "ROWS", "BYTES", "KEPT AS", "PAYLOAD")
    out.show(data, Grid(headers, rows, right=frozenset({0, 2, 3, 4})))


def _time(version: Version) -> str:
    if version.time is None:
        return "–"
    return datetime.fromtimestamp(version.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
