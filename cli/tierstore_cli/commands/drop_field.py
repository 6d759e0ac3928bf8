"""Remove fields from the rows of a table."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE
from tierstore_cli.stores import changing, choose_table


@click.command(cls=Command, writes="STORE")
@STORE
@click.argument("names", nargs=-1, required=True)
@TABLE
def drop_field(out: Output, store: Path, names: tuple[str, ...], table: str | None) -> None:
    """Remove the fields NAMES from every row of a table of STORE, in a commit of its own.

    Such as the state of an optimizer that is not used any more. The table is written again beside
    the old one, so that the disk needs room for both; versions that are kept still hold the
    fields. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore drop-field emb.tier exp_avg exp_avg_sq --table item
    """
    with changing(out, store, "writing") as change:
        name = choose_table(change.store, table).name
        change.store.drop_fields(name, names, progress=change.progress)
        left = list(change.store[name].fields)
        text = f"dropped {', '.join(names)} of {name}, which has {', '.join(left)}"
        change.done(text, table=name, dropped=list(names), fields=left)
