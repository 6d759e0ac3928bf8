"""Two ranks with a GPU each, over NCCL: rows and gradients never leave the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed import test_norms as norms
from tests.distributed.ranks import run, values
from tests.distributed.test_ranks import assert_same, contents
from tierstore import distributed
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ROWS = {"user": 400, "item": 5000}


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    return {name: tierstore.TableSpec(rows, 8, init=init) for name, rows in ROWS.items()}


def batch(step: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randint(0, rows, (64, 3), generator=generator)[rank::ranks]
        for name, rows in ROWS.items()
    }


def train(rank: int, path: Path, kind: str, device: str) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    device = f"cuda:{rank}" if device == "cuda" else device
    if device != "cpu":
        torch.cuda.set_device(rank)
    budget = tierstore.Budget(host_rows=600, gpu_rows=0 if device == "cpu" else 200)
    with distributed.open(path, average=False, device=device, budget=budget) as store:
        emb: Any
        if kind == "one":
            emb = TieredEmbedding(store["item"])
        elif kind == "rows":
            emb = TieredEmbeddingCollection(store, {name: name for name in ROWS})
        else:
            modes = {"user": "mean", "item": "sum"}
            emb = TieredEmbeddingBagCollection(store, {name: name for name in ROWS}, modes)
        optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.05)
        for step in range(5):
            ids = {name: each.to(device) for name, each in batch(step, rank, ranks).items()}
            found = [emb(ids["item"])] if kind == "one" else list(emb(ids).values())
            assert {each.device for each in found} == {torch.device(device)}
            sum((each * (each.detach() * 8).round()).sum() for each in found).backward()
            optimizer.step()
        ids = torch.arange(0, ROWS["item"], 7, device=device)
        assert store["item"].read(ids).device == torch.device(device)
        store.commit(5)


@pytest.mark.parametrize("kind", ["one", "rows", "bags"])
def test_two_gpus_train_what_one_process_trains_on_the_host(tmp_path: Path, kind: str) -> None:
    plain, parts = tmp_path / "plain", tmp_path / "parts"
    for path in (plain, parts):
        distributed.create(path, specs(), partitions=4).close()
    train(0, plain, kind, "cpu")
    values(run(2, train, parts, kind, "cuda", backend="nccl", timeout=60))
    assert_same(contents(parts), contents(plain), exact=False)


def refused(rank: int, path: Path) -> None:
    torch.cuda.set_device(rank)
    with distributed.open(path, device=f"cuda:{rank}") as store:
        ids = torch.tensor([1, ROWS["item"] if rank else 2], device=f"cuda:{rank}")
        TieredEmbedding(store["item"])(ids)


def test_a_bad_id_on_a_gpu_raises_on_both(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=4).close()
    one, other = run(2, refused, path, backend="nccl", timeout=60)
    assert isinstance(one, tierstore.errors.RanksError)
    assert isinstance(other, tierstore.errors.RowIndexError)
    assert np.isin("5000", str(other).split()).any()


@pytest.mark.parametrize("kind", ["layers", "collection"])
def test_clipping_is_that_of_plain_training(tmp_path: Path, kind: str) -> None:
    distributed.create(tmp_path / "store", norms.SPECS, partitions=4).close()
    norms.assert_alike(
        values(run(2, norms.trained, tmp_path / "store", kind, "cuda", backend="nccl"))
    )
