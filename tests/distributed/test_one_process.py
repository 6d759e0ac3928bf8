"""Scripts for one process that several ranks run: the error names what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.distributed.ranks import run
from tierstore.errors import InvalidInputError, LockedError
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

SPECS = {"item": tierstore.TableSpec(50, 4, init=tierstore.normal(std=0.5, seed=3))}
LINES = ("tierstore.distributed.create(", "tierstore.distributed.open(", "torchrun")


def second_writer(rank: int, path: Path) -> None:
    torch.distributed.barrier()
    if rank == 0:
        with tierstore.open(path, "r+"):
            torch.distributed.barrier()
            torch.distributed.barrier()
        return
    torch.distributed.barrier()
    try:
        tierstore.open(path, "r+")
    finally:
        torch.distributed.barrier()


def wrapped(rank: int, path: Path, kind: str) -> None:
    with tierstore.open(path / str(rank), "r+") as store:
        if kind == "collection":
            emb: Any = TieredEmbeddingCollection(store, {"item": "item"})
        else:
            emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
        model = torch.nn.parallel.DistributedDataParallel(Over(emb))
        with torch.no_grad():
            model(torch.arange(5))  # trains nothing
        with pytest.raises(InvalidInputError, match="replicated=True"):
            model(torch.arange(5))
        TieredOptimizer(torch.optim.SGD, [emb], lr=0.1, replicated=True)
        found = model(torch.arange(5))
        found.sum().backward()
        optimizer.step()  # which is not for copies


class Over(torch.nn.Module):
    def __init__(self, emb: torch.nn.Module) -> None:
        super().__init__()
        self.emb, self.top = emb, torch.nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.emb, TieredEmbedding):
            return self.top(self.emb(ids))
        return self.top(self.emb({"item": ids})["item"])


def assert_named(error: Any, kind: type[Exception]) -> None:
    assert isinstance(error, kind), error
    for each in LINES:
        assert each in str(error)


def test_a_second_rank_that_opens_a_plain_store_is_told_what_to_change(tmp_path: Path) -> None:
    tierstore.create(tmp_path / "store", SPECS).close()
    one, other = run(2, second_writer, tmp_path / "store")
    assert one is None
    assert_named(other, LockedError)


@pytest.mark.parametrize("kind", ["layer", "collection"])
def test_a_plain_table_under_data_parallel_training_is_told_what_to_change(
    tmp_path: Path, kind: str
) -> None:
    """At the first forward pass; else at the step of the optimizer."""
    for rank in range(2):
        tierstore.create(tmp_path / str(rank), SPECS).close()
    for each in run(2, wrapped, tmp_path, kind):
        assert_named(each, InvalidInputError)
