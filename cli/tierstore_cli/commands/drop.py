"""Remove a table from a store."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, UNTESTED, complete_table


@click.command(cls=Command)
@STORE
@click.argument("table", shell_complete=complete_table)
@UNTESTED
def drop(out: Output, store: Path, table: str, allow_untested: bool) -> None:
    """Remove TABLE from STORE, in a commit of its own.

    Versions that are kept still hold it, and its files stay until they go. A damaged table can be
    dropped too. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore drop emb.tier item
    """
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        opened.drop(table)
        version = opened.version
    data = {"store": os.path.abspath(store), "table": table, "version": version}
    out.show(data, f"{store} has no table {table} from version {version} on")
