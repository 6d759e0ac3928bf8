"""Do 26 tables train at the speed of the disk, with an eighth of them in memory?

The process runs in a memory cgroup. The tables have the cardinalities and the skew of Criteo's
click log, and Adam keeps its state beside the rows. Batches are announced ahead, as
`tierstore.lookahead` does, and nothing is committed: rows that are evicted are written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import criteo
from bench_memory import memory_cgroup
from coldness import make_cold, random_reads
from common import Answer, arguments, workspace

import tierstore

QUESTION = "Training 26 tables of which an eighth is in memory, ids given ahead"
MIB = 1 << 20
AHEAD = 3
LEAST = 0.7
"""Minimum relative to the rows a second that the misses and the disk's random reads allow."""


def fields(dim: int) -> dict[str, tierstore.Field]:
    """Return the weight and what Adam keeps of it."""
    weight = tierstore.Field(dim, init=tierstore.normal(seed=7))
    return {"weight": weight, "exp_avg": tierstore.Field(dim), "exp_avg_sq": tierstore.Field(dim)}


def epoch(path: Path, budget: int, gpu: int, samples: int, steps: int, device: str) -> None:
    """Train, and print what it took."""
    import torch

    from tierstore.nn import TieredEmbeddingCollection
    from tierstore.optim import TieredOptimizer

    given = {"host": budget} | ({"gpu": gpu} if device != "cpu" else {})
    with tierstore.open(path, "r+", budget=tierstore.Budget(**given), device=device) as store:
        sizes = {name: table.rows for name, table in store.items()}
        drawn = criteo.draw(sizes, samples, steps + steps // 2, device)
        collection = TieredEmbeddingCollection(store, list(sizes))
        optimizer = TieredOptimizer(torch.optim.Adam, [collection], lr=1e-3)
        loader = tierstore.lookahead(
            [dict(zip(sizes, ids, strict=True)) for ids in drawn],
            {collection: lambda batch: batch},
            depth=AHEAD,
        )
        begin, seen = 0.0, {}
        for number, batch in enumerate(loader):
            if number == len(drawn) - steps:  # the tiers are warm
                _finish(device)
                seen, begin = counted(store), time.perf_counter()
            rows = torch.cat(list(collection(batch).values()), 1)
            (rows * 0.5).sum().backward()
            optimizer.step()
        _finish(device)
        seconds = time.perf_counter() - begin
        found = {key: value - seen[key] for key, value in counted(store).items()}
        print(json.dumps(found | {"seconds": seconds, "ids": steps * samples * len(sizes)}))
        store.rollback()


def counted(store: Any) -> dict[str, int]:
    """Return the rows that all tables have read from the disk so far, and written there."""
    disks = [table.stats()["disk"] for table in store.values()]
    return {
        "disk_rows": sum(each.requested for each in disks),
        "written_rows": sum(each.written for each in disks),
    }


def _finish(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def run(store: Path, options: argparse.Namespace, group: Path | str) -> dict[str, Any] | str:
    """Train in a process of its own; return what it took, or how it ended."""
    numbers = (options.mib * MIB // 8, options.gpu_mib * MIB, options.samples, options.steps)

    def enter() -> None:
        if isinstance(group, Path):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, __file__, "--epoch", str(store), *map(str, numbers), options.device],
        capture_output=True,
        text=True,
        preexec_fn=enter,
        check=False,
    )
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr[-500:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(
        QUESTION, mib=32_768, gpu_mib=2048, dim=64, samples=4096, steps=100, process_mib=4096
    )
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    record = 12 * options.dim
    sizes = criteo.sizes(options.mib * MIB // record)
    cap = options.mib * MIB // 8 + options.process_mib * MIB
    answer = Answer(
        "capped_tables",
        QUESTION,
        "the rows that miss the host tier: a 4 KiB block of the disk each",
        f"at least {LEAST} of the rows a second that the measured misses and the disk's random "
        "reads allow",
        notes=[
            " ".join(line.strip() for line in (__doc__ or "").splitlines()[2:]).strip(),
            f"{sum(sizes.values()):,} rows of {record} B",
            f"the cap leaves {options.process_mib} MiB for torch and CUDA",
            "allowed: the misses ÷ the disk's random 4 KiB reads, measured before and after",
        ],
    )
    with workspace(options) as directory, contextlib.ExitStack() as stack:
        store = directory / "bench.tier"
        specs = {
            name: tierstore.TableSpec(rows, fields=fields(options.dim))
            for name, rows in sizes.items()
        }
        tierstore.create(store, specs, budget=tierstore.Budget(host=0)).close()
        file = max(store.rglob("rows.npy"), key=lambda each: each.stat().st_size)
        share = make_cold(store)
        group = stack.enter_context(memory_cgroup(cap))
        limits = [random_reads(file, 65_536)]
        found = run(store, options, group)
        limits.append(random_reads(file, 65_536))
    if isinstance(group, str):
        answer.notes.append(f"without a cap: {group}")
    if isinstance(found, str):
        answer.notes.append(found)
        answer.met = False
    else:
        limit = sum(limits) / 2
        allowed = found["disk_rows"] / limit
        answer.rows.append(
            {"tables MiB": options.mib, "cap MiB": cap // MIB, "cold": share < 0.001}
            | {"ids/s": found["ids"] / found["seconds"]}
            | {"misses/s": found["disk_rows"] / found["seconds"], "limit/s": limit}
            | {"written/s": found["written_rows"] / found["seconds"]}
            | {"s": found["seconds"], "allowed s": allowed}
        )
        ratio = answer.ratios["of the rows a second the disk allows"] = allowed / found["seconds"]
        answer.met = None if isinstance(group, str) else ratio >= LEAST
    answer.give(options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--epoch"]:
        path, *numbers = sys.argv[2:7]
        epoch(Path(path), *map(int, numbers), sys.argv[7])
    else:
        main()
