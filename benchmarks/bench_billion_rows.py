"""What does a table of a billion rows cost before its rows are used?"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_child, private_bytes, workspace

import tierstore

QUESTION = "Opening a sparse table, and the first commit of 32,768 of its rows, against later ones"
IDS, DIM, COMMITS = 32_768, 16, 5
MOST_SECONDS, MOST_TIMES, MOST_BYTES = 0.2, 1.5, 200 << 20
"""Maxima: of opening, of the first commit relative to later ones, of private memory."""


def used(path: Path, rows: int, budget: int, is_new: bool) -> dict[str, Any]:
    """Create or open a store; return what that and its commits take, and its memory at the end."""
    rng = np.random.default_rng(is_new)
    given = {"budget": tierstore.Budget(host=budget), "device": "cpu"}
    before, begin = private_bytes(), time.perf_counter()
    if is_new:
        spec = tierstore.TableSpec(rows, DIM, sparse=True)
        store = tierstore.create(path, {"item": spec}, **given)
    else:
        store = tierstore.open(path, "r+", **given)
    opened = time.perf_counter() - begin
    commits = []
    with store:
        for _ in range(1 + COMMITS):
            ids = np.unique(rng.integers(0, rows, IDS))
            store["item"].write(ids, rng.random((ids.size, DIM), np.float32))
            begin = time.perf_counter()
            store.commit()
            commits.append(time.perf_counter() - begin)
        for _ in range(COMMITS):
            store["item"].read(rng.integers(0, rows, IDS))
        private = private_bytes() - before
    later = statistics.median(commits[1:])
    return {"opened": opened, "first": commits[0], "later": later, "private": private}


def main() -> None:
    parser = arguments(QUESTION, rows=1_000_000_000, budget_mib=9 << 10)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    budget = options.budget_mib << 20
    answer = Answer(
        "billion_rows",
        QUESTION,
        f"of a commit {IDS:,} records of {4 * DIM} B, with their ids and checksums",
        f"opened in {MOST_SECONDS} s; first commit {MOST_TIMES} times later ones; private memory "
        f"at most {MOST_BYTES >> 20} MiB above the budget",
        notes=["memory: of the process at the end, above what it had before it opened the store"],
    )
    runs: dict[str, list[dict[str, Any]]] = {"created": [], "opened": []}
    for _ in range(options.repeat):
        with workspace(options) as directory:
            for way, found in runs.items():
                is_new = way == "created"
                path = directory / "bench.tier"
                found.append(in_child(used, path, options.rows, budget, is_new))
    missed = False
    for way, found in runs.items():
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        times = middle["first"] / middle["later"]
        above = middle["private"] - budget
        answer.rows.append(
            {
                "a store": way,
                "s": middle["opened"],
                "first commit, ms": 1e3 * middle["first"],
                "later ones, ms": 1e3 * middle["later"],
                "private, MiB": middle["private"] / 2**20,
            }
        )
        answer.ratios[f"{way}: first commit / later ones"] = times
        missed |= times > MOST_TIMES or above > MOST_BYTES or middle["opened"] > MOST_SECONDS
    answer.met = not missed
    answer.give(options)


if __name__ == "__main__":
    main()
