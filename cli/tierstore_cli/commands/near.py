"""Find the rows nearest to a row."""

from __future__ import annotations

from typing import Any, Literal

import click
import numpy as np

from tierstore import Store, Table
from tierstore.errors import RowIndexError
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_field, choose_table, open_to_read
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import FIELD, READ_STORE, ROW_ID, TABLE, VERSION, Count, Place, full_name
from tierstore_cli.picking import chosen_ids


@click.command(cls=Command)
@READ_STORE
@click.option("--key", metavar="KEY", help="The row by its key.")
@click.option("--id", "row", type=ROW_ID, metavar="N", help="The row by its id.")
@click.option(
    "-k", "count", type=Count(), default="10", show_default=True, help="How many rows to find."
)
@click.option(
    "--by",
    type=click.Choice(["cosine", "dot"]),
    default="cosine",
    show_default=True,
    help="What to rank by.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Where to multiply: cpu, cuda, cuda:1, or auto for a GPU if there is one.",
)
@TABLE
@FIELD
@VERSION
def near(
    out: Output,
    store: Place,
    key: str | None,
    row: int | None,
    count: int,
    by: Literal["cosine", "dot"],
    device: str,
    table: str | None,
    field: str | None,
    version: int | str | None,
) -> None:
    """Find the rows of a table of STORE that are most similar to one of its rows.

    The result is exact: every row is read once and compared in float32, with memory for a few
    blocks of rows, here and on a GPU. The row itself is left out. STORE may be written meanwhile;
    one version is read. It may also be a matrix of another program, FILE or FILE::NAME, which is
    read in place.

    \b
    Examples:
      tierstore near emb.tier --table word --key paris
      tierstore near emb.tier --id 4711 -k 100 --by dot
      tierstore near emb.tier --table word --key paris --json | jq '.near[].key'
    """
    if (row is None) == (key is None):
        raise click.UsageError("which row? Give --key or --id")
    with open_to_read(store, version, device=device) as opened:
        chosen = choose_table(opened, table)
        field = choose_field(chosen, field)
        if not chosen.rows:
            raise RowIndexError(f"table {chosen.name!r} has no rows")
        ids = chosen_ids(chosen, [] if row is None else [row], [] if key is None else [key])
        query = chosen.by_row.read(ids, field, cache=False)
        scores, found = chosen.topk(query, min(count, chosen.rows), field, exclude=[ids], metric=by)
        rows = _rows(chosen, scores[0], found[0])
        data = {
            "store": full_name(store),
            "version": opened.version if isinstance(opened, Store) else None,
            "table": chosen.name,
            "field": field,
            "id": int(ids[0]),
            "by": by,
            "device": chosen.device,
            "near": rows,
        }
    keyed = any(each["key"] is not None for each in rows)
    grid = [
        [each["id"], *([each["key"]] if keyed else []), f"{each['score']:.6f}"] for each in rows
    ]
    headers = ["ROW", *(["KEY"] if keyed else []), by.upper()]
    out.show(data, Grid(headers, grid, right=frozenset({0, len(headers) - 1})))


def _rows(table: Table, scores: Any, ids: Any) -> list[dict[str, Any]]:
    scores, ids = scores[ids >= 0], ids[ids >= 0]
    keys = [None] * len(ids) if table.keys is None else np.asarray(table.keys[ids]).tolist()
    return [
        {"id": row, "key": key, "score": score}
        for row, key, score in zip(ids.tolist(), keys, scores.tolist(), strict=True)
    ]
