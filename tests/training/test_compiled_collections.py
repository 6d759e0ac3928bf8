"""Collections inside torch.compile, as one graph."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.pairs import pairs
from tests.training.conftest import PLACES, Place, rows_of
from tierstore.nn import TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

ROWS = {"user": 40, "item": 30, "tag": 12}
SOURCES = {"user": "user", "item": "item", "bought": "item", "tag": "tag"}
FEATURES = tuple(SOURCES)
SAME, MIXED = {"user": 6, "item": 6, "tag": 6}, {"user": 6, "item": 4, "tag": 6}
DIMS = {"one group": SAME, "two groups": MIXED}


@pytest.fixture(
    params=[
        pytest.param("aot_eager", marks=pytest.mark.slow),
        pytest.param("inductor", marks=pytest.mark.torture),
    ]
)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    torch.compiler.reset()
    return str(request.param)


def store(place: Place, dims: Mapping[str, int]) -> tierstore.Store:
    return place.store(
        {
            name: tierstore.TableSpec(rows, dims[name], init=tierstore.normal(seed=number))
            for number, (name, rows) in enumerate(ROWS.items())
        }
    )


def ids_of(place: Place, batch: int) -> dict[str, Tensor]:
    return {name: place.ids(batch, rows=ROWS[SOURCES[name]]) for name in FEATURES}


def bags_of(place: Place, batch: int) -> dict[str, Any]:
    """Draw bags in every form but weighted ones: 2-D, of several lengths, some empty."""
    flat = place.ids(3 * batch, rows=ROWS["item"])
    starts = torch.randint(0, 3 * batch, (batch - 1,)).sort().values
    return {
        "user": place.ids(batch, 2, rows=ROWS["user"]),
        "item": place.ids(batch, 1, rows=ROWS["item"]),
        "bought": (flat, torch.cat([torch.zeros(1, dtype=torch.int64), starts]).to(place.torch)),
        "tag": place.ids(batch, 3, rows=ROWS["tag"]),
    }


class Model(torch.nn.Module):
    """A collection under a function of all that it looks up."""

    def __init__(self, emb: Any) -> None:
        super().__init__()
        self.emb = emb

    def forward(self, features: Any) -> Tensor:
        found = self.emb(features)
        return sum((k + 1) * rows.tanh().square().mean() for k, rows in enumerate(found.values()))


class Keyed:
    """Has the methods of torchrec's KeyedJaggedTensor."""

    def __init__(self, features: Mapping[str, Tensor]) -> None:
        self._keys = list(features)
        self._values = torch.cat([each.reshape(-1) for each in features.values()])
        sizes = [each.shape[1] for each in features.values() for _ in range(len(each))]
        self._offsets = torch.tensor([0, *sizes]).cumsum(0).to(self._values.device)
        self._lengths = [each.numel() for each in features.values()]

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def length_per_key(self) -> list[int]:
        return self._lengths


def train(
    place: Place,
    models: list[torch.nn.Module],
    steps: list[Any],
    batches: list[Any],
    optimizer: Any = torch.optim.Adam,
) -> None:
    """Train an eager and a compiled model on the same batches; compare losses and rows."""
    optimizers = [TieredOptimizer(optimizer, [model], lr=0.05) for model in models]
    before = tables_of(models[0])
    for batch in batches:
        losses = [step(batch) for step in steps]
        torch.testing.assert_close(*losses)
        for loss, opt in zip(losses, optimizers, strict=True):
            loss.backward()
            opt.step()
            opt.zero_grad()
    found = [tables_of(model) for model in models]
    for name in ROWS:
        torch.testing.assert_close(found[0][name], found[1][name])
        assert not torch.equal(found[0][name], before[name])
    scalars = [{t.name: t.scalars["step"] for t in m.emb.features.values()} for m in models]
    assert scalars[0] == scalars[1]
    with torch.no_grad():
        torch.testing.assert_close(*[step(batches[0]) for step in steps])


def tables_of(model: Any) -> dict[str, Tensor]:
    return {table.name: rows_of(table) for table in model.emb.features.values()}


@pytest.mark.variants(0, 1)
@pairs(together=1, place=PLACES, groups=list(DIMS))
@pytest.mark.slow("emulated")
def test_a_compiled_collection_trains_as_an_eager_one(
    place: Place, backend: str, groups: str
) -> None:
    dims = DIMS[groups]
    models = [
        Model(TieredEmbeddingCollection(store(place, dims), SOURCES, padding_idx={"tag": 3}))
        for _ in range(2)
    ]
    steps = [models[0], torch.compile(models[1], fullgraph=True, backend=backend)]
    batches = [ids_of(place, 5 + number % 2) for number in range(4)]
    batches[1]["user"] = place.ids(3, 2, rows=ROWS["user"])
    train(place, models, steps, batches)


@pytest.mark.variants(0, 1)
@pairs(together=1, place=PLACES, groups=list(DIMS), padding=[None, {"bought": 2, "tag": 1}])
def test_compiled_bags_train_as_eager_ones(
    place: Place, backend: str, groups: str, padding: Any
) -> None:
    dims = DIMS[groups]
    modes = {"user": "sum", "item": "mean", "bought": "mean", "tag": "max"}
    models = [
        Model(
            TieredEmbeddingBagCollection(
                store(place, dims), SOURCES, mode=modes, padding_idx=padding
            )
        )
        for _ in range(2)
    ]
    steps = [models[0], torch.compile(models[1], fullgraph=True, backend=backend)]
    train(place, models, steps, [bags_of(place, 5 + number % 2) for number in range(3)])


@pytest.mark.variants(0, 1)
@pairs(together=1, place=PLACES, bags=[False, True])
@pytest.mark.slow("emulated")
def test_keyed_features_in_a_graph(place: Place, backend: str, bags: bool) -> None:
    kind = TieredEmbeddingBagCollection if bags else TieredEmbeddingCollection
    models = [Model(kind(store(place, MIXED), SOURCES)) for _ in range(2)]
    steps = [models[0], torch.compile(models[1], fullgraph=True, backend=backend)]
    batches = [
        Keyed({name: place.ids(4, 2, rows=ROWS[SOURCES[name]]) for name in FEATURES})
        for _ in range(3)
    ]
    train(place, models, steps, batches)


@pytest.mark.variants(0, 1)
@pairs(together=1, place=PLACES, padding=[None, {"seen": 2}])
def test_weights_get_their_gradient_in_a_graph(place: Place, backend: str, padding: Any) -> None:
    sources = {"seen": "item", "user": "user"}
    bags = [
        TieredEmbeddingBagCollection(store(place, SAME), sources, padding_idx=padding)
        for _ in range(2)
    ]
    optimizers = [TieredOptimizer(torch.optim.SGD, [each], lr=0.1) for each in bags]
    flat, starts = place.ids(9, rows=ROWS["item"]), torch.tensor([0, 4, 4]).to(place.torch)
    users, factors = place.ids(3, 2, rows=ROWS["user"]), torch.rand(9).to(place.torch)

    def run(emb: Any, ids: Tensor, weights: Tensor) -> Tensor:
        return emb.cat({"seen": (ids, starts, weights), "user": users}).square().sum()

    steps = [run, torch.compile(run, fullgraph=True, backend=backend)]
    found = []
    for emb, step in zip(bags, steps, strict=True):
        weights = factors.clone().requires_grad_()
        step(emb, flat, weights).backward()
        grads = {name: own.grad for name, own in emb.named_parameters()}
        found.append((weights.grad, *(grad.sum(0) for grad in grads.values())))
    torch.testing.assert_close(*found)
    del optimizers


@pytest.mark.variants(0, 1)
@pairs(together=1, place=PLACES, groups=list(DIMS))
def test_rows_as_one_in_a_graph(place: Place, backend: str, groups: str) -> None:
    emb = TieredEmbeddingCollection(store(place, DIMS[groups]), SOURCES)
    ids = ids_of(place, 4)
    del ids["item"], ids["bought"]
    compiled = torch.compile(lambda given: emb.cat(given), fullgraph=True, backend=backend)
    assert torch.equal(compiled(ids), torch.cat(list(emb(ids).values())))


@pytest.mark.variants(0, 1)
@pytest.mark.slow("emulated")
def test_what_comes_together_in_a_graph(place: Place, backend: str) -> None:
    emb = TieredEmbeddingBagCollection(store(place, MIXED), SOURCES)
    features = bags_of(place, 4)
    compiled = torch.compile(
        lambda given: emb(given).cat(["tag", "user"]), fullgraph=True, backend=backend
    )
    with torch.no_grad():
        assert torch.equal(compiled(features), emb(features).cat(["tag", "user"]))


@pytest.mark.variants(0, 1)
@pairs(together=1, place=PLACES, bags=[False, True])
@pytest.mark.slow("emulated")
def test_a_frozen_collection_only_reads_in_a_graph(place: Place, backend: str, bags: bool) -> None:
    kind = TieredEmbeddingBagCollection if bags else TieredEmbeddingCollection
    emb = kind(store(place, MIXED), SOURCES).requires_grad_(False)
    compiled = torch.compile(emb, fullgraph=True, backend=backend)
    features = bags_of(place, 4) if bags else ids_of(place, 4)
    found, expected = compiled(features), emb(features)
    assert list(found) == list(expected)
    for name, rows in found.items():
        assert not rows.requires_grad
        assert torch.equal(rows, expected[name])


@pytest.mark.variants(0, 1)
@pytest.mark.slow("emulated")
def test_no_text_in_a_graph_ends_a_line(place: Place) -> None:
    """torch's compiler writes the arguments of operators into comments."""
    texts: list[str] = []

    def keep(graph: Any, _: Any) -> Any:
        texts.extend(a for node in graph.graph.nodes for a in node.args if isinstance(a, str))
        return graph.forward

    torch.compiler.reset()
    for kind, drawn in (
        (TieredEmbeddingCollection, ids_of),
        (TieredEmbeddingBagCollection, bags_of),
    ):
        model = Model(kind(store(place, SAME), SOURCES))
        torch.compile(model, fullgraph=True, backend=keep)(drawn(place, 4))
    assert any("bought" in text for text in texts)
    assert not [text for text in texts if "\n" in text]
