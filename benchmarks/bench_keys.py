"""How long does it take to find the rows of keys, and how much memory does a key take?"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_child, in_turn, medians, private_bytes, workspace

import tierstore
from tierstore._keys.hashmap import HashMap

QUESTION = "Keys of a table's rows: lookups of a batch, beside a dict and a pandas Index"
TABLES = {"int64": "number", "str": "text"}


def drawn(kind: str, count: int) -> Any:
    """Return distinct keys of a kind, an array of integers or a list of texts."""
    if kind == "str":
        return [f"user-{number:09d}" for number in range(count)]
    return np.random.default_rng(1).permutation(count) * np.int64(0x9E3779B97F4A7C15 >> 2)


def batches(keys: Any, batch: int) -> tuple[Any, Any]:
    """Return random rows and their keys."""
    rows = np.random.default_rng(2).integers(0, len(keys), batch)
    return rows, keys[rows] if isinstance(keys, np.ndarray) else [keys[row] for row in rows]


def make(path: Path, rows: int) -> dict[str, float]:
    """Write a store with a table for each kind of keys; return the seconds of `set_keys`."""
    specs = {name: tierstore.TableSpec(rows, 1) for name in TABLES.values()}
    seconds = {}
    with tierstore.create(path, specs) as store:
        for kind, name in TABLES.items():
            keys = drawn(kind, rows)
            begin = time.perf_counter()
            store.set_keys(name, keys)
            seconds[kind] = time.perf_counter() - begin
    return seconds


def first(path: Path, kind: str, batch: int) -> tuple[float, float]:
    """Open a store and look a batch up; return the seconds, and the memory of each key in bytes.

    Memory counts what is private and the files that the map and the keys of the table take.
    """
    with tierstore.open(path) as store:
        table = store[TABLES[kind]]
        if kind == "str":
            wanted: Any = [f"user-{number:09d}" for number in range(batch)]
        else:
            wanted = np.arange(batch)
        before, begin = private_bytes(), time.perf_counter()
        table.lookup(wanted, missing=-1)
        seconds = time.perf_counter() - begin
        mapped = sum(each.stat().st_size for each in path.glob(f"{TABLES[kind]}/*/keys.*"))
        return seconds, (private_bytes() - before + mapped) / table.rows


def looked_up(path: Path, kind: str, rows: int, batch: int, repeat: int) -> dict[str, float]:
    """Return the median seconds of a lookup by contestant."""
    keys = drawn(kind, rows)
    wanted, asked = batches(keys, batch)
    listed = asked if isinstance(asked, list) else asked.tolist()
    by_key = {key: row for row, key in enumerate(keys)}
    with tierstore.open(path) as store:
        table = store[TABLES[kind]]
        contestants: dict[str, Any] = {
            "tierstore": lambda: table.lookup(asked),
            "dict": lambda: np.fromiter(map(by_key.__getitem__, listed), np.int64),
        }
        if importlib.util.find_spec("pandas") is not None:
            import pandas

            index = pandas.Index(keys)
            contestants["pandas"] = lambda: index.get_indexer(asked)
        for run in contestants.values():
            if not np.array_equal(run(), wanted):
                raise RuntimeError("a lookup found other rows")
        return medians(in_turn(contestants, repeat))


def grown(rows: int, batch: int, repeat: int) -> dict[str, float]:
    """Return figures of a map of integers that grows batch by batch."""
    table, rng, seconds = HashMap(), np.random.default_rng(3), []
    while len(table) < rows:
        keys = rng.integers(0, 2**64, batch, np.uint64)
        begin = time.perf_counter()
        table.add(keys)
        seconds.append(time.perf_counter() - begin)
    known = table.codes_of(rng.integers(0, len(table), batch))
    found = medians(in_turn({"find": lambda: table.find(known)}, repeat))
    return {
        "new, median ms": 1e3 * float(np.median(seconds)),
        "new, longest ms": 1e3 * max(seconds),
        "all there, ms": 1e3 * found["find"],
        "bytes a key": table.nbytes / len(table),
    }


def main() -> None:
    """Measure and print the answer."""
    parser = arguments(QUESTION, rows=1_000_000, batch=4096, map_rows=10_000_000, map_batch=32_768)
    options: argparse.Namespace = parser.parse_args()
    answer = Answer(
        name="keys",
        question=QUESTION,
        must_move=f"{options.batch:,} keys of {options.rows:,}",
        target="texts in 5 ms once opened, at most 60 bytes a key; "
        "32,768 of 10 M found in 1.2 ms, new ones entered in 4 ms",
    )
    with workspace(options) as directory:
        path = directory / "s"
        written = make(path, options.rows)
        for kind in TABLES:
            opened, memory = in_child(first, path, kind, options.batch)
            times = looked_up(path, kind, options.rows, options.batch, options.repeat)
            answer.rows.append(
                {"keys": kind}
                | {f"{name}, ms": 1e3 * each for name, each in times.items()}
                | {"first, ms": 1e3 * opened, "bytes a key": memory}
                | {"set_keys, s": written[kind]}
            )
            answer.ratios[f"{kind}: dict / tierstore"] = times["dict"] / times["tierstore"]
            if kind == "str":
                answer.met = times["tierstore"] <= 5e-3 and memory <= 60
    figures = grown(options.map_rows, options.map_batch, options.repeat)
    answer.rows.append({"keys": f"map, {options.map_batch:,} of {options.map_rows:,}"} | figures)
    answer.met = bool(
        answer.met and figures["all there, ms"] <= 1.2 and figures["new, median ms"] <= 4
    )
    answer.give(options)


if __name__ == "__main__":
    main()
