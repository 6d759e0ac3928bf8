"""What a store survives on which file system: python -m tests.durability.matrix, as root.

Runs in namespaces of its own, so that no mount and no process outlives it however it ends. Prints
the table and each trial that lost something, and exits with 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.durability.matrix import work
from tests.durability.matrix.cells import CELLS, Outcome, Trial
from tests.durability.matrix.children import in_child
from tests.durability.matrix.disks import (
    FILE_SYSTEMS,
    NAMESPACES,
    Disk,
    run,
    unmount,
    why_no_mounts,
)
from tests.durability.matrix.report import Result, table

_INSIDE = "--inside"


def main(given: list[str]) -> int:
    """Run the cells that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.durability.matrix", description=__doc__)
    names = [cell.name for cell in CELLS]
    parser.add_argument("--on", action="append", choices=FILE_SYSTEMS, help="file systems; all")
    parser.add_argument("--cell", action="append", choices=names, help="what happens; all")
    parser.add_argument("--rounds", type=int, default=3, help="of what is random (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="what is random follows from it")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--publish", type=Path, help="a page whose table is replaced")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    if reason := why_no_mounts():
        print(f"the matrix of file systems is skipped: {reason}")
        return 0
    if not chosen.inside:
        command = [*NAMESPACES, sys.executable, "-m", "tests.durability.matrix", _INSIDE, *given]
        os.execvp(command[0], command)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    results = collect(
        chosen.on or list(FILE_SYSTEMS), chosen.cell or names, chosen.rounds, chosen.seed
    )
    printed = table(results)
    print(f"\n{printed}\n\nseed {chosen.seed}, {chosen.rounds} rounds")
    lost = [result for result in results if result.lost]
    for result in lost:
        for outcome in result.lost:
            print(f"LOST {result.system}, {result.cell}, {outcome.trial}: {outcome.text}")
    if chosen.json:
        record = {
            "kernel": platform.release(),
            "seed": chosen.seed,
            "rounds": chosen.rounds,
            "results": [result.plain() for result in results],
        }
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    if chosen.publish:
        publish(chosen.publish, printed)
    return 1 if lost else 0


def collect(systems: list[str], cells: list[str], rounds: int, seed: int) -> list[Result]:
    """Run each cell on each file system, and say how each ended."""
    results = []
    with tempfile.TemporaryDirectory() as name, memory(Path(name)) as scratch:
        source = scratch / "source"
        in_child(lambda say: work.make(source))
        for system in systems:
            for cell in (cell for cell in CELLS if cell.name in cells):
                start = time.monotonic()
                result = one(system, cell.name, rounds, seed, scratch / "disk", source)
                results.append(result)
                took = time.monotonic() - start
                print(f"{system}, {cell.name}: {result.summary} ({took:.0f} s)", flush=True)
    return results


@contextmanager
def memory(place: Path) -> Iterator[Path]:
    """A file system in memory at a place, which ends with the namespace at the latest."""
    run("mount", "-t", "tmpfs", "matrix", place)
    try:
        yield place
    finally:
        unmount(place)


def one(name: str, cell_name: str, rounds: int, seed: int, root: Path, source: Path) -> Result:
    """Run one cell on one file system."""
    system = FILE_SYSTEMS[name]
    cell = next(cell for cell in CELLS if cell.name == cell_name)
    reason = system.why_not() or cell.why_not(system)
    if reason:
        return Result(name, cell_name, reason=reason)
    result = Result(name, cell_name)
    with Disk(system, root, source) as disk:
        try:
            for outcome in cell.body(Trial(disk, seed, rounds)):
                result.outcomes.append(outcome)
        except Exception as error:
            result.outcomes.append(Outcome("lost", f"{type(error).__name__}: {error}", "the rest"))
    return result


def publish(page: Path, printed: str) -> None:
    """Put the table in the place of the one on a page."""
    begin, end = "<!-- matrix -->\n", "<!-- end of matrix -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}{printed}\n{end}{rest.split(end)[1]}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
