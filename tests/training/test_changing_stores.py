"""Collections are trained on through whatever happens to the tables of their store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore
from tests.pairs import pairs
from tests.training.conftest import PLACES, Place, rows_of
from tests.training.test_loops import KINDS, ROWS, SPECS, Pair
from tierstore.nn import TieredEmbeddingCollection


def commit(store: tierstore.Store) -> None:
    store.commit()


def fold(store: tierstore.Store) -> None:
    store.commit()
    store.fold()
    assert store.info().folded


def roll_back(store: tierstore.Store) -> None:
    store.rollback()


def grow(store: tierstore.Store) -> None:
    store.commit()
    store.grow("item", ROWS["item"] + 5)


def come(store: tierstore.Store) -> None:
    store.commit()
    store.create_table("late", tierstore.TableSpec(9, 6, init=tierstore.normal(seed=9)))


def go_back(store: tierstore.Store) -> None:
    store.commit(keep="kept")
    store["user"].write([0], np.ones((1, 6), np.float32))
    store["user"].scalars["step"] = 99
    store.commit()
    store.restore("kept")
    store.release("kept")


def verify(store: tierstore.Store) -> None:
    store.commit()
    assert store.verify().ok


def another(store: tierstore.Store) -> None:
    """Change the record of a table that no layer is over."""
    store.commit()
    store.create_table("other", tierstore.TableSpec(9, 6))
    store.add_fields("other", {"exp_avg": tierstore.Field(6), "exp_avg_sq": tierstore.Field(6)})
    store.rename("other", "renamed")
    store.drop("renamed")


CHANGES = (commit, fold, roll_back, grow, come, go_back, verify, another)


def step(pair: Pair) -> None:
    for found in pair.look_up(pair.ids()):
        found.pow(3).sum().backward()
    for optimizer in pair.optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.variants(1, 1)
@pairs(together=1, place=PLACES, kind=list(KINDS))
@pytest.mark.slow("emulated")
def test_training_goes_on_after_every_change(place: Place, kind: str) -> None:
    pair, taken = Pair(place, kind), 0
    for change in CHANGES:
        for store in pair.stores:
            store.commit()
        step(pair)
        for store in pair.stores:
            change(store)
        pair.check()
        step(pair)
        pair.check()
        taken += 1 if change is roll_back else 2
        assert pair.stores[0]["user"].scalars["step"] == taken, change


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_looks_up_what_was_committed(place: Place, kind: str) -> None:
    pair = Pair(place, kind)
    pair.stores[0].commit()
    budget = tierstore.Budget(host_rows=20)
    with tierstore.open(pair.stores[0].path, budget=budget, device=place.device) as reader:
        frozen, ids = KINDS[kind][0](reader, list(ROWS)).requires_grad_(False), pair.ids()
        before = pair.look_up(ids)[0].detach()
        for refreshed in (False, True):
            found = torch.cat(list(frozen(ids).values()), -1)
            expected = pair.look_up(ids)[0].detach() if refreshed else before
            assert torch.equal(found, expected)
            step(pair)
            pair.stores[0].commit()
            reader.refresh()


@pytest.mark.variants(4)
@pytest.mark.parametrize("change", CHANGES)
def test_a_table_with_a_budget_of_its_own_stays_apart(
    tmp_path: Path, change: Callable[[tierstore.Store], None]
) -> None:
    """Its rows take the slots that it was given, and no others."""
    tierstore.create(tmp_path / "s", SPECS).close()
    budget = tierstore.Budget(host={"item": 800, "user": 64 * 1024, "tag": 64 * 1024})
    with tierstore.open(tmp_path / "s", "r+", budget=budget) as store:
        emb = TieredEmbeddingCollection(store, list(ROWS)).requires_grad_(False)
        assert len(emb.groups) == len(store.info().spaces) == 3
        truth = {name: rows_of(table) for name, table in store.items()}
        change(store)
        assert ("item",) in {tuple(space.tables) for space in store.info().spaces}
        for _ in range(3):
            ids = {name: torch.randint(0, rows, (20,)) for name, rows in ROWS.items()}
            for name, found in emb(ids).items():
                assert torch.equal(found, truth[name][ids[name]])
        used = {name: store[name].occupancy()["host"].used for name in ROWS}
        assert 0 < used["item"] < 8 and used["user"] > 16 and used["tag"] > 12
        counted = [store[name].stats()["host"].requested for name in store]
        assert store.stats()["host"].requested == sum(counted) > 0
