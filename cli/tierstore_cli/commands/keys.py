"""Set or remove the keys of a table's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.errors import counted
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE
from tierstore_cli.picking import keys_in
from tierstore_cli.stores import changing, choose_table


@click.command(cls=Command, writes="STORE")
@click.argument("action", type=click.Choice(["set", "forget"]))
@STORE
@click.argument("file", required=False)
@TABLE
def keys(
    out: Output,
    action: str,
    store: Path,
    file: str | None,
    table: str | None,
) -> None:
    """Set the keys of a table of STORE from FILE, or forget them, in a commit of its own.

    FILE has one key for each row, all distinct: .txt with one a line, .npy, or FILE.parquet:COLUMN.
    Rows do not change. No other process may have STORE open for writing.

    \b
    Examples:
      tierstore keys set emb.tier words.txt --table word
      tierstore keys forget emb.tier --table word
    """
    if (file is None) == (action == "set"):
        raise click.UsageError("`keys set STORE FILE`, or `keys forget STORE`")
    named: Any = None if file is None else keys_in(file)
    count = None if named is None else len(named)
    with changing(out, store, "writing keys") as change:
        name = choose_table(change.store, table).name
        change.store.set_keys(name, named, progress=change.progress)
        done = "forgot the keys" if count is None else f"set {counted(count, 'key')}"
        change.done(f"{done} of {name}", table=name, keys=count)
