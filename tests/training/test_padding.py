"""Padding in collections, against layers of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.training.conftest import Place, rows_of
from tierstore.errors import InvalidInputError, UnknownNameError
from tierstore.nn import TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

ROWS = {"user": 30, "item": 50, "wide": 9}
FEATURES = {"user": "user", "bought": "item", "item": "item", "wide": "wide"}
PADDING = {"user": 3, "bought": -1, "wide": 0}
MODES: dict[str, Any] = {"user": "mean", "bought": "sum", "item": "max", "wide": "max"}


def start(place: Place) -> tuple[Any, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(rows, 6 if name == "wide" else 4, generator=generator)
        for name, rows in ROWS.items()
    }
    specs = {
        name: tierstore.TableSpec(*each.shape, init=tierstore.from_array(each))
        for name, each in weights.items()
    }
    return place.store(specs), weights


def ids_of(number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    found = {
        name: torch.randint(0, ROWS[table], (12, 5), generator=generator)
        for name, table in FEATURES.items()
    }
    for name, row in PADDING.items():
        found[name][::2, 1:4] = row % ROWS[FEATURES[name]]
    found["user"][1] = 3  # a bag of padding alone
    return found


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_padding_is_looked_up_as_by_torch(place: Place, kind: str) -> None:
    store, weights = start(place)
    functional = torch.nn.functional
    layers: dict[str, Any] = {}
    for name in FEATURES:
        row = PADDING.get(name)
        if kind == "rows":
            layers[name] = lambda ids, weight, row=row: functional.embedding(ids, weight, row)
        else:
            layers[name] = lambda ids, weight, row=row, mode=MODES[name]: functional.embedding_bag(
                ids, weight, mode=mode, padding_idx=row
            )
    emb: Any
    if kind == "rows":
        emb = TieredEmbeddingCollection(store, FEATURES, padding_idx=PADDING)
    else:
        emb = TieredEmbeddingBagCollection(store, FEATURES, MODES, padding_idx=PADDING)
    optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.01)
    plain = {name: each.clone().requires_grad_() for name, each in weights.items()}
    dense = torch.optim.SGD(list(plain.values()), lr=0.01)
    for number in range(3):
        ids = ids_of(number)
        found = emb({name: each.to(place.torch) for name, each in ids.items()})
        expected = {name: layers[name](ids[name], plain[FEATURES[name]]) for name in FEATURES}
        for name in FEATURES:
            torch.testing.assert_close(found[name].cpu(), expected[name])
        left_out = "bought" if number == 1 else None
        for one in (found, expected):
            loss = sum((each**2).sum() for name, each in one.items() if name != left_out)
            loss.backward()
        optimizer.step()
        dense.step()
        dense.zero_grad()
    for name, each in plain.items():
        torch.testing.assert_close(rows_of(store[name]), each.detach())
    with torch.no_grad():
        again = emb({name: each.to(place.torch) for name, each in ids_of(4).items()})
    for name in FEATURES:
        torch.testing.assert_close(
            again[name].cpu(), layers[name](ids_of(4)[name], plain[FEATURES[name]]).detach()
        )


def test_padding_of_weighted_bags_with_offsets(place: Place) -> None:
    store, weights = start(place)
    bags = TieredEmbeddingBagCollection(store, {"item": "item", "user": "user"}, padding_idx=2)
    bags.requires_grad_(False)
    ids, offsets = torch.tensor([2, 4, 2, 5, 6, 2]), torch.tensor([0, 3, 3])
    factors = torch.rand(6, requires_grad=True)
    own = factors.detach().clone().requires_grad_()
    one = torch.tensor([[2], [1], [2]])
    found = bags({"item": (ids, offsets, factors), "user": one})["item"]
    expected = torch.nn.functional.embedding_bag(
        ids, weights["item"], offsets, mode="sum", per_sample_weights=own, padding_idx=2
    )
    torch.testing.assert_close(found.cpu(), expected)
    for each in (found.cpu(), expected):
        (each**2).sum().backward()
    torch.testing.assert_close(factors.grad, own.grad)


def test_padding_that_is_no_row_is_refused(place: Place) -> None:
    store, _ = start(place)
    with pytest.raises(InvalidInputError, match="padding_idx 9 is not a row"):
        TieredEmbeddingCollection(store, ["wide"], padding_idx=9)
    with pytest.raises(UnknownNameError, match="no feature 'other'"):
        TieredEmbeddingCollection(store, ["wide"], padding_idx={"other": 0})
    keyed = place.store({"page": tierstore.TableSpec(10, 4, keys="int64")})
    with pytest.raises(InvalidInputError, match="is by key; padding_idx is a row of tables by id"):
        TieredEmbeddingCollection(keyed, ["page"], padding_idx=0)
