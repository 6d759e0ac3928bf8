"""Does a training step by key cost more than one by id, on the CPU?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = (
    "An Adam step by key beside one by id on the CPU, every key known and every row in memory"
)
FACTOR = np.int64(0x1E3779B97F4A7C15)
BLOCK = 1 << 18


def step(layer: Any, optimizer: Any, ids: Any, gradient: Any) -> None:
    """Train one batch."""
    layer(ids).backward(gradient)
    optimizer.step()
    optimizer.zero_grad()


def steps(path: Path, rows: int, batch: int, dim: int, repeat: int) -> dict[str, float]:
    """Return the median seconds of a step by id and by key."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    fields = {name: tierstore.Field(dim) for name in ("weight", "exp_avg", "exp_avg_sq")}
    specs = {
        "ids": tierstore.TableSpec(rows, fields=fields, sparse=True),
        "keys": tierstore.TableSpec(rows, fields=fields, sparse=True, keys="int64"),
    }
    budget = tierstore.Budget(host_rows=dict.fromkeys(specs, rows))
    generator = torch.Generator().manual_seed(3)
    with tierstore.create(path, specs, budget=budget) as store:
        values = np.random.default_rng(4).random((BLOCK, dim), np.float32)
        for start in range(0, rows, BLOCK):
            numbers = np.arange(start, min(start + BLOCK, rows))
            store["ids"].write(numbers, values[: numbers.size])
            store["keys"].write((numbers + 1) * FACTOR, values[: numbers.size])
        ids = torch.randperm(rows, generator=generator)[:batch]
        keys = (ids + 1) * int(FACTOR)
        gradient = torch.rand(batch, dim, generator=generator)
        contestants = {}
        for name, given in (("ids", ids), ("keys", keys)):
            layer = TieredEmbedding(store[name])
            optimizer = TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
            contestants[name] = functools.partial(step, layer, optimizer, given, gradient)
        times = medians(in_turn(contestants, repeat))
        if not torch.equal(store["ids"].read(ids[:1000]), store["keys"].read(keys[:1000])):
            raise RuntimeError("training by key gave other rows")
        store.rollback()
        return times


def main() -> None:
    """Measure and print the answer."""
    parser = arguments(QUESTION, rows=2_000_000, batch=1 << 20, dim=64)
    options = parser.parse_args()
    with workspace(options) as directory:
        times = steps(directory / "s", options.rows, options.batch, options.dim, options.repeat)
    ratio = times["keys"] / times["ids"]
    answer = Answer(
        name="keyed_step",
        question=QUESTION,
        must_move=f"{options.batch:,} rows of 3 x {options.dim} float32, read and written",
        target="a step by key takes at most 1.15 of one by id",
        met=ratio <= 1.15,
        ratios={"step by key / by id": ratio},
    )
    for what, seconds in times.items():
        answer.rows.append({"step by": what, "ms": 1e3 * seconds})
    answer.give(options)


if __name__ == "__main__":
    main()
