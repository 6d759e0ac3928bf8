"""Check this machine, the installed packages and a store."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

import tierstore
from tierstore import machine
from tierstore.budget import format_bytes
from tierstore.errors import TierStoreError, counted
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.measured import speed_lines
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import FILE
from tierstore_cli.printing import quoted
from tierstore_cli.stores import open_store

_SAMPLE = 10_000
"""Rows of each table that are checked."""


@click.command(cls=Command)
@click.argument("path", type=FILE, default=Path())
def doctor(out: Output, path: Path) -> None:
    """Check this machine: versions, memory, the disk under PATH, and whether torch and CuPy match.

    Shows the speeds measured by `tierstore bench`, and lists partial files of killed commands
    beside and in PATH. In a store, it checks all files and a sample of 10,000 rows per table.
    Changes nothing, sends nothing, uses no GPU. If there is a problem, prints the command that
    fixes it and exits with 1, with 4 if the store is damaged.

    \b
    Examples:
      tierstore doctor
      tierstore doctor /mnt/nvme/emb.tier
      tierstore doctor --json
    """
    if not path.exists():
        raise Failure(f"{path} does not exist; doctor checks the disk and the store at a path", 3)
    facts = machine.examine(path)
    found = machine.known_speeds(path)
    measured = (
        [("speeds", "not measured yet: tierstore bench")] if found is None else speed_lines(found)
    )
    left = machine.leftovers(path)
    store = _examined(path) if tierstore.is_store(path) else None
    data = {
        **facts.to_dict(),
        "speeds": None if found is None else found.to_dict(),
        "leftovers": [{"path": str(each.path), "disk_bytes": each.disk_bytes} for each in left],
        "store": store,
    }
    lines = [] if store is None else _store_rows(store)
    out.show(data, Grid((), [*_rows(facts), *measured, *lines, *map(_left, left)]))
    if store is not None and store["damage"]:
        raise Failure(f"{path} is damaged: tierstore verify {quoted(path)} lists what", 4)
    if facts.problems:
        raise Failure("\n".join(facts.problems))


def _examined(path: Path) -> dict[str, Any]:
    """Return what a store holds, and the damage to its files and to a sample of its rows."""
    report = tierstore.verify(path, sample=_SAMPLE)
    facts: dict[str, Any] = {"damage": not report.ok, "bad_files": list(report.bad_files)}
    facts["newer"] = list(report.newer)
    facts["notes"] = report.notes
    facts["bad_rows"] = {name: list(map(int, rows)) for name, rows in report.bad_rows.items()}
    with contextlib.suppress(TierStoreError), open_store(path) as store:
        info = store.info()
        facts |= {"version": info.version, "tables": len(info.tables)}
        facts["unfolded_bytes"] = sum(each.delta_bytes for each in info.tables)
    return facts


def _store_rows(store: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("store", "damaged" if store["damage"] else "no damage found")]
    rows += [("note", each) for each in store["notes"]]
    if "version" in store:
        rows.append(("version", f"{store['version']} of {counted(store['tables'], 'table')}"))
        rows.append(("not folded", format_bytes(store["unfolded_bytes"])))
    rows += [("newer than its manifest", each) for each in store["newer"]]
    if store["newer"]:
        rows.append(("", "a commit did not end, or its manifest was removed: tierstore verify"))
    return rows


def _left(leftover: machine.Leftover) -> tuple[str, str]:
    size = format_bytes(leftover.disk_bytes)
    return "left over", f"{leftover.path}, {size}; remove it unless a command is writing it"


def _rows(facts: machine.Machine) -> list[tuple[str, str]]:
    locked, cuda, disk = facts.lock_limit_bytes, facts.cuda, facts.storage
    packages = {name: version or "not installed" for name, version in facts.packages.items()}
    return [
        ("python", f"{facts.python} on {facts.platform}"),
        *packages.items(),
        *(cuda.cupy.items() or [("cupy", "not installed")]),
        ("torch's CUDA", cuda.torch or "none"),
        ("NVIDIA driver", cuda.driver or "none"),
        ("GPUs", ", ".join(cuda.devices) or "none"),
        ("CPUs", f"{facts.cpus}, threads of a large batch: {facts.threads}"),
        (
            "memory",
            f"{format_bytes(facts.available_bytes)} free of {format_bytes(facts.memory_bytes)}",
        ),
        ("ulimit -l", "unlimited" if locked is None else format_bytes(locked)),
        ("disk", f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"),
        ("core", facts.core),
        ("page reads", f"{facts.page_reads}, merged across {format_bytes(facts.merge_gap_bytes)}"),
        ("filesystem", f"{disk.filesystem or 'unknown'} at {disk.path}"),
    ]
