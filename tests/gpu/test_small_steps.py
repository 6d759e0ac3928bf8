"""What a step on few rows, whose time is the host's, calls and launches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tierstore
from tests import inside
from tests.gpu.emulator import EmulatedDevice
from tests.training.test_collections import Calls, Made
from tierstore.nn import TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.nn.zeros import Zeros
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

TABLES, ROWS, DIM = 3, 12, 6


class Counting(EmulatedDevice):
    """Notes the kernels that it launches."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.launched: list[str] = []

    def _loaded(self, found: Any, name: str, *, cooperative: bool) -> Any:
        launch, blocks = super()._loaded(found, name, cooperative=cooperative)

        def note(blocks: int, arguments: int, stream: int) -> None:
            self.launched.append(name)
            launch(blocks, arguments, stream)

        return note, blocks


class Operators(TorchDispatchMode):
    """Notes the operators of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.fixture
def device() -> Counting:
    return Counting()


@pytest.fixture
def store(tmp_path: Path, device: Counting) -> Iterator[Any]:
    specs = {
        f"t{k}": tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=k))
        for k in range(TABLES)
    }
    budget = tierstore.Budget(host_rows=ROWS * TABLES, gpu_rows=ROWS * TABLES)
    opened = tierstore.create(tmp_path / "s", specs, budget=budget, device=device)
    yield opened
    opened.rollback()
    opened.close()


def stepping(store: Any, kind: Any) -> tuple[Any, TieredOptimizer, Callable[[], None]]:
    emb = kind(store, list(store))
    optimizer = TieredOptimizer(RowWiseAdagrad, [emb], lr=0.05)
    features = Made({name: torch.arange(12).view(4, 3) % ROWS for name in store})
    gradient = torch.ones(())

    def step() -> None:
        emb.cat(features).sum().backward(gradient)
        optimizer.step()

    return emb, optimizer, step


@pytest.mark.parametrize(
    ("kind", "most", "launches"),
    [
        (TieredEmbeddingCollection, 177, ["probe", "promote", "sum", "step"]),
        (TieredEmbeddingBagCollection, 224, ["probe", "promote", "pool", "scatter", "step"]),
    ],
)
def test_a_small_step_makes_few_calls(
    store: Any, device: Counting, kind: Any, most: int, launches: list[str]
) -> None:
    """Each costs about a microsecond: lower the limits with the calls."""
    *_, step = stepping(store, kind)
    for _ in range(3):
        step()
    device.launched.clear()
    with Calls() as calls:
        step()
    assert device.launched == launches
    assert calls.count <= most
    with Operators() as operators:
        step()
    assert not [name for name in operators.names if "zeros" in name]


def test_a_step_unpins_what_it_trained(store: Any, device: Counting) -> None:
    _, _, step = stepping(store, TieredEmbeddingCollection)
    for _ in range(3):
        step()
    memory = inside.space(store["t0"]).gpu.memory
    assert not inside.arrays(memory)["pins"].any()
    assert not (inside.arrays(memory)["stamp"] >> 31).any()
    assert "release" not in device.launched


def test_gradients_that_were_seen_stay_as_they_are(store: Any) -> None:
    emb, optimizer, step = stepping(store, TieredEmbeddingCollection)
    step()
    ids = Made({name: torch.arange(12).view(4, 3) % ROWS for name in store})
    emb.cat(ids).sum().backward()
    (rows,) = emb.parameters()
    seen: Tensor = rows.grad
    kept = seen.clone()
    assert kept.any()
    optimizer.step()
    step()
    assert torch.equal(seen, kept)


def test_gradients_that_hooks_keep_stay_as_they_are(store: Any) -> None:
    emb, optimizer, step = stepping(store, TieredEmbeddingCollection)
    step()
    (rows,) = emb.parameters()
    seen: list[Tensor] = []
    hook = rows.register_hook(seen.append)
    ids = Made({name: torch.arange(12).view(4, 3) % ROWS for name in store})
    emb.cat(ids).sum().backward()
    hook.remove()
    kept = seen[0].clone()
    assert kept.any()
    optimizer.step()
    step()
    assert torch.equal(seen[0], kept)


def test_zeros_are_used_once_for_as_many_rows_or_half_as_many() -> None:
    zeros, cleared = Zeros(), torch.zeros(8, DIM)
    assert zeros.take(8) is None
    for rows in (4, 8):
        zeros.put(cleared)
        assert zeros.take(9) is None
        assert zeros.take(3) is None
        assert zeros.take(rows) is cleared
        assert zeros.take(rows) is None


def test_sums_begin_from_zeros_for_fewer_and_other_rows(store: Any, tmp_path: Path) -> None:
    """As on the host, where nothing is left from one step to the next."""
    specs = {name: store[name].spec for name in store}
    with tierstore.create(tmp_path / "h", specs) as host:
        rows_of_all, found = np.arange(ROWS), []
        for name in store:
            host[name].write(rows_of_all, store[name].read(rows_of_all))
        host.commit()
        for each in (store, host):
            emb = TieredEmbeddingCollection(each, list(each))
            padded = TieredEmbeddingCollection(each, list(each), padding_idx=2)
            optimizer = TieredOptimizer(RowWiseAdagrad, [emb], lr=0.05)
            drawn = np.random.default_rng(5)
            for size, layers in ((9, [emb]), (8, [padded, emb]), (12, [emb]), (7, [emb, padded])):
                for layer in layers:
                    ids = {name: torch.from_numpy(drawn.integers(0, ROWS, size)) for name in each}
                    every = enumerate(layer(ids).values(), 1)
                    sum((rows * k).sum() for k, rows in every).backward()
                optimizer.step()
            found.append({name: each[name].read(rows_of_all) for name in each})
        host.rollback()
    for name in store:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-6)
