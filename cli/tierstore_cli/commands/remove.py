"""Remove given keys of a table by key."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tierstore import KeyedTable
from tierstore.errors import counted
from tierstore_cli.command import Command
from tierstore_cli.opening import choose_table, open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE, UNTESTED
from tierstore_cli.picking import given_keys


@click.command(cls=Command)
@STORE
@click.option("--key", "keys", multiple=True, metavar="KEY", help="A key to remove; repeatable.")
@click.option(
    "--keys-from",
    "file",
    metavar="FILE",
    help="Keys in a file: .txt, .npy, FILE.parquet:COL; - for standard input.",
)
@TABLE
@click.option("--missing-ok", is_flag=True, help="Keys that have no row are no error.")
@click.option("--dry-run", is_flag=True, help="Only count them; remove nothing.")
@UNTESTED
def remove(
    out: Output,
    store: Path,
    keys: tuple[str, ...],
    file: str | None,
    table: str | None,
    missing_ok: bool,
    dry_run: bool,
    allow_untested: bool,
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
    if not keys and file is None:
        raise click.UsageError("which keys? Give --key or --keys-from")
    with open_store(store, "r+", allow_untested=allow_untested, partitions=True) as opened:
        chosen = choose_table(opened, table)
        if not isinstance(chosen, KeyedTable):
            raise click.UsageError(
                f"table {chosen.name!r} is not by key (init --keys), so its rows are not removed"
            )
        given = given_keys(chosen, keys, file)
        missing = len(given) - int(chosen.contains(given).sum()) if given else 0
        if missing and not missing_ok:
            chosen.lookup(given)  # which names them
        removed = chosen.remove(given) if given else 0
        left = chosen.rows
        if dry_run:
            opened.rollback()
        elif removed:
            opened.commit()
        version = opened.version
    data = {
        "store": os.path.abspath(store),
        "table": chosen.name,
        "removed": removed,
        "missing": missing,
        "rows": left,
        "dry_run": dry_run,
        "version": version,
    }
    verb = "would remove" if dry_run else "removed"
    now = f"; {store} is now at version {version}" if removed and not dry_run else ""
    none = f", {counted(missing, 'key')} had no row" if missing else ""
    rest = f"{counted(left, 'is', 'are')} left"
    out.show(data, f"{verb} {counted(removed, 'key')} of table {chosen.name}{none}: {rest}{now}")
