"""Removals of keys: which table they are for, whether they are committed, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tierstore import KeyedTable, Store
from tierstore.errors import counted
from tierstore_cli.opening import choose_table
from tierstore_cli.params import full_name

Told = tuple[dict[str, Any], str]
"""What a command shows: as JSON, and for people."""


def choose_keyed(store: Store, name: str | None, otherwise: str) -> KeyedTable:
    """Return a table by key, as `choose_table` does; `otherwise` says what rows by id do not do."""
    chosen = choose_table(store, name)
    if not isinstance(chosen, KeyedTable):
        raise click.UsageError(
            f"table {chosen.name!r} is not by key (init --by-key), so its rows {otherwise}"
        )
    return chosen


def settled(
    path: Path,
    store: Store,
    table: KeyedTable,
    removed: int,
    *,
    dry_run: bool,
    missing: int | None = None,
) -> Told:
    """Commit what was removed, or bring it back for a dry run; return what to show.

    `missing` is how many of the keys had no row; None where no keys were given.
    """
    left = table.rows
    if dry_run:
        store.rollback()
    elif removed:
        store.commit()
    data = {
        "store": full_name(path),
        "table": table.name,
        "removed": removed,
        **({} if missing is None else {"missing": missing}),
        "rows": left,
        "dry_run": dry_run,
        "version": store.version,
    }
    verb = "would remove" if dry_run else "removed"
    none = f", {counted(missing, 'key')} had no row" if missing else ""
    now = f"; {path} is now at version {store.version}" if removed and not dry_run else ""
    rest = f"{counted(left, 'is', 'are')} left"
    return data, f"{verb} {counted(removed, 'key')} of table {table.name}{none}: {rest}{now}"
