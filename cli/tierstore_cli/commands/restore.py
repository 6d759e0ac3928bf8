"""Restore a store to a kept version."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, VERSION_OF
from tierstore_cli.stores import changing


@click.command(cls=Command, writes="STORE", was={"--name": "a version by a name is VERSION"})
@STORE
@click.argument("version", metavar="VERSION", type=VERSION_OF, required=False)
@click.option("--version", "option", type=VERSION_OF, hidden=True, help="VERSION, as elsewhere.")
@click.option("--name", metavar="NAME", help="VERSION, a name that is a number.")
def restore(
    out: Output,
    store: Path,
    version: int | str | None,
    option: int | str | None,
    name: str | None,
) -> None:
    """Restore STORE to VERSION, the number or the name of a kept version, as a new version.

    Rows, optimizer state, keys, step and payload are restored. Nothing is copied, and later
    versions are kept like any others. `tierstore log` lists the kept versions. No other process may
    have STORE open for writing.

    \b
    Examples:
      tierstore restore emb.tier 812
      tierstore restore emb.tier best
    """
    given = [each for each in (version, option, name) if each is not None]
    if len(given) != 1:
        raise click.UsageError("give one version: 'tierstore log' lists those that are kept")
    (wanted,) = given
    with changing(out, store, "restoring") as change:
        change.store.restore(wanted)
        change.done(f"restored {wanted}", restored=wanted)
