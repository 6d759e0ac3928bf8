"""`tierstore save`: copy a whole store, also while it is being trained."""

from __future__ import annotations

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import READ_STORE, VERSION, Place, PlaceType, full_name
from tierstore_cli.progress import Progress


@click.command(cls=Command)
@READ_STORE
@click.argument("dest", type=PlaceType())
@VERSION
def save(out: Output, store: Place, dest: Place, version: int | None) -> None:
    """Copy one version of STORE to DEST, which must not exist.

    The copy is a store of its own, complete and durable when it appears under its name. A trainer
    may go on writing to STORE meanwhile. DEST may be a URL that fsspec knows; inspect, export,
    verify and save read stores there, as programs do with tierstore.open(URL).

    \b
    Examples:
      tierstore save emb.tier backup/emb.tier
      tierstore save emb.tier epoch3.tier --version 812
      tierstore save emb.tier s3://bucket/emb.tier
    """
    with open_store(store, version=version) as opened, Progress("copying") as progress:
        version = opened.version
        opened.save(dest, progress=progress)
    data = {"store": full_name(store), "dest": full_name(dest), "version": version}
    out.show(data, f"saved version {version} of {store} to {dest}")
