"""How long does a table by key take to open, to answer, and to drop unused keys?

A read of 65,536 rows of 256 bytes moves 34 MB, 50 with the lines that are fetched before they are
written. By key it also takes two lines of 64 bytes a key at random, a place of the map and the key
of its row: 8 MB, so by bytes alone a read by key could reach 0.86 of one by row. But lines at
random and single passes cost more time than bytes. On one core of an AMD EPYC, beside other work, a
row is copied in 34 to 50 ns and a key found in some 30: 15 to 20 for the two accesses, 5 to 9 for
its hash and its place, 6 to 12 for more probes of the 8 % of the keys that need them. So half of
the speed is about what two cores reach, 0.48 to 0.57 in turn with the reads by row. A second map
before this one, whose places prove 80 % of the keys by one access, takes 0.86 of the time to find
them and 16 bytes a key. To copy half of the rows while the other half is found takes 0.3 ms longer.

Reads use the cores that the process may use, by key and by row: `taskset -c 0-3` limits both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_child, in_turn, medians, private_bytes, workspace

import tierstore

QUESTION = "A table by key: from opening it to the first rows by number and by key, and expiry"
BLOCK = 1 << 20


def keys_of(numbers: Any) -> Any:
    """Return hashes of numbers."""
    return np.asarray(numbers, np.int64) * np.int64(0x1E3779B97F4A7C15)


def make(path: Path, rows: int) -> float:
    """Write a store of so many keys; return the seconds."""
    spec, begin = tierstore.TableSpec(rows, 1, keys="int64"), time.perf_counter()
    with tierstore.create(path, {"user": spec}) as store:
        for start in range(0, rows, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, rows))
            store["user"].write(keys_of(numbers), numbers[:, None].astype(np.float32))
            if start // BLOCK % 16 == 15:
                store.commit()
        store.commit()
    return time.perf_counter() - begin


def opened(path: Path, batch: int) -> dict[str, float]:
    """Open a store; return the seconds until it answers, and the memory of a key in bytes.

    Modules are imported before, by opening another one.
    """
    with tierstore.create(path.with_name("small"), {"user": tierstore.TableSpec(1, 1)}):
        pass
    times = [time.perf_counter()]
    with tierstore.open(path) as store:
        table = store["user"]
        times.append(time.perf_counter())
        table.by_row.read(np.arange(batch))
        times.append(time.perf_counter())
        before = private_bytes()
        found = table.read(keys_of(np.arange(batch)))
        times.append(time.perf_counter())
        if not np.array_equal(found[:, 0], np.arange(batch)):
            raise RuntimeError("keys have other rows")
        opening, by_row, by_key = np.diff(times)
        return {
            "opened, ms": 1e3 * opening,
            "first by row, ms": 1e3 * by_row,
            "first by key, s": by_key,
            "bytes a key": (private_bytes() - before) / table.rows,
        }


def reads(path: Path, rows: int, dim: int, batch: int, repeat: int) -> dict[str, float]:
    """Return the seconds of reads of rows that the host tier holds."""
    spec = tierstore.TableSpec(rows, dim, keys="int64")
    budget = tierstore.Budget(host_rows=rows)
    with tierstore.create(path, {"user": spec}, budget=budget) as store:
        table = store["user"]
        for start in range(0, rows, BLOCK // 8):
            numbers = np.arange(start, min(start + BLOCK // 8, rows))
            table.write(keys_of(numbers), np.repeat(numbers[:, None].astype(np.float32), dim, 1))
        numbers = np.random.default_rng(2).integers(0, rows, batch)
        keys = keys_of(numbers)
        if not np.array_equal(table.read(keys)[:, 0], numbers.astype(np.float32)):
            raise RuntimeError("keys have other rows")
        times = {
            "by key": lambda: table.read(keys),
            "by row": lambda: table.by_row.read(numbers),
        }
        found = medians(in_turn(times, repeat))
        store.rollback()
        return found


def expired(path: Path, rows: int) -> dict[str, float]:
    """Return the seconds to drop a fifth of the keys, and to commit that."""
    spec = tierstore.TableSpec(rows, 1, keys="int64", track_uses=True)
    rng = np.random.default_rng(3)
    with tierstore.create(path, {"user": spec}) as store:
        table = store["user"]
        for start in range(0, rows, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, rows))
            table.write(keys_of(numbers), rng.random((len(numbers), 1), np.float32))
            store.commit()
        for _ in range(4):  # any of them are used again, so that the unused ones are scattered
            again = np.unique(rng.integers(0, rows, rows // 2))
            for start in range(0, len(again), BLOCK):
                numbers = again[start : start + BLOCK]
                table.write(keys_of(numbers), rng.random((len(numbers), 1), np.float32))
            store.commit()
        capacity, begin = table.capacity, time.perf_counter()
        gone = sum(len(keys) for keys, _ in table.expire(keep_at_most=rows - rows // 5))
        removed = time.perf_counter()
        store.commit()
        committed = time.perf_counter()
        table.write(keys_of(np.arange(rows, rows + gone)), np.ones((gone, 1), np.float32))
        if table.capacity != capacity or table.rows != rows:
            raise RuntimeError("new keys do not take the places of those that expired")
        store.rollback()
        return {
            "expired": gone,
            "expire, s": removed - begin,
            "commit of that, s": committed - removed,
        }


def main() -> None:
    """Measure and print the answer."""
    parser = arguments(
        QUESTION,
        rows=10_000_000,
        batch=65_536,
        expiry_rows=10_000_000,
        read_rows=1_000_000,
        dim=64,
    )
    options = parser.parse_args()
    answer = Answer(
        name="keyed_opening",
        question=QUESTION,
        must_move=f"{options.rows:,} keys of 8 bytes",
        target="a read by key at most twice one by number, of 64 values; "
        "100 M keys: 100 ms to the first row by number, 20 s to the first by key; "
        "a fifth of 10 M expires in 2 s",
    )
    with workspace(options) as directory:
        written = make(directory / "s", options.rows)
        figures = in_child(opened, directory / "s", options.batch)
        answer.rows.append({"keys": options.rows, "written, s": written} | figures)
        for dim in (1, options.dim):
            given = directory / f"r{dim}", options.read_rows, dim, options.batch, options.repeat
            times = in_child(reads, *given)
            answer.rows.append(
                {"keys": options.read_rows, "dim": dim}
                | {f"{name}, ms": 1e3 * each for name, each in times.items()}
            )
            answer.ratios[f"read by row / by key, dim {dim}"] = times["by row"] / times["by key"]
        gone = in_child(expired, directory / "e", options.expiry_rows)
        answer.rows.append({"keys": options.expiry_rows} | gone)
        ratio = answer.ratios[f"read by row / by key, dim {options.dim}"]
        first_row = figures["opened, ms"] + figures["first by row, ms"]
        if options.rows >= 100_000_000 and options.expiry_rows >= 10_000_000:
            answer.met = bool(
                first_row <= 100
                and figures["first by key, s"] <= 20
                and ratio >= 0.5
                and gone["expire, s"] <= 2
            )
    answer.give(options)


if __name__ == "__main__":
    main()
