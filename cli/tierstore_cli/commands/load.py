"""Load rows from a file into a table."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import click

from tierstore import Store
from tierstore.errors import counted
from tierstore.importing import (
    ImportResult,
    Preview,
    import_table,
    in_order_of_numbers,
    preview,
)
from tierstore_cli import params
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.output import Grid, Output
from tierstore_cli.picking import keys_in
from tierstore_cli.pipes import FORMAT, as_file, is_stream
from tierstore_cli.stores import allow_untested, awaited, makes, open_store


@click.command(cls=Command, writes="STORE")
@params.STORE
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@FORMAT
@params.TABLE
@params.FIELDS
@params.KEYS
@click.option(
    "--dtype", type=params.DTYPE, help="Element type of a new table; default: of the file."
)
@params.text_options
@click.option(
    "--duplicates",
    type=click.Choice(["error", "first", "last"]),
    default="error",
    help="Which row stays of those with equal keys.",
)
@click.option(
    "--upsert", is_flag=True, help="Replace the rows of the keys in SRC, append those that are new."
)
@click.option(
    "--expand",
    is_flag=True,
    help="Take a file that holds less than a 200th of what it claims: sparse, or all zeros.",
)
@params.dry_run_option("Show what would be read, and the first rows")
@params.MEMORY
def load(
    out: Output,
    store: Path,
    sources: tuple[str, ...],
    suffix: str | None,
    table: str | None,
    fields: Sequence[str] | None,
    keys: str | None,
    memory: int,
    dry_run: bool,
    **options: Any,
) -> None:
    """Load the rows of SRC into a table of STORE, replacing all rows of the table.

    In a table by key, the rows of SRC's keys are added or replaced, and the others stay.

    SRC is a .npy .npz .safetensors .pt .pth .ckpt .parquet .arrow .arrows .feather .h5 .vec .txt
    .bin .zarr .csv .tsv .jsonl .fvecs or .fbin file, the .json index of a model in several files,
    or a directory of .parquet or .arrow files, as Hugging Face saves data sets. FILE:NAME selects
    one of several arrays. SRC may be a URL for fsspec, from which all but a .zarr is copied to a
    temporary file. Several files are read as one, whose rows follow each other in the order given;
    files as a shell lists them, rows-10.npy before rows-2.npy, in the order of their numbers.
    - is standard input, which like a pipe needs --format. A missing store or table
    is created with the shape and element type of the file. Other fields of the table do not change.

    Several fields are each the array or column of its name, as export writes them.

    With --upsert, only rows of the keys in SRC are written; for a table without keys, the keys are
    row ids. New keys get a row in a table by key, and are appended to another.

    Files in text may be packed: .csv.gz, .vec.bz2, .csv.xz, .tsv.zst, or alone in a .zip. Their
    header, keys, separator and decimal mark are found by the types of their cells; what was found
    is said on stderr. What can be read in two ways is refused, with the options that decide it.

    \b
    Examples:
      tierstore load emb.tier vectors.npy
      tierstore load emb.tier model.safetensors:encoder.weight --table item
      tierstore load emb.tier glove.txt --table word
      tierstore load emb.tier moments.npy --table item --field exp_avg
      tierstore load emb.tier trained.parquet --field weight,exp_avg,exp_avg_sq
      tierstore load emb.tier rows.npy --table item --keys keys.txt
      curl -s https://example.org/words.vec.gz | tierstore load emb.tier - --format vec.gz
      tierstore load emb.tier items.csv.gz --key-column item_id --dry-run
      tierstore load emb.tier today.parquet --table item --upsert
      tierstore load emb.tier rows-*.npy
    """
    ordered = in_order_of_numbers(sources)
    if ordered != list(sources):
        out.note(f"Note: read in the order of the numbers in their names: {', '.join(ordered)}")
    source: str | list[str] = ordered[0] if len(ordered) == 1 else ordered
    with ExitStack() as files:
        places = [files.enter_context(as_file(each, suffix)) for each in ordered]
        file = places[0] if len(places) == 1 else places
        if dry_run:
            del options["duplicates"], options["upsert"]
            _show_first(out, file, field=fields, memory=memory, **options)
            return
        names: Any = keys_in(keys, memory) if keys and is_stream(keys) else keys

        def work() -> ImportResult:
            with _opened(store) as opened, Progress("loading") as progress:
                return import_table(
                    opened,
                    file,
                    table=table,
                    field=fields,
                    keys=names,
                    memory=memory,
                    allow_untested=allow_untested(),
                    progress=progress,
                    **options,
                )

        done = awaited(work)  # another process may make the store meanwhile, and have it open
    say_reading(out, done)
    data = {"store": params.full_name(store), "source": source, **dataclasses.asdict(done)}
    into = f"{'made' if done.created else 'loaded'} table {done.table}, field {done.field}"
    shape = f"{counted(done.rows, 'row')} of {done.dim} {done.dtype}"
    shape += ", with keys" if done.keys else ""
    if done.added:
        shape += f", {done.added:,} of them new"
    out.show(data, f"{into}: {shape}; {store} is now at version {done.version}")


def _opened(store: Path) -> AbstractContextManager[Store | Path]:
    """Open a store for writing; a path where none is yet stays one, and gets a new store."""
    if os.path.lexists(store):
        return open_store(store, "r+")
    makes(store)
    return nullcontext(store)


SHOWN = 6
"""Elements of a row that a dry run shows."""


def say_reading(out: Output, done: ImportResult | Preview) -> None:
    """Report on stderr how a text was read, and what was left out, kept or narrowed."""
    if done.read_as is not None:
        out.note(f"read as: {done.read_as}")
    for note in done.notes:
        out.note(f"Note: {note}")


def _show_first(out: Output, source: str | list[str], **options: Any) -> None:
    """Show what a load would read."""
    seen = preview(source, **options)
    say_reading(out, seen)
    first = seen.first.tolist()
    more = ["…"] if seen.dim > SHOWN else []
    rows = [
        [key, *(f"{value:.9g}" for value in row[:SHOWN]), *more]
        for key, row in zip(seen.keys or range(len(first)), first, strict=True)
    ]
    out.show(
        {"source": source, **dataclasses.asdict(seen), "first": first},
        f"{counted(seen.rows, 'row')} of {seen.dim} {seen.dtype}; nothing was loaded",
        Grid((), rows),
    )
