"""`tierstore verify`: check every checksum and list the damaged rows."""

from __future__ import annotations

import click

from tierstore_cli.background import in_background
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.opening import open_store
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import READ_STORE, Place, full_name
from tierstore_cli.progress import Progress

DAMAGE = 4
LISTED = 20


@click.command(cls=Command)
@READ_STORE
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="N", help="Check N random rows of each table."
)
def verify(out: Output, store: Place, sample: int | None) -> None:
    """Check the rows and files of STORE against their checksums.

    Goes on after the first damage and lists all of it; exits with 4 if there is any. What is
    checked is the newest version; a trainer may go on writing meanwhile, and has priority.

    \b
    Examples:
      tierstore verify emb.tier
      tierstore verify emb.tier --sample 100000
      tierstore verify emb.tier --json | jq .bad_rows
    """
    with open_store(store) as opened, Progress("verifying") as progress:
        version = opened.version
        report = in_background(lambda told: opened.verify(sample=sample, progress=told), progress)

    data = {
        "store": full_name(store),
        "version": version,
        "ok": report.ok,
        "rows_checked": report.rows_checked,
        "bad_rows": report.bad_rows,
        "bad_files": report.bad_files,
    }
    damage = [("file", name, "") for name in report.bad_files]
    damage += [("rows", name, _listed(ids)) for name, ids in report.bad_rows.items() if ids]
    summary = f"version {version}: {report.rows_checked:,} rows checked"
    out.show(data, f"{summary}, all sound" if report.ok else summary, *_grid(damage))
    if not report.ok:
        rows = sum(map(len, report.bad_rows.values()))
        files = len(report.bad_files)
        raise Failure(f"damage in {rows:,} rows and {files:,} files; restore from a copy", DAMAGE)


def _grid(damage: list[tuple[str, str, str]]) -> list[Grid]:
    return [Grid(("DAMAGED", "IN", "IDS"), damage)] if damage else []


def _listed(ids: list[int]) -> str:
    """Return the first ids as text; --json has them all."""
    rest = len(ids) - LISTED
    return " ".join(map(str, ids[:LISTED])) + (f" … and {rest:,} more" if rest > 0 else "")
