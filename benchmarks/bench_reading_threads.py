"""Do threads that read rows in memory get in each other's way?"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_child, in_turn, workspace

import tierstore

QUESTION = "Threads that read rows of one table, all in memory, against np.take in as many"
THREADS = (1, 2, 8)
IDS = (2_048, 65_536)
LEAST = 0.8
SECONDS = 0.3
"""Each measurement repeats its calls for about as long."""

Read = Callable[[Any], object]


def rows_of(read: Read, batches: list[Any]) -> float:
    """Return how many rows a second threads read, each one of these batches again and again."""
    done, end = [0] * len(batches), time.perf_counter() + SECONDS

    def work(number: int) -> None:
        ids = batches[number]
        while time.perf_counter() < end:
            read(ids)
            done[number] += ids.size

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(batches))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - begin)


def rates_of(ways: dict[str, Read], batches: list[Any], repeat: int) -> dict[str, list[float]]:
    """Return the rows a second of every measurement, each way."""
    found: dict[str, list[float]] = {way: [] for way in ways}

    def note(way: str) -> None:
        found[way].append(rows_of(ways[way], batches))

    in_turn({way: partial(note, way) for way in ways}, repeat)
    return found


def measure(path: Path, rows: int, repeat: int) -> list[tuple[int, int, dict[str, float]]]:
    """Return median rows a second, each way, by ids of a batch and threads."""
    found = []
    with tierstore.open(path, budget=tierstore.Budget(host_rows=rows), device="cpu") as store:
        table = store["item"]
        plain = table.read(np.arange(rows))
        ways: dict[str, Read] = {
            "np.take": lambda ids: plain.take(ids, axis=0),
            "tierstore": table.read,
        }
        for ids in IDS:
            for threads in THREADS:
                rng = np.random.default_rng(threads)
                batches = [rng.integers(0, rows, ids) for _ in range(threads)]
                rates = rates_of(ways, batches, repeat)
                found.append(
                    (ids, threads, {way: float(np.median(each)) for way, each in rates.items()})
                )
    return found


def main() -> None:
    options = arguments(QUESTION, rows=400_000, dim=128).parse_args()
    answer = Answer(
        "reading_threads",
        QUESTION,
        f"the rows, {4 * options.dim} B each, from anywhere in {options.rows:,}",
        f"{max(THREADS)} threads read at least {LEAST} of the rows that np.take reads in as many",
    )
    with workspace(options) as directory:
        path = directory / "bench.tier"
        spec = tierstore.TableSpec(options.rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(path, {"item": spec}).close()
        found = in_child(measure, path, options.rows, options.repeat)
    for ids, threads, rates in found:
        ratio = rates["tierstore"] / rates["np.take"]
        answer.rows.append(
            {"ids a read": ids, "threads": threads}
            | {f"{way}, M rows/s": rate / 1e6 for way, rate in rates.items()}
            | {"ratio": ratio}
        )
        if threads == max(THREADS):
            answer.ratios[f"{threads} threads, {ids} ids, of np.take"] = ratio
    answer.met = bool(min(answer.ratios.values()) >= LEAST)
    answer.notes.append(
        "a read of less than 2 MiB takes no lock of the store; of 2,048 rows it takes "
        "a few microseconds of Python more than np.take, for which threads wait for each other"
    )
    answer.give(options)


if __name__ == "__main__":
    main()
