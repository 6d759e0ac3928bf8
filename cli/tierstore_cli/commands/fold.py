"""Fold the newest version into the base files."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import awaited, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, full_name
from tierstore_cli.progress import Progress


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
    with open_store(store, "r+") as opened:
        with Progress("folding") as progress:
            dropped = awaited(lambda: opened.fold(progress=progress))
        version = opened.version
    data = {"store": full_name(store), "version": version, "dropped": dropped}
    note = f"; versions dropped: {', '.join(map(str, dropped))}" if dropped else ""
    out.show(data, f"{store} is folded to version {version}{note}")
