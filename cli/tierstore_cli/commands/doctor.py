"""Check this machine and what is installed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click

from tierstore import _io, machine
from tierstore.budget import format_bytes
from tierstore.machine import speeds
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.limits import limits
from tierstore_cli.output import Grid, Output


@click.command(cls=Command)
@click.argument("path", type=click.Path(path_type=Path), default=Path())
def doctor(out: Output, path: Path) -> None:
    """Check this machine: versions, memory, the disk under PATH, and whether torch and CuPy match.

    Shows how fast it is, too, once `tierstore bench` has measured that. Nothing is changed, nothing
    leaves the machine, and no GPU is touched. Exits with 1 when something is wrong, and prints the
    line that mends it. Lists what killed commands left beside PATH and in it.

    \b
    Examples:
      tierstore doctor
      tierstore doctor /mnt/nvme/emb.tier
      tierstore doctor --json
    """
    facts = machine.examine(path)
    found = speeds.known(path)
    measured = [("speeds", "not measured yet: tierstore bench")] if found is None else limits(found)
    left = _leftovers(path)
    data = {
        **facts.to_dict(),
        "speeds": None if found is None else found.to_dict(),
        "leftovers": [{"path": str(each), "disk_bytes": nbytes} for each, nbytes in left],
    }
    out.show(data, Grid((), [*_rows(facts), *measured, *map(_left, left)]))
    if facts.problems:
        raise Failure("\n".join(facts.problems))


def _leftovers(path: Path) -> list[tuple[Path, int]]:
    """Return what was never finished beside a path and in it, and the bytes it takes of a disk."""
    path = Path(os.path.abspath(path))
    found: list[tuple[Path, int]] = []
    for place in (path.parent, path):
        with contextlib.suppress(OSError):  # there is nothing, or it may not be looked into
            found += [(each, _disk_bytes(each)) for each in _io.leftovers(place)]
    return found


def _disk_bytes(path: Path) -> int:
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return sum(file.lstat().st_blocks for file in files) * 512


def _left(leftover: tuple[Path, int]) -> tuple[str, str]:
    path, nbytes = leftover
    return "left over", f"{path}, {format_bytes(nbytes)}; remove it, unless it is being made now"


def _rows(facts: machine.Machine) -> list[tuple[str, str]]:
    """Return the facts as names and texts."""
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
