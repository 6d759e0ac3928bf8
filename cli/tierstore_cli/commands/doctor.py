"""Check this machine and the installed packages."""

from __future__ import annotations

from pathlib import Path

import click

from tierstore import machine
from tierstore.budget import format_bytes
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.output import Grid, Output
from tierstore_cli.speeds import speed_lines


@click.command(cls=Command)
@click.argument("path", type=click.Path(path_type=Path), default=Path())
def doctor(out: Output, path: Path) -> None:
    """Check this machine: versions, memory, the disk under PATH, and whether torch and CuPy match.

    Shows the speeds measured by `tierstore bench`, and lists partial files of killed commands
    beside and in PATH. Changes nothing, sends nothing, uses no GPU. If there is a problem, prints
    the command that fixes it and exits with 1.

    \b
    Examples:
      tierstore doctor
      tierstore doctor /mnt/nvme/emb.tier
      tierstore doctor --json
    """
    facts = machine.examine(path)
    found = machine.known_speeds(path)
    measured = (
        [("speeds", "not measured yet: tierstore bench")] if found is None else speed_lines(found)
    )
    left = machine.leftovers(path)
    data = {
        **facts.to_dict(),
        "speeds": None if found is None else found.to_dict(),
        "leftovers": [{"path": str(each.path), "disk_bytes": each.disk_bytes} for each in left],
    }
    out.show(data, Grid((), [*_rows(facts), *measured, *map(_left, left)]))
    if facts.problems:
        raise Failure("\n".join(facts.problems))


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
        ("CPUs", str(facts.cpus)),
        (
            "memory",
            f"{format_bytes(facts.available_bytes)} free of {format_bytes(facts.memory_bytes)}",
        ),
        ("ulimit -l", "unlimited" if locked is None else format_bytes(locked)),
        ("disk", f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"),
        ("page reads", f"{facts.page_reads}, merged across {format_bytes(facts.merge_gap_bytes)}"),
        ("filesystem", f"{disk.filesystem or 'unknown'} at {disk.path}"),
    ]
