"""Remove given keys of a table by key."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.output import Output
from tierstore_cli.params import KEY, KEYS_FROM, STORE, TABLE, dry_run_option
from tierstore_cli.picking import distinct_keys
from tierstore_cli.removing import choose_keyed, settle
from tierstore_cli.stores import changing


@click.command(cls=Command, writes="STORE")
@STORE
@KEY
@KEYS_FROM
@TABLE
@click.option("--missing-ok", is_flag=True, help="Keys that have no row are no error.")
@dry_run_option("Only count them")
def remove(
    out: Output,
    store: Path,
    by_key: tuple[str, ...],
    keys_from: str | None,
    table: str | None,
    missing_ok: bool,
    dry_run: bool,
) -> None:
    """Remove keys of a table of STORE with their rows, in a commit of its own.

    A key without a row is an error, and nothing is removed. Older versions have the rows until they
    are dropped, and files until a fold: see the page "Erase a person". No other process may have
    STORE open for writing.

    \b
    Examples:
      tierstore remove emb.tier --table user --key 4711 --key 4712
      tierstore remove emb.tier --table user --keys-from left.txt --missing-ok
      tierstore remove emb.tier --table user --keys-from left.txt --dry-run
    """
    if not by_key and keys_from is None:
        raise click.UsageError("which keys? Give --key or --keys-from")
    with changing(out, store, "removing") as change:
        chosen = choose_keyed(change.store, table, "are not removed")
        named = distinct_keys(chosen, by_key, keys_from)
        missing = len(named) - int(chosen.contains(named).sum()) if named else 0
        if missing and not missing_ok:
            chosen.lookup(named)  # which names them
        removed = chosen.remove(named) if named else 0
        settle(change, chosen, removed, dry_run=dry_run, missing=missing)
