"""Change the element types, backend or compression of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore.budget import format_bytes
from tierstore.spec import BACKENDS, DTYPES
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE
from tierstore_cli.stores import changing, choose_table


@click.command(cls=Command, writes="STORE")
@STORE
@TABLE
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="[FIELD=]DTYPE",
    help="Element type of a field, or of all; may be repeated.",
)
@click.option("--backend", type=click.Choice(BACKENDS), help="How the table is stored.")
@click.option("--compression", metavar="NAME", help="Of the backend zarr: none, lz4, zstd, …")
def alter(
    out: Output,
    store: Path,
    table: str | None,
    dtypes: tuple[str, ...],
    backend: Any,
    compression: Any,
) -> None:
    """Change how a table of STORE is stored, in a commit of its own; rows, keys and names stay.

    Values are rounded to a narrower element type, and what is too large for it becomes infinite,
    which a warning counts. The table is written again beside the old one, so that the disk needs
    room for both. `tierstore grow`, `add-field`, `drop-field` and `rename` change the rest.

    \b
    Examples:
      tierstore alter emb.tier --dtype float16
      tierstore alter emb.tier --table item --dtype exp_avg=bfloat16 --dtype exp_avg_sq=bfloat16
      tierstore alter emb.tier --table item --backend zarr --compression zstd
    """
    if not dtypes and backend is compression is None:
        raise click.UsageError("give --dtype, --backend or --compression")
    with changing(out, store, "writing") as change:
        chosen = choose_table(change.store, table)
        name = chosen.name
        named = dict(_named(each, list(chosen.fields)) for each in dtypes)
        wanted = {field: dtype for fields, dtype in named.items() for field in fields}
        options: dict[str, Any] = {"dtype": wanted or None, "backend": backend}
        if compression is not None:
            options["compression"] = None if compression == "none" else compression
        change.store.alter_tables({name: options}, progress=change.progress)
        spec = change.store[name].spec
        types = {field: each.dtype for field, each in spec.fields.items()}
        size = f"{spec.backend}, {format_bytes(spec.nbytes)}"
        change.done(
            f"{name} is {', '.join(map(' '.join, types.items()))}, {size}",
            table=name,
            fields=types,
            backend=spec.backend,
            compression=spec.compression,
            disk_bytes=spec.nbytes,
        )


def _named(text: str, every: list[str]) -> tuple[tuple[str, ...], Any]:
    """Return the fields that a change is for, and the element type."""
    field, _, dtype = text.rpartition("=")
    if dtype not in DTYPES:
        raise click.UsageError(f"--dtype {text!r}: {dtype!r} is not one of {', '.join(DTYPES)}")
    return ((field,) if field else tuple(every)), dtype
