"""Averages and stochastic rounding of rows that several ranks share, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import run, values
from tests.distributed.test_collections import batch, weights
from tests.distributed.test_ranks import assert_same, contents
from tierstore import distributed
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

ROWS = {"user": 40, "item": 300}


def specs(dtype: str) -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    return {name: tierstore.TableSpec(rows, 4, dtype, init=init) for name, rows in ROWS.items()}


def train(store: Any, rank: int, ranks: int, kind: str, **options: Any) -> dict[str, Any]:
    """Train, and return what is looked up at the end, of averages where there are some."""
    emb: Any
    if kind == "one":
        emb = TieredEmbedding(store["item"])
    elif kind == "rows":
        emb = TieredEmbeddingCollection(store, {name: name for name in ROWS})
    else:
        emb = TieredEmbeddingBagCollection(store, {name: name for name in ROWS}, "sum")
    optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=2.0**-6, **options)

    def of(step: int) -> Any:
        ids = {name: each for name, each in batch(step, rank, ranks).items() if name in ROWS}
        if step == 2:
            ids["user"] = ids["user"][:0] if kind == "rows" else ids["user"]
        return ids["item"] if kind == "one" else ids

    for step in range(4):
        found = emb(of(step))
        each = [found] if kind == "one" else found.values()
        sum((one * weights(one, step)).sum() for one in each).backward()
        optimizer.step()
    if "ema" in options:
        emb = emb.averaged()
    with torch.no_grad():
        found = emb(of(1))
    return {"item": found} if kind == "one" else dict(found)


def train_and_commit(rank: int, path: Path, kind: str, options: dict[str, Any]) -> Any:
    with distributed.open(path, average=False, budget=tierstore.Budget(host_rows=90)) as store:
        found = train(store, rank, dist.get_world_size(), kind, **options)
        store.commit(4)
        return {name: each.float().numpy() for name, each in found.items()}


@pytest.mark.variants(0, 4)
@pytest.mark.parametrize("kind", ["one", "rows", "bags"])
@pytest.mark.parametrize(
    ("dtype", "options"), [("float32", {"ema": 0.9}), ("bfloat16", {"stochastic_rounding": True})]
)
def test_they_are_those_of_one_process(
    tmp_path: Path, kind: str, dtype: str, options: dict[str, Any]
) -> None:
    with tierstore.create(tmp_path / "plain", specs(dtype)) as plain:
        whole = train(plain, 0, 1, kind, **options)
        plain.commit(4)
    path = tmp_path / "parts"
    distributed.create(path, specs(dtype), partitions=8).close()
    parts = values(run(2, train_and_commit, path, kind, options))
    exact = "stochastic_rounding" in options
    assert_same(contents(path), contents(tmp_path / "plain"), exact=exact)
    for name, each in whole.items():
        found = np.concatenate([part[name] for part in parts])
        np.testing.assert_allclose(found, each.float(), rtol=2e-4, atol=2e-5)
