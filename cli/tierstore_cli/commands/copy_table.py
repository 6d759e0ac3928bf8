"""Copy a table from one store to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from tierstore import KeyedTable, Table
from tierstore.errors import ExistsError, counted
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import READ_STORE, TABLE, VERSION, Place, PlaceType, full_name
from tierstore_cli.stores import changing, choose_table, open_store


@click.command(cls=Command, writes="DEST")
@READ_STORE
@click.argument("dest", type=PlaceType(on_disk=True))
@TABLE
@click.option("--as", "name", metavar="NAME", help="Its name in DEST; default: as in STORE.")
@VERSION
def copy_table(
    out: Output,
    store: Place,
    dest: Path,
    table: str | None,
    name: str | None,
    version: int | str | None,
) -> None:
    """Copy a table of STORE with all fields and keys into DEST, a store, where none has its name.

    One version of STORE is read, which may be written meanwhile. `tierstore save` copies a whole
    store; `tierstore load` takes rows from files. A table by key is made first, and its rows are a
    second version of DEST. No other process may have DEST open for writing.

    \b
    Examples:
      tierstore copy-table emb.tier other.tier --table item
      tierstore copy-table emb.tier other.tier --table item --as item_before --version best
    """
    with open_store(store, version=version) as source, changing(out, dest, "copying") as change:
        to, chosen = change.store, choose_table(source, table)
        name = name or chosen.name
        if name in to:
            raise ExistsError(f"{dest} already has a table {name!r}; choose another name (--as)")
        spec = dataclasses.replace(chosen.spec, sparse=False)
        if isinstance(chosen, KeyedTable):
            made = to.create_table(name, spec)
            if isinstance(made, KeyedTable):
                made.merge(chosen, progress=change.progress)
                to.commit()
        else:
            keys, blocks = None if chosen.keys is None else chosen.keys[:], _records(chosen)
            to.create_table(name, spec, blocks=blocks, keys=keys, progress=change.progress)
        rows, read = to[name].rows, source.version
        text = (
            f"copied {counted(rows, 'row')} of {chosen.name}, version {read} of {store}, to {name}"
        )
        origin = {"origin": full_name(store), "from": read}
        change.done(text, table=name, rows=rows, **origin)


def _records(table: Table) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the records of a table in blocks, in order."""
    layout = table.spec.layout
    scans = {name: table.scan(name, raw=True) for name in table.fields}
    for blocks in zip(*scans.values(), strict=True):
        records = np.zeros((len(blocks[0]), layout.record_bytes), np.uint8)
        for name, block in zip(scans, blocks, strict=True):
            layout.view(records, name)[:] = block
        yield records
