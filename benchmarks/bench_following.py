"""What do commits of a trainer cost a server that follows it?"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from common import SLOW_IMPORTS, Answer, arguments, workspace

import tierstore

QUESTION = "Reads of a server that refreshes five times a second, beside a trainer that commits"
IDS, SKEW, BATCHES = 64, 1.05, 4096
CHANGED, EVERY = 4096, 0.2
MOST, MOST_REFRESH_MS = 1.3, 1.5
"""Maximum of reads relative to those next to an idle writer, and of a refresh."""


def skewed(rows: int, ids: int, batches: int, seed: int) -> list[Any]:
    """Return batches of ids by a power law, the popular rows anywhere in the table."""
    rng = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, rows + 1) ** -SKEW)
    places = np.random.default_rng(1).permutation(rows)
    found = places[np.searchsorted(shares, rng.random((batches, ids)) * shares[-1])]
    return list(found)


def commits(path: Path, rows: int, dim: int, commits: bool, ready: Event, over: Event) -> None:
    """Commit some rows every time the readers refresh, or do nothing, until it is over."""
    rng = np.random.default_rng(2)
    with tierstore.open(path, "r+", budget=tierstore.Budget(host=0), device="cpu") as store:
        ready.set()
        while not over.wait(EVERY):
            if commits:
                changed = np.unique(rng.integers(0, rows, CHANGED))
                store["t"].write(changed, rng.random((changed.size, dim), np.float32))
                store.commit()


def served(path: Path, rows: int, dim: int, seconds: float) -> dict[str, float]:
    """Return what reads and refreshes take, in seconds, once the tier is warm."""
    batches = skewed(rows, IDS, BATCHES, 3)
    reads: list[float] = []
    refreshes: list[float] = []
    with tierstore.open(path, budget=rows * 4 * dim // 2, device="cpu") as store:
        table = store["t"]
        table.warm(np.unique(np.concatenate(batches)))
        begin = last = time.perf_counter()
        number = 0
        while (now := time.perf_counter()) < begin + seconds:
            if now - last >= EVERY:
                store.refresh()
                refreshes.append(time.perf_counter() - now)
                last = now = time.perf_counter()
            table.read(batches[number % BATCHES])
            reads.append(time.perf_counter() - now)
            number += 1
    low, high = np.quantile(reads, [0.5, 0.999])
    return {"p50": float(low), "p99.9": float(high), "refresh": statistics.median(refreshes)}


def beside(path: Path, options: Any, is_committing: bool) -> dict[str, float]:
    """Return the time of reads next to a writer in another process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*SLOW_IMPORTS])
    ready, over = context.Event(), context.Event()
    given = path, options.rows, options.dim, is_committing, ready, over
    writer = context.Process(target=commits, args=given)
    writer.start()
    ready.wait()
    try:
        return served(path, options.rows, options.dim, options.seconds)
    finally:
        over.set()
        writer.join()


def main() -> None:
    parser = arguments(QUESTION, rows=2_000_000, dim=64, seconds=4)
    options = parser.parse_args()
    answer = Answer(
        "following",
        QUESTION,
        "of a read 64 rows, 16 KiB; of a refresh the ids that changed, 32 KiB",
        f"reads {MOST} times those beside an idle writer, a refresh {MOST_REFRESH_MS} ms",
    )
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with workspace(options) as directory:
        path = directory / "served.tier"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.uniform(-1, 1))
        tierstore.create(path, {"t": spec}, budget=tierstore.Budget(host=0)).close()
        for _ in range(options.repeat):
            for is_committing, each in found.items():
                each.append(beside(path, options, is_committing))
    medians = {
        writer: {name: statistics.median(each[name] for each in runs) for name in runs[0]}
        for writer, runs in found.items()
    }
    for writer, took in medians.items():
        answer.rows.append(
            {
                "the writer": "commits" if writer else "is idle",
                "read p50 us": 1e6 * took["p50"],
                "read p99.9 us": 1e6 * took["p99.9"],
                "refresh p50 ms": 1e3 * took["refresh"],
            }
        )
    for name in ("p50", "p99.9"):
        answer.ratios[f"read {name}, of beside an idle writer"] = (
            medians[True][name] / medians[False][name]
        )
    refresh = 1e3 * medians[True]["refresh"]
    answer.met = max(answer.ratios.values()) <= MOST and refresh <= MOST_REFRESH_MS
    answer.give(options)


if __name__ == "__main__":
    main()
