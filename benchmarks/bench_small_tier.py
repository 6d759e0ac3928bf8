"""Is a host tier that holds a part of the rows ever slower than none?"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Answer, arguments, in_turn, medians, workspace

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

QUESTION = "A step of Adagrad over 26 tables that share a small host tier, against one without any"
SHARES = (0.1, 0.25, 0.5, 1.0)
"""Shares of the bytes of the tables that the host tier may take."""
TABLES, DIM, SKEW, BATCHES = 26, 16, 1.05, 8
RECORD_BYTES = 4 * 2 * DIM


def sizes(largest: int) -> list[int]:
    """Return the rows of the tables, in one proportion each, up to the largest."""
    return [int(each) for each in np.geomspace(min(300, largest), largest, TABLES)]


def drawn(rows: list[int], ids: int) -> list[list[torch.Tensor]]:
    """Return batches of ids for each table, by a power law, popular rows anywhere."""
    rng = np.random.default_rng(0)
    batches: list[list[torch.Tensor]] = [[] for _ in range(BATCHES)]
    for count in rows:
        shares = np.cumsum(np.arange(1, count + 1) ** -SKEW)
        places = rng.permutation(count)
        for batch in batches:
            found = np.searchsorted(shares, rng.random(ids) * shares[-1])
            batch.append(torch.from_numpy(places[found]))
    return batches


class Training:
    """A store whose tables are trained in turn; each call is a step of all tables."""

    def __init__(self, path: Path, host: int, batches: list[list[torch.Tensor]]) -> None:
        """Open a copy of its own."""
        self.store = tierstore.open(path, "r+", budget=tierstore.Budget(host=host), device="cpu")
        self._layers = [TieredEmbedding(self.store[name]) for name in self.store]
        self._optimizer = TieredOptimizer(torch.optim.Adagrad, self._layers, lr=0.01)
        self._batches = batches
        self._gradient = torch.ones(len(batches[0][0]), DIM)
        self._number = 0
        for _ in batches:
            self()

    def __call__(self) -> None:
        """Take a step."""
        self._optimizer.zero_grad()
        batch = self._batches[self._number % len(self._batches)]
        self._number += 1
        for layer, ids in zip(self._layers, batch, strict=True):
            layer(ids).backward(self._gradient)
        self._optimizer.step()


def ended(store: tierstore.Store) -> None:
    """Close a store without what was trained."""
    store.rollback()
    store.close()


def main() -> None:
    parser = arguments(QUESTION, rows=40_000)
    parser.add_argument("--ids", type=int, default=2048)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    rows = sizes(options.rows)
    batches = drawn(rows, options.ids)
    answer = Answer(
        "small_tier",
        QUESTION,
        "of each distinct row its record read and written once; below the host tier through a file",
        "a tier of 10, 25 and 50 % takes no longer than none",
    )
    with workspace(options) as directory, ExitStack() as stack:
        steps: dict[str, Any] = {}
        for share in (0.0, *SHARES):
            path = directory / f"{share}.tier"
            specs = {
                f"t{number}": tierstore.TableSpec(
                    count, DIM, init=tierstore.normal(std=0.1, seed=number)
                )
                for number, count in enumerate(rows)
            }
            tierstore.create(path, specs).close()
            made = Training(path, int(share * sum(rows) * RECORD_BYTES * 1.1), batches)
            stack.callback(partial(ended, made.store))
            steps[f"{share:.0%}"] = made
        found = medians(in_turn(steps, options.repeat))
    for name, seconds in found.items():
        answer.rows.append({"host tier": name, "ms": 1e3 * seconds})
        answer.ratios[f"{name}, of none"] = seconds / found["0%"]
    answer.met = all(found[f"{share:.0%}"] <= found["0%"] for share in SHARES[:3])
    answer.give(options)


if __name__ == "__main__":
    main()
