"""Remove a table from a store."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, complete_table
from tierstore_cli.stores import changing


@click.command(cls=Command, writes="STORE")
@STORE
@click.argument("table", shell_complete=complete_table)
def drop(out: Output, store: Path, table: str) -> None:
    """Remove TABLE from STORE, in a commit of its own.

    Versions that are kept still hold it, and its files stay until they go. A damaged table can be
    dropped too. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore drop emb.tier item
    """
    with changing(out, store, "dropping") as change:
        change.store.drop(table)
        change.done(f"dropped table {table}", table=table)
