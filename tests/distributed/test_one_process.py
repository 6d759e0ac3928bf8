"""Scripts for one process that several ranks run: the error names what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.distributed.ranks import run
from tierstore.errors import InvalidInputError, LockedError
from tierstore.nn import TieredEmbedding
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


def wrapped(rank: int, path: Path) -> None:
    with tierstore.open(path / str(rank), "r+") as store:
        model: Any = torch.nn.Sequential(TieredEmbedding(store["item"]), torch.nn.Linear(4, 1))
        optimizer = TieredOptimizer(torch.optim.SGD, model, lr=0.1)
        model = torch.nn.parallel.DistributedDataParallel(model)
        try:
            model(torch.arange(5)).sum().backward()
            optimizer.step()
        finally:
            store.rollback()


def assert_named(error: Any, kind: type[Exception]) -> None:
    assert isinstance(error, kind), error
    for each in LINES:
        assert each in str(error)


def test_a_second_rank_that_opens_a_plain_store_is_told_what_to_change(tmp_path: Path) -> None:
    tierstore.create(tmp_path / "store", SPECS).close()
    one, other = run(2, second_writer, tmp_path / "store")
    assert one is None
    assert_named(other, LockedError)


def test_a_plain_table_under_data_parallel_training_is_told_what_to_change(tmp_path: Path) -> None:
    for rank in range(2):
        tierstore.create(tmp_path / str(rank), SPECS).close()
    for each in run(2, wrapped, tmp_path):
        assert_named(each, InvalidInputError)
