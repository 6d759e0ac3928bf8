"""Remove given keys of a table by key."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, TABLE, UNTESTED
from tierstore_cli.picking import given_keys
from tierstore_cli.removing import choose_keyed, settled


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
        chosen = choose_keyed(opened, table, "are not removed")
        given = given_keys(chosen, keys, file)
        missing = len(given) - int(chosen.contains(given).sum()) if given else 0
        if missing and not missing_ok:
            chosen.lookup(given)  # which names them
        removed = chosen.remove(given) if given else 0
        told = settled(store, opened, chosen, removed, dry_run=dry_run, missing=missing)
    out.show(*told)
