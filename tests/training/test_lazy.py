"""What the optimizers of torch do to rows that are not in a batch, and a table does not."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore.errors import LazyUpdatesWarning
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

ROWS, DIM = 12, 4
SPEC = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=3))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "SGD with decay": (torch.optim.SGD, {"weight_decay": 1e-4}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adagrad with decay": (torch.optim.Adagrad, {"weight_decay": 1e-6}),
    "Adam": (torch.optim.Adam, {}),
    "Adam with decay": (torch.optim.Adam, {"weight_decay": 1e-6}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW without decay": (torch.optim.AdamW, {"weight_decay": 0.0}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "SparseAdam": (torch.optim.SparseAdam, {}),
    "RowWiseAdagrad": (RowWiseAdagrad, {}),
}
DECAYING = {"SGD with decay", "Adagrad with decay", "Adam with decay", "AdamW"}
EVERY = list(range(ROWS))
BATCHES = {
    "one": [[1, 2, 3]],
    "others": [[1, 2, 3], [3, 4, 5]],
    "the same": [[1, 2, 3]] * 5,
    "more": [[1, 2, 3], [1, 2, 3, 7]],
    "all": [EVERY, EVERY[::-1] + EVERY, EVERY],
    "all, then some": [EVERY, EVERY[:-1]],
    "late": [[1, 2, 3], [1, 2, 3, 7], [1, 2, 3, 4], [3, 4, 5]],
}


def warned(work: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        work()
    return [str(each.message) for each in seen if each.category is LazyUpdatesWarning]


def plain(kind: str, weight: Tensor, batches: list[list[int]], *, dense: bool) -> Tensor:
    """Train a weight as torch does, or only the rows of each batch, as a table is trained."""
    make, options = KINDS[kind]
    parameter = torch.nn.Parameter(weight.clone())
    opt = make([parameter], lr=0.1, **options)
    for ids in batches:
        before = parameter.detach().clone()
        kept = {k: v.clone() for k, v in opt.state[parameter].items() if torch.is_tensor(v)}
        opt.zero_grad()
        torch.nn.functional.embedding(
            torch.tensor(ids), parameter, sparse=make is torch.optim.SparseAdam
        ).square().sum().backward()
        opt.step()
        if dense:
            continue
        stay = torch.ones(ROWS, 1).index_fill(0, torch.tensor(ids), 0).bool()
        with torch.no_grad():
            parameter.copy_(torch.where(stay, before, parameter))
            for name, value in opt.state[parameter].items():
                if torch.is_tensor(value) and value.shape[:1] == (ROWS,):
                    earlier = kept.get(name, torch.zeros_like(value))
                    mask = stay.reshape(-1, *[1] * (value.dim() - 1))
                    value.copy_(torch.where(mask, earlier, value))
    return parameter.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_said_where_torch_would_do_something_else(kind: str) -> None:
    """Whether torch, over a weight, differs from updates of the rows of a batch alone."""
    make, options = KINDS[kind]
    for name, batches in BATCHES.items():
        with tierstore.create(None, {"item": SPEC}) as store:
            emb = TieredEmbedding(store["item"])
            weight = emb(torch.arange(ROWS)).detach().clone()
            opt = TieredOptimizer(make, [emb], lr=0.1, **options)

            def train(emb: Any = emb, opt: Any = opt, batches: Any = batches) -> None:
                for ids in batches:
                    emb(torch.tensor(ids)).square().sum().backward()
                    opt.step()

            told = warned(train)
            found = emb(torch.arange(ROWS)).detach()
            store.rollback()
        lazy, dense = (plain(kind, weight, batches, dense=each) for each in (False, True))
        torch.testing.assert_close(found, lazy, msg=f"{kind}, {name}")
        differs = not torch.allclose(lazy, dense, rtol=0, atol=1e-9)
        # Mean squares, and rows that were in every batch so far, may make no difference yet.
        assert len(told) == differs or (told and kind == "RMSprop"), (kind, name, told)
        for each in told:
            assert "table 'item'" in each and make.__name__ in each
            assert ("by weight decay" in each) == (kind in DECAYING)


class OfFloats(torch.optim.SGD):
    """A class of another library, whose kernels are for float32."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(each.dtype != torch.float32 for each in group["params"]):
                raise TypeError("only float32")
        return super().step(closure)


def test_a_class_of_another_library_is_tried_in_float32() -> None:
    with tierstore.create(None, {"item": SPEC}) as store:
        emb = TieredEmbedding(store["item"])
        opt = TieredOptimizer(OfFloats, [emb], lr=0.1, momentum=0.9)

        def train() -> None:
            for ids in ([1, 2], [3, 4]):
                emb(torch.tensor(ids)).sum().backward()
                opt.step()

        (told,) = warned(train)
        assert "OfFloats changes every row" in told
        store.rollback()


def test_options_of_a_group_decide_as_they_are_then() -> None:
    with tierstore.create(None, {"item": SPEC, "user": SPEC, "word": SPEC}) as store:
        layers = {name: TieredEmbedding(store[name]) for name in store}
        groups = [
            {"params": [layers["item"]], "momentum": 0.0},
            {"params": [layers["user"]], "momentum": 0.9},
        ]
        opt = TieredOptimizer(torch.optim.SGD, groups, lr=0.1)

        def train(*names: str) -> None:
            for name, first in itertools.product(names, range(ROWS - 1)):
                layers[name](torch.tensor([first, first + 1])).sum().backward()
                opt.step()

        assert warned(lambda: train("item")) == []
        (told,) = warned(lambda: train(*["item", "user"] * 4))
        assert "table 'user'" in told
        assert warned(lambda: train("user", "item")) == []  # once
        opt = TieredOptimizer(torch.optim.SGD, [layers["item"]], lr=0.1)
        assert warned(lambda: train("item")) == []
        opt.add_param_group({"params": [layers["word"]], "weight_decay": 0.1})
        (told,) = warned(lambda: train("word"))
        assert "table 'word'" in told
        store.rollback()


def test_tables_of_a_collection_are_looked_at_as_one() -> None:
    with tierstore.create(None, {"item": SPEC, "user": SPEC}) as store:
        both = TieredEmbeddingCollection(store, ["item", "user"])
        opt = TieredOptimizer(torch.optim.Adam, both, lr=0.1)

        def train(ids: list[int]) -> None:
            found = both({"item": torch.tensor(ids), "user": torch.arange(ROWS)})
            (found["item"].sum() + found["user"].sum()).backward()
            opt.step()

        assert warned(lambda: [train(EVERY) for _ in range(3)]) == []
        assert len(warned(lambda: [train([1, 2]), train([3])])) == 1
        store.rollback()
