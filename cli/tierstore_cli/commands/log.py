"""List the versions of a store."""

from __future__ import annotations

import dataclasses

import click

from tierstore_cli.command import Command
from tierstore_cli.dated import versions_grid
from tierstore_cli.output import Output
from tierstore_cli.params import READ_STORE, Place, full_name
from tierstore_cli.stores import open_store


@click.command(cls=Command)
@READ_STORE
def log(out: Output, store: Place) -> None:
    """List the versions of STORE that can be opened, the newest first.

    ROWS are the rows that the version changed or added, those of a commit as often as they were
    written, and BYTES what was written for them: a table that grows in a new file counts whole.
    TABLES are those that it changed, with the rows of each if there are several; --json has all. A
    version that restores another has none of these. PAYLOAD names the values committed with the
    rows. `tierstore diff` tells which tables differ between any two versions.

    \b
    Examples:
      tierstore log emb.tier
      tierstore log emb.tier | head -3
      tierstore log emb.tier --json | jq '.versions[0].time'
    """
    with open_store(store) as opened:
        versions = opened.versions()[::-1]
    data = {"store": full_name(store), "versions": [dataclasses.asdict(each) for each in versions]}
    out.show(data, versions_grid(versions))
