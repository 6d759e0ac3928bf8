"""States that a program keeps keep the versions to which they point, as the best of a run."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.durability.crash import scratch
from tests.tries import tries
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM, MOST = 60, 4, 8
EVERY = torch.arange(ROWS)
LOSSES = [5.0, 4.0, 4.5, 2.0, 3.0, 2.5, 2.25, 6.0, 2.75, 7.0]
SPEC = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=3))


def to_disk(state: Any) -> Callable[[], Any]:
    file = io.BytesIO()
    torch.save(state, file)

    def load() -> Any:
        file.seek(0)
        return torch.load(file)

    return load


def pickled(state: Any) -> Callable[[], Any]:
    data = pickle.dumps(state)
    return lambda: pickle.loads(data)


def held(state: Any) -> Callable[[], Any]:
    return lambda: state


KEEP: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "the state": held,
    "deepcopy": lambda state: held(copy.deepcopy(state)),
    "copy": lambda state: held(copy.copy(state)),
    "a copy of each": lambda state: held({name: copy.copy(each) for name, each in state.items()}),
    "clones": lambda state: held({name: each.clone() for name, each in state.items()}),
    "on the CPU": lambda state: held(
        {name: each.detach().cpu().clone() for name, each in state.items()}
    ),
    "a copy on the device": lambda state: held(
        {name: each.to("cpu", copy=True) for name, each in state.items()}
    ),
    "torch.save": to_disk,
    "pickle": pickled,
}
SHARING = [KEEP[name] for name in ("the state", "copy", "a copy of each")]


class Model(torch.nn.Module):
    def __init__(self, item: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.item, self.head = item, torch.nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.item(ids)).squeeze(-1)


def best_of(
    model: Model, opt: Any, commit: Callable[[], Any], keep: Callable[[Any], Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Stop early, as programs do; return what the best one gave, the last, and the one loaded."""
    random, least, waited = torch.Generator().manual_seed(2), float("inf"), 0
    for loss in LOSSES:
        for _ in range(2):
            ids = torch.randint(0, ROWS, (16,), generator=random)
            opt.zero_grad()
            (model(ids) - (ids % 3)).square().mean().backward()
            opt.step()
        commit()
        if loss < least:
            least, waited = loss, 0
            best, at_best = keep(model.state_dict()), model(EVERY).detach()
        else:
            waited += 1
            if waited == 5:
                break
    last = model(EVERY).detach()
    model.load_state_dict(best())
    return at_best, last, model(EVERY).detach()


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_early_stopping_ends_with_the_best_as_in_torch(tmp_path: Path, keep: Any) -> None:
    with tierstore.create(tmp_path / "s", {"item": SPEC}) as store:
        ours = Model(TieredEmbedding(store["item"]))
        weight = ours.item(EVERY).detach().clone()
        opt = TieredOptimizer(torch.optim.Adagrad, ours, lr=0.5)
        found = best_of(ours, opt, store.commit, keep)
        plain = Model(torch.nn.Embedding.from_pretrained(weight, freeze=False))
        other = torch.optim.Adagrad(plain.parameters(), lr=0.5)
        expected = best_of(plain, other, lambda: None, keep)
    if keep in SHARING:  # the dense part is still the model's, as torch's; rows are the best
        assert not torch.equal(found[2], found[1])
        found, expected = found[:2], expected[:2]
    else:
        assert torch.equal(found[2], found[0])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_states_of_optimizers_and_stores_keep_versions_too(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "s", {"item": SPEC}) as store:
        emb = TieredEmbedding(store["item"])
        opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
        states = []
        for take in (
            lambda: copy.deepcopy(opt.state_dict()),
            store.state_dict,
            lambda: copy.copy(store.state_dict()),
            lambda: store.state_dict().copy(),
            lambda: copy.deepcopy({"run": [store.state_dict()]})["run"][0],
        ):
            emb(EVERY).square().sum().backward()
            opt.step()
            opt.zero_grad()
            store.commit()
            states.append((store.version, take(), emb(EVERY).detach()))
        for _ in range(3):
            emb.table.write([1], np.ones((1, DIM), np.float32))
            store.commit()
        assert [each.version for each in store.versions()] == [3, 4, 5, 6, 7, 9, 10]
        for number, (_, state, rows) in enumerate(states):
            (store if number else opt).load_state_dict(state)
            assert torch.equal(emb(EVERY), rows)
        file = io.BytesIO()
        torch.save(states[1][1], file)
        file.seek(0)
        assert dict(torch.load(file)) == states[1][1]


def numbers(store: Any) -> list[int]:
    return [each.version for each in store.versions()]


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[tuple[Any, Model, Callable[[], int]]]:
    with tierstore.create(tmp_path / "s", {"item": SPEC}) as store:
        random = np.random.default_rng(5)

        def commit() -> int:
            store["item"].write(
                random.integers(0, ROWS, 3), random.standard_normal((3, DIM)).astype(np.float32)
            )
            return store.commit()

        yield store, Model(TieredEmbedding(store["item"])), commit


def test_a_version_goes_with_the_last_of_its_states(trained: Any) -> None:
    store, model, commit = trained
    commit()
    state = model.state_dict()
    copied = copy.deepcopy(state)
    for _ in range(3):
        commit()
    assert numbers(store) == [2, 4, 5]
    del state
    commit()
    assert numbers(store) == [2, 5, 6]
    sums = [copied["item._extra_state"].sum(), copied["item._extra_state"].float()]
    del copied
    gc.collect()
    commit()
    assert numbers(store) == [6, 7]
    assert {type(each) for each in sums} == {Tensor}


def test_a_state_of_a_payload_claims_no_version_of_its_own(trained: Any) -> None:
    store, model, commit = trained
    commit()
    best = copy.deepcopy(model.state_dict())
    version = store.version
    for _ in range(3):
        store.commit(payload={"model": model, "best": best})
        commit()
    assert numbers(store)[:-2] == [version]
    loaded = store.payload["best"].state_dict()
    assert torch.equal(loaded["item._extra_state"], best["item._extra_state"])


def test_states_of_another_store_leave_room(trained: Any, tmp_path: Path) -> None:
    store, model, commit = trained
    version, state = commit(), model.state_dict()
    with tierstore.create(tmp_path / "other", {"item": SPEC}) as other:
        states = [state]
        for value in range(MOST):
            other["item"].write([1], np.full((1, DIM), value, np.float32))
            other.commit()
            states.append(other.state_dict())
        commit(), commit()
        assert numbers(store)[0] == version


def test_opening_the_store_again_keeps_what_states_point_to(trained: Any) -> None:
    store, model, commit = trained
    commit()
    state, rows = model.state_dict(), model.item(EVERY).detach()
    for _ in range(3):
        commit()
    store.close()
    with tierstore.open(store.path, "r+") as again:
        again["item"].write([1], np.ones((1, DIM), np.float32))
        again.commit()
        again_model = Model(TieredEmbedding(again["item"]))
        again_model.load_state_dict(state)
        assert torch.equal(again_model.item(EVERY), rows)


def test_a_fold_drops_every_older_version_as_it_says(trained: Any) -> None:
    store, model, commit = trained
    first = commit()
    state = model.state_dict()
    commit(), commit()
    assert first in store.fold()
    with pytest.raises(InvalidInputError, match=r'no longer kept.*commit\(keep="best"\)'):
        model.load_state_dict(state)
    commit(), commit()
    assert store.verify().ok


def test_states_of_many_versions_keep_the_latest_and_say_so_once(trained: Any) -> None:
    store, model, commit = trained
    states = {commit(): model.state_dict() for _ in range(MOST)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        commit(), commit()
    assert numbers(store)[:-2] == [*states]
    first, *_ = states
    model.state_dict()  # is dropped at once
    states[store.version] = model.state_dict()
    with pytest.warns(UserWarning, match=rf"more than {MOST}.*version {first},.*keep=\"best\""):
        commit(), commit()
    states[store.version] = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        commit(), commit()
    assert numbers(store)[:-2] == [*states][2:]
    with pytest.raises(InvalidInputError, match=r'no longer kept.*commit\(keep="best"\)'):
        model.load_state_dict(states[first])
    assert f"{MOST} such versions" in tierstore.Store.commit.__doc__.replace("\n", " ")


STEPS = st.lists(
    st.tuples(st.sampled_from(["commit", "take", "drop", "load", "restore"]), st.integers(0, 99)),
    max_size=40,
)


@given(STEPS)
@tries(6)
def test_any_living_state_loads(steps: list[tuple[str, int]]) -> None:
    """The states that a program holds, up to `MOST` versions, give the rows of their moment."""
    ways = [way for name, way in KEEP.items() if name not in ("torch.save", "pickle")]
    with scratch() as root, tierstore.create(root / "s", {"item": SPEC}) as store:
        model, states = Model(TieredEmbedding(store["item"])), list[Any]()
        for step, number in steps:
            if step == "commit":
                store["item"].write([number % ROWS], np.full((1, DIM), number, np.float32))
                store.commit()
            elif step == "take":
                way = ways[number % len(ways)]
                states = [*states, (way(model.state_dict()), model.item(EVERY).detach())][-MOST:]
            elif step == "restore":
                store.restore(numbers(store)[number % len(numbers(store))])
            elif states and step == "drop":
                del states[number % len(states)]
            elif states:
                state, rows = states[number % len(states)]
                model.load_state_dict(state())
                assert torch.equal(model.item(EVERY), rows)
        for state, rows in states:
            model.load_state_dict(state())
            assert torch.equal(model.item(EVERY), rows)
