"""Load rows from a file into a table."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore.importing import import_table
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import FIELD, KEYS, MEMORY, STORE, TABLE, UNTESTED
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@STORE
@click.argument("source", metavar="SRC")
@TABLE
@FIELD
@KEYS
@MEMORY
@UNTESTED
def load(
    out: Output,
    store: Path,
    source: str,
    table: str | None,
    field: str | None,
    keys: str | None,
    memory: int,
    allow_untested: bool,
) -> None:
    """Load the rows of SRC into a table of STORE, replacing all rows of the table.

    SRC is a .npy .npz .safetensors .pt .parquet .vec .txt .bin .zarr .csv or .tsv file. FILE:NAME
    selects one of several arrays, and a .zarr may be a URL for fsspec. A missing store or table is
    created with the shape and element type of the file. Other fields of the table do not change.

    \b
    Examples:
      tierstore load emb.tier vectors.npy
      tierstore load emb.tier model.safetensors:encoder.weight --table item
      tierstore load emb.tier glove.txt --table word
      tierstore load emb.tier moments.npy --table item --field exp_avg
      tierstore load emb.tier rows.npy --table item --keys keys.txt
    """
    with Progress("loading") as progress:
        done = import_table(
            store,
            source,
            table=table,
            field=field,
            keys=keys,
            memory=memory,
            allow_untested=allow_untested,
            progress=progress,
        )
    data = {
        "store": os.path.abspath(store),
        "source": source,
        "table": done.table,
        "field": done.field,
        "rows": done.rows,
        "dim": done.dim,
        "dtype": done.dtype,
        "created": done.created,
        "keys": done.keys,
        "overflowed": done.overflowed,
        "version": done.version,
    }
    verb = "made" if done.created else "loaded"
    shape = f"{done.rows:,} rows of {done.dim} {done.dtype}{', with keys' if done.keys else ''}"
    out.show(
        data, f"{verb} {done.table} {done.field}: {shape}; {store} is now at version {done.version}"
    )
