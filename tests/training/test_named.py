"""What ends a batch: no gradient reaches another key than the one it was computed for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.gpu.emulator import EmulatedDevice, library
from tierstore import TableSpec
from tierstore.errors import ClosedError
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
)
from tierstore.optim import TieredOptimizer
from tierstore.spec import Field

KEYS, DIM = 10, 4


class Setting(NamedTuple):
    """A table of ten keys, and one of ids, looked up by a layer that is trained."""

    store: Any
    table: Any
    forward: Callable[[list[int]], Tensor]
    optimizer: Any
    key: Callable[[int], Any]

    def rows(self) -> np.ndarray:
        """Return the rows of the keys."""
        return np.asarray(self.table.read([self.key(each) for each in range(KEYS)]))

    def step(self, *asked: int) -> None:
        """Take a whole step."""
        self.forward(list(asked)).sum().backward()
        self.optimizer.step()


@pytest.fixture(params=["host", "emulated"])
def device(request: pytest.FixtureRequest) -> Any:
    if request.param == "host":
        return "cpu"
    library()
    return EmulatedDevice()


LAYERS = ("embedding", "bag", "collection", "bags")


def looked_up(layer: str, store: Any) -> tuple[Any, Callable[[Any, int], Tensor]]:
    """Return a layer, and what it makes of so many keys: a row for each."""
    if layer == "embedding":
        return (made := TieredEmbedding(store["t"])), lambda keys, n: made(keys)
    if layer == "bag":
        bag = TieredEmbeddingBag(store["t"], mode="sum")
        return bag, lambda keys, n: bag(keys, torch.arange(n))
    features = {"a": "t", "b": "other"}
    if layer == "collection":
        every = TieredEmbeddingCollection(store, features)
        return every, lambda keys, n: every({"a": keys, "b": keys})["a"]
    bags = TieredEmbeddingBagCollection(store, features, "sum")
    return bags, lambda keys, n: bags({"a": (keys, torch.arange(n)), "b": (keys, torch.arange(n))})[
        "a"
    ]


@pytest.fixture
def make(tmp_path: Any, device: Any) -> Iterator[Callable[..., Setting]]:
    stores: list[Any] = []

    def made(layer: str, optimizer: Any = torch.optim.SGD, kind: Any = "int64") -> Setting:
        budget = tierstore.Budget(host_rows=8, **({} if device == "cpu" else {"gpu_rows": 4}))
        spec = TableSpec(dim=DIM, keys=kind, track_uses=True)
        store = tierstore.create(
            tmp_path / f"{len(stores)}", {"t": spec, "other": spec}, budget=budget, device=device
        )
        stores.append(store)
        table, key = store["t"], (str if kind == "text" else int)
        keys = [key(each) for each in range(KEYS)]
        for each in ("t", "other"):
            store[each].write(keys, np.zeros((KEYS, DIM), np.float32))
        store.commit()
        module, look_up = looked_up(layer, store)
        trained = TieredOptimizer(optimizer, module, lr=1.0)

        def forward(asked: list[int]) -> Tensor:
            given = [key(each) for each in asked]
            return look_up(torch.tensor(given) if kind == "int64" else given, len(given))

        return Setting(store, table, forward, trained, key)

    yield made
    for store in stores:
        store.rollback()
        store.close()


def removed(setting: Setting) -> None:
    """Remove a key of the batch."""
    assert setting.table.remove([setting.key(0)]) == 1


def removed_another(setting: Setting) -> None:
    """Remove one that is not in the batch."""
    assert setting.table.remove([setting.key(3)]) == 1


def expired(setting: Setting) -> None:
    """Keep those that were used most, which the batch is not among."""
    setting.table.write([setting.key(each) for each in range(1, 6)], np.zeros((5, DIM), np.float32))
    assert sum(len(keys) for keys, _ in setting.table.expire(keep_at_most=5)) == 5


REMOVALS = (removed, removed_another, expired)


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("end", REMOVALS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_removal_ends_a_batch(make: Any, layer: str, optimizer: Any, end: Any) -> None:
    """Before the backward pass or after it; the next pass is trained as ever."""
    for late, kind in ((False, "int64"), (True, "int64"), (layer == "bag", "text")):
        setting = make(layer, optimizer, kind)
        loss = (setting.forward([0, 9]) * torch.tensor([[1.0], [5.0]])).sum()
        if late:
            loss.backward()
        end(setting)
        before = setting.rows()
        with pytest.raises(ClosedError, match=r"keys were removed since .*forward pass again"):
            setting.optimizer.step() if late else loss.backward()
        setting.optimizer.step()
        assert np.array_equal(setting.rows(), before)
        setting.step(9)
        changed = np.flatnonzero((setting.rows() != before).any(1))
        assert changed.tolist() == [9]


def test_accumulated_gradients_are_dropped_together(make: Any) -> None:
    """Those of before a removal and of after it: the step says so, and uses none."""
    setting = make("embedding")
    setting.forward([0, 9]).sum().backward()
    removed_another(setting)
    setting.forward([0, 9]).sum().backward()
    with pytest.raises(ClosedError, match=r"call zero_grad\(\) and run the forward pass again"):
        setting.optimizer.step()
    assert not setting.rows().any()
    setting.step(9)
    assert np.flatnonzero(setting.rows().any(1)).tolist() == [9]


@pytest.mark.parametrize("cleared", ["optimizer", "module"])
def test_a_gradient_that_was_lost_is_looked_at_and_cleared(make: Any, cleared: str) -> None:
    """By clipping, for which it is nothing, and by zero_grad, after which nothing is told."""
    setting = make("embedding")
    (rows,) = setting.optimizer.parameters()
    setting.forward([0, 9]).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([rows], 1e9)
    assert norm > 0
    removed(setting)
    assert torch.nn.utils.clip_grad_norm_([rows], 1e9, norm_type=float("inf")) == 0
    if cleared == "optimizer":
        setting.optimizer.zero_grad()
    else:
        rows.grad = None
    setting.optimizer.step()
    setting.step(9)
    assert np.flatnonzero(setting.rows().any(1)).tolist() == [9]


def test_values_written_into_rows_that_moved_are_not_written(make: Any) -> None:
    """Nor is that kept from the user, who may have clamped them."""
    setting = make("embedding")
    (rows,) = setting.optimizer.parameters()
    setting.forward([0, 9]).sum().backward()
    assert rows.grad is not None
    with torch.no_grad():
        rows.data.fill_(7.0)
    removed(setting)
    with pytest.raises(ClosedError, match="keys were removed"):
        setting.optimizer.step()
    assert not setting.rows().any()


PLACES: dict[str, Callable[[Setting], object]] = {
    "fields": lambda s: s.store.add_fields("t", {"age": Field(1)}),
    "other table": lambda s: s.store.create_table("new", TableSpec(40, DIM)),
    "grow": lambda s: s.table._grow(9000),
    "merge": lambda s: s.table.merge(s.store["other"]),
    "another's removal": lambda s: s.store["other"].remove([s.key(1), s.key(9)]),
    "commit": lambda s: s.store.commit(),
    "fold": lambda s: (s.store.commit(), s.store.fold()),
}
"""What moves rows at most to other places, or writes them before the step does."""


@pytest.mark.variants(2, 4)
@pytest.mark.parametrize("how", PLACES)
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_in_other_places_get_their_gradient(make: Any, layer: str, how: str) -> None:
    for late in (False, True):
        if layer in ("collection", "bags") and how in ("fields", "another's removal"):
            continue  # their tables are no longer alike, and both are in the batch
        setting = make(layer)
        setting.store.commit()
        loss = (setting.forward([0, 9]) * torch.tensor([[1.0], [5.0]])).sum()
        setting.store.commit()  # the keys of the layers' other table
        if late:
            loss.backward()
        PLACES[how](setting)
        if not late:
            loss.backward()
        setting.optimizer.step()
        expected = np.zeros((KEYS, DIM), np.float32)
        expected[0], expected[9] = -1, -5
        assert np.array_equal(setting.rows(), expected)


def test_a_removal_gives_pins_back(make: Any) -> None:
    """Those of a batch that never gets its gradient too, or the cache would shrink for ever."""
    setting = make("embedding")
    host = setting.store["t"]._backing.space.host
    if setting.store["t"]._backing.space.gpu is not None:
        return
    for _ in range(3):
        loss = setting.forward([0, 5, 9])
        setting.table.write([setting.key(0)], np.zeros((1, DIM), np.float32))
        removed(setting)
        assert not host.map.pins.leases.any()
        del loss
        setting.step(5, 7)
        assert not host.map.pins.leases.any()


def test_an_id_of_a_table_that_was_replaced_gets_no_gradient(tmp_path: Any) -> None:
    """Its rows are others than the forward pass read; so are those of another version."""
    spec = TableSpec(KEYS, DIM, init=tierstore.normal(seed=1))
    for how in ("replace", "restore", "drop", "rename"):
        with tierstore.create(tmp_path / how, {"t": spec}) as store:
            store["t"].write([0], np.ones((1, DIM), np.float32))
            store.commit()
            emb = TieredEmbedding(store["t"])
            optimizer = TieredOptimizer(torch.optim.SGD, emb, lr=1.0)
            loss = emb(torch.tensor([0, 9])).sum()
            if how == "replace":
                store.replace_table("t", spec, reinitialize=True)
            elif how == "restore":
                store.restore(1)
            elif how == "drop":
                store.drop("t")
            else:
                store.rename("t", "u")
            with pytest.raises(ClosedError, match="run the forward pass again"):
                loss.backward()
            optimizer.zero_grad()


@pytest.mark.variants(2, 4)
@pytest.mark.parametrize("layer", LAYERS)
def test_keys_that_go_while_a_pass_looks_them_up_are_looked_up_again(
    make: Any, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, after their rows were found and before these are leased."""
    for trains in (True, False):
        check_a_key_that_goes_meanwhile(make(layer), monkeypatch, trains=trains)


def check_a_key_that_goes_meanwhile(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, *, trains: bool
) -> None:
    from tierstore._table.keyed import KeyedTable

    setting.table.write([setting.key(9)], np.full((1, DIM), 3, np.float32))
    real: Any = KeyedTable._like
    fired: list[bool] = []

    def remove_first(table: Any, rows: Any, kind: str) -> Any:
        if table is setting.table and not fired:
            fired.append(True)
            other = threading.Thread(target=setting.table.remove, args=([setting.key(0)],))
            other.start()
            other.join()
        return real(table, rows, kind)

    with monkeypatch.context() as patch:
        patch.setattr(KeyedTable, "_like", remove_first)
        patch.setattr(KeyedTable, "_guessed", lambda *_: None)
        with torch.set_grad_enabled(trains):
            found = setting.forward([9])
    if not fired:
        return
    assert torch.equal(found, torch.full((1, DIM), 3.0)), trains
    if trains:
        found.sum().backward()
        setting.optimizer.step()
        assert (setting.rows()[9] == 2).all() and not setting.rows()[:9].any()
