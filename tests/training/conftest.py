"""Where the training tests run: on the host, on an emulated GPU, and on a real one."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests import inside
from tests.gpu.emulator import EmulatedDevice

ROWS, DIM = 40, 6
PLACES = ("host", "emulated", "cuda")
"""What `place` is made of, for tests whose options are chosen with it; see `tests.pairs.pairs`."""


@dataclass
class Place:
    """A device to open stores on, and where torch tensors for it live."""

    folder: Path
    device: Any = "cpu"
    torch: str = "cpu"
    budget: dict[str, int] = field(default_factory=lambda: {"host_rows": 4})
    opened: list[tierstore.Store] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=itertools.count)

    def store(self, tables: dict[str, tierstore.TableSpec], **budget: int) -> tierstore.Store:
        """Make a store with small tiers; it is closed after the test."""
        store = tierstore.create(
            self.folder / f"{next(self.names)}.tier",
            tables,
            budget=tierstore.Budget(**(budget or self.budget)),
            device=self.device,
        )
        self.opened.append(store)
        return store

    def table(self, weights: Tensor, **budget: int) -> Any:
        """Make a table with these rows."""
        dtype = str(weights.dtype).removeprefix("torch.")
        spec = tierstore.TableSpec(len(weights), weights.shape[1], dtype)
        table = self.store({"item": spec}, **budget)["item"]
        table.write(torch.arange(len(weights)), weights)
        self.opened[-1].commit()
        return table

    def close(self) -> None:
        """Drop what was not committed and close the stores."""
        for store in self.opened:
            if not inside.door(store).closed:
                store.rollback()
                store.close()

    def ids(self, *shape: int, rows: int = ROWS) -> Tensor:
        """Draw ids."""
        return torch.randint(0, rows, shape).to(self.torch)


@pytest.fixture(params=["host", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    torch.manual_seed(sum(map(ord, request.node.name)))
    place = Place(tmp_path)
    if request.param == "emulated":
        if shutil.which("g++") is None:
            pytest.skip("the emulator needs g++")
        place.device = EmulatedDevice(seed=1)
        place.budget = {"host_rows": 20, "gpu_rows": 7}
    elif request.param == "cuda":
        place.device = place.torch = "cuda:0"
        place.budget = {"host_rows": 20, "gpu_rows": 7}
    yield place
    place.close()


@pytest.fixture
def weights() -> Tensor:
    return torch.randn(ROWS, DIM)


def same(found: Tensor, expected: Tensor, place: Place) -> bool:
    """Compare to the bit where the same operations in the same order made both, else closely."""
    if place.device == "cpu":
        return torch.equal(found, expected)
    torch.testing.assert_close(found, expected)
    return True


def rows_of(table: Any, field: str | None = None) -> Tensor:
    """Return all rows of a table, on the CPU."""
    rows: Tensor = table.read(torch.arange(table.rows), field)
    return rows.cpu()


def randomly(*shape: int, like: Tensor) -> Tensor:
    """Draw factors that make a scalar of rows."""
    return torch.randn(*shape, dtype=like.dtype).to(like.device)
