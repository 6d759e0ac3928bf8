"""How fast are scattered rows read from the disk when none of their pages is in memory?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from coldness import make_cold, random_reads
from common import Answer, arguments, in_turn, medians, workspace
from disk_peers import THREADS, Contestant, Tierstore, TierstoreZarr, installed
from figures import Figure, give, nothing, processor

import tierstore

QUESTION = "Random rows of 512 bytes gathered from a table on disk of which nothing is in memory"
TARGETS = {
    "Lance take": 2.5,
    f"LMDB, {THREADS} threads": 2.5,
    "RocksDB multi-get": 10,
    "memmap": 10,
}
MOST_RESIDENT = 0.001


def prepare(
    directory: Path,
    options: argparse.Namespace,
    kinds: Mapping[str, Callable[[Path, np.ndarray, Path], Contestant]],
) -> dict[str, Contestant]:
    """Write the same rows for every contestant."""
    spec = {"rows": options.rows, "dim": options.dim, "init": tierstore.uniform(-1, 1, seed=3)}
    for backend in ("memmap", "zarr"):
        table = tierstore.TableSpec(**spec, backend=backend)
        path = directory / f"{backend}.tier"
        tierstore.create(path, {"item": table}, budget=tierstore.Budget(host=0)).close()
    (rows,) = (directory / "memmap.tier").rglob("rows.npy")
    made = {}
    for name, kind in kinds.items():
        place = directory / kind.__name__
        place.mkdir()
        made[name] = kind(place, np.load(rows, mmap_mode="r"), directory)
    return made


def cold(contestant: Contestant, ids: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Return the rows a second of one gather, and the share of pages in memory before it."""
    share = make_cold(contestant.path)
    contestant.open()
    begin = time.perf_counter()
    found = contestant.read(ids)
    seconds = time.perf_counter() - begin
    contestant.close()
    if not np.array_equal(found, expected):
        raise RuntimeError(f"{contestant.__class__.__name__} read other rows")
    return ids.size / seconds, share


def compared(directory: Path, options: argparse.Namespace) -> dict[str, Figure]:
    """Return what a gather of rows takes of which nothing is in memory."""
    options.rows = min(options.rows, 1 << 18)
    rng, found = np.random.default_rng(5), {}
    ours = {"memmap": Tierstore, "zarr": TierstoreZarr}
    for name, contestant in prepare(directory, options, ours).items():
        drawn = [rng.permutation(options.rows)[: options.batch] for _ in range(options.repeat + 1)]

        def make_ready(contestant: Contestant = contestant) -> None:
            contestant.close()
            make_cold(contestant.path)
            contestant.open()

        contestant.open()
        for kind, before in (("cold", make_ready), ("warm", nothing)):
            reads = (contestant.read(ids) for ids in drawn)
            figure = processor(lambda reads=reads: next(reads), options.repeat, before)
            found[f"{name}, {drawn[0].size:,} rows, {kind}"] = figure
        contestant.close()
    return found


def warm(ours: list[Contestant], rows: int, batch: int, repeat: int) -> list[float]:
    """Return the rows a second of gathers from files that are wholly in the page cache."""
    rng = np.random.default_rng(5)
    for each in ours:
        each.open()
        each.read(np.arange(rows))
    reads = {str(at): lambda each=each: each.read(ids) for at, each in enumerate(ours)}
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(4 * repeat):
        ids = rng.integers(0, rows, batch)
        for name, each in in_turn(reads, 1).items():
            seconds[name] += each
    for each in ours:
        each.close()
    return [batch / median for median in medians(seconds).values()]


def main() -> None:
    parser = arguments(QUESTION, rows=4 << 20, dim=128, batch=16_384)
    parser.set_defaults(repeat=3)
    options = parser.parse_args()
    answer = Answer(
        "cold_reads",
        QUESTION,
        f"{options.batch:,} blocks of 4 KiB, one for nearly every row",
        "at least 0.8 of the disk's random reads; 2.5 times Lance and LMDB, 10 times RocksDB and "
        "the default memmap; zarr at least 0.9 of memmap, cold and warm",
        notes=[
            "limit: 4 KiB reads at random places, 256 in flight, past the page cache",
            "those are in no order; tierstore reads a batch in the file's order, which is faster",
            "cold: pages were dropped before each gather, and mincore counted what was left",
            "every reader is opened anew, and what it returns is compared",
            "a page fault of a mapping reads far ahead: one gather brings in the whole table",
        ],
    )
    with workspace(options) as directory:
        if options.figures:
            give(options, compared(directory, options))
            return
        contestants = prepare(directory, options, installed())
        (file,) = (directory / "memmap.tier").rglob("rows.npy")
        sizes = (options.batch, min(4 * options.batch, options.rows))
        rounds = [measure(contestants, file, options, size) for size in sizes]
        ours = [contestants[name] for name in ("tierstore", "tierstore, zarr")]
        in_memory = warm(ours, options.rows, sizes[-1], options.repeat)
    fill_in(answer, rounds, in_memory)
    answer.give(options)


@dataclass
class Round:
    """Gathers of one size: the rows a second of each, and its largest share of cached pages."""

    size: int
    limits: list[float]
    rates: dict[str, list[float]]
    shares: dict[str, float]

    @property
    def limit(self) -> float:
        return statistics.median(self.limits)

    @property
    def found(self) -> dict[str, float]:
        return {name: statistics.median(each) for name, each in self.rates.items()}


def measure(
    contestants: dict[str, Contestant], file: Path, options: argparse.Namespace, size: int
) -> Round:
    """Gather the same rows with each contestant in turn, after measuring the disk's limit."""
    done = Round(size, [], {name: [] for name in contestants}, dict.fromkeys(contestants, 0.0))
    rng = np.random.default_rng(size)
    for _ in range(options.repeat):
        ids = rng.permutation(options.rows)[:size]
        expected = np.asarray(np.load(file, mmap_mode="r")[ids])
        for name, contestant in contestants.items():
            done.limits.append(random_reads(file, size))
            rate, share = cold(contestant, ids, expected)
            done.rates[name].append(rate)
            done.shares[name] = max(done.shares[name], share)
    return done


def fill_in(answer: Answer, rounds: list[Round], in_memory: list[float]) -> None:
    """Put the figures and their verdict into the answer; the first round is the promise."""
    for each in rounds:
        part = f"{each.size:,} rows"
        answer.rows.append({"reader": f"limit, {part}", "rows/s": each.limit, "of the limit": 1.0})
        for name, rate in each.found.items():
            answer.rows.append(
                {"reader": f"{name}, {part}", "rows/s": rate, "of the limit": rate / each.limit}
                | {"slowest": min(each.rates[name]), "fastest": max(each.rates[name])}
                | {"in memory before, %": 100 * each.shares[name]}
            )
    for name, rate in zip(("tierstore, warm", "tierstore, zarr, warm"), in_memory, strict=True):
        answer.rows.append({"reader": name, "rows/s": rate})
    ratios, found = answer.ratios, rounds[0].found
    ratios["of the limit"] = found["tierstore"] / rounds[0].limit
    ratios[f"of the limit, {rounds[1].size:,} rows"] = (
        rounds[1].found["tierstore"] / rounds[1].limit
    )
    for name in found:
        if not name.startswith("tierstore"):
            ratios[f"times {name}"] = found["tierstore"] / found[name]
    ratios["zarr ÷ memmap, cold"] = found["tierstore, zarr"] / found["tierstore"]
    ratios["zarr ÷ memmap, warm"] = in_memory[1] / in_memory[0]
    answer.met = (
        ratios["of the limit"] >= 0.8
        and all(
            ratios[f"times {name}"] >= least for name, least in TARGETS.items() if name in found
        )
        and min(ratios["zarr ÷ memmap, cold"], ratios["zarr ÷ memmap, warm"]) >= 0.9
        and max(max(each.shares.values()) for each in rounds) <= MOST_RESIDENT
    )
    missing = set(TARGETS) - set(found)
    if missing:
        answer.notes.append(f"not installed: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
