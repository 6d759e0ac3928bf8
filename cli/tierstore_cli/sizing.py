"""What `simulate` and `plan` share: the options of a stream of ids, sizes, and small curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tierstore_cli.params import MEMORY
from tierstore_cli.text import BLOCKS

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic in older versions of click

Function = TypeVar("Function", bound=Callable[..., Any])


class TierSize(ParamType):
    """A size of a tier: rows, or a part of the table such as `5%`."""

    name = "N|P%"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        """Return rows as an int, a part as a float in 0..1."""
        text = str(value)
        try:
            size = float(text[:-1]) / 100 if text.endswith("%") else int(text)
        except ValueError:
            self.fail(f"{text!r}: write a number of rows, or a part such as 5%", param, ctx)
        if size <= 0 or (isinstance(size, float) and size > 1):
            self.fail(f"{text!r} is no size: at least one row, at most 100%", param, ctx)
        return size


def stream_options(function: Function) -> Function:
    """Add the options that say how a file becomes batches of ids."""
    for option in (
        MEMORY,
        click.option(
            "--shuffle", is_flag=True, help="A new order for each epoch, as a shuffling loader has."
        ),
        click.option(
            "--epochs",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="N",
            help="How often to go through the ids.",
        ),
        click.option(
            "--column", metavar="NAME", help="The array of an .npz, the column of a .parquet."
        ),
        click.option(
            "--batch",
            type=click.IntRange(min=1),
            metavar="B",
            help="Ids a batch; else the trace's, or 4,096.",
        ),
    ):
        function = option(function)
    return function


MEASURED = click.option(
    "--measured",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    metavar="PART",
    help="The last part of the batches that counts; the rest fills the tiers.",
)
DEPTH = click.option(
    "--depth",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    metavar="N",
    help="Batches that `lookahead` knows ahead.",
)
TRACE = click.Path(path_type=Path)
PLOT = click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw it too: .png, .svg or .pdf; needs tierstore[plot].",
)


def sparkline(values: Sequence[float], top: float = 1.0) -> str:
    """Return values 0..top as block characters, one each; blank for 0."""
    steps = [min(-(-value * len(BLOCKS) // top), len(BLOCKS)) for value in values]
    return "".join(BLOCKS[int(step) - 1] if step > 0 else " " for step in steps)


def percent(rate: float | None) -> str:
    """Return a rate 0..1 for people."""
    return "–" if rate is None else f"{100 * rate:.1f} %"
