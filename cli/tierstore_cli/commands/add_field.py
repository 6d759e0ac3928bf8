"""Add a field to the rows of a table."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore import Field
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import (
    COUNT_OF,
    DTYPE,
    STORE,
    TABLE,
    SeededInitializer,
    full_name,
    init_option,
    seeded,
)
from tierstore_cli.progress import Progress


@click.command(cls=Command, writes="STORE")
@STORE
@click.argument("name")
@TABLE
@click.option("--dim", type=COUNT_OF, help="Elements; default: of the first field.")
@click.option("--dtype", type=DTYPE, help="Element type; default: of the first field.")
@init_option("First values; default: zeros.")
def add_field(
    out: Output,
    store: Path,
    name: str,
    table: str | None,
    dim: int | None,
    dtype: str | None,
    initializer: SeededInitializer | None,
    seed: int | None,
) -> None:
    """Add the field NAME to every row of a table of STORE, in a commit of its own.

    The table is written again beside the old one, so that the disk needs room for both. No other
    process may have STORE open for writing.

    \b
    Examples:
      tierstore add-field emb.tier age --dim 1
      tierstore add-field emb.tier exp_avg --table item
      tierstore add-field emb.tier bias --dim 1 --init "normal(0,0.01)" --seed 3
    """
    init = seeded(initializer, seed)
    with (
        open_store(store, "r+") as opened,
        Progress("writing") as progress,
    ):
        chosen = choose_table(opened, table)
        like = next(iter(chosen.fields.values()))
        field = Field(dim or like.dim, dtype or like.dtype, init=init)
        opened.add_fields(chosen.name, {name: field}, progress=progress)
        version = opened.version
    data = {
        "store": full_name(store),
        "table": chosen.name,
        "field": name,
        "dim": field.dim,
        "dtype": field.dtype,
        "version": version,
    }
    shape = f"{field.dim} {field.dtype}"
    out.show(data, f"added {name}, {shape}, to {chosen.name}; {store} is now at version {version}")
