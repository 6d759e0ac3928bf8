"""A run that commits as it goes, in a process to be killed: -m … PATH STEPS DEVICE LAYERS."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch

import tierstore
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

ROWS, DIM = 200, 8


class Apart(torch.nn.Module):
    """A layer a table."""

    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.users, self.items = TieredEmbedding(store["user"]), TieredEmbedding(store["item"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.users(ids[:, 0]) * self.items(ids[:, 1])


class Together(torch.nn.Module):
    """A layer for both."""

    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.both = TieredEmbeddingCollection(store, {"users": "user", "items": "item"})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.both({"users": ids[:, 0], "items": ids[:, 1]})
        return rows["users"] * rows["items"]


LAYERS = {"apart": Apart, "together": Together}


class Model(torch.nn.Module):
    def __init__(self, rows: torch.nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.dropout = torch.nn.Dropout(0.3)
        self.linear = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.linear(self.dropout(self.rows(ids))).square().mean()


def opened(path: Path, device: str) -> tierstore.Store:
    budget = tierstore.Budget(host_rows=20, gpu_rows=10)
    if path.exists():
        return tierstore.open(path, "r+", budget=budget, device=device)
    init = tierstore.normal(seed=1)
    specs = {name: tierstore.TableSpec(ROWS, DIM, init=init) for name in ("user", "item")}
    return tierstore.create(path, specs, budget=budget, device=device)


def train(path: Path, steps: int, device: str = "cpu", layers: str = "apart") -> None:
    torch.use_deterministic_algorithms(device != "cpu")
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    with opened(path, device) as store:
        model = Model(LAYERS[layers](store)).to(device)
        tiered = TieredOptimizer(torch.optim.Adam, [model.rows], lr=0.05)
        dense = torch.optim.Adam(model.parameters(), lr=0.05)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 7) for each in (tiered, dense)]
        run = tierstore.Checkpoint(
            store, model=model, tiered=tiered, dense=dense, one=schedules[0], two=schedules[1]
        )
        for step in range(run.resume(), steps):
            ids = torch.from_numpy(np.random.randint(0, ROWS, (16, 2))).to(device)
            model(ids).backward()
            for each in (tiered, dense):
                each.step()
                each.zero_grad()
            for schedule in schedules:
                schedule.step()
            if (step + 1) % 5 == 0:
                run.commit(step + 1, seen=step + 1)
            print(step, flush=True)
        run.commit(steps, seen=steps)
    torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
