"""Set or remove the keys of a table's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.errors import counted
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE, full_name
from tierstore_cli.picking import keys_in
from tierstore_cli.progress import Progress


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
    found: Any = None if file is None else keys_in(file)
    with (
        open_store(store, "r+") as opened,
        Progress("writing keys") as progress,
    ):
        name = choose_table(opened, table).name
        opened.set_keys(name, found, progress=progress)
        version = opened.version
    count = None if found is None else len(found)
    data = {"store": full_name(store), "table": name, "keys": count, "version": version}
    done = "forgot the keys" if count is None else f"set {counted(count, 'key')}"
    out.show(data, f"{done} of {name}; {store} is now at version {version}")
