"""Options of `simulate` and `plan`: how a file becomes batches of ids, and how to replay them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tierstore_cli.params import COUNT_OF, MEMORY, FiniteRange, Spelled, whole_number

Function = TypeVar("Function", bound=Callable[..., Any])


def _tier_size(text: str) -> int | float:
    """Return a number of rows as int, a percentage as float in 0..1."""
    try:
        size = float(text[:-1]) / 100 if text.endswith("%") else whole_number(text)
    except ValueError:
        raise ValueError(f"{text!r}: write a number of rows, or a percentage such as 5%") from None
    if size <= 0 or (isinstance(size, float) and size > 1):
        raise ValueError(f"{text!r}: a size is at least one row and at most 100%")
    return size


TIER_SIZE = Spelled("N|P%", _tier_size)
"""The size of a tier: a number of rows, or a percentage of the table such as `5%`."""


def stream_options(function: Function) -> Function:
    """Add the options that turn a file into batches of ids."""
    for option in (
        MEMORY,
        click.option("--shuffle", is_flag=True, help="Shuffle the ids in each epoch."),
        click.option(
            "--epochs",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="Passes over the ids.",
        ),
        click.option(
            "--column",
            metavar="NAME",
            help="The array in an .npz, or the column in a .parquet file.",
        ),
        click.option(
            "--batch",
            type=COUNT_OF,
            metavar="B",
            help="Ids per batch; default: as in the trace, or 4,096.",
        ),
    ):
        function = option(function)
    return function


def for_stream(options: dict[str, Any]) -> dict[str, Any]:
    """Take what `stream_options` got out of options; return it as `load_stream` takes it."""
    named = {name: options.pop(name) for name in ("column", "epochs", "shuffle", "memory")}
    return {"batch_size": options.pop("batch"), **named}


MEASURED = click.option(
    "--measured",
    type=FiniteRange(0, 1, min_open=True),
    default=0.5,
    metavar="PART",
    help="Fraction of the batches, at the end, that is counted; the others warm up the tiers.",
)
DEPTH = click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=4,
    metavar="N",
    help="Batches announced ahead to the policy `lookahead`.",
)


def use_option(*, training: bool) -> Callable[[Function], Function]:
    """Return the option that says what is done with the rows; `training` is the default."""
    return click.option(
        "--training/--reading",
        default=training,
        show_default=True,
        help="Whether rows are trained, for which those of a batch are held, or only read.",
    )


PLOT = click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path, readable=False, dir_okay=False),
    metavar="FILE",
    help="Draw a figure, an .svg file.",
)
