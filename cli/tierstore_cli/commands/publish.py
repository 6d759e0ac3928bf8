"""Publish the newest version for servers."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore.publishing import publish_tables
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.failure import Unchanged
from tierstore_cli.output import Output
from tierstore_cli.params import FILE, LAST, READ_STORE, VERSION, Place, full_name
from tierstore_cli.stores import open_store


@click.command(cls=Command, was={"--keep": "--last"})
@READ_STORE
@click.argument("directory", metavar="DIR", type=FILE)
@click.option("--table", "tables", metavar="NAME", multiple=True, help="A table; default: all.")
@click.option("--format", "suffix", metavar="SUFFIX", default="npy", help="Of the files.")
@LAST
@VERSION
def publish(
    out: Output,
    store: Place,
    directory: Path,
    tables: tuple[str, ...],
    suffix: str,
    last: int | None,
    version: int | str | None,
) -> None:
    """Export STORE to DIR/version-N, then make the link DIR/current lead there, in one step.

    Programs open DIR/current/TABLE.npy, which always is a complete file of the version that was
    published last; DIR/current/version.json names it. The other versions are removed but for the
    newest, two unless --last says how many. If DIR/current leads to the version already, the exit
    code is 10. STORE may be written meanwhile.

    \b
    Examples:
      tierstore publish emb.tier serving
      tierstore publish emb.tier serving --table item --format safetensors --last 5
      tierstore publish emb.tier serving && systemctl reload search
    """
    with open_store(store, version=version) as opened, Progress("publishing") as progress:
        done = publish_tables(
            opened,
            directory,
            tables=tables or None,
            format=f".{suffix.removeprefix('.')}",
            keep=last or 2,
            progress=progress,
        )
    if not done.changed:
        raise Unchanged(f"{directory}/current leads to version {done.version} already")
    data = {
        "store": full_name(store),
        "version": done.version,
        "path": str(done.path),
        "removed": done.removed,
    }
    out.show(data, f"{directory}/current leads to {done.path.name} now")
