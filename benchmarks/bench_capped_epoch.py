"""Does training reach the speed of the disk, on a table four times the memory it may use?

The process runs in a memory cgroup. Ids follow a power law; a step takes the distinct rows of its
batch, adds a random gradient to them and puts them back, so every row it evicts must be written.
Batches are announced ahead, as `tierstore.lookahead` does; it is committed a few times, and folds
go on behind it. The epoch ends when the store is closed, which leaves a fold under way for later;
what it was to merge is still in deltas then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from bench_memory import memory_cgroup
from coldness import make_cold, random_reads
from common import Answer, arguments, workspace

import tierstore

QUESTION = "An epoch of training on a table 4 times the memory cap of its process"
MIB = 1 << 20
AHEAD = 3


def batches(rows: int, batch: int, count: int) -> Iterator[np.ndarray]:
    """Yield batches of ids; a tenth of the rows gets about half of them."""
    rng = np.random.default_rng(11)
    for _ in range(count):
        yield (rng.random(batch) ** 3.3 * rows).astype(np.int64) * 0x9E3779B1 % rows


def epoch(path: Path, budget: int, batch: int, steps: int, commits: int) -> None:
    """Train, and print what it took."""
    rng = np.random.default_rng(12)
    with tierstore.open(path, "r+", budget=tierstore.Budget(host=budget)) as store:
        table = store["item"]
        gradient = rng.standard_normal((batch, table.dim), np.float32)
        coming = batches(table.rows, batch, steps)
        begin, committing = time.perf_counter(), 0.0
        loader = tierstore.lookahead(coming, {table: lambda ids: ids}, depth=AHEAD)
        for number, ids in enumerate(loader):
            with table.lease(ids) as lease:
                values = lease.read("weight")
                values -= np.float32(0.01) * gradient[: len(values)]
                lease.write("weight", values)
            if (number + 1) * commits // steps > number * commits // steps:
                at = time.perf_counter()
                store.commit(step=number)
                committing += time.perf_counter() - at
        training = time.perf_counter() - begin
        stats = table.stats()
        found = {
            "committing": committing,
            "disk_rows": stats["disk"].requested,
            "written_rows": stats["disk"].written,
            "hit_rate": stats["host"].unique_hit_rate,
        }
    seconds = time.perf_counter() - begin
    deltas = sum(file.stat().st_size for file in path.rglob("delta-*"))
    found |= {"seconds": seconds, "closing": seconds - training, "delta_bytes": deltas}
    found["cpu_seconds"] = time.process_time()
    print(json.dumps(found))


def run(store: Path, options: argparse.Namespace, budget: int, group: Path | str) -> dict | str:
    """Run the epoch in a process of its own; return what it took, or how it ended."""
    steps = max(options.commits, options.rows // options.batch)
    given = [str(store), str(budget), *map(str, (options.batch, steps, options.commits))]

    def enter() -> None:
        if isinstance(group, Path):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, __file__, "--epoch", *given],
        capture_output=True,
        text=True,
        preexec_fn=enter,
        check=False,
    )
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr[-500:]}"
    found: dict = json.loads(done.stdout)
    return found | {"ids": steps * options.batch}


def main() -> None:
    parser = arguments(QUESTION, rows=8 << 20, dim=128, batch=32_768, cap=1 << 30, commits=8)
    options = parser.parse_args()
    budget = options.cap // 2
    answer = Answer(
        "capped_epoch",
        QUESTION,
        "the rows that miss the host tier: a 4 KiB block of the disk each",
        "completes; at least 0.7 of the rows a second that the measured misses and the disk's "
        "random reads allow",
        notes=[
            " ".join(line.strip() for line in (__doc__ or "").splitlines()[2:]).strip(),
            "a fold begins when 1 GiB of changes has gathered, and rewrites the base",
            "allowed: the misses ÷ the disk's random 4 KiB reads, measured before and after",
        ],
    )
    with workspace(options) as directory:
        store = directory / "bench.tier"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(store, {"item": spec}, budget=tierstore.Budget(host=0)).close()
        (file,) = store.rglob("rows.npy")
        share = make_cold(store)
        with memory_cgroup(options.cap) as group:
            limits = [random_reads(file, 65_536)]
            found = run(store, options, budget, group)
            limits.append(random_reads(file, 65_536))
    if isinstance(group, str):
        answer.notes.append(f"without a cap: {group}")
    if isinstance(found, str):
        answer.notes.append(found)
        answer.met = False
    else:
        limit = sum(limits) / 2
        allowed = found["disk_rows"] / limit
        ratio = allowed / found["seconds"]
        answer.rows.append(
            {"table MiB": options.rows * options.dim * 4 // MIB, "cap MiB": options.cap // MIB}
            | {"budget MiB": budget // MIB, "cold": share < 0.001}
            | {"ids/s": found["ids"] / found["seconds"], "hit rate": found["hit_rate"]}
            | {"misses/s": found["disk_rows"] / found["seconds"], "limit/s": limit}
            | {"s": found["seconds"], "of them in commits": found["committing"]}
            | {"closing": found["closing"]}
            | {"allowed s": allowed, "CPU s": found["cpu_seconds"]}
            | {"written/s": found["written_rows"] / found["seconds"]}
            | {"in deltas MiB": found["delta_bytes"] / MIB}
        )
        answer.ratios["of the rows a second the disk allows"] = ratio
        between = found["seconds"] - found["committing"] - found["closing"]
        answer.ratios["the same without the time of commits and of closing"] = allowed / between
        answer.met = None if isinstance(group, str) else ratio >= 0.7
    answer.give(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--epoch"]:
        epoch(Path(sys.argv[2]), *map(int, sys.argv[3:7]))
    else:
        main()
