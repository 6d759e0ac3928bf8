"""Remove the name of a kept version."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, UNTESTED


@click.command(cls=Command)
@STORE
@click.argument("name")
@UNTESTED
def release(out: Output, store: Path, name: str, allow_untested: bool) -> None:
    """Remove NAME from the version of STORE that is kept under it.

    The version is dropped unless it is one of the newest, or has another name. No other process may
    have STORE open for writing.

    \b
    Examples:
      tierstore release emb.tier best
    """
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        opened.release(name)
        kept = [each.version for each in opened.versions()]
    data = {"store": os.path.abspath(store), "released": name, "kept": kept}
    out.show(data, f"{store} keeps versions {', '.join(map(str, kept))}")
