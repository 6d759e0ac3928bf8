"""Layers over tables by key against torch's own over rows in the order of arrival."""

import numpy as np
import pytest
import torch

import tierstore
from tierstore import Budget, TableSpec
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

DIM = 4
INIT = tierstore.normal(std=0.1, seed=3)


@pytest.fixture(params=["int64", "text"])
def kind(request):
    return request.param


@pytest.fixture
def store(tmp_path, kind):
    spec = TableSpec(300, DIM, init=INIT, keys=kind)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=50)) as made:
        yield made
        made.rollback()


def keys_for(kind, numbers):
    keys = np.asarray(numbers, np.int64) * 0x9E3779B9 - 7
    return torch.from_numpy(keys) if kind == "int64" else [f"user {key}" for key in keys.tolist()]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad])
def test_training_by_key_is_training_by_row(store, kind, make):
    table = store["t"]
    every = keys_for(kind, range(100))
    first = torch.as_tensor(table.read(every))
    layer = TieredEmbedding(table)
    plain = torch.nn.Embedding.from_pretrained(first.clone(), freeze=False)
    options = {"lr": 0.3}
    optimizer = TieredOptimizer(make, layer, **options)
    expected = make(plain.parameters(), **options)
    rng = np.random.default_rng(5)
    target = torch.randn(100, DIM)
    seen: set[int] = set()
    for step in range(12):
        numbers = rng.integers(0, 100, 17)
        seen.update(numbers.tolist())
        for model, opt, ids in (
            (layer, optimizer, keys_for(kind, numbers)),
            (plain, expected, torch.from_numpy(numbers)),
        ):
            opt.zero_grad()
            (model(ids) - target[numbers]).square().sum().backward()
            opt.step()
        assert table.rows == len(seen)
        assert table.contains(every).tolist() == [number in seen for number in range(100)]
        if step % 5 == 4:
            store.commit()
    found = torch.as_tensor(table.read(every))
    torch.testing.assert_close(found, plain.weight.detach(), rtol=1e-5, atol=1e-6)


def test_evaluation_adds_nothing(store, kind):
    table, keys = store["t"], keys_for(kind, range(9))
    layer = TieredEmbedding(table)
    expected = table.read(keys)
    with torch.no_grad():
        assert np.array_equal(layer(keys).numpy(), expected)
    layer.prefetch(keys)
    layer.eval()
    assert np.array_equal(layer(keys).detach().numpy(), expected)
    assert table.rows == 0
    assert layer.num_embeddings == 0
    layer.train()
    assert np.array_equal(layer(keys).detach().numpy(), expected)
    assert table.rows == 9


def test_keys_of_a_rolled_back_step_are_gone(store, kind):
    table = store["t"]
    layer = TieredEmbedding(table)
    optimizer = TieredOptimizer(torch.optim.SGD, layer, lr=0.1)
    layer(keys_for(kind, range(5))).sum().backward()
    optimizer.step()
    store.rollback()
    assert table.rows == 0
    layer(keys_for(kind, [7, 8])).sum().backward()
    optimizer.step()
    store.commit()
    assert list(table.keys) == [*np.asarray(keys_for(kind, [7, 8]), object)]


def test_layers_that_go_by_row_refuse(store, kind):
    table = store["t"]
    with pytest.raises(InvalidInputError, match="by key, and padding_idx"):
        TieredEmbedding(table, padding_idx=0)
    with pytest.raises(InvalidInputError, match="by key, and TieredEmbeddingBag"):
        TieredEmbeddingBag(table)
    with pytest.raises(InvalidInputError, match="by key"):
        TieredEmbeddingCollection(store, {"a": table})
    with pytest.raises(InvalidInputError, match="by key"):
        TieredEmbedding(table).averaged()
    with pytest.raises(InvalidInputError, match="by key"):
        store.replace_table("t", table.spec, blocks=[], keys=[])
