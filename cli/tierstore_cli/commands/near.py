"""Find the rows nearest to rows or vectors."""

from __future__ import annotations

from typing import Any, Literal

import click
import numpy as np
import numpy.typing as npt

from tierstore import Table
from tierstore.errors import RowIndexError, counted
from tierstore.importing import preview
from tierstore_cli.command import Command
from tierstore_cli.numbers import numbers_in
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import COUNT_OF, FIELD, READ_STORE, TABLE, VERSION, Place, full_name
from tierstore_cli.picking import picked_ids, picking_options
from tierstore_cli.pipes import FORMAT, as_file
from tierstore_cli.shown_rows import keys_of
from tierstore_cli.stores import choose_field, choose_table, open_to_read, version_of


@click.command(cls=Command)
@READ_STORE
@picking_options
@click.option("--values", metavar="NUMBERS", help="Rows near a vector: as `put` takes them.")
@click.option(
    "--values-from", metavar="FILE", help="Rows near each vector of a file that `load` reads."
)
@FORMAT
@click.option("-k", "count", type=COUNT_OF, default="10", help="How many rows to find.")
@click.option(
    "--by",
    type=click.Choice(["cosine", "dot"]),
    default="cosine",
    help="What to rank by.",
)
@click.option(
    "--device",
    default="auto",
    metavar="NAME",
    help="Where to multiply: cpu, cuda, cuda:1, or auto for a GPU if there is one.",
)
@TABLE
@FIELD
@VERSION
def near(
    out: Output,
    store: Place,
    values: str | None,
    values_from: str | None,
    suffix: str | None,
    count: int,
    by: Literal["cosine", "dot"],
    device: str,
    table: str | None,
    field: str | None,
    version: int | str | None,
    **named: Any,
) -> None:
    """Find the rows of a table of STORE that are most similar to some of its rows, or to vectors.

    The result is exact: every row is read once, however many are asked about, and compared in
    float32, with memory for a few blocks of rows, here and on a GPU. A row itself is left out of
    what is near it. Similar to a row of zeros, or with a NaN, is none: a note says so. STORE may be
    written meanwhile; one version is read. It may also be a matrix of another program, FILE or
    FILE::NAME, which is read in place.

    With --json, "queries" has an object for each row or vector, in this order: of --id, --key,
    --ids-from, --keys-from, --values, --values-from; the rows of a single one are "near", too.

    \b
    Examples:
      tierstore near emb.tier --table word --key paris
      tierstore near emb.tier --id 4711 -k 100 --by dot
      tierstore near emb.tier --table word --keys-from words.txt
      tierstore near emb.tier --table word --values "0.1 0.2 -0.3"
      tierstore near emb.tier --table word --values-from queries.npy --json
    """
    with open_to_read(store, version, device=device) as opened:
        chosen = choose_table(opened, table)
        field = choose_field(chosen, field)
        if not chosen.rows:
            raise RowIndexError(f"table {chosen.name!r} has no rows")
        ids = picked_ids(chosen, **named)
        vectors = _vectors(chosen.fields[field].dim, values, values_from, suffix)
        if not ids.size + len(vectors):
            raise click.UsageError("near what? Give --key, --id, --values, or a file of these")
        rows = chosen.by_row.read(ids, field, cache=False)
        queries = np.concatenate([rows, vectors.astype(rows.dtype)]) if len(vectors) else rows
        left_out = [*ids[:, None], *(np.empty(0, np.int64) for _ in vectors)]
        most = min(count, chosen.rows)
        scores, nearest = chosen.topk(queries, most, field, exclude=left_out, metric=by)
        of = [*zip(ids.tolist(), keys_of(chosen, ids), strict=True), *[(None, None)] * len(vectors)]
        answers = [
            {"id": row, "key": key, "near": _rows(chosen, *best)}
            for (row, key), *best in zip(of, scores, nearest, strict=True)
        ]
        data = {
            "store": full_name(store),
            "version": version_of(opened),
            "table": chosen.name,
            "field": field,
            "by": by,
            "device": chosen.device,
            "queries": answers,
        }
        if len(answers) == 1:  # as programs know it that ask about one row
            data |= {"id": answers[0]["id"], "near": answers[0]["near"]}
        keyed = chosen.keys is not None
    out.show(data, _grid(answers, keyed, by))
    if empty := int((~queries.any(axis=1) | np.isnan(queries).any(axis=1)).sum()):
        out.note(f"Note: nothing is near {counted(empty, 'vector')} of zeros, or with a NaN")


def _vectors(
    dim: int, values: str | None, file: str | None, suffix: str | None
) -> npt.NDArray[np.float32]:
    """Return the vectors that are asked about, written in the shell and in a file."""
    vectors = [np.empty((0, dim), np.float32)]
    if values is not None:
        vectors.append(numbers_in(values, "--values")[None].astype(np.float32))
    if file is not None:
        with as_file(file, suffix) as place:
            vectors.append(preview(place, rows=max(1, preview(place).rows)).first)
    for each in vectors:
        if each.shape[1] != dim:
            raise click.UsageError(
                f"{counted(each.shape[1], 'value')}; the field has {counted(dim, 'element')}"
            )
    return np.concatenate(vectors)


def _rows(table: Table, scores: Any, ids: Any) -> list[dict[str, Any]]:
    scores, ids = scores[ids >= 0], ids[ids >= 0]
    return [
        {"id": row, "key": key, "score": score}
        for row, key, score in zip(ids.tolist(), keys_of(table, ids), scores.tolist(), strict=True)
    ]


def _grid(answers: list[dict[str, Any]], keyed: bool, by: str) -> Grid:
    """Return the rows of all answers; of several, with what each is near."""
    lines: list[list[object]] = []
    for number, each in enumerate(answers):
        of = each["key"] if each["key"] is not None else each["id"]
        head = [] if len(answers) == 1 else [f"vector {number}" if of is None else of]
        for row in each["near"]:
            named = [row["id"], row["key"]] if keyed else [row["id"]]
            lines.append([*head, *named, f"{row['score']:.6f}"])
    head = ["NEAR"] * (len(answers) > 1)
    headers = [*head, "ROW", *(["KEY"] if keyed else []), by.upper()]
    return Grid(headers, lines, right=frozenset({len(head), len(headers) - 1}))
