"""Show which rows changed between two versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from tierstore import Store
from tierstore.budget import format_bytes
from tierstore.errors import counted
from tierstore_cli import params
from tierstore_cli.command import Command, given_here
from tierstore_cli.failure import Unchanged
from tierstore_cli.output import Grid, Output
from tierstore_cli.shown_rows import Removed, keys_by_table, removed_keys, shown_lines
from tierstore_cli.stores import open_store


@click.command(cls=Command, was={"--ids": "--changed"})
@params.READ_STORE
@click.argument("old", metavar="V1", type=params.VERSION_OF)
@click.argument("new", metavar="[V2]", type=params.VERSION_OF, required=False)
@params.TABLE
@params.CHANGED
@params.REMOVED
@click.option(
    "--out",
    "patch",
    metavar="FILE",
    type=params.FILE,
    help="Write a file for `tierstore patch` with only these rows.",
)
@params.FORCE
def diff(
    out: Output,
    store: params.Place,
    old: int | str,
    new: int | str | None,
    table: str | None,
    listed: bool,
    removed: bool,
    patch: Path | None,
    force: bool,
) -> None:
    """Count the rows of STORE that differ between versions V1 and V2, by default the newest.

    Versions are numbers or names that are kept; `tierstore log` lists them. The time depends on the
    rows that were written in between, not on the size of the tables. Rows that were added or have
    other keys count; a table that only lost rows is listed with 0. With --changed, a row is a line:
    table, id, and the key if there is one, divided by tabs. With --removed, a line is a table and a
    key that has no row any more, as an index downstream must learn. STORE may be written meanwhile.
    With --out, the exit code is 10 if V1 is V2, and nothing is written.

    \b
    Examples:
      tierstore diff emb.tier 811 812
      tierstore diff emb.tier yesterday --table item --changed | cut -f 2 > changed.txt
      tierstore diff emb.tier yesterday --table item --removed | cut -f 2 > gone.txt
      tierstore diff emb.tier yesterday --out monday.patch
    """
    if patch is not None and (given_here("table") or listed or removed):
        raise click.UsageError(
            "--out writes the rows of all tables: no --table, no --changed, no --removed"
        )
    if listed and removed and not out.as_json:
        raise click.UsageError("give one of --changed and --removed, or --json")
    if force and patch is None:
        raise click.UsageError(
            "--force replaces the file of --out: give that too, or leave --force out"
        )
    with open_store(store, version=new) as opened:
        data: dict[str, Any] = {"store": params.full_name(store), "from": old, "to": opened.version}
        if patch is not None:
            if any(
                each.version == opened.version and old in (each.version, *each.names)
                for each in opened.versions()
            ):
                raise Unchanged(f"{old} is version {opened.version} itself; nothing written")
            made = opened.write_patch(patch, old, force=force)
            data |= {"from": made.from_version, "tables": made.rows}
            data |= {"out": params.full_name(patch), "bytes": made.bytes}
            written = counted(sum(made.rows.values()), "row")
            line = f"wrote {patch}: {written}, {format_bytes(made.bytes)}"
            out.show(data, line)
            return
        gone = _removed(store, old, opened, table) if removed else None
        if removed and not out.as_json:
            shown_lines(out, data, opened, None, gone)
            return
        changed = opened.changed(old)
        if table is not None:
            opened[table]
            changed = {name: rows for name, rows in changed.items() if name == table}
        if shown_lines(out, data, opened, changed if listed else None, gone):
            return
        data["tables"] = {name: rows.size for name, rows in changed.items()}
    out.show(data, *_counts(data["tables"], old, data["to"]))


def _removed(path: params.Place, old: int | str, opened: Store, table: str | None) -> Removed:
    """Yield the keys by table that a version has and an open store lacks."""
    with open_store(path, version=old) as before:
        keys = keys_by_table(before)
        if table is not None:
            keys = {name: each for name, each in keys.items() if name == table}
        yield from removed_keys(keys, opened)


def _counts(tables: Mapping[str, int], old: object, new: object) -> Iterator[str | Grid]:
    if not tables:
        yield f"no row differs between versions {old} and {new}"
        return
    rows = [(name, f"{count:,}") for name, count in tables.items()]
    yield Grid(("TABLE", "CHANGED ROWS"), rows, right=frozenset({1}))
