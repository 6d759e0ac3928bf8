"""Add rows to a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.errors import counted
from tierstore_cli import params
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.picking import keys_in
from tierstore_cli.stores import changing, choose_table


@click.command(cls=Command, writes="STORE")
@params.STORE
@params.TABLE
@click.option(
    "--rows", type=params.COUNT_OF, required=True, metavar="N", help="Rows it is to have."
)
@params.init_option("First values of new rows; default: as the table was made.")
@params.KEYS
def grow(
    out: Output,
    store: Path,
    table: str | None,
    rows: int,
    initializer: params.SeededInitializer | None,
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
    init = params.seeded(initializer, seed)
    new_keys: Any = None if keys is None else keys_in(keys)
    with changing(out, store, "writing") as change:
        chosen = choose_table(change.store, table)
        name, added = chosen.name, rows - chosen.spec.rows
        change.store.grow(name, rows, init=init, keys=new_keys, progress=change.progress)
        text = f"added {counted(added, 'row')} to {name}: {rows:,}"
        change.done(text, table=name, rows=rows, added=added)
