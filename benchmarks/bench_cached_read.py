"""Does a read of rows that are in memory take about as long as `np.take`, cached or not?

A table that does not fit into its budget is what the library is for. Here a cache holds more than
half of the rows, full and warm, and every id of a read is in it: the core looks it up, copies its
record and notes its use. The same reads of a table that fits whole need no look-up. The peer is
`weights.take(ids, axis=0)` of an array of the same rows, which must be in memory as a whole.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_child, workspace
from figures import Figure, give, keep_in_memory, processor

import tierstore

QUESTION = "Processor time of a read of rows in memory, relative to np.take of the same rows"
COUNTS = (1, 64, 2048, 65_536)
MOST = {
    "half": dict(zip(COUNTS, (5, 4, 3.3, 3), strict=True)),
    "whole": dict(zip(COUNTS, (4, 3, 1.2, 0.8), strict=True)),
}
"""Largest ratios wanted, for rows of 64 B."""
_SHARE = 0.55
"""Of the rows, what a cache holds."""


def opened(path: Path, cached: str, rows: int) -> tierstore.Store:
    """Open the store with a budget that holds the whole of it, or more than half of one table."""
    held = {"host_rows": int(_SHARE * rows)} if cached == "half" else {"host": 64 << 30}
    return tierstore.open(path, budget=tierstore.Budget(**held), device="cpu")


def warm(table: tierstore.Table, cached: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Fill the cache and return ids of rows that it holds, half of all or all."""
    rng = np.random.default_rng(3)
    for start in range(0, table.rows, 1 << 16):
        table.read(np.arange(start, min(start + (1 << 16), table.rows)))
    ids = rng.permutation(table.rows)
    if cached == "half":
        ids = ids[: ids.size // 2]
        for start in range(0, ids.size, 1 << 14):
            table.read(ids[start : start + (1 << 14)])
    return ids


def batches(
    ids: np.ndarray[Any, np.dtype[np.int64]], count: int
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return some batches of ids, drawn uniformly."""
    rng = np.random.default_rng(5)
    return [ids[rng.integers(0, ids.size, count)] for _ in range(16)]


def measure(path: Path, cached: str, rows: int, repeat: int) -> dict[int, dict[str, float]]:
    """Return median processor seconds of a read, of the table and of np.take, by ids in it."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    found: dict[int, dict[str, float]] = {}
    with opened(path, cached, rows) as store:
        table = store["item"]
        weights = np.concatenate([block.copy() for block in table.scan()])
        ids = warm(table, cached)
        before = table.stats()["host"]
        for count in COUNTS:
            drawn = batches(ids, count)
            if not np.array_equal(table.read(drawn[0]), weights[drawn[0]]):
                raise RuntimeError("tierstore and NumPy read different rows")
            times = max(1, 100_000 // (count + 200) // len(drawn)) * len(drawn)
            seconds: dict[str, list[float]] = {"tierstore": [], "np.take": []}
            for number in range(repeat + 1):
                for name, read in (
                    ("tierstore", table.read),
                    ("np.take", lambda ids: weights.take(ids, axis=0)),
                ):
                    begin = time.process_time_ns()
                    for which in range(times):
                        read(drawn[which % len(drawn)])
                    if number:
                        seconds[name].append((time.process_time_ns() - begin) / times / 1e9)
            found[count] = {name: statistics.median(each) for name, each in seconds.items()}
        after = table.stats()["host"]
        if after.requested - before.requested != after.hits - before.hits:
            raise RuntimeError("not all rows were in memory")
    return found


def main() -> None:
    """Run the benchmark."""
    parser = arguments(QUESTION, rows=1_000_000, width=64, tables=3)
    options = parser.parse_args()
    keep_in_memory(options)
    answer = Answer(
        "cached_read",
        QUESTION,
        f"each record of {options.width} B once from memory and once into the result; of a cache "
        "also four bytes to look up, and four to note the use",
        f"of {', '.join(f'{count:,}' for count in COUNTS)} rows at most "
        + "; ".join(f"{name}: {', '.join(map(str, each.values()))}" for name, each in MOST.items()),
    )
    spec = tierstore.TableSpec(options.rows, options.width // 4, init=tierstore.normal(seed=7))
    small = tierstore.TableSpec(1000, options.width // 4)
    others = {f"other_{number}": small for number in range(1, options.tables)}
    with workspace(options) as directory:
        path = directory / "bench.tier"
        tierstore.create(path, {"item": spec, **others}).close()
        if options.figures:
            figures = {}
            for cached in MOST:
                with opened(path, cached, options.rows) as store:
                    table, ids = store["item"], warm(store["item"], cached)
                    for count in COUNTS:
                        drawn = batches(ids, count)

                        def read(drawn: list[Any] = drawn, table: tierstore.Table = table) -> None:
                            for each in drawn:
                                table.read(each)

                        times = max(1, 20_000 // (count + 200))
                        taken = processor(read, options.repeat, times=times)
                        name = f"{count:,} rows, {cached} in memory"
                        figures[name] = Figure(taken.seconds / len(drawn))
            give(options, figures)
            return
        for cached, most in MOST.items():
            found: dict[int, dict[str, float]] = in_child(
                measure, path, cached, options.rows, options.repeat
            )
            for count, seconds in found.items():
                ratio = seconds["tierstore"] / seconds["np.take"]
                answer.rows.append(
                    {
                        "in memory": cached,
                        "rows": count,
                        **{f"{name}, µs": 1e6 * each for name, each in seconds.items()},
                        "ratio": ratio,
                        "at most": most[count],
                    }
                )
                answer.ratios[f"of np.take, {count:,} rows, {cached} in memory"] = ratio
    answer.met = all(row["ratio"] <= row["at most"] for row in answer.rows)
    answer.give(options)


if __name__ == "__main__":
    main()
