"""`tierstore fold`: fold the newest version into the base files."""

from __future__ import annotations

from pathlib import Path

import click

import tierstore
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE


@click.command(cls=Command)
@STORE
def fold(out: Output, store: Path) -> None:
    """Fold all deltas of STORE into its base files, and drop every version but the newest.

    Afterwards the base file alone is the table: NumPy or zarr opens it without tierstore.

    \b
    Examples:
      tierstore fold emb.tier
      tierstore fold emb.tier && python -c 'import numpy; numpy.load("…/rows.npy", mmap_mode="r")'
    """
