"""An optimizer that is made later in a process starts anew, as torch's does, unless it is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.training.conftest import DIM, ROWS, Place, rows_of
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

EVERY = torch.arange(ROWS)
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.1}),
]


class Twins:
    """A layer, and torch's of the same values; every row is in each batch, so both are equal."""

    def __init__(self, place: Place, weights: Tensor) -> None:
        self.place = place
        self.emb = TieredEmbedding(place.table(weights))
        plain = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False)
        self.plain = plain.to(place.torch)

    def train(self, *optimizers: Any, steps: int = 2) -> None:
        every = EVERY.to(self.place.torch)
        for step in range(steps):
            for layer, optimizer in zip((self.emb, self.plain), optimizers, strict=False):
                (layer(every) * (1.0 + step)).pow(3).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    def check(self) -> None:
        torch.testing.assert_close(rows_of(self.emb.table), self.plain.weight.detach().cpu())


@contextmanager
def told(times: int) -> Iterator[None]:
    """Expect so many warnings of state that is dropped."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    text = [str(each.message) for each in found if "starts with no state" in str(each.message)]
    assert len(text) == times, [str(each.message) for each in found]
    assert all('state="continue"' in each and "'item'" in each for each in text)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda each: str(each))
def test_one_made_in_each_epoch_is_that_of_torch(
    place: Place, weights: Tensor, kind: Any, options: dict[str, Any]
) -> None:
    twins = Twins(place, weights)
    has_state = kind is not torch.optim.SGD or "momentum" in options
    for epoch in range(3):
        tiered = TieredOptimizer(kind, [twins.emb], **options)
        with told(int(epoch > 0 and has_state)):
            twins.train(tiered, kind(twins.plain.parameters(), **options))
        twins.check()


@pytest.mark.variants(1)
def test_one_that_goes_on_is_as_the_first(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    plain = torch.optim.Adam(twins.plain.parameters(), lr=0.1)
    with told(0):
        for _ in range(3):
            tiered = TieredOptimizer(torch.optim.Adam, [twins.emb], state="continue", lr=0.1)
            twins.train(tiered, plain)
    twins.check()


def test_a_store_that_is_opened_goes_on_and_the_second_optimizer_over_it_does_not(
    weights: Tensor, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    twins = Twins(place, weights)
    plain = torch.optim.Adam(twins.plain.parameters(), lr=0.1)
    twins.train(TieredOptimizer(torch.optim.Adam, [twins.emb], lr=0.1), plain)
    path = place.opened[0].path
    place.opened[0].commit()
    place.close()
    with tierstore.open(path, "r+") as store:
        twins.emb = TieredEmbedding(store["item"])
        unused = TieredOptimizer(torch.optim.Adam, [twins.emb], lr=0.1)
        tiered = TieredOptimizer(torch.optim.Adam, [twins.emb], lr=0.1)
        del unused  # it took no step, so the other one is the first
        with told(0):
            twins.train(tiered, plain)
        twins.check()
        with told(1):
            twins.train(
                TieredOptimizer(torch.optim.Adam, [twins.emb], lr=0.1),
                torch.optim.Adam(twins.plain.parameters(), lr=0.1),
            )
        twins.check()
        store.commit()


@pytest.mark.variants(1)
def test_a_state_that_is_loaded_is_gone_on_with(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    store, adam = twins.emb.table.store, torch.optim.Adam
    first, plain = TieredOptimizer(adam, [twins.emb], lr=0.1), adam(twins.plain.parameters(), 0.1)
    twins.train(first, plain)
    tierstore.Checkpoint(store, opt=first).commit(step=2)
    state, rows_state = first.state_dict(), plain.state_dict()["state"][0]
    with told(0):
        second = TieredOptimizer(adam, [twins.emb], lr=0.1)
        second.load_state_dict(state)
        twins.train(second, plain)
        twins.check()
    rows_state = plain.state_dict()["state"][0]
    with told(0):
        third = TieredOptimizer(adam, [twins.emb], lr=0.1)
        third.load_rows_state(twins.emb, rows_state)
        twins.train(third, plain)
        twins.check()
    store.rollback()
    with told(0):
        fourth = TieredOptimizer(adam, [twins.emb], lr=0.1)
        assert tierstore.Checkpoint(store, opt=fourth).resume() == 2
        twins.train(fourth)
    assert store["item"].scalars["step"] == 4


@pytest.mark.variants(1)
def test_a_rollback_brings_the_dropped_state_back_for_no_step(
    place: Place, weights: Tensor
) -> None:
    twins = Twins(place, weights)
    store, adam = twins.emb.table.store, torch.optim.Adam
    twins.train(TieredOptimizer(adam, [twins.emb], lr=0.1), adam(twins.plain.parameters(), 0.1))
    store.commit()
    tiered = TieredOptimizer(adam, [twins.emb], lr=0.1)
    with told(1):
        for _ in range(2):
            twins.train(tiered)
            store.rollback()
        twins.train(tiered, adam(twins.plain.parameters(), 0.1))
    twins.check()
    store.commit()
    rows = rows_of(twins.emb.table)
    twins.train(tiered, steps=1)
    once = rows_of(twins.emb.table)
    store.rollback()
    assert torch.equal(rows_of(twins.emb.table), rows)
    twins.train(tiered, steps=1)
    assert torch.equal(rows_of(twins.emb.table), once)
    assert store["item"].scalars["step"] == 3


@pytest.mark.variants(1)
def test_tables_of_a_collection_start_anew_and_those_that_were_not_trained_go_on(
    place: Place,
) -> None:
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=1))
    store = place.store({"a": spec, "b": spec})
    layers = [TieredEmbedding(store[name]) for name in "ab"]
    for layer in layers[:1]:
        opt = TieredOptimizer(torch.optim.Adam, [layer], lr=0.1)
        layer(EVERY.to(place.torch)).sum().backward()
        opt.step()
    store.commit()
    both = TieredEmbeddingCollection(store, {"a": "a", "b": "b"})
    opt = TieredOptimizer(torch.optim.Adam, [both], lr=0.1)
    found = both({name: EVERY.to(place.torch) for name in "ab"})
    sum(each.sum() for each in found.values()).backward()
    with pytest.warns(UserWarning, match="left in table 'a', of 1 step, is dropped"):
        opt.step()
    assert [store[name].scalars["step"] for name in "ab"] == [1, 1]
    torch.testing.assert_close(rows_of(store["a"], "exp_avg"), rows_of(store["b"], "exp_avg"))


@pytest.mark.variants(2)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda each: str(each))
@pytest.mark.parametrize("order", ["in turn", "both in each step", "a phase each, and back"])
def test_two_that_keep_state_do_not_train_the_same_rows(
    place: Place, weights: Tensor, kind: Any, options: dict[str, Any], order: str
) -> None:
    """Each of torch's has a state of its own: here the first is told that its own is gone."""
    twins, has_state = Twins(place, weights), kind is not torch.optim.SGD or "momentum" in options
    ours, torchs = (
        [make(params, **options) for _ in range(2)]
        for make, params in (
            (partial(TieredOptimizer, kind), [twins.emb]),
            (kind, list(twins.plain.parameters())),
        )
    )
    turns = {"in turn": [[0], [1]], "both in each step": [[0, 1]]}.get(order, [[0], [0], [1], [1]])

    def step(turn: list[int]) -> None:
        for layer, optimizers in ((twins.emb, ours), (twins.plain, torchs)):
            layer(EVERY.to(place.torch)).pow(3).sum().backward()
            for number in turn:
                optimizers[number].step()
            layer.zero_grad()

    with told(int(has_state)):
        for turn in turns:
            step(turn)
    twins.check()
    rows = rows_of(twins.emb.table)
    if not has_state:
        step(turns[0])
        twins.check()
        return
    with pytest.raises(InvalidInputError, match=r"is gone: another optimizer.*reset_state\(\)"):
        step(turns[0])
    assert torch.equal(rows_of(twins.emb.table), rows)
    twins.emb.zero_grad()
    ours[0].reset_state()
    torchs[0] = kind(twins.plain.parameters(), **options)
    step([0])
    twins.check()
    with pytest.raises(InvalidInputError, match="is gone"):
        step([1])


@pytest.mark.variants(1)
def test_state_is_shared_where_that_is_asked_for(place: Place, weights: Tensor) -> None:
    twins = Twins(place, weights)
    plain = torch.optim.Adam(twins.plain.parameters(), lr=0.1)
    tiered = [
        TieredOptimizer(torch.optim.Adam, [twins.emb], state="continue", lr=0.1) for _ in range(2)
    ]
    with told(0):
        for number in (0, 1, 1, 0):
            twins.emb.zero_grad()
            twins.train(tiered[number], plain, steps=1)
    twins.check()


def test_a_loaded_state_is_that_of_the_optimizer_that_loaded_it(
    weights: Tensor, tmp_path: Path
) -> None:
    place = Place(tmp_path)
    twins = Twins(place, weights)
    store, adam = twins.emb.table.store, torch.optim.Adam
    first, plain = TieredOptimizer(adam, [twins.emb], lr=0.1), adam(twins.plain.parameters(), 0.1)
    twins.train(first, plain)
    store.commit(keep="first")
    state, dense = first.state_dict(), twins.plain.weight.detach().clone()
    second = TieredOptimizer(adam, [twins.emb], lr=0.1)
    with told(1):
        twins.train(second)
    first.load_state_dict(state)
    with torch.no_grad():
        twins.plain.weight.copy_(dense)
    twins.emb.zero_grad()
    with told(0):
        twins.train(first, plain)
    twins.check()
    with pytest.raises(InvalidInputError, match="is gone"):
        twins.train(second)
    place.close()


def test_what_state_takes(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    wrong: Any = "resume"
    with pytest.raises(InvalidInputError, match=r"state is 'continue'.*'resume'"):
        TieredOptimizer(torch.optim.Adam, [emb], state=wrong)
    with pytest.raises(InvalidInputError, match="does not go with reset=True"):
        TieredOptimizer(torch.optim.Adam, [emb], state="continue", reset=True)
