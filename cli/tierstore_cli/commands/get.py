"""Print rows by id or key."""

from __future__ import annotations

from collections.abc import Iterator

import click
import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_field, choose_table, open_to_read
from tierstore_cli.output import Output
from tierstore_cli.params import FIELD, READ_STORE, ROW_ID, TABLE, VERSION, Place
from tierstore_cli.picking import chosen_ids
from tierstore_cli.rows import rows_data


@click.command(cls=Command)
@READ_STORE
@click.argument("ids", metavar="[ID]...", nargs=-1, type=ROW_ID)
@click.option(
    "--id", "more", multiple=True, type=ROW_ID, metavar="N", help="A row by its id; repeatable."
)
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A row by its key; repeatable.")
@click.option("--ids", "file", metavar="FILE", help="Ids in a file: .txt, .npy, FILE.parquet:COL.")
@TABLE
@FIELD
@VERSION
def get(
    out: Output,
    store: Place,
    ids: tuple[int, ...],
    more: tuple[int, ...],
    keys: tuple[str, ...],
    file: str | None,
    table: str | None,
    field: str | None,
    version: int | str | None,
) -> None:
    """Print rows of a table of STORE: the id, the key if there is one, and all elements.

    A row is a line, its cells divided by tabs, every digit that tells its numbers apart. Lines come
    as rows are read. STORE may be written meanwhile; one version is read. It may also be a matrix
    of another program, FILE or FILE::NAME, which is read in place.

    \b
    Examples:
      tierstore get emb.tier 0 17 4711
      tierstore get emb.tier --table word --key the --key "of"
      tierstore get emb.tier --table item --ids ids.txt --field exp_avg | cut -f 1,2
      tierstore get model.safetensors::ple.weight 0 17
    """
    with open_to_read(store, version) as opened:
        chosen = choose_table(opened, table)
        field = choose_field(chosen, field)
        rows = chosen_ids(chosen, ids + more, keys, file)
        if not len(rows) and file is None:
            raise click.UsageError("which rows? Give ids, --key or --ids")
        if out.as_json:
            out.show(rows_data(chosen, field, rows.tolist()))
            return
        for cells in _cells(chosen, field, rows):
            out.cells(cells)


def _cells(table: Table, field: str, rows: npt.NDArray[np.int64]) -> Iterator[list[object]]:
    digits = ".17g" if table.fields[field].dtype == "float64" else ".9g"
    for row in rows_data(table, field, rows.tolist())["rows"]:
        head = [row["id"]] if row["key"] is None else [row["id"], row["key"]]
        cells = [x if isinstance(x, str) else format(x, digits) for x in row["values"]]
        yield [*head, *cells]
