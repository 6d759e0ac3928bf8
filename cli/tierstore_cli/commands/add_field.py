"""Add a field to the rows of a table."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore import Field
from tierstore_cli import params
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.stores import changing, choose_table


@click.command(cls=Command, writes="STORE")
@params.STORE
@click.argument("name")
@params.TABLE
@click.option("--dim", type=params.COUNT_OF, help="Elements; default: of the first field.")
@click.option("--dtype", type=params.DTYPE, help="Element type; default: of the first field.")
@params.init_option("First values; default: zeros.")
def add_field(
    out: Output,
    store: Path,
    name: str,
    table: str | None,
    dim: int | None,
    dtype: str | None,
    initializer: params.SeededInitializer | None,
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
    init = params.seeded(initializer, seed)
    with changing(out, store, "writing") as change:
        chosen = choose_table(change.store, table)
        like = next(iter(chosen.fields.values()))
        field = Field(dim or like.dim, dtype or like.dtype, init=init)
        change.store.add_fields(chosen.name, {name: field}, progress=change.progress)
        text = f"added {name}, {field.dim} {field.dtype}, to {chosen.name}"
        change.done(text, table=chosen.name, field=name, dim=field.dim, dtype=field.dtype)
