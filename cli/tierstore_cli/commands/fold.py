"""Fold the newest version into the base files."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE
from tierstore_cli.stores import awaited, changing


@click.command(cls=Command, writes="STORE")
@STORE
def fold(out: Output, store: Path) -> None:
    """Fold the commits of STORE into its base files, and drop older versions.

    Afterwards the base file alone contains the table: NumPy or zarr opens it without tierstore,
    with the line that `tierstore inspect` prints. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore fold emb.tier
      tierstore fold emb.tier --json | jq .dropped
    """
    with changing(out, store, "folding") as change:
        dropped = awaited(lambda: change.store.fold(progress=change.progress))
        note = f", and dropped versions {', '.join(map(str, dropped))}" if dropped else ""
        change.done(f"folded {store}{note}", dropped=dropped)
