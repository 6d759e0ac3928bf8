"""Does an epoch over a table ten times the host budget stay within the budget?"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from common import Answer, arguments, private_bytes, workspace

import tierstore

QUESTION = "Private memory over an epoch of reads and writes, power law, table 10 times the budget"
MIB = 1 << 20
ABOVE_PRIVATE = 200 * MIB
ABOVE_CGROUP = 512 * MIB


def epoch(path: Path, budget: int, batch: int) -> None:
    """Read and write as many rows as the table has, popular ones more often, and print the peak.

    Every eighth batch is committed. The values that are read are checked.
    """
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, private_bytes())

    threading.Thread(target=watch, daemon=True).start()
    rng = np.random.default_rng(7)
    with tierstore.open(path, "r+", budget=tierstore.Budget(host=budget)) as store:
        table = store["item"]
        for number in range(max(1, table.rows // batch)):
            ranks = np.exp(rng.random(batch) * np.log(table.rows)).astype(np.int64) - 1
            ids = ranks * 0x9E3779B1 % table.rows
            rows = table.read(ids)
            rows += np.float32(0.01)
            table.write(ids, rows)
            if number % 8 == 7:
                store.commit(step=number)
        if not np.array_equal(table.read(ids[-1:])[0], rows[-1]):
            raise RuntimeError("the row that was written last reads differently")
        store.commit()
        hits = table.stats()["host"].hit_rate if "host" in table.stats() else 0.0
    done.set()
    print(max(peak, private_bytes()), hits)


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path | str]:
    """Make a memory cgroup with a limit; yields its directory, or why there can be none."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    with suppress(OSError):  # of version 2, which counts memory where it is told to
        (root / "cgroup.subtree_control").write_text("+memory")
    group = root / f"tierstore-bench-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        yield f"no memory cgroup can be made here: {error}"
        return
    try:
        yield group
    finally:
        group.rmdir()


def run(store: Path, options: argparse.Namespace, group: Path | None) -> list[str] | None:
    """Run an epoch in a process of its own, within a cgroup; None if it did not complete."""
    given = [str(store), str(options.budget), str(options.batch)]
    command = [sys.executable, __file__, "--epoch", *given]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        print(f"the epoch ended with {done.returncode}: {done.stderr[-500:]}", file=sys.stderr)
        return None
    return done.stdout.split()


def main() -> None:
    parser = arguments(QUESTION, budget=256 * MIB, dim=128, batch=16_384, times=10)
    options = parser.parse_args()
    rows = options.times * options.budget // (4 * options.dim)
    batches = max(1, rows // options.batch)
    nbytes = options.batch * 4 * options.dim * batches
    answer = Answer(
        "memory",
        QUESTION,
        f"{batches:,} batches of {options.batch:,} rows of {4 * options.dim} B read and written: "
        f"{nbytes / MIB:,.0f} MiB each way, most of it to and from the host tier",
        "at most 200 MB of private memory above the budget, "
        "and it completes in a memory cgroup of the budget + 512 MB",
        notes=["private memory is RssAnon + RssShmem, Python and NumPy included, every 5 ms"],
    )
    with workspace(options) as directory:
        store = directory / "bench.tier"
        spec = tierstore.TableSpec(rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(store, {"item": spec}, budget=tierstore.Budget(host=0)).close()
        free = run(store, options, None)
        with memory_cgroup(options.budget + ABOVE_CGROUP) as group:
            limited = None if isinstance(group, str) else run(store, options, group)
    peaks = {}
    for where, found in (("no limit", free), ("in the cgroup", limited)):
        if found is not None:
            peaks[where] = int(found[0])
            answer.rows.append(
                {"where": where, "table MiB": rows * 4 * options.dim // MIB}
                | {"budget MiB": options.budget // MIB, "peak MiB": int(found[0]) // MIB}
                | {"above MiB": (int(found[0]) - options.budget) // MIB}
                | {"host hit rate": float(found[1])}
            )
            answer.ratios[f"peak ÷ budget, {where}"] = int(found[0]) / options.budget
    answer.met = bool(peaks) and max(peaks.values()) <= options.budget + ABOVE_PRIVATE
    if isinstance(group, str):
        answer.notes.append(f"skipped: the run in a cgroup; {group}")
    else:
        answer.met = answer.met and limited is not None
    answer.give(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--epoch"]:
        epoch(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
