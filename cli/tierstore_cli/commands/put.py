"""Write the values of one row."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from tierstore.errors import counted
from tierstore.spec import Field
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
        rows = _held(vector, chosen.fields[field])[None]
        if key is not None:
            add_key(chosen, key, field)
        (number,) = chosen_ids(chosen, [] if row is None else [row], [] if key is None else [key])
        chosen.by_row.write([number], rows, field)
        version = opened.commit()
        name = chosen.name
    data = {
        "store": os.path.abspath(store),
        "table": name,
        "field": field,
        "id": int(number),
        "version": version,
    }
    out.show(
        data,
        f"wrote row {number} of table {name}, field {field}; {store} is now at version {version}",
    )


def _given() -> str:
    """Return the text on standard input; other bytes become signs that are no number."""
    return b"".join(standard_input()).decode(errors="replace")


def _held(vector: npt.NDArray[np.float64], item: Field) -> npt.NDArray[Any]:
    """Return numbers in the type that a field is written in; raises UsageError for unfit ones."""
    element = item.element
    stored = element.encode(vector)
    if element.overflowed(vector, stored):
        raise click.UsageError(f"a value is too large for {item.dtype}, or NaN, which it lacks")
    if element.integer and (element.decode(stored) != vector).any():
        raise click.UsageError(f"{item.dtype} holds whole numbers")
    with np.errstate(over="ignore"):
        return vector.astype(element.numpy)


def _numbers(text: str) -> npt.NDArray[np.float64]:
    words = re.findall(r"[^\s,]+", text)
    if not words:
        raise click.UsageError("VALUES are numbers: there are none")
    try:
        found = np.array([float(word) for word in words], np.float64)
    except ValueError as error:
        raise click.UsageError(f"VALUES are numbers: {error}") from None
    for word, number in zip(words, found, strict=True):
        if not word.isascii() or "_" in word:  # which Python takes, and `load` does not
            raise click.UsageError(f"VALUES are numbers: {word!r} is none")
        if np.isinf(number) and any(map(str.isdigit, word)):
            raise click.UsageError(f"{word} is too large for float64")
    return found
