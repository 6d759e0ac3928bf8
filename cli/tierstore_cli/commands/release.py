"""Remove the name of a kept version."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, full_name


@click.command(cls=Command, writes="STORE")
@STORE
@click.argument("name")
def release(out: Output, store: Path, name: str) -> None:
    """Remove NAME from the version of STORE that is kept under it.

    The version is dropped unless it is one of the newest, or has another name. No other process may
    have STORE open for writing.

    \b
    Examples:
      tierstore release emb.tier best
    """
    with open_store(store, "r+") as opened:
        opened.release(name)
        kept = [each.version for each in opened.versions()]
    data = {"store": full_name(store), "released": name, "kept": kept}
    out.show(data, f"{store} keeps versions {', '.join(map(str, kept))}")
