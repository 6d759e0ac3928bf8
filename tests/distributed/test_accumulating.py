"""Gradient accumulation under DistributedDataParallel, beside a plain embedding in the same."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.distributed.ranks import run, values
from tierstore import distributed
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM, BATCH = 40, 8, 13
SPEC = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=3))


class Model(torch.nn.Module):
    def __init__(self, emb: Any) -> None:
        super().__init__()
        self.emb, self.top = emb, torch.nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.top(self.emb(ids)))


def batches(rank: int) -> list[Tensor]:
    """Return the batches of a rank: of other sizes on each, with rows in common."""
    random = torch.Generator().manual_seed(rank)
    return [torch.randint(ROWS, (BATCH + rank,), generator=random) for _ in range(6)]


def trained(rank: int, path: Path, how: str, passes: int, views: bool) -> list[list[Tensor]]:
    """Train the model with rows of a store, and a plain one; return the values of each."""
    with distributed.open(path, budget=tierstore.Budget(host_rows=30)) as store:
        ours = Model(TieredEmbedding(store["item"]))
        plain = Model(torch.nn.Embedding(ROWS, DIM))
        everything = torch.arange(ROWS)
        with torch.no_grad():
            plain.emb.weight.copy_(ours.emb(everything))
        plain.top.load_state_dict(ours.top.state_dict())
        found = []
        for model, kind in ((ours, TieredOptimizer), (plain, None)):
            whole = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
            optimizer: Any = (
                torch.optim.SGD(whole.parameters(), lr=0.3)
                if kind is None
                else kind(torch.optim.SGD, whole, lr=0.3)
            )
            ids = iter(batches(rank))
            for _ in range(6 // passes):
                for number in range(passes):
                    last = number == passes - 1
                    apart = whole.no_sync() if how == "no_sync" and not last else None
                    with apart or contextlib.nullcontext():
                        whole(next(ids)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            rows = ours.emb(everything) if model is ours else plain.emb.weight
            found.append([each.detach() for each in (rows, *model.top.parameters())])
        store.commit(1)
        return found


@pytest.mark.parametrize(
    ("how", "passes", "views"),
    [
        ("backward", 2, False),
        pytest.param("backward", 3, True, marks=pytest.mark.slow),
        ("no_sync", 3, False),
        pytest.param("no_sync", 2, True, marks=pytest.mark.slow),
        pytest.param("backward", 1, False, marks=pytest.mark.slow),
    ],
)
def test_accumulated_gradients_are_those_of_plain_training(
    tmp_path: Path, how: str, passes: int, views: bool
) -> None:
    distributed.create(tmp_path / "store", {"item": SPEC}, partitions=4).close()
    ranks = values(run(2, trained, tmp_path / "store", how, passes, views))
    for ours, plain in ranks:
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(ranks[0][0], ranks[1][0], strict=True):
        assert np.array_equal(mine.numpy(), theirs.numpy())  # the replicas have not drifted apart
