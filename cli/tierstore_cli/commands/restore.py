"""Restore a store to a kept version."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, UNTESTED, VERSION


@click.command(cls=Command)
@STORE
@VERSION
@click.option("--name", metavar="NAME", help="The name of the kept version.")
@UNTESTED
def restore(
    out: Output, store: Path, version: int | str | None, name: str | None, allow_untested: bool
) -> None:
    """Restore STORE to a kept version, as a new version.

    Rows, optimizer state, keys, step and payload are restored. Nothing is copied, and later
    versions are kept like any others. `tierstore inspect --versions` lists the kept versions. No
    other process may have STORE open for writing.

    \b
    Examples:
      tierstore restore emb.tier --version 812
      tierstore restore emb.tier --name best
    """
    wanted = name if version is None else version
    if wanted is None or (name is not None and version is not None):
        raise click.UsageError("give either --version or --name")
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        number = opened.restore(wanted)
    data = {"store": os.path.abspath(store), "restored": wanted, "version": number}
    out.show(data, f"{store} is now at version {number}, which restores {wanted}")
