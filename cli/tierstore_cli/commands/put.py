"""Write the values of one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from tierstore.errors import counted
from tierstore.spec import Field
from tierstore_cli.command import Command
from tierstore_cli.numbers import numbers_in
from tierstore_cli.output import Output
from tierstore_cli.params import FIELD, IDS, KEY, STORE, TABLE
from tierstore_cli.picking import add_key, one_row, picked_ids
from tierstore_cli.pipes import STREAM, standard_input
from tierstore_cli.stores import changing, choose_field, choose_table


@click.command(cls=Command, writes="STORE", context_settings={"ignore_unknown_options": True})
@STORE
@click.argument("values", metavar="VALUE...", nargs=-1, required=True)
@IDS
@KEY
@TABLE
@FIELD
def put(
    out: Output,
    store: Path,
    values: tuple[str, ...],
    by_id: tuple[int, ...],
    by_key: tuple[str, ...],
    table: str | None,
    field: str | None,
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
    one_row(by_id, by_key)
    vector = numbers_in(_piped() if values == (STREAM,) else " ".join(values))
    with changing(out, store, "writing") as change:
        chosen = choose_table(change.store, table)
        field = choose_field(chosen, field)
        if vector.size != (dim := chosen.fields[field].dim):
            raise click.UsageError(
                f"{counted(vector.size, 'value')}; {field} has {counted(dim, 'element')}"
            )
        rows = _held(vector, chosen.fields[field])[None]
        for key in by_key:
            add_key(chosen, key, field)
        (row,) = map(int, picked_ids(chosen, by_id, by_key))
        chosen.by_row.write([row], rows, field)
        change.store.commit()
        what = f"row {row}" if by_id else f"key {by_key[0]}, row {row},"
        text = f"wrote {what} of table {chosen.name}, field {field}"
        change.done(text, table=chosen.name, field=field, id=row)


def _piped() -> str:
    """Return the text on standard input; other bytes become signs that are no number."""
    return b"".join(standard_input()).decode(errors="replace")


def _held(vector: npt.NDArray[np.float64], item: Field) -> npt.NDArray[Any]:
    """Return numbers in the type that a field is written in; raises UsageError for unfit ones."""
    element = item.element
    stored = element.encode(vector)
    if element.overflowed(vector, stored):
        wrong = next(x for x in vector if element.overflowed(x[None], element.encode(x[None])))
        why = "has no NaN" if np.isnan(wrong) else f"cannot hold {wrong:.9g}"
        raise click.UsageError(f"VALUE: {item.dtype}, the element type of the field, {why}")
    whole = element.decode(stored) == vector
    if element.integer and not whole.all():
        wrong = vector[~whole][0]
        raise click.UsageError(f"VALUE: {item.dtype} holds whole numbers, not {wrong:.9g}")
    with np.errstate(over="ignore"):
        return vector.astype(element.numpy)
