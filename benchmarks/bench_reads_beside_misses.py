"""Does a read of rows in memory wait for another thread, which always misses?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from common import Answer, arguments, in_child, workspace

import tierstore

QUESTION = "Reading 8 rows that are in the host tier, alone and beside a thread that always misses"
FEW = 8
SLOTS = 8
"""A host tier of one row in so many: nearly all that the other thread reads is missing."""
ROUNDS = 5

Nanoseconds = npt.NDArray[np.int64]


def timed(read: Callable[[], object], count: int) -> Nanoseconds:
    """Return how long each of `count` calls takes."""
    found = np.empty(count, np.int64)
    for number in range(count):
        begin = time.perf_counter_ns()
        read()
        found[number] = time.perf_counter_ns() - begin
    return found


def beside(work: Callable[[], object], read: Callable[[], object], count: int) -> Nanoseconds:
    """Return the same while another thread does `work` over and over."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()

    other = threading.Thread(target=run)
    other.start()
    try:
        time.sleep(0.05)
        return timed(read, count)
    finally:
        ended.set()
        other.join()


def measure(path: Path, batch: int, count: int) -> dict[str, list[float]]:
    """Return median and 99th percentile in microseconds, by what the other thread does."""
    rng = np.random.default_rng(3)
    numbers = rng.standard_normal(1 << 16)
    with tierstore.open(path) as store:
        rows = store["item"].rows
    found: dict[str, list[Nanoseconds]] = {}
    with tierstore.open(path, budget=tierstore.Budget(host_rows=rows // SLOTS)) as store:
        table = store["item"]
        resident = np.arange(FEW)
        with table.lease(resident):  # nothing can take their slots
            ways: dict[str, Callable[[], object] | None] = {
                "nothing": None,
                "sorts an array": lambda: np.sort(numbers),
                "misses": lambda: table.read(rng.integers(FEW, rows, batch)),
            }
            for _ in range(ROUNDS):
                for way, work in ways.items():
                    read = lambda: table.read(resident)  # noqa: E731
                    times = timed(read, count) if work is None else beside(work, read, count)
                    found.setdefault(way, []).append(times)
    return {
        way: [float(np.median([np.percentile(each, q) for each in times])) / 1e3 for q in (50, 99)]
        for way, times in found.items()
    }


def main() -> None:
    parser = arguments(QUESTION, rows=1 << 21, dim=32, batch=65_536, reads=20_000)
    options = parser.parse_args()
    answer = Answer(
        "reads_beside_misses",
        QUESTION,
        f"{FEW * options.dim * 4} B a read; the other thread brings {options.batch:,} rows a call "
        "from the page cache, checks and evicts",
        "median and 99th percentile at most 3 times those of reads alone",
    )
    with workspace(options) as directory:
        path = directory / "bench.tier"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(path, {"item": spec}, budget=tierstore.Budget(host_rows=0)).close()
        found = in_child(measure, path, options.batch, options.reads)
    for way, (median, high) in found.items():
        answer.rows.append({"the other thread": way, "median us": median, "p99 us": high})
    alone, missing = found["nothing"], found["misses"]
    answer.ratios = {
        "median beside misses / alone": missing[0] / alone[0],
        "p99 beside misses / alone": missing[1] / alone[1],
    }
    answer.notes.append(
        "sorting shows what any busy thread costs: the interpreter changes threads every 5 ms"
    )
    answer.met = max(answer.ratios.values()) <= 3
    answer.give(options)


if __name__ == "__main__":
    main()
