"""A small model of clicks over a store, that libraries train in their loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import tierstore
from tests import inside
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM = 100, 8
OTHERS = {"test_accelerate.py", "test_lightning.py", "test_transformers.py", "test_on_ranks.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave to --slow what needs libraries that `make test-all` alone installs."""
    return True if collection_path.name in OTHERS and not config.getoption("--slow") else None


class Clicks(torch.nn.Module):
    """The odds of a click of a user on an item."""

    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.user, self.item = TieredEmbedding(store["user"]), TieredEmbedding(store["item"])
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        odds = self.head(self.user(ids[:, 0]) * self.item(ids[:, 1])).squeeze(-1)
        if labels is None:
            return odds
        loss = torch.nn.functional.binary_cross_entropy_with_logits(odds, labels)
        return {"loss": loss, "logits": odds}


class Setting:
    """A store, a model over it with its optimizer, and what it is trained on."""

    def __init__(self, path: Path) -> None:
        init = tierstore.normal(std=0.5, seed=3)
        specs = {name: tierstore.TableSpec(ROWS, DIM, init=init) for name in ("user", "item")}
        budget = tierstore.Budget(host_rows=20)
        self.store = tierstore.open_or_create(path, specs, budget=budget)
        torch.manual_seed(1)
        self.model = Clicks(self.store)
        self.opt = TieredOptimizer(torch.optim.Adam, self.model, lr=0.05)
        made = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, ROWS, (256, 2), generator=made)
        self.labels = (self.ids.sum(1) % 2).float()
        self.data = TensorDataset(self.ids, self.labels)

    def loss(self) -> float:
        with torch.no_grad():
            return float(self.model(self.ids, self.labels)["loss"])

    def train(self, steps: int) -> None:
        for step in range(steps):
            part = slice(32 * (step % 8), 32 * (step % 8) + 32)
            self.opt.zero_grad()
            self.model(self.ids[part], self.labels[part])["loss"].backward()
            self.opt.step()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path / "store")
    yield made
    if not inside.door(made.store).closed:
        made.store.rollback()
        made.store.close()
