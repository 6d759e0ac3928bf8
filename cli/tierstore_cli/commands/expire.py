"""Remove seldom used keys of a table by key."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import COUNT_OF, COUNT_OR_NONE, STORE, TABLE, dry_run_option
from tierstore_cli.removing import choose_keyed, settle
from tierstore_cli.stores import changing


@click.command(cls=Command, writes="STORE")
@STORE
@TABLE
@click.option("--unused-for", type=COUNT_OF, help="Keys last used N commits ago.")
@click.option("--fewer-than", type=COUNT_OF, help="Keys used fewer times than N.")
@click.option("--keep-at-most", type=COUNT_OR_NONE, help="The least used, until N keys are left.")
@dry_run_option("Only count them")
def expire(
    out: Output,
    store: Path,
    table: str | None,
    unused_for: int | None,
    fewer_than: int | None,
    keep_at_most: int | None,
    dry_run: bool,
) -> None:
    """Remove keys of a table of STORE that meet any of the conditions, in a commit of its own.

    The table must have been made to track uses. New keys use the places that become free. No other
    process may have STORE open for writing.

    \b
    Examples:
      tierstore expire emb.tier --table user --unused-for 30 --fewer-than 2
      tierstore expire emb.tier --table user --keep-at-most 50M --dry-run
    """
    with changing(out, store, "expiring") as change:
        chosen = choose_keyed(change.store, table, "do not expire")
        if unused_for is fewer_than is keep_at_most is None:
            raise click.UsageError("give --unused-for, --fewer-than or --keep-at-most")
        gone = chosen.expire(
            unused_for=unused_for, fewer_than=fewer_than, keep_at_most=keep_at_most
        )
        settle(change, chosen, sum(len(keys) for keys, _ in gone), dry_run=dry_run)
