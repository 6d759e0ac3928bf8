"""Do the jobs of a row memory keep within their budget of host memory, and within a cgroup?

Each job runs in a process of its own, in a memory cgroup where one can be made. Private memory is
counted from when torch and the GPU are ready, so that only what the job takes is in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_memory import memory_cgroup
from common import Answer, arguments, private_bytes, workspace

import tierstore
from tierstore import Budget, Field, TableSpec

QUESTION = "Private memory of reads, replays and training of a row memory, an eighth in host memory"
MIB = 1 << 20
ABOVE = 200 * MIB
DIM, ATTACHED_DIM = 64, 128
SMALL = "bfloat16"
STATES = ("exp_avg", "exp_avg_sq")
DEPTH = 2
BLOCK = 1 << 16


def attached(place: Path, budget: Any, options: argparse.Namespace) -> Any:
    """Attach the file of rows."""
    return tierstore.attach({"t": place / "rows.npy"}, budget=budget, device=options.device)


def drawn(rows: int, options: argparse.Namespace) -> Iterator[Any]:
    """Yield batches of ids by a power law, each as it is asked for."""
    import torch

    rng = np.random.default_rng(7)
    for _ in range(options.steps):
        ranks = np.exp(rng.random(options.batch) * np.log(rows)).astype(np.int64) - 1
        yield torch.from_numpy(ranks * 0x9E3779B1 % rows).to(options.device)


def read(place: Path, budget: Budget, options: argparse.Namespace) -> None:
    """Read rows of a file that is attached."""
    with attached(place, budget, options) as tables:
        for ids in drawn(tables["t"].rows, options):
            found = tables["t"].read(ids)
        last = tables["t"].read(ids[-1:].cpu().numpy())
        if not np.array_equal(found[-1:].cpu().numpy(), last):
            raise RuntimeError("a row reads differently on the host")


def replay(place: Path, budget: Budget, options: argparse.Namespace) -> None:
    """Read rows of a file that is attached in a CUDA graph, brought before each replay."""
    import torch

    with attached(place, budget, options) as tables:
        table = tables["t"]
        given = torch.zeros(options.batch, dtype=torch.int64, device=options.device)
        out = torch.empty(options.batch, ATTACHED_DIM, device=options.device)
        table.read_into(given, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.read_into(given, out)
        for ids in drawn(table.rows, options):
            table.prefetch(ids)
            given.copy_(ids)
            graph.replay()
            table.adapt()
        if not torch.equal(out, table.read(given)):
            raise RuntimeError("a replay read other rows")


def train(place: Path, budget: Budget, options: argparse.Namespace, *, ahead: bool) -> None:
    """Train a table whose optimizer's state is narrow, with Adam, and commit at the end."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    path = place / "rows.tier"
    with tierstore.open(path, "r+", budget=budget, device=options.device) as store:
        layer = TieredEmbedding(store["t"])
        optimizer = TieredOptimizer(torch.optim.Adam, [layer], lr=0.01, state_dtype=SMALL)
        batches: Any = drawn(store["t"].rows, options)
        if ahead:
            batches = tierstore.lookahead(batches, {layer: lambda ids: ids}, depth=DEPTH)
        for ids in batches:
            layer(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        store.commit()


def train_ahead(place: Path, budget: Budget, options: argparse.Namespace) -> None:
    """Train, with the ids of the next batches announced."""
    train(place, budget, options, ahead=True)


def train_plain(place: Path, budget: Budget, options: argparse.Namespace) -> None:
    """Train, with each batch's ids known when it is looked up."""
    train(place, budget, options, ahead=False)


JOBS = {
    "rows of an attached file": read,
    "the same in a CUDA graph": replay,
    "training, state in bfloat16": train_plain,
    "the same, ids ahead": train_ahead,
}


def budget_of(options: argparse.Namespace) -> Budget:
    """Return an eighth of the rows for the host tier, and a 64th for the GPU."""
    gpu = {} if options.device == "cpu" else {"gpu": options.mib * MIB // 64}
    return Budget(host=options.mib * MIB // 8, **gpu)


def work(job: str, place: Path, options: argparse.Namespace) -> None:
    """Do a job, and print the most private memory that it took."""
    few = argparse.Namespace(**vars(options) | {"batch": 8, "steps": 2})
    JOBS[job](place, budget_of(options), few)  # loads modules, kernels and torch's own memory
    begin = peak = private_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, private_bytes())

    threading.Thread(target=watch, daemon=True).start()
    JOBS[job](place, budget_of(options), options)
    done.set()
    print(json.dumps(max(peak, private_bytes()) - begin))


def run(job: str, place: Path, options: argparse.Namespace, group: Path | str) -> int | str:
    """Do a job in a process of its own; return its peak of private memory, or how it ended."""
    given = ["--job", job, "--place", str(place), "--device", options.device]
    for name in ("mib", "batch", "steps"):
        given += [f"--{name}", str(getattr(options, name))]

    def enter() -> None:
        if isinstance(group, Path):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, __file__, *given],
        capture_output=True,
        text=True,
        preexec_fn=enter,
        check=False,
    )
    if done.returncode:
        return f"{job}: ended with {done.returncode}: {done.stderr[-500:]}"
    return int(json.loads(done.stdout.splitlines()[-1]))


def make(place: Path, options: argparse.Namespace) -> None:
    """Write a file of random rows to attach, and a store of as many bytes to train."""
    rows = options.mib * MIB // (4 * ATTACHED_DIM)
    shape = (rows, ATTACHED_DIM)
    values = np.lib.format.open_memmap(place / "rows.npy", "w+", "<f4", shape)
    rng = np.random.default_rng(3)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        values[start:stop] = rng.random((stop - start, ATTACHED_DIM), np.float32)
    fields = {"weight": Field(DIM, init=tierstore.normal(seed=7))}
    fields |= {name: Field(DIM, SMALL) for name in STATES}
    spec = TableSpec(options.mib * MIB // (8 * DIM), fields=fields)
    tierstore.create(place / "rows.tier", {"t": spec}, budget=Budget(host=0)).close()


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, mib=4096, batch=65_536, steps=60, process_mib=4096)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--job", choices=list(JOBS), help="do this alone, and print its peak")
    parser.add_argument("--place", type=Path, help="where the job's files are")
    options = parser.parse_args()
    if options.job:
        work(options.job, options.place, options)
        return
    budget = options.mib * MIB // 8
    cap = budget + options.process_mib * MIB
    answer = Answer(
        "row_memory_cap",
        QUESTION,
        f"{options.steps} batches of {options.batch:,} rows of {4 * ATTACHED_DIM} B, a job",
        f"at most {ABOVE // MIB} MiB of private memory above the budget, and each job ends in a "
        "memory cgroup",
        notes=[
            f"tables of {options.mib} MiB; the cap is {options.process_mib} MiB above the budget",
            "private memory is RssAnon + RssShmem, every 5 ms",
        ],
    )
    with workspace(options) as place, contextlib.ExitStack() as stack:
        make(place, options)
        group = stack.enter_context(memory_cgroup(cap))
        for job in JOBS:
            if job == "the same in a CUDA graph" and options.device == "cpu":
                continue
            found = run(job, place, options, group)
            if isinstance(found, str):
                answer.notes.append(found)
                answer.met = False
                continue
            above = found - budget
            answer.rows.append(
                {"job": job, "budget MiB": budget // MIB, "cap MiB": cap // MIB}
                | {"private MiB": found // MIB, "above MiB": above // MIB}
            )
            answer.met = answer.met is not False and above <= ABOVE
    if isinstance(group, str):
        answer.notes.append(f"without a cap: {group}")
    answer.give(options)


if __name__ == "__main__":
    main()
