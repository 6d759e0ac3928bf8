"""A collection equals one layer a table, to the bit, at the price of one."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tierstore
from tests import inside
from tests.pairs import pairs
from tests.training.conftest import PLACES, Place, rows_of
from tierstore._table.recycled import Recycled
from tierstore.errors import (
    InvalidInputError,
    InvalidTypeError,
    LazyUpdatesWarning,
    RowIndexError,
    UnknownNameError,
)
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
    autograd,
    parts,
)
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.05, "momentum": 0.5}),
    "row-wise adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.05}),
}


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Twins:
    """The same tables twice, under a collection and under one layer each."""

    def __init__(
        self,
        place: Place,
        rows: list[int],
        dims: list[int] | None = None,
        dtype: str = "float32",
        **budget: Any,
    ) -> None:
        self.place = place
        self.rows = {f"t{number}": count for number, count in enumerate(rows)}
        self.dims = dict(zip(self.rows, dims or [6] * len(rows), strict=True))
        self.stores = [self._store(dtype, budget) for _ in range(2)]
        self.collection = TieredEmbeddingCollection(self.stores[0], {n: n for n in self.rows})
        self.layers = torch.nn.ModuleDict(
            {name: TieredEmbedding(self.stores[1][name]) for name in self.rows}
        )

    def _store(self, dtype: str, budget: Mapping[str, Any]) -> tierstore.Store:
        specs = {
            name: tierstore.TableSpec(
                count, self.dims[name], dtype, init=tierstore.normal(seed=number)
            )
            for number, (name, count) in enumerate(self.rows.items())
        }
        return self.place.store(specs, **budget)

    def optimizers(self, kind: type, **options: Any) -> list[TieredOptimizer]:
        return [
            TieredOptimizer(kind, [layer], **options) for layer in (self.collection, self.layers)
        ]

    def ids(self, n: int = 9, leave_out: str = "") -> dict[str, Tensor]:
        return {
            name: self.place.ids(n, rows=count)
            for name, count in self.rows.items()
            if name != leave_out
        }

    def step(
        self, optimizers: list[TieredOptimizer], ids: dict[str, Tensor], unused: str = ""
    ) -> None:
        """Train both with the same gradients, and compare what they looked up."""
        one = self.collection(ids)
        each = {name: self.layers[name](own) for name, own in ids.items()}
        assert one.keys() == ids.keys()
        for found in (one, each):
            torch.stack(
                [found[name].pow(3).sum() for name in ids if name != unused]
            ).sum().backward()
        for name in ids:
            assert same(one[name].detach(), each[name].detach()), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Compare every byte of every table, and what its rows share."""
        for name in self.rows:
            one, two = (store[name] for store in self.stores)
            assert one.fields.keys() == two.fields.keys()
            for field in one.fields:
                exact = self.place.torch == "cpu"
                pairs = zip(one.scan(field, raw=exact), two.scan(field, raw=exact), strict=True)
                for found, expected in pairs:
                    if exact:
                        assert found.tobytes() == expected.tobytes(), (name, field)
                    else:
                        np.testing.assert_allclose(found, expected, **CLOSE)
            assert one.scalars == two.scalars, name


CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def same(one: Tensor, two: Tensor) -> bool:
    """Whether tensors are equal to the bit; on a real GPU, whether they are close.

    There torch adds up the gradients of a row in parts that depend on where its ids are among all.
    """
    if one.is_cuda:
        torch.testing.assert_close(one, two, **CLOSE)
        return True
    return one.dtype == two.dtype and bool(torch.equal(one, two))


@pytest.mark.variants(1, 2)
@pairs(together=1, place=PLACES, variant=list(OPTIMIZERS))
def test_training_equals_one_layer_a_table(place: Place, variant: str) -> None:
    kind, options = OPTIMIZERS[variant]
    twins = Twins(place, [3, 40, 1, 17, 60])
    assert len(twins.collection.groups) == 1
    optimizers = twins.optimizers(kind, **options)
    with in_order():
        for _ in range(3):
            twins.step(optimizers, twins.ids())
    for store in twins.stores:
        store.commit()
    twins.check()


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["one slot", "all"])
@pytest.mark.nightly("emulated", "one slot")
def test_two_hundred_tables(place: Place, budget: str) -> None:
    check_tables(place, 200, budget)


@pytest.mark.variants(1, 2)
@pairs(place=PLACES, tables=[1, 2, 13], budget=["one slot", "some", "all"])
def test_any_number_of_tables_and_any_budget(place: Place, tables: int, budget: str) -> None:
    check_tables(place, tables, budget)


def check_tables(place: Place, tables: int, budget: str) -> None:
    rows = [1 + (7 * number) % 23 for number in range(tables)]
    slots = {"one slot": 1, "some": max(2, sum(rows) // 5), "all": sum(rows)}[budget]
    sizes = {"host_rows": slots} | ({} if place.device == "cpu" else {"gpu_rows": slots})
    twins = Twins(place, rows, **sizes)
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    with in_order():
        for _ in range(3):
            twins.step(optimizers, twins.ids(5))
    twins.check()


@pytest.mark.variants(1, 1)
def test_tables_of_several_dims_make_several_groups(place: Place) -> None:
    twins = Twins(place, [30, 20, 10, 40, 5], [4, 8, 4, 64, 8])
    assert sorted(len(each.table.tables) for each in twins.collection.groups) == [1, 2, 2]
    optimizers = twins.optimizers(torch.optim.Adagrad, lr=0.1)
    with in_order():
        for _ in range(3):
            twins.step(optimizers, twins.ids())
    twins.check()


def test_tables_that_a_budget_keeps_apart_are_groups_too(place: Place) -> None:
    if place.device != "cpu":
        pytest.skip("the host's budget shows it")
    specs = {name: tierstore.TableSpec(30, 4) for name in ("a", "b", "c")}
    budget = tierstore.Budget(host_rows={"a": 5, "b": 6, "c": 7})
    store = tierstore.create(place.folder / "apart", specs, budget=budget)
    place.opened.append(store)
    with pytest.warns(tierstore.errors.ZeroRowsWarning):
        emb = TieredEmbeddingCollection(store, {name: name for name in specs})
    assert len(emb.groups) == 3
    found = emb({name: torch.arange(3) for name in specs})
    assert all(rows.shape == (3, 4) for rows in found.values())


def test_features_share_a_table(place: Place) -> None:
    weights = torch.randn(40, 6)
    table = place.table(weights)
    twin = place.table(weights)
    emb = TieredEmbeddingCollection(table.store, {"item": table, "bought": "item", "seen": "item"})
    layer = TieredEmbedding(twin)
    optimizers = [TieredOptimizer(torch.optim.Adam, [each], lr=0.1) for each in (emb, layer)]
    with in_order():
        for _ in range(3):
            ids = {"item": place.ids(5), "bought": place.ids(4, 3), "seen": place.ids(0)}
            rows = emb(ids)
            assert rows["bought"].shape == (4, 3, 6) and rows["seen"].shape == (0, 6)
            every = layer(torch.cat([own.reshape(-1) for own in ids.values()]))
            assert same(torch.cat([own.reshape(-1, 6) for own in rows.values()]), every)
            torch.cat([own.reshape(-1, 6) for own in rows.values()]).pow(3).sum().backward()
            every.pow(3).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    found, expected = (each.read(torch.arange(40)) for each in (table, twin))
    assert same(found, expected)
    assert table.scalars == twin.scalars


@pytest.mark.variants(1, 1)
@pairs(together=1, place=PLACES, variant=["sgd momentum", "adam", "row-wise adagrad", "nadam"])
def test_steps_are_counted_by_table(place: Place, variant: str) -> None:
    """Tables without ids, or whose rows the loss does not use, take no part in a step."""
    kind, options = OPTIMIZERS[variant]
    twins = Twins(place, [30, 12, 25, 9])
    optimizers = twins.optimizers(kind, **options)
    with in_order():
        twins.step(optimizers, twins.ids())
        twins.step(optimizers, twins.ids(leave_out="t1"))
        twins.step(optimizers, twins.ids(), unused="t2")
        twins.step(optimizers, {**twins.ids(), "t3": place.ids(0)})
        for _ in range(2):
            twins.step(optimizers, twins.ids())
    assert [twins.stores[0][name].scalars["step"] for name in twins.rows] == [6, 5, 5, 5]
    twins.check()


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("dims", [[6, 6, 6, 6], [6, 8, 6, 4]])
def test_tables_have_options_of_their_own(place: Place, dims: list[int]) -> None:
    twins = Twins(place, [30, 12, 25, 9], dims)
    emb, layers = twins.collection, twins.layers
    slow, fixed = {"lr": 0.001}, {"weight_decay": 0.3}
    optimizers = [
        TieredOptimizer(
            torch.optim.Adam,
            [
                {"params": [of("t1"), of("t2")], **slow},
                {"params": [rest]},
                {"params": [of("t3")], **fixed},
            ],
            lr=0.1,
        )
        for of, rest in ((emb.rows_of, emb), (layers.__getitem__, layers["t0"]))
    ]
    with in_order():
        twins.step(optimizers, twins.ids())
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.5
        twins.step(optimizers, twins.ids(leave_out="t3"))
        twins.step(optimizers, twins.ids())
    twins.check()


def test_options_of_every_table_are_found_in_any_group(place: Place) -> None:
    """Also where a table is looked up by itself, so that its part is the whole."""
    twins = Twins(place, [30, 12], [6, 8])
    emb, layers = twins.collection, twins.layers
    optimizers = [
        TieredOptimizer(
            torch.optim.SGD, [{"params": [rest]}, {"params": [of("t1")], "lr": 0.5}], lr=0.1
        )
        for of, rest in ((emb.rows_of, emb), (layers.__getitem__, layers["t0"]))
    ]
    with in_order():
        for _ in range(2):
            twins.step(optimizers, twins.ids())
    twins.check()


def test_tables_that_no_group_names_are_not_trained(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    emb, layers = twins.collection, twins.layers
    layers["t1"].requires_grad_(False)
    optimizers = [
        TieredOptimizer(torch.optim.SGD, [of("t0"), of("t2")], lr=0.1)
        for of in (emb.rows_of, layers.__getitem__)
    ]
    with in_order():
        for _ in range(2):
            twins.step(optimizers, twins.ids())
    twins.check()


def test_options_may_not_ask_for_other_state(place: Place) -> None:
    emb = Twins(place, [30, 12]).collection
    groups = [{"params": [emb]}, {"params": [emb.rows_of("t1")], "momentum": 0.9}]
    with pytest.raises(InvalidInputError, match="momentum_buffer"):
        TieredOptimizer(torch.optim.SGD, groups, lr=0.1)


def test_a_table_is_trained_once(place: Place) -> None:
    twins = Twins(place, [30, 12])
    layer = TieredEmbedding(twins.stores[0]["t1"])
    with pytest.raises(InvalidInputError, match="'t1' is in two groups"):
        TieredOptimizer(torch.optim.SGD, [twins.collection, layer], lr=0.1)
    part = twins.collection.rows_of("t1")
    groups = [{"params": [part]}, {"params": [part], "lr": 1.0}]
    with pytest.raises(InvalidInputError, match="'t1' is in two groups"):
        TieredOptimizer(torch.optim.SGD, groups, lr=0.1)


def test_an_optimizer_gives_all_tables_their_state_in_one_commit(place: Place) -> None:
    twins = Twins(place, [30, 12, 25, 9], [6, 6, 8, 8])
    before = twins.stores[0].version
    TieredOptimizer(torch.optim.Adam, [twins.collection], lr=0.1)
    assert twins.stores[0].version == before + 1
    assert [len(each.table.tables) for each in twins.collection.groups] == [2, 2]


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_of_tables(place: Place, dtype: str) -> None:
    twins = Twins(place, [30, 12, 25], dtype=dtype)
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    with in_order():
        for _ in range(2):
            twins.step(optimizers, twins.ids())
    twins.check()


@pytest.mark.variants(1)
def test_rounding_at_random_draws_from_the_table_itself(place: Place) -> None:
    twins = Twins(place, [30, 12, 25], dtype="bfloat16")
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.001, stochastic_rounding=True)
    with in_order():
        twins.step(optimizers, twins.ids())
        twins.step(optimizers, twins.ids(leave_out="t1"))
        twins.step(optimizers, twins.ids())
    twins.check()


@pytest.mark.variants(1, 1)
def test_averages(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05, ema=0.9)
    with in_order():
        twins.step(optimizers, twins.ids())
        twins.step(optimizers, twins.ids(leave_out="t1"))
        twins.step(optimizers, twins.ids(), unused="t2")
    twins.check()
    averaged, ids = twins.collection.averaged(), twins.ids()
    found = averaged(ids)
    for name, layer in twins.layers.items():
        assert same(found[name], layer.averaged()(ids[name]))
    assert not any(parameter.requires_grad for parameter in averaged.parameters())


def test_projections(place: Place) -> None:
    twins = Twins(place, [30, 12])
    optimizers = [
        TieredOptimizer(torch.optim.SGD, [layer], lr=0.5, project={layer: clipped})
        for layer in (twins.collection, twins.layers)
    ]
    with in_order():
        for _ in range(2):
            twins.step(optimizers, twins.ids())
    twins.check()


def clipped(rows: Tensor) -> Tensor:
    return rows.clamp(-0.3, 0.3)


@pytest.mark.variants(1)
def test_gradients_accumulate_and_are_clipped(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    with in_order():
        for _ in range(2):
            for ids in (twins.ids(), twins.ids(4, leave_out="t0")):
                one = twins.collection(ids)
                each = {name: twins.layers[name](own) for name, own in ids.items()}
                for found in (one, each):
                    sum(rows.pow(3).sum() for rows in found.values()).backward()
            for optimizer in optimizers:
                torch.nn.utils.clip_grad_value_(list(optimizer.parameters()), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    twins.check()


def test_the_norm_of_gradients_is_that_of_all_tables(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.05)
    ids = twins.ids()
    norms = []
    for found in (twins.collection(ids), {n: twins.layers[n](own) for n, own in ids.items()}):
        sum(rows.pow(3).sum() for rows in found.values()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(optimizers[len(norms)].parameters(), 1.0))
    torch.testing.assert_close(*norms)


def test_what_is_written_into_the_parameter_reaches_the_tables(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    emb = twins.collection
    optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.05)
    ids = {name: torch.unique(own) for name, own in twins.ids().items()}
    sum(rows.sum() for rows in emb(ids).values()).backward()
    (rows,) = optimizer.parameters()
    with torch.no_grad():
        rows.data.fill_(0.25)
    count = sum(own.numel() for own in ids.values())
    with pytest.warns(LazyUpdatesWarning, match=f"{count} rows of table 't0, t1, t2'"):
        found = emb(ids)
    assert all((each == 0.25).all() for each in found.values())
    own, tables = rows.ids.cpu(), rows.table_of.cpu()
    for number, table in enumerate(rows.tables):
        assert sorted(own[tables == number].tolist()) == ids[table.name].tolist()


def test_without_gradients_and_frozen(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    emb, ids = twins.collection, twins.ids()
    with torch.no_grad():
        read = emb(ids)
    assert not any(rows.requires_grad for rows in read.values())
    emb.requires_grad_(False)
    frozen = emb(ids)
    assert not any(rows.requires_grad for rows in frozen.values())
    for name in ids:
        assert same(read[name], twins.layers[name](ids[name]).detach())
        assert same(read[name], frozen[name])
    with pytest.raises(InvalidInputError, match="layers or parameters that can be trained"):
        TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)


def test_the_type_of_the_module(place: Place) -> None:
    twins = Twins(place, [30, 12])
    rows = twins.collection.to(torch.float64)(twins.ids())
    assert all(each.dtype == torch.float64 for each in rows.values())
    assert twins.stores[0]["t0"].dtype == np.float32


def test_rows_may_be_changed_in_place(place: Place) -> None:
    twins = Twins(place, [30, 12])
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.1)
    ids = twins.ids()
    one = [rows.mul_(2) for rows in twins.collection(ids).values()]
    each = [twins.layers[name](own) * 2 for name, own in ids.items()]
    with in_order():
        for found in (one, each):
            sum(rows.sum() for rows in found).backward()
    for optimizer in optimizers:
        optimizer.step()
    twins.check()


# -- what comes in


class Keyed:
    """What torchrec calls a KeyedJaggedTensor."""

    def __init__(self, lengths: dict[str, Tensor], values: Tensor) -> None:
        self._lengths, self._values = lengths, values

    def keys(self) -> list[str]:
        return list(self._lengths)

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return torch.cat(list(self._lengths.values()))

    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths().cumsum(0)])


@pytest.mark.variants(5)
@pytest.mark.parametrize("without", ["nothing", "offsets"])
@pytest.mark.parametrize("dims", [[6, 6, 6], [6, 4, 6]])
def test_keyed_jagged_tensors(
    place: Place, dims: list[int], without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without == "offsets":
        monkeypatch.delattr(Keyed, "offsets")
    twins = Twins(place, [30, 12, 25], dims)
    lengths = {name: torch.tensor([2, 0, 3, n]) for n, name in enumerate(twins.rows)}
    ids = {name: place.ids(int(own.sum()), rows=twins.rows[name]) for name, own in lengths.items()}
    rows = twins.collection(Keyed(lengths, torch.cat(list(ids.values()))))
    assert list(rows) == list(ids)
    for name, own in ids.items():
        assert same(rows[name], twins.layers[name](own))


def test_lengths_of_keys_are_those_of_their_ids(place: Place) -> None:
    twins = Twins(place, [30, 12])
    lengths = {"t0": torch.tensor([2, 1]), "t1": torch.tensor([1, 1])}
    with pytest.raises(InvalidInputError, match="5 ids by their lengths, and there are 4"):
        twins.collection(Keyed(lengths, place.ids(4, rows=12)))


def test_nested_ids_give_nested_rows(place: Place) -> None:
    twins = Twins(place, [30, 12])
    lists = [place.ids(3, rows=30), place.ids(2, rows=30)]
    nested = torch.nested.nested_tensor(lists, layout=torch.jagged)
    rows = twins.collection({"t0": nested, "t1": place.ids(2, 2, rows=12)})
    assert rows["t0"].is_nested and rows["t1"].shape == (2, 2, 6)
    assert same(rows["t0"].values(), twins.layers["t0"](torch.cat(lists)))


def test_widths_of_ids(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    ids = twins.ids()
    narrow = {
        name: own.to(torch.int32 if name == "t1" else torch.uint8) for name, own in ids.items()
    }
    found, expected = twins.collection(narrow), twins.collection(ids)
    assert all(same(found[name], expected[name]) for name in ids)
    for wrong in (ids["t1"].float(), ids["t1"] > 3):
        with pytest.raises(InvalidTypeError, match="'t1'"):
            twins.collection({**ids, "t1": wrong})
    with pytest.raises(InvalidTypeError, match="'t1' are a list"):
        twins.collection({**ids, "t1": [1, 2]})


@pytest.mark.variants(1)
def test_a_bad_id_is_named(place: Place) -> None:
    twins = Twins(place, [30] * 26)
    emb, ids = twins.collection, twins.ids()
    for bad in (30, -1, 2**60, -(2**62)):
        wrong = ids["t17"].clone()
        wrong[4] = bad
        if place.device == "cpu":
            with pytest.raises(RowIndexError, match="position 4 of feature 't17'") as found:
                emb({**ids, "t17": wrong})
            assert f"id {bad} " in str(found.value) and "0 to 29" in str(found.value)
            continue
        rows = emb({**ids, "t17": wrong})
        assert rows["t17"][4].isnan().all()
        assert not torch.cat([each for name, each in rows.items() if name != "t17"]).isnan().any()
        with pytest.raises(RowIndexError, match="feature 't17'") as found:
            twins.stores[0].commit()
        assert f"position {17 * 9 + 4} of" in str(found.value)
        if abs(bad) < 2**40:
            assert f"id {bad} " in str(found.value)
        twins.stores[0].rollback()


def test_bad_ids_reach_no_other_table(place: Place) -> None:
    """On a GPU, where they show later, what was looked up beside them is trained alone."""
    if place.device == "cpu":
        pytest.skip("the host raises at once")
    twins = Twins(place, [30, 12, 25])
    optimizer = TieredOptimizer(torch.optim.SGD, [twins.collection], lr=0.1)
    before = {name: twins.stores[0][name].read(torch.arange(n)) for name, n in twins.rows.items()}
    bad = {"t0": torch.tensor([30, 31, 41]), "t1": torch.tensor([-1, 12])}
    rows = twins.collection({name: ids.to(place.torch) for name, ids in bad.items()})
    torch.cat(list(rows.values())).sum().backward()
    optimizer.step()
    for name, count in twins.rows.items():
        assert same(twins.stores[0][name].read(torch.arange(count)), before[name])


def test_features_that_are_not_there(place: Place) -> None:
    twins = Twins(place, [30, 12])
    with pytest.raises(UnknownNameError, match="no feature 'user'; the collection has t0, t1"):
        twins.collection({"user": place.ids(3)})
    with pytest.raises(UnknownNameError):
        TieredEmbeddingCollection(twins.stores[0], {"user": "users"})
    with pytest.raises(UnknownNameError):
        TieredEmbeddingCollection(twins.stores[0], {"user": ("t0", "bias")})
    with pytest.raises(InvalidTypeError, match="'user' needs a table"):
        TieredEmbeddingCollection(twins.stores[0], {"user": 3})
    with pytest.raises(InvalidInputError, match="another store"):
        TieredEmbeddingCollection(twins.stores[0], {"user": twins.stores[1]["t0"]})
    with pytest.raises(InvalidInputError, match="at least one feature"):
        TieredEmbeddingCollection(twins.stores[0], {})
    for wrong in ("t0", 3, ["t0", "t0"], [twins.stores[0]["t0"]]):
        with pytest.raises(InvalidTypeError, match="list of tables"):
            TieredEmbeddingCollection(twins.stores[0], wrong)  # type: ignore[arg-type]
    assert list(TieredEmbeddingCollection(twins.stores[0], ["t1", "t0"]).features) == ["t1", "t0"]
    assert twins.collection({}) == {}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_would_not_look_up_is_refused(place: Place) -> None:
    twins = Twins(place, [30, 12])
    ids = place.ids(4, rows=12)

    def rows(ids: Tensor) -> Tensor:
        return twins.collection({"t0": ids})["t0"]

    with pytest.raises(InvalidInputError, match="a collection cannot"):
        torch.func.vmap(rows)(ids[:, None])
    with pytest.raises(InvalidInputError, match="bake the rows"):
        torch.jit.trace(rows, (ids,))


# -- the store beneath


def test_a_rollback_drops_what_was_not_committed(place: Place) -> None:
    twins = Twins(place, [30, 12])
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    with in_order():
        twins.step(optimizers, twins.ids())
        for store in twins.stores:
            store.commit()
        twins.step(optimizers, twins.ids())
        rows = twins.collection(twins.ids())
        for store in twins.stores:
            store.rollback()
        with pytest.raises(tierstore.errors.ClosedError, match="rolled back"):
            rows["t0"].sum().backward()
        for optimizer in optimizers:
            optimizer.zero_grad()
        twins.step(optimizers, twins.ids())
    twins.check()


def test_tables_that_come_and_grow_move_the_others(place: Place) -> None:
    """Gradients that wait meanwhile reach the rows they are of."""
    twins = Twins(place, [30, 12, 25])
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    with in_order():
        ids = twins.ids()
        for find in (twins.collection, lambda ids: {n: twins.layers[n](i) for n, i in ids.items()}):
            sum(rows.pow(3).sum() for rows in find(ids).values()).backward()
        for store in twins.stores:
            store.grow("t0", 50)
            store.create_table("new", tierstore.TableSpec(9, 18, init=tierstore.normal(seed=7)))
        for optimizer in optimizers:
            optimizer.step()
        twins.step(optimizers, {**twins.ids(), "t0": place.ids(9, rows=50)})
    twins.check()
    assert len(twins.collection.groups) == 1


def test_tables_that_are_parted_say_so(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    twins.stores[0].add_fields("t1", {"age": tierstore.Field(1)})
    with pytest.raises(InvalidInputError, match="make the collection anew"):
        twins.collection(twins.ids())
    anew = TieredEmbeddingCollection(twins.stores[0], {name: name for name in twins.rows})
    assert len(anew.groups) == 2
    ids = twins.ids()
    found = anew(ids)
    for name in ids:
        assert same(found[name].detach(), twins.layers[name](ids[name]).detach())


@pytest.mark.variants(1)
def test_states_are_pointers(place: Place) -> None:
    twins = Twins(place, [30, 12], [6, 4])
    (first, _), store = twins.optimizers(torch.optim.Adam, lr=0.05), twins.stores[0]
    emb = twins.collection
    sum(rows.sum() for rows in emb(twins.ids()).values()).backward()
    first.step()
    with pytest.raises(InvalidInputError, match="not committed"):
        emb.state_dict()
    store.commit(keep="then")
    then, opt = emb.state_dict(), first.state_dict()
    assert list(then) == ["_extra_state"]
    kept = {name: store[name].read(torch.arange(count)) for name, count in twins.rows.items()}
    sum(rows.sum() for rows in emb(twins.ids()).values()).backward()
    first.step()
    store.commit()
    emb.load_state_dict(then)
    first.load_state_dict(opt)
    for name, count in twins.rows.items():
        assert same(store[name].read(torch.arange(count)), kept[name])
    other = TieredEmbeddingCollection(store, {"a": "t0"})
    with pytest.raises(InvalidInputError, match="features"):
        other.load_state_dict(then)


@pytest.mark.variants(1)
def test_tables_go_on_from_what_layers_left(place: Place) -> None:
    """State and counts of steps that were trained a table at a time are those of a collection."""
    twins = Twins(place, [30, 12, 25])
    before = [{name: TieredEmbedding(store[name]) for name in twins.rows} for store in twins.stores]
    with in_order():
        for layers in before:
            optimizer = TieredOptimizer(torch.optim.Adam, list(layers.values()), lr=0.05)
            torch.manual_seed(3)
            for names in (["t0", "t1", "t2"], ["t0"], ["t0", "t2"]):
                for name in names:
                    layers[name](place.ids(5, rows=twins.rows[name])).pow(3).sum().backward()
                optimizer.step()
        for store in twins.stores:
            store.commit()
        twins.collection = TieredEmbeddingCollection(twins.stores[0], {n: n for n in twins.rows})
        optimizers = twins.optimizers(torch.optim.Adam, lr=0.05, state="continue")
        for _ in range(2):
            twins.step(optimizers, twins.ids())
    assert [twins.stores[0][name].scalars["step"] for name in twins.rows] == [5, 3, 4]
    twins.check()


def test_scaled_gradients_and_autocast(place: Place) -> None:
    twins = Twins(place, [30, 12])
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.05)
    ids, kind = twins.ids(), torch.device(place.torch).type
    for find, optimizer in zip(
        (twins.collection, lambda ids: {n: twins.layers[n](own) for n, own in ids.items()}),
        optimizers,
        strict=True,
    ):
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
        with in_order(), torch.autocast(kind, torch.bfloat16):
            loss = sum(
                (rows @ torch.ones(6, 3, device=place.torch)).sum() for rows in find(ids).values()
            )
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    twins.check()


def test_layers_beside_a_collection_have_gradients_of_their_own(place: Place) -> None:
    twins = Twins(place, [30, 12])
    layer = TieredEmbedding(twins.stores[0]["t1"])
    optimizers = [
        TieredOptimizer(torch.optim.SGD, [each], lr=0.5) for each in (twins.collection, layer)
    ]
    before = twins.stores[0]["t1"].read(torch.tensor([3]))
    sum(rows.sum() for rows in twins.collection({"t1": torch.tensor([3])}).values()).backward()
    layer(torch.tensor([3])).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.allclose(twins.stores[0]["t1"].read(torch.tensor([3])), before - 1)


def test_collections_over_the_same_tables_share_a_parameter(place: Place) -> None:
    twins = Twins(place, [30, 12])
    other = TieredEmbeddingCollection(twins.stores[0], {"a": "t0", "b": "t1"})
    assert set(other.parameters()) == set(twins.collection.parameters())


def test_a_copy_shares_the_tables(place: Place) -> None:
    twins = Twins(place, [30, 12])
    other = copy.deepcopy(twins.collection)
    ids = twins.ids()
    found, expected = other(ids), twins.collection(ids)
    assert all(same(found[name], expected[name]) for name in ids)
    assert not set(other.parameters()) & set(twins.collection.parameters())
    trained = TieredOptimizer(torch.optim.SGD, [twins.collection], lr=0.1)
    assert len(list(trained.parameters())) == 1
    with pytest.raises(InvalidInputError, match="nowhere to go"):
        sum(rows.sum() for rows in found.values()).backward()


def test_what_a_copy_gets_is_its_own(place: Place) -> None:
    twins = Twins(place, [30, 12])
    first, calls = twins.collection, list[torch.nn.Module]()
    first.head = torch.nn.Linear(2, 2)
    other = copy.deepcopy(first)
    other.register_forward_hook(lambda layer, *_: calls.append(layer))
    other.groups[0].register_buffer("scale", torch.ones(1))
    first(twins.ids())
    assert not calls
    other(twins.ids())
    assert calls == [other]
    assert not [*first.buffers()]
    assert not {*first.head.parameters()} & {*other.head.parameters()}
    assert len({*other.parameters()}) == len({*first.parameters()})
    assert other.groups[0].coming is not first.groups[0].coming


def test_state_of_rows(place: Place) -> None:
    twins = Twins(place, [30, 12])
    optimizers = twins.optimizers(torch.optim.Adagrad, lr=0.1)
    with in_order():
        twins.step(optimizers, twins.ids())
        state = {"step": torch.tensor(5.0), "sum": torch.rand(12, 6)}
        optimizers[0].load_rows_state(twins.collection.rows_of("t1"), state)
        optimizers[1].load_rows_state(twins.layers["t1"], state)
        twins.step(optimizers, twins.ids())
        twins.check()
        for optimizer in optimizers:
            optimizer.reset_state()
        twins.step(optimizers, twins.ids())
    twins.check()


@pytest.mark.variants(1)
def test_rows_that_were_announced(place: Place) -> None:
    twins = Twins(place, [30, 12, 25])
    batches = [{"features": twins.ids(), "label": n} for n in range(5)]
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    announced = {twins.collection: lambda batch: batch["features"]}
    with in_order():
        for batch in tierstore.loader.lookahead(batches, announced, depth=2):
            twins.step(optimizers, batch["features"])
    twins.check()
    with contextlib.suppress(RowIndexError):
        twins.collection.prefetch({"t0": [1, 2], "t1": np.arange(3)})


def test_recordings_get_the_ids_of_their_table(place: Place) -> None:
    twins = Twins(place, [30, 12])
    ids = twins.ids()
    with twins.stores[0]["t1"].record(place.folder / "t1.trace"):
        twins.collection(ids)
        twins.collection({"t0": ids["t0"]})
    (found,) = tierstore._table.trace.read_trace(place.folder / "t1.trace")
    assert sorted(found.tolist()) == sorted(ids["t1"].tolist())


def test_counters_are_those_of_one_layer_a_table(place: Place) -> None:
    if place.device != "cpu":
        pytest.skip("a GPU tier counts for all tables of a space")
    twins = Twins(place, [30, 12, 25], host_rows=67)
    optimizers = twins.optimizers(torch.optim.Adam, lr=0.05)
    for _ in range(3):
        twins.step(optimizers, twins.ids())
    with torch.no_grad():
        ids = twins.ids(leave_out="t1")
        twins.collection(ids)
        for name, own in ids.items():
            twins.layers[name](own)
    for name in twins.rows:
        one, two = (vars(store[name].stats()["host"]) for store in twins.stores)
        sampled = {"unique", "unique_of", "unique_hits"}  # of reads, one batch in so many
        assert {k: v for k, v in one.items() if k not in sampled} == {
            k: v for k, v in two.items() if k not in sampled
        }, name


# -- the rows of all features as one tensor


@pytest.mark.variants(2, 3)
@pytest.mark.parametrize("form", ["dict", "keyed", "nested"])
@pytest.mark.parametrize("padding", [None, 3])
def test_rows_as_one_are_trained_as_those_of_each_feature(
    place: Place, form: str, padding: int | None
) -> None:
    twins = Twins(place, [30, 4, 25])
    emb, other = (
        TieredEmbeddingCollection(store, list(twins.rows), padding_idx=padding)
        for store in twins.stores
    )
    optimizers = [TieredOptimizer(torch.optim.Adam, [each], lr=0.05) for each in (emb, other)]
    with in_order():
        for number in range(3):
            ids = twins.ids(n=11)
            factors = torch.randn(33, 6).to(place.torch)
            given: Any = ids
            if form == "keyed":
                given = Keyed(dict.fromkeys(ids, torch.tensor([4, 7])), torch.cat([*ids.values()]))
            elif form == "nested":
                given = {
                    name: torch.nested.nested_tensor(list(own.split([4, 7])), layout=torch.jagged)
                    for name, own in ids.items()
                }
            one, each = emb.cat(given), other(ids)
            assert one.shape == (33, 6)
            assert same(one.detach(), torch.cat([rows.detach() for rows in each.values()]))
            one.backward(factors)
            torch.autograd.backward(list(each.values()), list(factors.split(11)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if number == 1:
                with torch.no_grad():
                    assert same(emb.cat(given), torch.cat(list(other(ids).values())))
    twins.check()


def test_rows_of_several_groups_as_one(place: Place) -> None:
    """In the order of the features, whichever are looked up together."""
    init = tierstore.normal(seed=2)
    more = {"weight": tierstore.Field(6, init=init), "kept": tierstore.Field(3)}
    specs = {name: tierstore.TableSpec(30, 6, init=init) for name in "abc"}
    specs["b"] = tierstore.TableSpec(30, fields=more)
    emb = TieredEmbeddingCollection(place.store(specs), list(specs))
    assert len(emb.groups) == 2
    ids = {name: place.ids(7, rows=30) for name in "cba"}
    optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    with in_order():
        found = emb.cat(ids)
        assert torch.equal(found, torch.cat(list(emb(ids).values())))
        before = {name: rows_of(emb.features[name]) for name in "abc"}
        found.square().sum().backward()
        optimizer.step()
    for name, own in ids.items():
        expected = before[name].clone().requires_grad_()
        torch.nn.functional.embedding(own.cpu(), expected).square().sum().backward()
        assert expected.grad is not None
        torch.testing.assert_close(rows_of(emb.features[name]), before[name] - expected.grad)


def test_rows_of_several_dims_are_not_one_tensor(place: Place) -> None:
    twins = Twins(place, [9, 9], [8, 3])
    with pytest.raises(InvalidInputError, match="dims 3, 8 are not one tensor"):
        twins.collection.cat(twins.ids())
    with pytest.raises(InvalidInputError, match="at least one feature"):
        twins.collection.cat({})


# -- what it costs


def test_gradients_that_are_parts_of_one_tensor_are_not_copied(monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "_MUCH", {})
    whole = torch.randn(9, 6)
    for given in (whole.split([2, 3, 0, 4]), whole[2:].split([3, 4])):
        found, columns = parts.as_one(given)
        assert columns is None
        assert found.data_ptr() == given[0].data_ptr()
        assert torch.equal(found, torch.cat(given))
    side_by_side = [
        [whole[:, :2], whole[:, 2:4], whole[:, 4:]],
        [whole[:, 4:], whole[:, :2]],  # in another order, with a gap
        [whole[2:7, 3:], whole[2:7, :3]],
    ]
    for given in side_by_side:
        found, columns = parts.as_one(given)
        assert columns is not None
        assert found.data_ptr() == min(each.data_ptr() for each in given)
        assert torch.equal(columns.in_order(found), torch.cat(given))
        positions = torch.randperm(sum(map(len, given))).int()
        spread = columns.spread(positions, len(found))
        assert sorted(spread[spread >= 0].tolist()) == list(range(len(positions)))
        assert torch.equal(spread[columns.rows(spread.device)], positions)


def test_other_gradients_are_copied_into_one_tensor(monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "_MUCH", {})
    whole = torch.randn(9, 6)
    others = [
        [whole[3:], whole[:3]],  # in another order
        [whole[:3], whole[4:]],  # with a gap
        [whole[:3, :2], whole[3:, :2]],  # columns of other rows
        [whole[:, :3], whole[1:, 3:]],  # of other lengths
        [whole[:, 1:3], whole[:, 2:4]],  # that overlap
        [whole[:, :3], whole[:, :3]],  # one twice
        [whole[:3], whole[:3]],
        [whole[:3], torch.randn(6, 6)],
        [whole.t(), whole.t()],
        [whole[:3].expand(2, 3, 6)[0], whole[3:].double()],
        [whole[:0], whole[:0]],
    ]
    for given in others:
        found, columns = parts.as_one(given)
        assert columns is None
        assert torch.equal(found, torch.cat(given))
        found.fill_(7)  # a copy
        assert not (whole == 7).any()


@pytest.fixture
def copies(monkeypatch: Any) -> list[int]:
    """Treat any gradients as large; return what gets the number of features of each copy."""
    made, copied = list[int](), parts._copied

    def noted(given: Any, memory: Any) -> Tensor:
        made.append(len(given))
        return copied(given, memory)

    monkeypatch.setattr(parts, "_MUCH", {})
    monkeypatch.setattr(parts, "_copied", noted)
    return made


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("cores", [1, 3])
def test_gradients_that_lie_apart_are_summed_where_they_are(
    place: Place, copies: list[int], cores: int
) -> None:
    """In any order of the features, where some have no ids, by any number of threads."""
    twins = Twins(place, [30, 2, 12, 25, 4])
    optimizers = twins.optimizers(RowWiseAdagrad, lr=0.1)
    with in_order(), inside.core_threads(cores):
        for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2], [4, 3, 2, 1, 0]):
            lengths = dict(zip(twins.rows, [9, 0, 40, 1, order[0] + 2], strict=True))
            names = [f"t{number}" for number in order]
            ids = {name: place.ids(lengths[name], rows=twins.rows[name]) for name in names}
            twins.step(optimizers, ids)
    twins.check()
    assert copies == ([] if place.device == "cpu" else [5, 5, 5])


@pytest.mark.parametrize("way", ["a table twice", "run again"])
def test_gradients_that_lie_apart_are_those_of_one_tensor(
    place: Place, copies: list[int], way: str, monkeypatch: Any
) -> None:
    """Also of features that share a table; of a batch that is no more they are copied."""
    specs = {name: tierstore.TableSpec(9, 6, init=tierstore.normal(seed=2)) for name in "tu"}
    tables = {"a": "t", "b": "t" if way == "a table twice" else "u"}
    found = []
    ids, factors = {name: place.ids(20, rows=9) for name in "ab"}, torch.randn(2, 20, 6)
    for much in ({}, {"cpu": 1 << 20, "cuda": 1 << 20}):
        monkeypatch.setattr(parts, "_MUCH", much)
        store = place.store(specs)
        emb = TieredEmbeddingCollection(store, tables)
        optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
        with in_order():
            rows = emb(ids)
            own = zip(rows.values(), factors.to(place.torch), strict=True)
            total = torch.stack([(one * each).sum() for one, each in own]).sum()
            total.backward(retain_graph=True)
            optimizer.step()
            if way == "run again":
                if not much:
                    copies.clear()
                total.backward()
                optimizer.step()
        found.append([rows_of(store[name]) for name in specs])
    assert copies == ([2] if way == "run again" or place.device != "cpu" else [])
    for one, two in zip(*found, strict=True):
        assert same(one, two)


def test_copies_of_gradients_are_made_in_the_same_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "_MUCH", {})
    given = [torch.randn(5, 6), torch.randn(4, 6)]
    memory = Recycled()
    places = set()
    for _ in range(3):
        whole, _ = parts.as_one(given, memory)
        assert torch.equal(whole, torch.cat(given))
        places.add(whole.data_ptr())
        del whole
    assert len(places) == 1
    kept, _ = parts.as_one(given, memory)
    assert parts.as_one(given, memory)[0].data_ptr() != kept.data_ptr()


def test_neighbours_by_chance_are_not_one_tensor(monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "_MUCH", {})
    memory = np.random.default_rng(3).standard_normal((5, 4)).astype(np.float32)
    given = [torch.from_numpy(memory[:2]), torch.from_numpy(memory[2:])]  # two storages
    assert given[0].data_ptr() + given[0].nbytes == given[1].data_ptr()
    found, columns = parts.as_one(given)
    assert columns is None
    assert found.data_ptr() != given[0].data_ptr()
    assert torch.equal(found, torch.from_numpy(memory))


@pytest.mark.variants(2)
@pytest.mark.parametrize("little", [0, 1 << 20])
def test_sums_are_cleared_by_torch_or_a_kernel(place: Place, little: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(autograd, "_LITTLE", little)
    twins = Twins(place, [30, 12], [8, 3])
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.05)
    for _ in range(3):
        ids = twins.ids(n=50)
        for rows in (twins.collection(ids), {n: twins.layers[n](own) for n, own in ids.items()}):
            torch.cat([each.pow(3) for each in rows.values()], 1).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name in twins.rows:
        one, two = (rows_of(store[name]) for store in twins.stores)
        torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.variants(2, 3)
@pytest.mark.parametrize("ordered", [True, False])
def test_what_a_model_concatenates_is_trained_as_by_one_layer_a_table(
    place: Place, ordered: bool, monkeypatch: Any
) -> None:
    """Its gradients are columns of one tensor, some of which are of no feature."""
    monkeypatch.setattr(parts, "_MUCH", {})
    twins = Twins(place, [30, 12, 25])
    optimizers = twins.optimizers(torch.optim.SGD, lr=0.05)
    names = list(twins.rows)
    with in_order() if ordered else contextlib.nullcontext():
        for number in range(3):
            ids = twins.ids(n=40)
            dense, factors = (torch.randn(40, n).to(place.torch) for n in (6, 24))
            names = names[::-1] if number == 2 else names
            each = {name: twins.layers[name](own) for name, own in ids.items()}
            for rows in (twins.collection(ids), each):
                joined = torch.cat([dense, *(rows[name] for name in names)], 1)
                (joined * factors).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    if ordered or place.device == "cpu":
        twins.check()
    for name in twins.rows:
        one, two = (rows_of(store[name]) for store in twins.stores)
        torch.testing.assert_close(one, two, **CLOSE)


PACKAGE = str(Path(tierstore.__file__).parent)


class Calls:
    """Counts calls of Python functions of the library."""

    def __enter__(self) -> Calls:
        self.count = 0
        gc.disable()  # which calls what is to be called when something is gone
        sys.setprofile(self._note)
        return self

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


class Operators(TorchDispatchMode):
    """Counts operators of torch, those of backward passes and of steps too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


class Made(Keyed):
    """The same, made beforehand: with no operator of its own in a step."""

    def __init__(self, features: Mapping[str, Tensor]) -> None:
        self._names = list(features)
        self._ids = torch.stack(list(features.values()))
        self._offsets = torch.arange(0, self._ids.numel() + 1, 3, device=self._ids.device)

    def keys(self) -> list[str]:
        return self._names

    def values(self) -> Tensor:
        return self._ids.reshape(-1)

    def offsets(self) -> Tensor:
        return self._offsets

    def length_per_key(self) -> list[int]:
        return [self._ids[0].numel()] * len(self._names)


def ragged(features: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (ids, ids.new_tensor([0, 2, 2, 7])) for name, ids in features.items()}


def cost_of_a_step(
    place: Place, tables: int, kind: type, form: Any, *, apart: bool
) -> tuple[int, int]:
    """Return how many functions of the library, and operators of torch, a step calls.

    Its model takes a tensor of each feature if `apart`, else one of all.
    """
    specs = {
        f"t{k}": tierstore.TableSpec(12, 6, init=tierstore.normal(seed=k)) for k in range(tables)
    }
    store = place.store(specs, host_rows=12 * tables, gpu_rows=12 * tables)
    emb = kind(store, {name: name for name in specs})
    optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.05)
    shape = (4, 3) if kind is TieredEmbeddingBagCollection and form is not ragged else (12,)
    features = form({name: place.ids(*shape, rows=12) for name in specs})
    gradients: list[Tensor] = []

    def step() -> None:
        found = list(emb(features).values()) if apart else [emb.cat(features)]
        if not gradients:
            gradients.extend(map(torch.ones_like, found))
        torch.autograd.backward(found, gradients)
        optimizer.step()

    for _ in range(3):
        with Calls() as calls:
            step()
    with Operators() as operators:
        step()
    return calls.count, operators.count


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (TieredEmbeddingCollection, dict),
        (TieredEmbeddingCollection, Made),
        (TieredEmbeddingBagCollection, dict),
        (TieredEmbeddingBagCollection, Made),
        (TieredEmbeddingBagCollection, ragged),
    ],
)
@pytest.mark.slow("emulated")
def test_a_step_makes_as_many_calls_for_any_number_of_tables(
    place: Place, kind: type, form: Any, apart: bool
) -> None:
    """Some more or less where tables share a space, and where copies are large; none a table."""
    one, few, many = (
        cost_of_a_step(place, tables, kind, form, apart=apart) for tables in (1, 4, 24)
    )
    for before, after in ((one, few), (few, many)):
        for count, other in zip(before, after, strict=True):
            assert abs(other - count) <= 12, (one, few, many)
