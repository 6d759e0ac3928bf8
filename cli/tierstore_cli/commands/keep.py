"""Keep a version of a store under a name."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, UNTESTED, VERSION


@click.command(cls=Command)
@STORE
@click.argument("name")
@VERSION
@UNTESTED
def keep(
    out: Output, store: Path, name: str, version: int | str | None, allow_untested: bool
) -> None:
    """Keep a version of STORE as NAME, regardless of later versions.

    If another version has this name, it loses it. Commits since the oldest kept version cannot be
    folded, so STORE needs more disk space until `tierstore release`. No other process may have
    STORE open for writing.

    \b
    Examples:
      tierstore keep emb.tier best
      tierstore keep emb.tier epoch3 --version 812
    """
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        number = opened.keep(opened.version if version is None else version, name)
    data = {"store": os.path.abspath(store), "name": name, "version": number}
    out.show(data, f"version {number} of {store} is kept as {name}")
