"""Add rows to a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.errors import counted
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import (
    COUNT_OF,
    KEYS,
    STORE,
    TABLE,
    SeededInitializer,
    full_name,
    init_option,
    seeded,
)
from tierstore_cli.picking import keys_in
from tierstore_cli.progress import Progress


@click.command(cls=Command, writes="STORE")
@STORE
@TABLE
@click.option("--rows", type=COUNT_OF, required=True, metavar="N", help="Rows it is to have.")
@init_option("First values of new rows; default: as the table was made.")
@KEYS
def grow(
    out: Output,
    store: Path,
    table: str | None,
    rows: int,
    initializer: SeededInitializer | None,
    seed: int | None,
    keys: str | None,
) -> None:
    """Add rows to a table of STORE until it has N, in a commit of its own.

    The table is written again beside the old one, so that the disk needs room for both. No other
    process may have STORE open for writing.

    \b
    Examples:
      tierstore grow emb.tier --rows 2M
      tierstore grow emb.tier --table item --rows 5500000 --init "normal(0,0.01)" --seed 8
      tierstore grow emb.tier --table user --rows 2100 --keys new_users.txt
    """
    init = seeded(initializer, seed)
    new_keys: Any = None if keys is None else keys_in(keys)
    with (
        open_store(store, "r+") as opened,
        Progress("writing") as progress,
    ):
        chosen = choose_table(opened, table)
        name, before = chosen.name, chosen.spec.rows
        opened.grow(
            name,
            rows,
            init=init,
            keys=new_keys,
            progress=progress,
        )
        version = opened.version
    data = {
        "store": full_name(store),
        "table": name,
        "rows": rows,
        "added": rows - before,
        "version": version,
    }
    out.show(
        data, f"added {counted(rows - before, 'row')} to {name}: {rows:,}, at version {version}"
    )
