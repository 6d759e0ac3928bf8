"""`tierstore save`: copy a whole store, also while it is being trained."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, VERSION
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@STORE
@click.argument("dest", type=click.Path(path_type=Path))
@VERSION
def save(out: Output, store: Path, dest: Path, version: int | None) -> None:
    """Copy one version of STORE to DEST, which must not exist.

    The copy is a store of its own, complete and durable when it appears under its name. A trainer
    may go on writing to STORE meanwhile.

    \b
    Examples:
      tierstore save emb.tier backup/emb.tier
      tierstore save emb.tier epoch3.tier --version 812
    """
    with open_store(store, version=version) as opened, Progress("copying") as progress:
        version = opened.version
        opened.save(dest, progress=progress)
    data = {"store": os.path.abspath(store), "dest": os.path.abspath(dest), "version": version}
    out.show(data, f"saved version {version} of {store} to {dest}")
