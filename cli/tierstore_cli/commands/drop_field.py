"""Remove fields from the rows of a table."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE, full_name
from tierstore_cli.progress import Progress


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
    with (
        open_store(store, "r+") as opened,
        Progress("writing") as progress,
    ):
        chosen = choose_table(opened, table)
        opened.drop_fields(chosen.name, names, progress=progress)
        left = list(opened[chosen.name].fields)
        version = opened.version
    data = {
        "store": full_name(store),
        "table": chosen.name,
        "dropped": list(names),
        "fields": left,
        "version": version,
    }
    gone, kept = ", ".join(names), ", ".join(left)
    out.show(data, f"{chosen.name} of {store} has no {gone} from version {version} on, but {kept}")
