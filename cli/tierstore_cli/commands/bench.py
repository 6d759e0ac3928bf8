"""Measure the speed of this machine, and of tierstore on it."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore.budget import format_bytes
from tierstore.machine import examine_storage, speeds
from tierstore.machine.comparison import Comparison, compare
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.measured import speed_lines
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import BYTES, FILE, FiniteRange


@click.command(cls=Command)
@click.argument("directory", metavar="[PATH]", type=FILE, default=Path())
@click.option(
    "--size",
    type=BYTES,
    default="512MiB",
    help="Size of the file and of the store used for measuring.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    hidden=True,
    metavar="S",
    default=0.5,
    help="Time for each figure.",
)
def bench(out: Output, directory: Path, size: int, seconds: float) -> None:
    """Measure memory, the disk under PATH and the link to a GPU, and compare tierstore with them.

    Takes about ten seconds and temporarily twice SIZE of disk space. Other work on the machine
    distorts the figures. They are saved for `tierstore plan` and `tierstore doctor`.

    \b
    Examples:
      tierstore bench
      tierstore bench /mnt/nvme --size 4GiB
    """
    free = examine_storage(directory).free_bytes
    if 2 * size > free:
        raise click.UsageError(
            f"--size {format_bytes(size)} takes twice as much of the disk, of which "
            f"{format_bytes(free)} are free"
        )
    with Progress("measuring") as progress:
        found = speeds.measure(directory, file_bytes=size, seconds=seconds, progress=progress)
    with Progress("making a store") as progress:
        comparisons = compare(
            directory, found, store_bytes=size, seconds=seconds, progress=progress
        )
    kept = speeds.known_speeds(directory)  # with the rates of tierstore
    if kept is None or kept.copy_bytes != found.copy_bytes:
        out.note(
            "Warning: the figures could not be saved, so plan and doctor do not have them; set "
            "XDG_CACHE_HOME to a directory that you may write"
        )
    else:
        found = kept
    data = {
        "path": os.path.abspath(directory),
        "speeds": found.to_dict(),
        "tierstore": [each.to_dict() for each in comparisons],
    }
    out.show(data, Grid((), speed_lines(found), frozenset({1})), "", _compared(comparisons))


def _compared(comparisons: list[Comparison]) -> Grid:
    rows = [
        (
            each.name,
            f"{each.reached:,.0f}/s",
            f"{each.slow:,.0f} to {each.fast:,.0f}",
            f"{each.limit:,.0f}/s",
            f"{each.ratio:.2f}",
        )
        for each in comparisons
    ]
    names = ("TIERSTORE", "REACHES", "8 OF 10 CALLS", "OF", "RATIO")
    return Grid(names, rows, frozenset({1, 2, 3, 4}))
