"""Give a table of a store another name."""

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
@click.argument("new")
def rename(out: Output, store: Path, table: str, new: str) -> None:
    """Rename TABLE of STORE to NEW, in a commit of its own.

    The rows are copied, since older versions still name the files of the table, so that the disk
    needs room for the table once more. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore rename emb.tier embeddings item
    """
    with changing(out, store, "copying") as change:
        change.store.rename(table, new, progress=change.progress)
        change.done(f"renamed {table} to {new}", table=new, was=table)
