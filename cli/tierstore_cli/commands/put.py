"""Write the values of one row."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from tierstore.errors import counted
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_field, choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import FIELD, ROW_ID, STORE, TABLE, UNTESTED
from tierstore_cli.picking import add_key, chosen_ids
from tierstore_cli.streams import STREAM, standard_input


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@STORE
@click.argument("values", metavar="VALUE...", nargs=-1, required=True)
@click.option("--id", "row", type=ROW_ID, metavar="N", help="The row by its id.")
@click.option("--key", metavar="KEY", help="The row by its key.")
@TABLE
@FIELD
@UNTESTED
def put(
    out: Output,
    store: Path,
    values: tuple[str, ...],
    row: int | None,
    key: str | None,
    table: str | None,
    field: str | None,
    allow_untested: bool,
) -> None:
    """Write VALUES over a row of a table of STORE, in a commit of its own.

    VALUES are numbers, one for each element, divided by spaces, commas or tabs, in one argument or
    several; - reads them from standard input. Other fields of the row are kept. Values that the
    element type cannot hold are refused. In a table by key, a key without a row gets one. No other
    process may have STORE open for writing.

    \b
    Examples:
      tierstore put emb.tier --table item --id 17 0.5 -0.25 1e-3 0
      tierstore put emb.tier --table word --key the "0.5, -0.25, 1e-3, 0"
      tierstore get emb.tier 3 | cut -f 2- | tierstore put emb.tier --id 4 -
    """
    if (row is None) == (key is None):
        raise click.UsageError("which row? Give --id or --key")
    vector = _numbers(_given() if values == (STREAM,) else " ".join(values))
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        chosen = choose_table(opened, table)
        field = choose_field(chosen, field)
        if vector.size != (dim := chosen.fields[field].dim):
            raise click.UsageError(
                f"{counted(vector.size, 'value')}; {field} has {counted(dim, 'element')}"
            )
        if key is not None:
            add_key(chosen, key, field)
        (number,) = chosen_ids(chosen, [] if row is None else [row], [] if key is None else [key])
        before = chosen.by_row.read([number], field)
        with np.errstate(over="ignore"):
            chosen.by_row.write([number], vector.astype(before.dtype)[None], field)
        if np.isinf(chosen.by_row.read([number], field)).sum() > np.isinf(vector).sum():
            opened.rollback()
            raise click.UsageError(f"a value is too large for {chosen.fields[field].dtype}")
        version = opened.commit()
        name = chosen.name
    data = {
        "store": os.path.abspath(store),
        "table": name,
        "field": field,
        "id": int(number),
        "version": version,
    }
    out.show(data, f"wrote row {number} of {name} {field}; {store} is now at version {version}")


def _given() -> str:
    """Return the text on standard input; other bytes become signs that are no number."""
    return b"".join(standard_input()).decode(errors="replace")


def _numbers(text: str) -> npt.NDArray[np.float64]:
    words = re.findall(r"[^\s,]+", text)
    if not words:
        raise click.UsageError("VALUES are numbers: there are none")
    try:
        return np.array([float(word) for word in words], np.float64)
    except ValueError as error:
        raise click.UsageError(f"VALUES are numbers: {error}") from None
