"""Collections over tables of many dims train as `torch.nn.Embedding` and `EmbeddingBag` do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.tiers.test_placement import CRITEO, scaled
from tests.training.conftest import Place, rows_of, same
from tierstore._tiers.slots import bytes_for
from tierstore.nn import TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

DIMS = (4, 8, 6, 1, 16)
SHARES = {"one slot": 0.0, "some": 0.2, "all": 1.0}


def trained(
    place: Place, rows: list[int], dims: list[int], mode: str | None, **budget: int
) -> None:
    """Train a collection, and a layer of torch for each table, and compare what became of them.

    To the bit on the host where rows are not pooled: torch adds the gradients of a row of bags up
    in the order of a sort that is not stable.
    """

    def alike(found: Tensor, expected: Tensor) -> bool:
        if mode is None:
            return same(found, expected, place)
        torch.testing.assert_close(found, expected)
        return True

    names = [f"t{number}" for number in range(len(rows))]
    specs = {
        name: tierstore.TableSpec(count, dim, init=tierstore.normal(seed=number))
        for number, (name, count, dim) in enumerate(zip(names, rows, dims, strict=True))
    }
    store = place.store(specs, **budget)
    layers: dict[str, Any] = {
        name: torch.nn.Embedding(count, dim)
        if mode is None
        else torch.nn.EmbeddingBag(count, dim, mode=mode)
        for name, count, dim in zip(names, rows, dims, strict=True)
    }
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(rows_of(store[name]))
            layer.to(place.torch)
    collection = (
        TieredEmbeddingCollection(store, names)
        if mode is None
        else TieredEmbeddingBagCollection(store, names, mode=mode)
    )
    weights = [layer.weight for layer in layers.values()]
    optimizers = [
        TieredOptimizer(torch.optim.Adagrad, [collection], lr=0.1),
        torch.optim.Adagrad(weights, lr=0.1),
    ]
    for _ in range(3):
        shape = (6,) if mode is None else (6, 3)
        ids = {name: place.ids(*shape, rows=count) for name, count in zip(names, rows, strict=True)}
        one, each = collection(ids), {name: layers[name](own) for name, own in ids.items()}
        for found in (one, each):
            torch.cat([found[name].pow(3) for name in names], 1).sum().backward()
        for name in names:
            assert alike(one[name].detach(), each[name].detach()), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, layer in layers.items():
        assert alike(rows_of(store[name]), layer.weight.detach().cpu()), name


@pytest.mark.variants(3)
@pytest.mark.parametrize("tables", [1, 2, 26, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("mode", [None, "sum", "mean", "max"])
@pytest.mark.slow("emulated")
@pytest.mark.nightly("200")
def test_tables_of_several_dims_train_as_layers_of_torch(
    place: Place, tables: int, share: str, mode: str | None
) -> None:
    if tables > 2 and (mode not in (None, "sum") or share == "some"):
        pytest.skip("fewer tables, or another budget, show it")
    if tables != 2 and place.device not in ("cpu", "cuda:0"):
        pytest.skip("two tables of two dims show it")
    if tables < 2 and (mode is not None or share == "some"):
        pytest.skip("two tables show it")
    rows = [1 + (7 * number) % 23 for number in range(tables)]
    dims = [DIMS[number % len(DIMS)] for number in range(tables)]
    slots = max(1, int(SHARES[share] * sum(rows)))
    sizes = {"host_rows": slots} | ({} if place.device == "cpu" else {"gpu_rows": slots})
    trained(place, rows, dims, mode, **sizes)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("mode", [None, "sum"])
def test_tables_of_criteo_with_a_thousandth_of_their_rows_in_memory(
    tmp_path: Any, mode: str | None
) -> None:
    """The smallest has three rows; a batch has more rows than there are slots."""
    torch.manual_seed(1)
    place, rows = Place(tmp_path), [scaled(count) for count in CRITEO]
    try:
        given = bytes_for(sum(rows), 48, sum(rows) // 1000)
        trained(place, rows, [6] * len(rows), mode, host=given)
        (store,) = place.opened
        (space,) = store.info().spaces
        assert sum(tier.nbytes for tier in space.tiers) <= given
        assert sum(tier.slots for tier in space.tiers) <= 2 * len(rows)
    finally:
        place.close()
