"""Write a table's rows to a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from tierstore import Attached, Store, Table
from tierstore.budget import format_bytes
from tierstore.errors import counted
from tierstore.exporting import export_table
from tierstore.sharing import PartNote, part_file, write_note
from tierstore.sharing import finish as finish_parts
from tierstore_cli import params, stores
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command, given_here
from tierstore_cli.failure import Failure, Unchanged
from tierstore_cli.output import Output
from tierstore_cli.picking import keys_in, picked_ids, picking_options
from tierstore_cli.pipes import FORMAT, STREAM, into_stream, is_standard_output, is_stream
from tierstore_cli.printing import some_rows


@click.command(
    cls=Command,
    was={"--rows": "--range", "--ids": "--ids-from", "--fields": "--field", "--name": "--rename"},
)
@params.READ_STORE
@click.argument("target", metavar="OUT", type=params.PlaceType())
@FORMAT
@params.TABLE
@params.FIELDS
@params.RANGE
@picking_options
@click.option("--since", type=params.VERSION_OF, help="Export rows changed since V.")
@click.option(
    "--if-changed",
    "unless_like",
    type=params.VERSION_OF,
    help="Export only if a row of the table changed since version V.",
)
@click.option("--part", type=params.PART, help="Write part K of N of OUT, counted from 0.")
@click.option("--finish", is_flag=True, help="Make OUT of its parts, once all are written.")
@params.VERSION
@click.option(
    "--dtype", type=params.DTYPE, help="Convert to this element type; default: the stored type."
)
@params.KEYS
@params.MEMORY
@click.option(
    "--header/--no-header",
    default=True,
    help="Whether a text begins with a line of names, or of counts.",
)
@click.option(
    "--rename",
    "names",
    multiple=True,
    metavar="FIELD=NAME",
    help="Another name in OUT, of a field, or with key=NAME of the keys; may be repeated.",
)
@click.option("--skip-damaged", is_flag=True, help="Write damaged rows as NaN.")
@params.FORCE
def export(
    out: Output,
    store: params.Place,
    target: params.Place,
    suffix: str | None,
    table: str | None,
    fields: Sequence[str] | None,
    span: params.Rows | None,
    since: int | str | None,
    unless_like: int | str | None,
    part: params.Share | None,
    finish: bool,
    version: int | str | None,
    dtype: str | None,
    keys: str | None,
    memory: int,
    header: bool,
    names: tuple[str, ...],
    skip_damaged: bool,
    force: bool,
    **named: Any,
) -> None:
    """Write rows of a table to OUT: .npy .npz .safetensors .parquet .vec .txt .bin .zarr .tsv .csv
    .arrow .feather .fvecs .fbin, or .projector, a directory for the embedding projector. Text is
    packed with .gz, .bz2, .xz or .zst after its suffix.

    Rows are streamed, so memory does not grow with the table. The table's keys are written into OUT
    or, where the format has no place for them, beside it: items.keys.npy for items.npy. .vec, .txt,
    .bin, .tsv and .csv number the rows of a table without keys. The export reads one version, and
    STORE may be written meanwhile. OUT may be a pipe, or a URL for fsspec, but not of a
    .projector; - is standard output and needs --format.

    Processes that share an export write one --part of OUT each, with the same --version and
    options; then one runs --finish, which makes a .npy or .safetensors file, or a directory
    of .parquet files, of the parts in OUT.parts. Parts that are missing or differ are an error. A
    part, and --finish, may be run again at any time. If there are no parts left, the exit code is
    10. Parts that go to a URL or a pipe are files of their own.

    Several fields are each a column of a .parquet, .arrow or .feather file, in the narrowest
    element type that holds them all exactly. --rename key=item_id --rename weight=f{} names the
    columns of a .csv item_id, f0, f1, …. --dtype int8 or uint8 writes floats with a scale for
    each row beside them, weight_scale.

    --id, --key, --ids-from, --keys-from and --since write some rows only, with their keys; of a
    table without keys the ids are the keys. Versions that --since and --if-changed compare with
    must be kept, see `tierstore keep`. If nothing has changed, nothing is written and the exit code
    is 10. Keys that were removed are a change for --if-changed alone: a file of --since has the
    rows that are there, and `tierstore diff V --removed` lists the others' keys.

    STORE may also be a matrix of another program, FILE or FILE::NAME, which is read in place.

    \b
    Examples:
      tierstore export emb.tier vectors.npy
      tierstore export emb.tier items.parquet --table item --keys item_ids.txt
      tierstore export emb.tier half.safetensors --table item --dtype float16
      tierstore export emb.tier words.vec --table word --range 0:10000
      tierstore export emb.tier glove.txt.gz --table word --no-header
      tierstore export emb.tier items.parquet --version 812 --part 3/16
      tierstore export emb.tier items.parquet --finish
      tierstore export emb.tier epoch3.npy --version 812 --force
      tierstore export emb.tier vectors.npy --skip-damaged
      tierstore export emb.tier - --format csv --table item | head
      tierstore export emb.tier changed.parquet --since yesterday
      tierstore export emb.tier some.tsv --table item --keys-from wanted.txt
      tierstore export emb.tier trained.parquet --field weight,exp_avg,exp_avg_sq
      tierstore export emb.tier s3://bucket/items.parquet --table item
    """
    target = STREAM if is_standard_output(target) else target
    streamed, to_stdout = is_stream(target), target == STREAM
    if to_stdout and out.as_json:
        raise click.UsageError("rows and --json would both go to standard output")
    if suffix is not None and not streamed:
        raise click.UsageError(
            f"--format is for - and pipes, and {target} is neither: its suffix names the format"
        )
    shared = not streamed and "://" not in str(target)
    if finish:
        more = (fields, span, since, unless_like, part, version, dtype, keys, *named.values())
        if not shared or skip_damaged or given_here("table") or any(more):
            raise click.UsageError("--finish takes a file on a disk and --force, nothing more")
        _finish(out, target, force=force)
        return
    picks = any(value not in (None, ()) for value in named.values())
    if (span is not None) + picks + (since is not None) > 1:
        raise click.UsageError("give one of --range, --since, and rows by id or key")
    if part is not None and (picks or since is not None):
        raise click.UsageError(
            "--part divides all rows, or those of --range: leave rows by id, key or --since out"
        )
    if part is not None and shared and skip_damaged:
        raise click.UsageError("parts with damaged rows make no whole; repair the store first")
    with (
        into_stream(str(target), suffix) if streamed else nullcontext(target) as place,
        stores.open_to_read(store, version) as opened,
        Progress("exporting") as progress,
    ):
        if part is not None and shared:
            target = place = part_file(Path(str(target)), *part)
        version = stores.version_of(opened)
        chosen = stores.choose_table(opened, table)
        written = stores.choose_fields(chosen, fields)
        picked: Any
        if picks:
            picked = picked_ids(chosen, **named)
        elif since is not None:
            picked = _changed(opened, chosen, since)
            if not picked.size:  # keys were removed, which a file of rows cannot tell
                raise _unchanged(chosen, since)
        else:
            picked = stores.choose_rows(chosen, span, part)
        if unless_like is not None:
            _changed(opened, chosen, unless_like)
        done = export_table(
            chosen,
            place,
            field=written,
            rows=picked,
            dtype=dtype,
            keys=None if keys is None else keys_in(keys, memory),
            memory=memory,
            names=dict(_renaming(each) for each in names),
            header=header,
            force=force or (part is not None and shared),
            damaged="skip" if skip_damaged else "raise",
            progress=progress,
        )
        if part is not None and shared:
            write_note(
                done.path,
                PartNote(
                    store=opened.uuid if isinstance(opened, Store) else params.full_name(store),
                    version=version,
                    table=chosen.name,
                    fields=written,
                    dtype=done.dtype,
                    dim=done.dim,
                    keyed=keys is not None or chosen.keys is not None,
                    all_rows=list(stores.choose_rows(chosen, span)),
                    rows=list(picked),
                    overflowed=done.overflowed,
                ),
            )
    data = {
        "store": params.full_name(store),
        "version": version,
        "table": chosen.name,
        "fields": written,
        "out": params.full_name(target),
        **dataclasses.asdict(done),
    }
    for name in ("path", *([] if skip_damaged else ["skipped"])):
        del data[name]
    if done.skipped:
        out.note(f"Warning: {some_rows(chosen.name, done.skipped)} and NaN in {target}")
    for note in done.notes:
        out.note(f"Note: {'the keys are not written: a stream is one file' if streamed else note}")
    if to_stdout:
        return
    shape = f"{counted(done.rows, 'row')} of {done.dim} {done.dtype}"
    out.show(data, f"wrote {target}: {shape}, {format_bytes(done.bytes)}")


def _finish(out: Output, target: params.Place, *, force: bool) -> None:
    """Make a target of its parts."""
    path = Path(str(target))
    try:
        with Progress("putting parts together") as progress:
            whole = finish_parts(path, force=force, progress=progress)
    except FileNotFoundError:
        if not path.exists():
            raise Failure(f"{target} has no parts; write them with --part") from None
        raise Unchanged(f"{target} has no parts left to put together; nothing written") from None
    rows = whole.all_rows[1] - whole.all_rows[0]
    data = {"out": params.full_name(target), **dataclasses.asdict(whole), "rows": rows}
    for name in ("store", "keyed", "all_rows"):
        del data[name]
    out.show(data, f"wrote {target}: {counted(rows, 'row')} of {whole.dim} {whole.dtype}")


def _renaming(text: str) -> tuple[str, str]:
    field, equals, name = text.partition("=")
    if not equals:
        raise click.UsageError(f"--rename is FIELD=NAME, not {text!r}")
    return field, name


def _changed(store: Store | Attached, table: Table, since: int | str) -> npt.NDArray[np.int64]:
    """Return the rows of a table that changed since a version, none if it only lost some.

    Raises Unchanged where it is the same.
    """
    if isinstance(store, Attached):
        raise click.UsageError("a file has no versions; leave --since and --if-changed out")
    changed = store.changed(since).get(table.name)
    if changed is None:
        raise _unchanged(table, since)
    return changed


def _unchanged(table: Table, since: int | str) -> Unchanged:
    return Unchanged(f"no row of {table.name} changed since version {since}; nothing written")
