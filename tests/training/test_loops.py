"""What training loops do to layers, done to collections: as to one layer a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.pairs import pairs
from tests.training.conftest import PLACES, Place, rows_of
from tierstore.checkpoint import Checkpoint
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
)
from tierstore.optim import TieredOptimizer

ROWS = {"user": 30, "item": 12, "tag": 25}
KINDS: dict[str, tuple[Any, Any]] = {
    "rows": (TieredEmbeddingCollection, TieredEmbedding),
    "bags": (TieredEmbeddingBagCollection, lambda table: TieredEmbeddingBag(table, mode="sum")),
}
SPECS = {
    name: tierstore.TableSpec(rows, 6, init=tierstore.normal(seed=number))
    for number, (name, rows) in enumerate(ROWS.items())
}


class Pair:
    """The same tables twice: under a collection, and under one layer each."""

    def __init__(self, place: Place, kind: str, optimizer: Any = torch.optim.Adam) -> None:
        self.place = place
        self.stores = [place.store(SPECS) for _ in range(2)]
        make, layer = KINDS[kind]
        self.collection = make(self.stores[0], list(ROWS))
        self.layers = torch.nn.ModuleDict({name: layer(self.stores[1][name]) for name in ROWS})
        self.modules = [self.collection, self.layers]
        self.optimizers = [TieredOptimizer(optimizer, [each], lr=0.05) for each in self.modules]

    def ids(self) -> dict[str, Tensor]:
        return {name: self.place.ids(4, 2, rows=rows) for name, rows in ROWS.items()}

    def look_up(self, ids: dict[str, Tensor]) -> list[Tensor]:
        """Return what both look up, side by side."""
        each = {name: self.layers[name](own) for name, own in ids.items()}
        return [torch.cat(list(found.values()), -1) for found in (self.collection(ids), each)]

    def check(self) -> None:
        for name in ROWS:
            one, two = (store[name] for store in self.stores)
            for field in one.fields:
                torch.testing.assert_close(rows_of(one, field), rows_of(two, field))
            assert one.scalars == two.scalars


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.variants(1, 2)
def test_gradients_accumulate_and_are_clipped(place: Place, kind: str) -> None:
    pair = Pair(place, kind)
    for number in range(3):
        for _ in range(2):
            for found in pair.look_up(pair.ids()):
                found.pow(3).sum().backward()
        norms = []
        for optimizer in pair.optimizers:
            parameters = list(optimizer.parameters())
            if number < 2:
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
            else:
                torch.nn.utils.clip_grad_value_(parameters, 0.05)
            optimizer.step()
            optimizer.zero_grad()
        if norms:
            torch.testing.assert_close(*norms)
    pair.check()


@pytest.mark.variants(1, 3)
def test_scaled_gradients_of_half_types(place: Place, kind: str) -> None:
    pair, device = Pair(place, kind, torch.optim.SGD), torch.device(place.torch).type
    scalers = [torch.amp.GradScaler(device, init_scale=64.0) for _ in range(2)]
    head = torch.randn(18, 3, device=place.torch)
    for number in range(3):
        with torch.autocast(device, torch.bfloat16):
            found = pair.look_up(pair.ids())
            losses = [(each @ head).float().square().sum() for each in found]
        before = rows_of(pair.stores[0]["user"])
        for loss, scaler, optimizer in zip(losses, scalers, pair.optimizers, strict=True):
            scaler.scale(loss * (torch.inf if number == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        skipped = torch.equal(rows_of(pair.stores[0]["user"]), before)
        assert skipped == (number == 1)
    pair.check()
    assert scalers[0].get_scale() == scalers[1].get_scale() < 64


@pytest.mark.variants(1, 2)
def test_reading_trains_nothing(place: Place, kind: str) -> None:
    pair = Pair(place, kind)
    before = {name: rows_of(pair.stores[0][name]) for name in ROWS}
    with torch.no_grad():
        one, each = pair.look_up(pair.ids())
    torch.testing.assert_close(one, each)
    with torch.inference_mode():
        assert not pair.collection(pair.ids())["user"].requires_grad
    for module in pair.modules:
        module.requires_grad_(False)
    one, each = pair.look_up(pair.ids())
    assert not one.requires_grad
    torch.testing.assert_close(one, each)
    for optimizer in pair.optimizers:
        optimizer.step()
    for name in ROWS:
        assert torch.equal(rows_of(pair.stores[0][name]), before[name])
        assert "step" not in pair.stores[0][name].scalars
    for module in pair.modules:
        module.requires_grad_(True)
    for found in pair.look_up(pair.ids()):
        found.sum().backward()
    for optimizer in pair.optimizers:
        optimizer.step()
    pair.check()


class Keyed:
    """Has the methods of torchrec's KeyedJaggedTensor."""

    def __init__(self, features: dict[str, Tensor]) -> None:
        self._features = features

    def keys(self) -> list[str]:
        return list(self._features)

    def values(self) -> Tensor:
        return torch.cat([ids.reshape(-1) for ids in self._features.values()])

    def lengths(self) -> Tensor:
        return torch.full((4 * len(self._features),), 2)


@pytest.mark.variants(1)
@pairs(together=1, place=PLACES, kind=list(KINDS), form=[dict, Keyed])
def test_ids_are_announced(place: Place, kind: str, form: type) -> None:
    pair = Pair(place, kind)
    batches = [pair.ids() for _ in range(5)]
    announced = {pair.collection: lambda batch: form(batch)}
    for number, batch in enumerate(tierstore.loader.lookahead(batches, announced, depth=2)):
        pair.collection.prefetch(form(batches[number]))
        found = pair.collection(form(batch))
        each = {name: pair.layers[name](own) for name, own in batch.items()}
        for name, rows in found.items():
            torch.testing.assert_close(rows.reshape(each[name].shape), each[name])
        for looked_up in (found, each):
            torch.stack([rows.pow(3).sum() for rows in looked_up.values()]).sum().backward()
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pair.check()


@pytest.mark.variants(1)
def test_states_bring_rows_back(place: Place, kind: str) -> None:
    pair = Pair(place, kind)
    pair.stores[0].commit(keep="first")
    ids = pair.ids()
    before, states = pair.look_up(ids)[0].detach(), pair.collection.state_dict()
    options = pair.optimizers[0].state_dict()
    pair.look_up(ids)[0].sum().backward()
    pair.optimizers[0].param_groups[0]["lr"] = 0.5
    pair.optimizers[0].step()
    pair.stores[0].commit()
    assert not torch.equal(pair.look_up(ids)[0], before)
    pair.collection.load_state_dict(states)
    pair.optimizers[0].load_state_dict(options)
    assert torch.equal(pair.look_up(ids)[0], before)
    assert pair.optimizers[0].param_groups[0]["lr"] == 0.05


def run_of(path: Path, kind: str, place: Place, steps: range, commit_at: int) -> None:
    """Train, from the last commit on; what comes behind the commit is lost."""
    with tierstore.open(
        path, "r+", budget=tierstore.Budget(host_rows=20), device=place.device
    ) as store:
        collection = KINDS[kind][0](store, list(ROWS))
        head = torch.nn.Linear(18, 1).to(place.torch)
        opt = TieredOptimizer(torch.optim.Adam, [collection, head], lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        run = Checkpoint(store, model=torch.nn.ModuleList([collection, head]), opt=opt, lr=schedule)
        start = run.resume()
        assert start == steps.start
        for step in steps:
            ids = {name: place.ids(4, 2, rows=rows) for name, rows in ROWS.items()}
            opt.zero_grad()
            head(torch.cat(list(collection(ids).values()), -1)).square().sum().backward()
            opt.step()
            schedule.step()
            if step + 1 == commit_at:
                run.commit(step + 1)
        store.rollback()


@pytest.mark.variants(1, 2)
def test_a_run_goes_on_from_its_checkpoint(place: Place, kind: str) -> None:
    paths = [place.folder / name for name in ("at once", "resumed")]
    for path in paths:
        torch.manual_seed(7)
        tierstore.create(path, SPECS).close()
        if path is paths[0]:
            run_of(path, kind, place, range(5), 5)
        else:
            run_of(path, kind, place, range(4), 2)
            torch.manual_seed(99)
            run_of(path, kind, place, range(2, 5), 5)
    stores = [tierstore.open(path) for path in paths]
    for name in ROWS:
        one, two = (store[name] for store in stores)
        assert one.scalars == two.scalars
        for field in one.fields:
            torch.testing.assert_close(rows_of(one, field), rows_of(two, field))
    for store in stores:
        store.close()
