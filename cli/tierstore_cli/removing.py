"""Removals of keys: which table they are for, whether they are committed, and what is said."""

from __future__ import annotations

import click

from tierstore import KeyedTable, Store
from tierstore.errors import counted
from tierstore_cli.stores import StoreChange, choose_table


def choose_keyed(store: Store, name: str | None, otherwise: str) -> KeyedTable:
    """Return a table by key, as `choose_table` does; `otherwise` says what rows by id do not do."""
    chosen = choose_table(store, name)
    if not isinstance(chosen, KeyedTable):
        raise click.UsageError(
            f"table {chosen.name!r} is not by key (init --by-key), so its rows {otherwise}"
        )
    return chosen


def settle(
    change: StoreChange,
    table: KeyedTable,
    removed: int,
    *,
    dry_run: bool,
    missing: int | None = None,
) -> None:
    """Commit what was removed, or bring it back for a dry run, and say so.

    `missing` is how many of the keys had no row; None where no keys were given.
    """
    left = table.rows
    if dry_run:
        change.store.rollback()
    elif removed:
        change.store.commit()
    verb = "would remove" if dry_run else "removed"
    none = f", {counted(missing, 'key')} had no row" if missing else ""
    rest = f"{counted(left, 'is', 'are')} left"
    change.done(
        f"{verb} {counted(removed, 'key')} of table {table.name}{none}: {rest}",
        None if removed and not dry_run else "",
        table=table.name,
        removed=removed,
        **({} if missing is None else {"missing": missing}),
        rows=left,
        dry_run=dry_run,
    )
