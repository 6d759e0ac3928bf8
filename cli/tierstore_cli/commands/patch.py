"""Apply a patch, made by diff --out, to a copy of a store."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore.errors import counted
from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import FILE, STORE
from tierstore_cli.stores import changing


@click.command(cls=Command, writes="STORE")
@STORE
@click.argument("file", type=FILE)
def patch(out: Output, store: Path, file: Path) -> None:
    """Apply FILE, written by `tierstore diff --out`, to STORE, as a new version.

    STORE is a copy, made by `tierstore save`, of the store that FILE is from. Its newest version
    must be the one that FILE follows, and nothing else may have changed it: files are applied in
    order, each once. Every row is checked first; after a failure STORE is as before. No other
    process may have STORE open for writing.

    \b
    Examples:
      tierstore save emb.tier copy.tier
      tierstore diff emb.tier yesterday --out monday.patch
      tierstore patch copy.tier monday.patch
    """
    with changing(out, store, "applying") as change:
        done = change.store.apply_patch(file)
        change.done(
            f"changed {counted(sum(done.rows.values()), 'row')}",
            tables=done.rows,
            origin=done.store,
            **{"from": done.from_version, "to": done.to_version},
        )
