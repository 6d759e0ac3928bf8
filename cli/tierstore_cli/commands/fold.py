"""Fold the newest version into the base files."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import awaited, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, UNTESTED
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@STORE
@UNTESTED
def fold(out: Output, store: Path, allow_untested: bool) -> None:
    """Fold the commits of STORE into its base files, and drop older versions.

    Afterwards the base file alone contains the table: NumPy or zarr opens it without tierstore,
    with the line that `tierstore inspect` prints. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore fold emb.tier
      tierstore fold emb.tier --json | jq .dropped
    """
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        with Progress("folding") as progress:
            dropped = awaited(lambda: opened.fold(progress=progress))
        version = opened.version
    data = {"store": os.path.abspath(store), "version": version, "dropped": dropped}
    note = f"; versions dropped: {', '.join(map(str, dropped))}" if dropped else ""
    out.show(data, f"{store} is folded to version {version}{note}")
