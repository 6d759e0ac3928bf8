"""Show each version that a trainer commits."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import click

from tierstore import Store
from tierstore.errors import counted
from tierstore_cli import params
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.output import Output
from tierstore_cli.shown_rows import keys_by_table, removed_keys, shown_lines
from tierstore_cli.stores import open_store


@click.command(cls=Command, was={"--ids": "--changed"})
@params.READ_STORE
@params.CHANGED
@params.REMOVED
@click.option(
    "--exec",
    "program",
    metavar="COMMAND",
    help="Run a shell command for each version; it finds $STORE, $VERSION and $SINCE.",
)
@click.option(
    "--timeout",
    type=params.FiniteRange(min=0),
    metavar="SECONDS",
    help="End when no version comes for so long; default: no end.",
)
@params.COUNT
@params.every_option(0.5, "Time between two looks at the directory of STORE.")
def follow(
    out: Output,
    store: params.Place,
    listed: bool,
    removed: bool,
    program: str | None,
    timeout: float | None,
    count: int | None,
    every: float,
) -> None:
    """Print a line for each version that is committed to STORE from now on, until Ctrl-C.

    A line has the version, the one before it, the step, and how many rows of which tables changed;
    with --json it is an object. With --changed, each row is a line: version, table, id, and the key
    if there is one; with --removed, for which keys are held in memory, each key that has no row any
    more: version, table, key. Versions
    that come while --exec runs are one line afterwards. A command that fails
    ends this one, with exit code 1. STORE is only read.

    \b
    Examples:
      tierstore follow emb.tier
      tierstore follow emb.tier --json --timeout 3600 >> versions.jsonl
      tierstore follow emb.tier --exec 'tierstore save emb.tier copy.tier --incremental'
    """
    if listed and removed and not out.as_json:
        raise click.UsageError("give one of --changed and --removed, or --json")
    with open_store(store) as opened:
        before = _held(opened) if removed else {}
        for number, new in enumerate(opened.follow(timeout=timeout, every=every), 1):
            counts = {name: rows.size for name, rows in new.rows.items()}
            data: dict[str, Any] = {
                "store": params.full_name(store),
                "version": new.version,
                "since": new.since,
                "step": new.step,
                "tables": counts,
            }
            gone = removed_keys(before, opened) if removed else None
            rows = new.rows if listed else None
            if not shown_lines(out, data, opened, rows, gone, [new.version]):
                out.show(data, _line(opened, counts))
            if removed:
                before = _held(opened)
            out.flush()
            if program is not None:
                _run(program, data)
            if number == count:
                return


def _held(store: Store) -> dict[str, Any]:
    """Return a copy of the keys of each table, which the store would replace."""
    return {name: keys[:] for name, keys in keys_by_table(store).items()}


def _line(store: Store, counts: dict[str, int]) -> str:
    step = "" if store.step is None else f" · step {store.step:,}"
    tables = "".join(f" · {name} {counted(count, 'row')}" for name, count in counts.items())
    return f"version {store.version}{step}{tables or ' · no row changed'}"


def _run(program: str, data: dict[str, Any]) -> None:
    names = {name.upper(): str(data[name]) for name in ("store", "version", "since")}
    with subprocess.Popen(program, shell=True, env={**os.environ, **names}) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # it gets time to remove its files
            process.terminate()
            process.wait()
            raise
    if code:
        raise Failure(f"--exec ended with exit code {code} at version {data['version']}")
