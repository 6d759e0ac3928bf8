"""Load rows from a file into a table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import tierstore
from tierstore import Store
from tierstore._formats import read_keys
from tierstore._io import publish
from tierstore.importing import load_table
from tierstore_cli.command import Command
from tierstore_cli.opening import NO_CACHE, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import FIELD, MEMORY, STORE, TABLE, UNTESTED
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@STORE
@click.argument("source", metavar="SRC")
@TABLE
@FIELD
@click.option("--keys", metavar="FILE", help="Keys of the rows: .txt, .npy or FILE.parquet:COLUMN.")
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
    """Load the rows of SRC into a table of STORE, in place of all rows it had.

    SRC is a .npy .npz .safetensors .pt .parquet .vec .txt .bin .zarr .csv or .tsv file; FILE:NAME
    picks one of several arrays in it, and a .zarr may be a URL that fsspec knows. A store or table
    that does not exist is made, with the shape and element type of the file. Other fields of a
    table stay as they are.

    \b
    Examples:
      tierstore load emb.tier vectors.npy
      tierstore load emb.tier model.safetensors:encoder.weight --table item
      tierstore load emb.tier glove.txt --table word
      tierstore load emb.tier moments.npy --table item --field exp_avg
      tierstore load emb.tier rows.npy --table item --keys keys.txt
    """
    named = None if keys is None else read_keys(keys, memory=memory)
    made_or_opened = _open_or_create(store, allow_untested=allow_untested)
    with made_or_opened as opened, Progress("loading") as progress:
        done = load_table(
            opened,
            source,
            table=table,
            field=field,
            keys=named,
            memory=memory,
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
        data, f"{verb} {done.table} {done.field}: {shape}; {store} is at version {done.version}"
    )


@contextmanager
def _open_or_create(path: Path, *, allow_untested: bool) -> Iterator[Store]:
    """Open a store for writing; a new one appears under its name only if the body succeeds."""
    if os.path.lexists(path):
        with open_store(path, "r+", allow_untested=allow_untested) as store:
            yield store
    else:
        with (
            publish(path) as partial,
            tierstore.create(partial, {}, budget=NO_CACHE, allow_untested=allow_untested) as store,
        ):
            yield store
