"""Check every checksum and list the damaged rows."""

from __future__ import annotations

import click

import tierstore
from tierstore.errors import counted
from tierstore_cli.background import in_background
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import COUNT_OF, READ_STORE, VERSION, Place, full_name
from tierstore_cli.printing import quoted, some_ids

DAMAGE = 4


@click.command(cls=Command)
@READ_STORE
@VERSION
@click.option(
    "--sample",
    type=COUNT_OF,
    help="Check only N random rows of each table.",
)
def verify(out: Output, store: Place, version: int | str | None, sample: int | None) -> None:
    """Check the rows and files of STORE against their checksums.

    Checks each manifest, table and file separately, also in a store that does not open. Lists all
    damage and the versions that are intact, and exits with 4 if there is damage. Checks the newest
    version and the files that only older versions use, or with --version that version alone. STORE
    may be written meanwhile; verify runs at low priority.

    Files that are newer than the newest manifest, of a commit that did not end or whose manifest
    was removed, are listed too; they are no damage.

    To mend damaged rows, take them from what is intact elsewhere, `tierstore mend`, write and
    commit them again, or copy the intact rows: `tierstore repair`. Damage of older versions goes
    with them: `tierstore fold`.

    With --json, bad_rows are the ids of damaged rows, by table; tables without any are left out.

    \b
    Examples:
      tierstore verify emb.tier
      tierstore verify emb.tier --version 812
      tierstore verify emb.tier --sample 100000
      tierstore verify emb.tier --json | jq .bad_rows
    """
    with Progress("verifying") as progress:
        report = in_background(
            lambda report: tierstore.verify(store, version=version, sample=sample, progress=report),
            progress,
        )

    data = {
        "store": full_name(store),
        "version": report.version,
        "ok": report.ok,
        "rows_checked": report.rows_checked,
        "bad_rows": report.bad_rows,
        "bad_files": report.bad_files,
        "whole": report.whole,
        "newer": report.newer,
        "notes": report.notes,
    }
    damage = [(name, some_ids(ids)) for name, ids in report.bad_rows.items()]
    summary = f"version {report.version}: {counted(report.rows_checked, 'row')} checked"
    parts = [f"damaged: {each}" for each in report.bad_files]
    parts += [f"note: {each}" for each in report.notes]
    out.show(data, f"{summary}, no damage" if report.ok else summary, *parts, *_grid(damage))
    say_newer(out, store, report.newer)
    if not report.ok:
        rows = sum(map(len, report.bad_rows.values()))
        files = len(report.bad_files)
        what = f"damage in {_counted(rows, 'row')} and {_counted(files, 'file')}"
        way_on = f"`tierstore repair {quoted(store)} DEST` copies the intact rows"
        if report.version in report.whole and not files:
            what += f" of older versions, and none in version {report.version}"
            way_on = f"`tierstore fold {quoted(store)}` drops them"
        elif not files:
            mend = f"`tierstore mend {quoted(store)} [--from COPY]`"
            way_on = f"{mend} takes rows that are intact elsewhere, {way_on}"
        raise Failure(f"{what}; {_intact(report.whole, sample)}{way_on}", DAMAGE)


def say_newer(out: Output, store: Place, newer: list[str]) -> None:
    """Note files that are newer than the newest manifest, which are no damage."""
    for each in newer:
        out.note(f"newer than the newest manifest: {each}")
    if newer:
        out.note(
            "left by a commit that did not end, or its manifest was removed: `tierstore repair "
            f"--adopt {quoted(store)} DEST` takes them; the next writer of {store} removes them"
        )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _grid(damage: list[tuple[str, str]]) -> list[Grid]:
    return [Grid(("TABLE", "DAMAGED ROWS"), damage)] if damage else []


def _intact(versions: list[int], sample: int | None) -> str:
    if sample is not None:
        return ""
    return f"intact versions: {', '.join(map(str, versions)) or 'none'}; "
