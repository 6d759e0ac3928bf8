"""Keep a version of a store under a name."""

from __future__ import annotations

import re
from pathlib import Path

import click

from tierstore_cli.command import Command
from tierstore_cli.dated import date_of
from tierstore_cli.output import Output
from tierstore_cli.params import LAST, STORE, VERSION
from tierstore_cli.stores import changing

_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)


@click.command(cls=Command, writes="STORE")
@STORE
@click.argument("name", required=False)
@click.option("--by-date", is_flag=True, help="The name is the day of the commit in UTC.")
@LAST
@VERSION
def keep(
    out: Output,
    store: Path,
    name: str | None,
    by_date: bool,
    last: int | None,
    version: int | str | None,
) -> None:
    """Keep a version of STORE as NAME, regardless of later versions.

    If another version has this name, it loses it. Commits since the oldest kept version cannot be
    folded, so STORE needs more disk space until `tierstore release`. No other process may have
    STORE open for writing.

    With --by-date, NAME is the day on which the version was committed, such as 2026-11-20, which
    every command takes for --version, and tierstore.open for version=. With --last N, the N newest
    days stay, and other names of days are released; names that are no days stay.

    \b
    Examples:
      tierstore keep emb.tier best
      tierstore keep emb.tier epoch3 --version 812
      tierstore keep emb.tier --by-date --last 7
      tierstore get emb.tier 17 --version 2026-11-20
    """
    if (name is None) != by_date:
        raise click.UsageError("give a NAME, or --by-date for the day of the commit")
    if last is not None and not by_date:
        raise click.UsageError("--last says how many days stay of --by-date; give both")
    with changing(out, store, "keeping") as change:
        opened = change.store
        wanted = opened.version if version is None else version
        if name is None:
            every = {key: each for each in opened.versions() for key in (each.version, *each.names)}
            name = date_of(every[wanted]) if wanted in every else "none"  # which `keep` refuses
        number = opened.keep(wanted, name)
        names = [each for version in opened.versions() for each in version.names]
        days = sorted(each for each in names if _DATE.fullmatch(each))
        released = days[:-last] if last is not None else []
        for each in released:
            opened.release(each)
        gone = f"; released: {', '.join(released)}" if released else ""
        text = f"version {number} of {store} is kept as {name}{gone}"
        change.done(text, "", name=name, version=number, released=released)
