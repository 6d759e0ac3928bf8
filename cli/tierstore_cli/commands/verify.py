"""Check every checksum and list the damaged rows."""

from __future__ import annotations

import click

import tierstore
from tierstore_cli.background import in_background
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import READ_STORE, VERSION, Place, full_name
from tierstore_cli.progress import Progress
from tierstore_cli.text import some_ids

DAMAGE = 4


@click.command(cls=Command)
@READ_STORE
@VERSION
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="N", help="Check N random rows of each table."
)
def verify(out: Output, store: Place, version: int | None, sample: int | None) -> None:
    """Check the rows and files of STORE against their checksums.

    Each manifest, table and file is checked by itself, also of a store that does not open. Goes on
    after the first damage and lists all of it, and which versions are whole; exits with 4 if there
    is any. What is checked is the newest version and what older ones add to it, or with --version
    that one alone; a trainer may go on writing meanwhile, and has priority.

    Rows that are damaged can be written again and committed; `tierstore repair` makes a store of
    all that is whole.

    \b
    Examples:
      tierstore verify emb.tier
      tierstore verify emb.tier --version 812
      tierstore verify emb.tier --sample 100000
      tierstore verify emb.tier --json | jq .bad_rows
    """
    with Progress("verifying") as progress:
        report = in_background(
            lambda told: tierstore.verify(store, version=version, sample=sample, progress=told),
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
    }
    damage = [(name, some_ids(ids)) for name, ids in report.bad_rows.items() if ids]
    summary = f"version {report.version}: {report.rows_checked:,} rows checked"
    parts = [f"damaged: {each}" for each in report.bad_files]
    out.show(data, f"{summary}, all sound" if report.ok else summary, *parts, *_grid(damage))
    if not report.ok:
        rows = sum(map(len, report.bad_rows.values()))
        files = len(report.bad_files)
        raise Failure(
            f"damage in {rows:,} rows and {files:,} files; {_whole(report.whole, sample)}"
            f"'tierstore repair {store} DEST' copies what is whole",
            DAMAGE,
        )


def _grid(damage: list[tuple[str, str]]) -> list[Grid]:
    return [Grid(("TABLE", "DAMAGED ROWS"), damage)] if damage else []


def _whole(versions: list[int], sample: int | None) -> str:
    """Return which versions are whole, as part of a sentence."""
    if sample is not None:
        return ""
    return f"versions that are whole: {', '.join(map(str, versions)) or 'none'}; "
