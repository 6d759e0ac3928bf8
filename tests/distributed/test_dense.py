"""The dense part beside rows that ranks share: DistributedDataParallel and FSDP2, untouched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import run, values
from tests.distributed.test_ranks import BATCH, DIM, assert_same, batch, contents, specs
from tierstore import distributed
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow


class Model(torch.nn.Module):
    """A layer over a table, or a collection over two, under a dense part."""

    def __init__(self, store: Any, kind: str) -> None:
        super().__init__()
        self.emb: Any
        if kind == "layer":
            self.emb = TieredEmbedding(store["item"])
        else:
            self.emb = TieredEmbeddingBagCollection(store, ["item", "user"], "sum")
        self.mid, self.top = torch.nn.Linear(DIM, 8), torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        if isinstance(self.emb, TieredEmbedding):
            rows = self.emb(ids).sum(1)
        else:
            found = self.emb({"item": ids, "user": users[:, None]})
            rows = found["item"] + found["user"]
        return self.top(torch.tanh(self.mid(rows)))[:, 0]


def wrapped(model: Model, how: str) -> Any:
    """Return a model that ranks train together."""
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.mid, model.top):
        fsdp.fully_shard(part, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh, ignored_params=set(model.emb.parameters()))


def train(rank: int, path: Path, kind: str, how: str) -> list[np.ndarray[Any, Any]]:
    """Train with Adam on both sides; return the dense parameters, whole."""
    torch.manual_seed(1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path, budget=tierstore.Budget(host_rows=90)) as store:
        model = Model(store, kind)
        emb, every = model.emb, set(model.emb.parameters())
        optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.05)
        whole: Any = model if ranks == 1 else wrapped(model, how)
        dense = torch.optim.Adam([p for p in whole.parameters() if p not in every], lr=0.01)
        assert len(dense.param_groups[0]["params"]) == 4
        for step in range(4):
            ids, _, users = batch(step)
            mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
            whole(ids[mine], users[mine]).square().mean().backward()
            optimizer.step()
            dense.step()
            dense.zero_grad()
        store.commit(4)
        found = [each.detach() for each in dense.param_groups[0]["params"]]
        if ranks > 1 and how == "fsdp":
            assert all(each.to_local().numel() < each.numel() for each in found[:2])  # sharded
            found = [each.full_tensor() for each in found]
        return [each.numpy() for each in found]


@pytest.mark.parametrize("kind", ["layer", "collection"])
def test_two_ranks_train_what_one_process_trains(tmp_path: Path, kind: str) -> None:
    distributed.create(tmp_path / "one", specs(), partitions=4).close()
    (one,) = values(run(1, train, tmp_path / "one", kind, ""))
    for how in ("ddp", "fsdp"):
        distributed.create(tmp_path / how, specs(), partitions=4).close()
        for dense in values(run(2, train, tmp_path / how, kind, how)):
            for mine, expected in zip(dense, one, strict=True):
                np.testing.assert_allclose(mine, expected, rtol=2e-4, atol=1e-6)
        assert_same(contents(tmp_path / "one"), contents(tmp_path / how), exact=False)
