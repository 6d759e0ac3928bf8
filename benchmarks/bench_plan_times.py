"""Does a step take the time that `tierstore plan` predicts from what `tierstore bench` measured?

The speeds are measured before each round of runs, so that a loaded machine slows both, and medians
are compared. A run fills the tiers with the first half of its batches and times the second. With
--device cuda the tables have a GPU tier, ids are there, and a step ends when its kernels have.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, workspace

import tierstore
from tierstore.machine import comparison
from tierstore.machine import speeds as machine
from tierstore.sizing import Plan, Stream, plan, stream_of
from tierstore.sizing.streams import Batch

QUESTION = "Milliseconds to move the rows of a step: planned, and measured"
DIM = 64
WITHIN = 30


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to run: the share of the rows in each tier, and what is done to a batch.

    `fresh` takes the files out of the page cache before each batch.
    """

    share: float
    training: bool = False
    fresh: bool = False
    even: bool = False
    batches: int = 60
    gpu: float = 0.0


CASES = {
    "resident, read": Case(1.0),
    "resident, trained": Case(1.0, training=True),
    "cached files, no tier, read": Case(0.0),
    "tier of 15 %, read": Case(0.15),
    "tier of 15 %, trained": Case(0.15, training=True),
    "cold files, no tier, read": Case(0.0, fresh=True, even=True, batches=12),
}

ON_GPU = {
    "all on the GPU, read": Case(1.0, gpu=1.0),
    "all on the GPU, trained": Case(1.0, gpu=1.0, training=True),
    "GPU 15 %, host all, read": Case(1.0, gpu=0.15),
    "GPU 15 %, host all, trained": Case(1.0, gpu=0.15, training=True),
    "GPU 5 %, host 30 %, read": Case(0.3, gpu=0.05),
    "GPU 5 %, host 30 %, trained": Case(0.3, gpu=0.05, training=True),
}


def stream(rows: int, batch: int, case: Case, seed: int) -> Stream:
    """Return the ids of a run: by a power law, or uniform."""
    rng = np.random.default_rng(seed)
    drawn = rng.random((case.batches, batch))
    ids = drawn * rows if case.even else np.exp(drawn * np.log(rows)) - 1
    places = np.random.default_rng(0).permutation(rows)
    return stream_of(places[ids.astype(np.int64)], rows, seed)


def budget_of(path: Path, case: Case) -> tierstore.Budget:
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as store:
        table = store["item"]
        rows, record = table.rows, table.spec.layout.record_bytes

    def size(share: float) -> int:
        return int(rows * (share * record + 24)) if share else 0

    return tierstore.Budget(host=size(case.share), gpu=size(case.gpu))


def measured(path: Path, ids: Stream, case: Case, given: tierstore.Budget) -> float:
    """Return the median seconds of the batches in the second half of a run."""
    if case.fresh:
        return statistics.median(cold(path, batch, given) for batch in ids.batches)
    seconds = []
    on_gpu: dict[str, Any] = {"device": "cuda"} if case.gpu else {}
    with tierstore.open(path, "r+" if case.training else "r", budget=given, **on_gpu) as store:
        table, rows_of, wait = store["item"], np.asarray, lambda: None
        if case.gpu:
            import cupy

            rows_of, wait = cupy.asarray, cupy.cuda.get_current_stream().synchronize
        if case.share == 1:
            table.warm()
        else:
            for _ in table.scan():
                pass
        for batch in ids.batches:
            rows = rows_of(shuffled(batch))
            wait()
            begin = time.perf_counter()
            if case.training:
                with table.lease(rows) as lease:
                    lease.write("weight", lease.read("weight"))
            else:
                table.read(rows)
            wait()
            seconds.append(time.perf_counter() - begin)
        if case.training:
            store.rollback()
    return statistics.median(seconds[len(seconds) // 2 :])


def shuffled(batch: Batch) -> np.ndarray:
    return np.random.default_rng(1).permutation(np.repeat(batch.rows, batch.counts))


def cold(path: Path, batch: Batch, budget: tierstore.Budget) -> float:
    """Return the seconds of a batch that is read from the disk; mapped pages stay in memory."""
    comparison._forget(path)
    with tierstore.open(path, budget=budget) as store:
        rows = shuffled(batch)
        begin = time.perf_counter()
        store["item"].read(rows)
        return time.perf_counter() - begin


def planned(
    path: Path, ids: Stream, case: Case, budget: tierstore.Budget, speeds: machine.Speeds
) -> Plan:
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as store:
        table = store["item"]
        rows, record = table.rows, table.spec.layout.record_bytes
    return plan(
        rows,
        record,
        host=budget.host,
        gpu=budget.gpu or 0,
        stream=ids,
        speeds=speeds,
        training=case.training,
        page_cache=0 if case.fresh else None,
    )


def main() -> None:
    parser = arguments(QUESTION, rows=1_000_000, batch=8192)
    parser.set_defaults(repeat=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="time for each speed")
    parser.add_argument("--device", default="cpu", help="cuda: tables with a GPU tier")
    options = parser.parse_args()
    cases = CASES if options.device == "cpu" else ON_GPU
    answer = Answer(
        "plan_times" if options.device == "cpu" else "gpu_plan_times",
        QUESTION,
        "the rows of a batch",
        f"each plan within {WITHIN} % of its run",
        notes=[" ".join(line.strip() for line in (__doc__ or "").splitlines()[2:]).strip()],
    )
    times: dict[str, list[tuple[float, dict[str, Any]]]] = {name: [] for name in cases}
    runs: dict[str, list[float]] = {name: [] for name in cases}
    with workspace(options) as directory:
        os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
        path = directory / "item.tier"
        spec = tierstore.TableSpec(options.rows, DIM, init=tierstore.normal(seed=1))
        tierstore.create(path, {"item": spec}).close()
        size = min(512 << 20, options.rows * 4 * DIM)
        for number in range(options.repeat):
            found = machine.measure(directory, file_bytes=max(1 << 20, size), seconds=0.1)
            comparison.compare(directory, found, store_bytes=size, seconds=options.seconds)
            speeds = machine.known_speeds(directory) or found
            for name, case in cases.items():
                ids, budget = (
                    stream(options.rows, options.batch, case, number),
                    budget_of(path, case),
                )
                made = planned(path, ids, case, budget, speeds)
                times[name].append((made.step_seconds, made.seconds))
                comparison._forget(path)
                runs[name].append(measured(path, ids, case, budget))
    off = 0.0
    for name in cases:
        expected = statistics.median(total for total, _ in times[name])
        took = statistics.median(runs[name])
        apart = 100 * (expected / took - 1)
        off = max(off, abs(apart))
        parts = {
            part: round(1e3 * statistics.median(each[part] for _, each in times[name]), 3)
            for part in times[name][0][1]
        }
        answer.rows.append(
            {"run": name, "planned, ms": 1e3 * expected, "measured, ms": 1e3 * took}
            | {"apart, %": apart}
            | parts
        )
    answer.ratios["percent apart, at most"] = off
    answer.met = off <= WITHIN
    answer.give(options)


if __name__ == "__main__":
    main()
