"""Remove the name of a kept version."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE
from tierstore_cli.stores import changing


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
    with changing(out, store, "releasing") as change:
        change.store.release(name)
        kept = [each.version for each in change.store.versions()]
        end = f"; {store} keeps versions {', '.join(map(str, kept))}"
        change.done(f"released {name}", end, released=name, kept=kept)
