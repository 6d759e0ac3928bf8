"""The same for ids of torch, where the checker knows torch: pyright does."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt
import torch

import tierstore


def reads(store: tierstore.Store, ids: torch.Tensor, given: npt.NDArray[np.int64]) -> None:
    table = store["item"]
    assert_type(table.read(ids), torch.Tensor)
    assert_type(table.read(ids, ["weight"]), dict[str, torch.Tensor])
    assert_type(table.read(given, as_tensor=True), torch.Tensor)
    assert_type(table.read(given, ["weight"], as_tensor=True), dict[str, torch.Tensor])
    assert_type(table.read(given), npt.NDArray[np.floating[Any]])
    assert_type(table[ids], torch.Tensor)


def refused(store: tierstore.Store, ids: torch.Tensor) -> None:
    table = store["item"]
    table.read([1.5])  # pyright: ignore[reportArgumentType, reportCallIssue]
    table.read("x")  # pyright: ignore[reportArgumentType, reportCallIssue]
    table.read({1: 2})  # pyright: ignore[reportArgumentType, reportCallIssue]
    table.read(ids, 5)  # pyright: ignore[reportArgumentType, reportCallIssue]
    table.read(ids, out=np.empty(3))  # pyright: ignore[reportArgumentType, reportCallIssue]


def trains(store: tierstore.Store) -> None:
    emb = tierstore.nn.TieredEmbedding(store["item"])
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    dense = torch.nn.Linear(4, 1)
    run = tierstore.Checkpoint(store, dense=dense, opt=opt)
    assert_type(run.commit(3), int)
    model = torch.nn.Sequential(emb, dense)
    groups: list[dict[str, Any]] = [{"params": [emb], "lr": 0.1}, {"params": dense.parameters()}]
    for params in (model, [emb, dense], model.parameters(), model.named_parameters(), groups):
        tierstore.optim.TieredOptimizer(torch.optim.Adam, params, ema=0.9)
    assert_type(emb.averaged(), tierstore.nn.TieredEmbedding)
    assert_type(emb.rows.ids, torch.Tensor)
