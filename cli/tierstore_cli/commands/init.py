"""Create a store, or add a table to one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click

import tierstore
from tierstore.budget import format_bytes
from tierstore.errors import (
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    NotAStoreError,
    StoreFullError,
    counted,
)
from tierstore.initializers import Initializer, Random, zeros
from tierstore.machine import examine_storage
from tierstore.spec import BACKENDS, Field, TableSpec, check_name
from tierstore_cli import params
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.stores import NO_CACHE, allow_untested, makes, open_store

CHECKSUM_BYTES = 4


@click.command(cls=Command, writes="STORE", was={"--keys": "--by-key"})
@params.STORE
@click.option("--rows", type=params.COUNT_OF, help="Number of rows; may be left out with --by-key.")
@click.option("--dim", type=params.COUNT_OF, required=True, metavar="D", help="Elements per row.")
@click.option("--table", default="embeddings", metavar="NAME", help="Name of the table.")
@click.option("--dtype", type=params.DTYPE, default="float32", help="Element type.")
@params.init_option("First values; default: zeros.")
@params.state_option("Optimizer state stored with each row, see below; repeatable.")
@click.option("--backend", type=click.Choice(BACKENDS), default="memmap", help="Base file.")
@click.option(
    "--sparse",
    is_flag=True,
    help="Allocate disk space only when rows are written; rows start as zeros.",
)
@click.option(
    "--by-key",
    "kind",
    type=click.Choice(("int64", "text")),
    help="Look rows up by keys of this kind; --rows is how many keys there can be. Without it the "
    "table grows as keys arrive.",
)
@click.option("--track-uses", is_flag=True, help="Keep the uses of each key, for `expire`.")
@click.option(
    "--admit-after",
    type=params.COUNT_OF,
    help="Give a key its row with its use N in training.",
)
@params.dry_run_option("Only print the size")
def init(
    out: Output,
    store: Path,
    rows: int | None,
    dim: int,
    table: str,
    dtype: str,
    initializer: params.SeededInitializer | None,
    seed: int | None,
    state: tuple[list[params.StateField], ...],
    backend: str,
    sparse: bool,
    kind: Literal["int64", "text"] | None,
    track_uses: bool,
    admit_after: int | None,
    dry_run: bool,
) -> None:
    """Create a store at STORE, or add a table to an existing store.

    Reserves disk space for every row, so that a full disk is an error here and not during training.
    Never replaces existing data; an empty directory becomes the store.

    \b
    Examples:
      tierstore init emb.tier --rows 1000000 --dim 128
      tierstore init emb.tier --rows 10M --dim 64 --init "normal(0,0.01)" --seed 7
      tierstore init emb.tier --table user --rows 5000 --dim 64 --state adam --dtype bfloat16
      tierstore init emb.tier --table user --dim 64 --by-key int64 --init "normal(0,0.01)"
      tierstore init emb.tier --table word --dim 64 --by-key text --track-uses
      tierstore init emb.tier --table item --rows 5000 --dim 64 --state sum:float32:1 --dry-run

    \b
    State, by the names of torch.optim:
      adam adamw nadam radam sparse_adam   exp_avg exp_avg_sq
      amsgrad                              exp_avg exp_avg_sq max_exp_avg_sq
      adamax                               exp_avg exp_inf
      adagrad, rowwise_adagrad             sum; one element if row-wise
      rmsprop                              square_avg
      adadelta                             square_avg acc_delta
      sgd-momentum                         momentum_buffer
      NAME[:DTYPE[:DIM]]                   any field; DTYPE and DIM default to the weight's;
                                           field:NAME where NAME is like one of the above
    adam:bfloat16 is that of TieredOptimizer(..., state_dtype="bfloat16"), likewise the others,
    and adam:float8.
    """
    by_key = {"keys": kind, "track_uses": track_uses, "admit_after": admit_after}
    if rows is not None:
        by_key["rows"] = rows
    elif kind is None:
        raise click.UsageError("Missing option '--rows'.")
    first = params.seeded(initializer, seed) or zeros()
    if seed is not None and not isinstance(first, Random):
        raise click.UsageError(
            "--seed starts random values, which --init normal(0,0.01) has: give such an --init"
        )
    spec = _spec((dim, dtype, first), state, backend, table, sparse, by_key)
    if os.path.islink(store) and not os.path.exists(store):
        raise NotAStoreError(f"{store} is a link that leads nowhere; remove it or name another")
    exists = os.path.lexists(store) and not _is_empty(store)
    disk_bytes = spec.nbytes + CHECKSUM_BYTES * spec.rows
    free_bytes = examine_storage(store).free_bytes
    if disk_bytes > free_bytes and _reserves(spec) and not dry_run:
        raise _too_large(store, disk_bytes, free_bytes)
    with Progress("writing") as progress:
        version = _make(store, exists, table, spec, progress, dry_run=dry_run)

    data = {
        "store": params.full_name(store),
        "created": not exists,
        "dry_run": dry_run,
        "version": version,
        "table": table,
        "rows": spec.rows,
        "grows": spec.grows,
        "dim": dim,
        "dtype": dtype,
        "fields": [
            {"name": name, "dim": field.dim, "dtype": field.dtype}
            for name, field in spec.fields.items()
        ],
        "backend": backend,
        "record_bytes": spec.layout.record_bytes,
        "disk_bytes": disk_bytes,
        "free_bytes": free_bytes,
    }
    verb = "would make" if dry_run else "made"
    size = f"{spec.layout.record_bytes} B per row, {format_bytes(disk_bytes)}"
    fields = " ".join(f"{name}[{field.dim}]" for name, field in spec.fields.items())
    count = f"{'at first ' if spec.grows else ''}{counted(spec.rows, 'row')}"
    out.show(data, f"{verb} {store}: table {table}, {count} of {fields}, {size}")
    if disk_bytes > free_bytes and _reserves(spec):
        raise _too_large(store, disk_bytes, free_bytes)


def _reserves(spec: TableSpec) -> bool:
    """Whether a new table takes the space of every row; chunks are packed as they are written."""
    return spec.backend == "memmap" and not spec.sparse


def _too_large(store: Path, needed: int, free: int) -> StoreFullError:
    return StoreFullError(
        f"{store} would not fit: it takes {format_bytes(needed)}, and {format_bytes(free)} are "
        "free; free some space, or let rows take it when they are written (--sparse)"
    )


def _spec(
    weight: tuple[int, str, Initializer],
    state: tuple[list[params.StateField], ...],
    backend: str,
    table: str,
    sparse: bool,
    by_key: dict[str, Any],
) -> TableSpec:
    """Return the table's spec; conflicting options are a usage error."""
    try:
        check_name(table)
        fields = params.with_state(Field(*weight), state)
        return TableSpec(fields=fields, backend=backend, sparse=sparse, **by_key)
    except (InvalidInputError, InvalidTypeError) as error:
        raise click.UsageError(str(error)) from None


def _make(
    store: Path,
    exists: bool,
    table: str,
    spec: TableSpec,
    progress: Progress,
    *,
    dry_run: bool,
) -> int | None:
    """Create the store or the table; return its first version, or None for a dry run."""
    if exists:
        mode: Literal["r", "r+"] = "r" if dry_run else "r+"
        with open_store(store, mode) as opened:
            if table in opened:
                raise ExistsError(f"{store} already has a table {table!r}; choose another --table")
            if not dry_run:
                opened.create_table(table, spec, progress=progress)
            return None if dry_run else opened.version
    if dry_run:
        return None
    makes(store)
    with (
        _making_way(store),
        tierstore.create(
            store,
            {table: spec},
            progress=progress,
            budget=NO_CACHE,
            allow_untested=allow_untested(),
        ) as made,
    ):
        return made.version


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and next(path.iterdir(), None) is None


@contextmanager
def _making_way(path: Path) -> Iterator[None]:
    """Remove an empty directory; a store with the same mode replaces it."""
    mode = path.stat().st_mode if path.exists() else None
    if mode is not None:
        path.rmdir()
    try:
        yield
    finally:
        if mode is not None:
            path.mkdir(exist_ok=True)
            path.chmod(stat.S_IMODE(mode))
