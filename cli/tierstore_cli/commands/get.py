"""Print rows by id or key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import FIELDS, READ_STORE, ROW_ID, TABLE, VERSION, Place, full_name
from tierstore_cli.picking import picked_ids, picking_options
from tierstore_cli.shown_rows import rows_data
from tierstore_cli.stores import choose_fields, choose_table, open_to_read, version_of


@click.command(cls=Command, was={"--ids": "--ids-from"})
@READ_STORE
@click.argument("numbers", metavar="[ID]...", nargs=-1, type=ROW_ID)
@picking_options
@TABLE
@FIELDS
@VERSION
def get(
    out: Output,
    store: Place,
    numbers: tuple[int, ...],
    table: str | None,
    fields: Sequence[str] | None,
    version: int | str | None,
    **named: Any,
) -> None:
    """Print rows of a table of STORE: the id, the key if there is one, and all elements.

    A row is a line, its cells divided by tabs, every digit that tells its numbers apart; several
    fields follow one another. Lines come as rows are read. STORE may be written meanwhile; one
    version is read. It may also be a matrix of another program, FILE or FILE::NAME, which is read
    in place.

    \b
    Examples:
      tierstore get emb.tier 0 17 4711
      tierstore get emb.tier --table word --key the --key "of"
      tierstore get emb.tier --table item --ids-from ids.txt --field exp_avg | cut -f 1,2
      tierstore get emb.tier --table item 17 --field weight,exp_avg --json
      tierstore get model.safetensors::ple.weight 0 17
    """
    with open_to_read(store, version) as opened:
        chosen = choose_table(opened, table)
        names = choose_fields(chosen, fields)
        rows = picked_ids(chosen, **named | {"by_id": numbers + named["by_id"]})
        if not len(rows) and named["ids_from"] is named["keys_from"] is None:
            raise click.UsageError("which rows? Give ids, --key, --ids-from or --keys-from")
        if out.as_json:
            head = {"store": full_name(store), "version": version_of(opened)}
            out.show(head | rows_data(chosen, names, rows.tolist()))
            return
        for cells in _cells(chosen, names, rows):
            out.cells(cells)


def _cells(
    table: Table, fields: Sequence[str], rows: npt.NDArray[np.int64]
) -> Iterator[list[object]]:
    digits = [".17g" if table.fields[name].dtype == "float64" else ".9g" for name in fields]
    for row in rows_data(table, fields, rows.tolist())["rows"]:
        head = [row["id"]] if row["key"] is None else [row["id"], row["key"]]
        vectors = [row["values"]] if len(fields) == 1 else row["values"].values()
        pairs = zip(digits, vectors, strict=True)
        yield [*head, *(format(x, form) for form, vector in pairs for x in vector)]
