"""`tierstore init`: make a store, or add a table to one."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

import tierstore
from tierstore.budget import format_bytes
from tierstore.errors import InvalidInputError, InvalidTypeError, NotAStoreError
from tierstore.spec import BACKENDS, Field
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import DTYPE, STORE, InitLaw, LawOfSeed, State, StateField
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@STORE
@click.option("--rows", type=click.IntRange(min=1), required=True, help="Number of rows.")
@click.option("--dim", type=click.IntRange(min=1), required=True, help="Elements of a row.")
@click.option("--table", default="embeddings", show_default=True, metavar="NAME", help="Its name.")
@click.option("--dtype", type=DTYPE, default="float32", show_default=True, help="Of the elements.")
@click.option(
    "--init", "law", type=InitLaw(), default="zeros", show_default=True, help="First values."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    default=0,
    show_default=True,
    help="Of random laws.",
)
@click.option(
    "--state", type=State(), multiple=True, help="Optimizer state kept beside each row; repeatable."
)
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="memmap",
    show_default=True,
    help="Kind of base file.",
)
@click.option("--sparse", is_flag=True, help="Reserve no disk space until rows are written.")
@click.option("--dry-run", is_flag=True, help="Only say how large it would be.")
def init(
    out: Output,
    store: Path,
    rows: int,
    dim: int,
    table: str,
    dtype: str,
    law: LawOfSeed,
    seed: int,
    state: tuple[list[StateField], ...],
    backend: str,
    sparse: bool,
    dry_run: bool,
) -> None:
    """Make a store at STORE, or add a table to the store that is there.

    Disk space for all rows is reserved at once, so that a full disk is an error here and not in
    the middle of training. Nothing that exists is ever replaced.

    \b
    Examples:
      tierstore init emb.tier --rows 1000000 --dim 128
      tierstore init emb.tier --rows 1e6 ... is refused: write whole numbers
      tierstore init emb.tier --table item --rows 10000000 --dim 64 --init "normal(0,0.01)" --seed 7
      tierstore init emb.tier --table user --rows 5000 --dim 64 --state adam --dtype bfloat16
      tierstore init emb.tier --rows 5000 --dim 64 --state sum:float32:1 --dry-run

    \b
    State, by the names of torch.optim:
      adam adamw nadam radam sparse_adam: exp_avg exp_avg_sq   amsgrad: and max_exp_avg_sq
      adagrad: sum   rowwise_adagrad: sum of dim 1   rmsprop: square_avg   adamax: exp_avg exp_inf
      sgd-momentum: momentum_buffer   adadelta: square_avg acc_delta
      NAME[:DTYPE[:DIM]]: any other field; dtype and dim are the weight's where left out
    """
    try:
        fields = {"weight": Field(dim, dtype, law(seed))}
        for wanted in (each for group in state for each in group):
            if wanted.name in fields:
                raise click.UsageError(f"the record would have two fields named {wanted.name!r}")
            fields[wanted.name] = wanted.beside(fields["weight"])
        spec = tierstore.TableSpec(rows, fields=fields, backend=backend, sparse=sparse)
    except (InvalidInputError, InvalidTypeError) as error:
        raise click.UsageError(str(error)) from None

    ...
