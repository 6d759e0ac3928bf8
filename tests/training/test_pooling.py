"""Bags pooled where the rows are equal torch.nn.EmbeddingBag, for one table and for many."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.pairs import pairs
from tests.training.conftest import PLACES, Place, randomly, rows_of, same
from tests.training.test_collections import Calls
from tierstore._table import table
from tierstore._table.gpu import DeviceLease
from tierstore.errors import (
    ClosedError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    UnknownNameError,
)
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    autograd,
    pooled,
)
from tierstore.optim import TieredOptimizer

BATCH = 5
MODES = ("sum", "mean", "max")


class Keyed:
    """What a KeyedJaggedTensor shows of itself."""

    def __init__(
        self, keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> None:
        self._keys, self._values, self._offsets, self._weights = keys, values, offsets, weights

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        return self._weights


class Twins:
    """A collection over tables, and one torch.nn.EmbeddingBag a table with the same rows."""

    def __init__(
        self,
        place: Place,
        rows: list[int],
        dims: list[int] | None = None,
        modes: str | list[str] = "sum",
        dtype: str = "float32",
        **budget: int,
    ) -> None:
        self.place = place
        self.rows = {f"t{number}": count for number, count in enumerate(rows)}
        self.dims = dict(zip(self.rows, dims or [6] * len(rows), strict=True))
        each = [modes] * len(rows) if isinstance(modes, str) else modes
        self.modes: dict[str, Any] = dict(zip(self.rows, each, strict=True))
        specs = {
            name: tierstore.TableSpec(
                count, self.dims[name], dtype, init=tierstore.normal(seed=number)
            )
            for number, (name, count) in enumerate(self.rows.items())
        }
        self.store = place.store(specs, **budget)
        self.bags = TieredEmbeddingBagCollection(
            self.store, {name: name for name in self.rows}, self.modes
        )
        self.plain = torch.nn.ModuleDict(
            {
                name: torch.nn.EmbeddingBag.from_pretrained(
                    rows_of(self.store[name]).clone(), freeze=False, mode=self.modes[name]
                )
                for name in self.rows
            }
        ).to(place.torch)
        self.opt = TieredOptimizer(torch.optim.SGD, [self.bags], lr=0.5)
        self.plain_opt = torch.optim.SGD(self.plain.parameters(), lr=0.5)

    def ragged(self, name: str, *, weighted: bool = False, batch: int = BATCH) -> tuple[Any, ...]:
        """Draw bags of a feature: some are empty, and ids repeat within a bag."""
        lengths = torch.randint(0, 5, (batch,))
        lengths[batch // 2 :: 3] = 0
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
        ids = self.place.ids(int(lengths.sum()), rows=min(self.rows[name], 7))
        found = (ids, offsets.to(self.place.torch))
        weights = torch.rand(len(ids), dtype=self.plain[name].weight.dtype).to(self.place.torch)
        return (*found, weights.requires_grad_()) if weighted else found

    def of_plain(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        for name, given in features.items():
            arguments = given if isinstance(given, tuple) else (given,)
            found[name] = self.plain[name](*arguments)
        return found

    def check(self, features: dict[str, Any], *, exact: bool = False) -> None:
        """Compare what comes out, and the rows after a step on it.

        With `exact`, the gradient has whole numbers, whose sums are the same in any order.
        """
        expected = self.of_plain(features)
        found = self.bags(features)
        names = [name for name in self.rows if name in features]
        assert list(found) == names
        whole = torch.cat([expected[name] for name in names], 1)
        assert same(found.cat(), whole, self.place)
        with torch.no_grad():
            assert same(self.bags.cat(features), whole, self.place)
        for name in names:
            assert same(found[name], expected[name], self.place)
        factors = {name: randomly(*each.shape, like=each) for name, each in expected.items()}
        if exact:
            factors = {name: (8 * each).round() for name, each in factors.items()}
        for bags, optimizer in ((found, self.opt), (expected, self.plain_opt)):
            torch.stack([(bags[name] * factors[name]).sum() for name in names]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name in names:
            trained = self.plain[name].weight.detach().cpu()
            tolerance = {"rtol": 0, "atol": 0} if exact else {}
            torch.testing.assert_close(rows_of(self.store[name]), trained, **tolerance)


@pytest.mark.variants(1, 3)
@pairs(place=PLACES, tables=[1, 2, 26], budget=["one slot", "some", "all"])
def test_any_number_of_tables_and_any_budget(place: Place, tables: int, budget: str) -> None:
    rows = [1 + (7 * number) % 23 for number in range(tables)]
    slots = {"one slot": 1, "some": max(2, sum(rows) // 5), "all": sum(rows)}[budget]
    sizes = {"host_rows": slots} | ({} if place.device == "cpu" else {"gpu_rows": slots})
    twins = Twins(place, rows, **sizes)
    assert len(twins.bags.groups) == 1
    for _ in range(2):
        twins.check({name: twins.ragged(name) for name in twins.rows})
    twins.check({name: place.ids(BATCH, 3, rows=count) for name, count in twins.rows.items()})


@pytest.mark.variants(1, 1)
def test_dims_and_modes_may_differ(place: Place) -> None:
    twins = Twins(
        place,
        [9, 30, 4, 12, 7, 5],
        [8, 3, 8, 1, 3, 8],
        ["sum", "mean", "max", "sum", "max", "sum"],
        host_rows=40,
        **({} if place.device == "cpu" else {"gpu_rows": 20}),
    )
    assert len(twins.bags.groups) == 3
    for _ in range(3):
        twins.check({name: twins.ragged(name) for name in reversed(twins.rows)})
    twins.check({name: twins.ragged(name) for name in ("t4", "t0", "t1")})
    twins.check({"t0": place.ids(BATCH, 2, rows=9), "t2": twins.ragged("t2")})


@pytest.mark.variants(5, 9)
@pytest.mark.parametrize("modes", [["sum", "sum"], ["max", "sum"]])
@pytest.mark.parametrize("dim", [1, 8, 36])
def test_more_ids_than_a_block_takes_at_a_time(place: Place, modes: list[str], dim: int) -> None:
    """Rows that nearly all ids have, rows that few have, and bags that end within a tile."""
    twins = Twins(place, [3, 900], [dim, dim], modes, host_rows=903)
    given = {}
    for name, rows in twins.rows.items():
        lengths = torch.randint(0, 60, (80,))
        ids = (rows * torch.rand(int(lengths.sum())) ** 3).long().to(place.torch)
        given[name] = ids, (lengths.cumsum(0) - lengths).to(place.torch)
    twins.check(given, exact=True)


@pytest.mark.parametrize("modes", MODES)
def test_features_that_share_a_table(place: Place, modes: Any) -> None:
    store = place.store({"item": tierstore.TableSpec(20, 4, init=tierstore.normal(seed=1))})
    tables = {"seen": "item", "bought": "item"}
    bags = TieredEmbeddingBagCollection(store, tables, modes)
    plain = torch.nn.EmbeddingBag.from_pretrained(
        rows_of(store["item"]).clone(), freeze=False, mode=modes
    ).to(place.torch)
    opt = TieredOptimizer(torch.optim.SGD, [bags], lr=0.5)
    plain_opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    ids = {name: place.ids(BATCH, 6, rows=20) for name in tables}
    found = bags(ids)
    expected = {name: plain(each) for name, each in ids.items()}
    for each in (found, expected):
        (each["seen"] * each["bought"]).sum().backward()
    opt.step()
    plain_opt.step()
    torch.testing.assert_close(rows_of(store["item"]), plain.weight.detach().cpu())


@pytest.mark.variants(1)
def test_weights_and_their_gradient(place: Place) -> None:
    twins = Twins(place, [9, 30, 4], [8, 3, 8], ["sum", "sum", "mean"])
    given = {name: twins.ragged(name, weighted=name != "t2") for name in twins.rows}
    twins.check(given)
    ours = {name: each[2].grad.clone() for name, each in given.items() if len(each) == 3}
    for each in given.values():
        if len(each) == 3:
            each[2].grad = None
    found, expected = twins.bags(given), twins.of_plain(given)
    found.cat().square().sum().backward()
    ours = {name: each[2].grad.clone() for name, each in given.items() if len(each) == 3}
    for each in given.values():
        if len(each) == 3:
            each[2].grad = None
    torch.cat([expected[name] for name in twins.rows], 1).square().sum().backward()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, given[name][2].grad)


def test_there_is_no_second_derivative(place: Place) -> None:
    twins = Twins(place, [9])
    ids = place.ids(7, rows=9)
    offsets = torch.tensor([0, 2, 5]).to(place.torch)
    weights = torch.ones(7, device=place.torch, requires_grad=True)
    out = twins.bags.cat({"t0": (ids, offsets, weights)})
    (first,) = torch.autograd.grad((out**2).sum(), [weights], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_weights_get_the_gradient_of_rows_that_a_step_changed(place: Place) -> None:
    twins = Twins(place, [9])
    (ids, offsets, weights) = twins.ragged("t0", weighted=True)
    other = weights.detach().clone().requires_grad_()
    rows = twins.plain["t0"].weight.detach().clone()
    late = twins.bags({"t0": (ids, offsets, weights)}).cat()
    twins.bags({"t0": (ids, offsets)}).cat().sum().backward()
    twins.opt.step()
    late.square().sum().backward()
    torch.nn.functional.embedding_bag(
        ids, rows, offsets, mode="sum", per_sample_weights=other
    ).square().sum().backward()
    torch.testing.assert_close(weights.grad, other.grad)


def keyed(
    twins: Twins, names: list[str], *, weighted: bool = False
) -> tuple[Keyed, dict[str, Any]]:
    """Draw bags as one jagged tensor, and the same by feature."""
    each = {name: twins.ragged(name, weighted=weighted) for name in names}
    begins, base = [], 0
    for ids, offsets, *_ in each.values():
        begins.append(offsets + base)
        base += len(ids)
    offsets = torch.cat([*begins, torch.tensor([base]).to(twins.place.torch)])
    values = torch.cat([ids for ids, *_ in each.values()])
    weights = torch.cat([w[2].detach() for w in each.values()]) if weighted else None
    return Keyed(names, values, offsets, weights), each


@pytest.mark.variants(3, 6)
@pytest.mark.parametrize("dims", [[6, 6, 6], [6, 3, 6]])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_keyed_jagged_tensor_is_taken_as_it_is(
    place: Place, dims: list[int], weighted: bool
) -> None:
    twins = Twins(place, [9, 30, 4], dims)
    for names in (["t0", "t1", "t2"], ["t2", "t0", "t1"], ["t1"]):
        jagged, each = keyed(twins, names, weighted=weighted)
        expected = twins.of_plain(each)
        found = twins.bags(jagged)
        assert list(found) == sorted(names)
        for name in names:
            assert same(found[name], expected[name], place)
        twins.bags.prefetch(jagged)
    found.cat().sum().backward()
    twins.opt.step()


def test_nested_ids_are_bags(place: Place) -> None:
    twins = Twins(place, [9, 30])
    lists = [torch.tensor(each).to(place.torch) for each in ([1, 2, 2], [7], [4, 5], [0, 0])]
    nested = torch.nested.nested_tensor(lists, layout=torch.jagged)
    ids = place.ids(4, 2, rows=30)
    found = twins.bags({"t0": nested, "t1": ids})
    offsets = torch.tensor([0, 3, 4, 6]).to(place.torch)
    expected = twins.of_plain({"t0": (torch.cat(lists), offsets), "t1": ids})
    for name in found:
        assert same(found[name], expected[name], place)


def test_columns_side_by_side_are_not_copied(place: Place) -> None:
    twins = Twins(place, [9, 30, 4, 8], [2, 3, 2, 4])
    given = {name: twins.ragged(name) for name in twins.rows}
    for found in (twins.bags(given), twins.bags.requires_grad_(False)(given)):
        whole = found.cat()
        assert whole.shape == (BATCH, 11)
        assert found["t2"].data_ptr() == whole[:, 5:].data_ptr()
        part = found.cat(["t1", "t2"])
        assert part.data_ptr() == found["t1"].data_ptr()
        assert torch.equal(part, whole[:, 2:7])
        assert torch.equal(found.cat(["t3", "t0"]), torch.cat([found["t3"], found["t0"]], 1))
        with pytest.raises(UnknownNameError, match="t9"):
            found.cat(["t9"])


def test_columns_that_were_written_into_are_what_comes_together(place: Place) -> None:
    twins = Twins(place, [9, 30])
    given = {name: twins.ragged(name) for name in twins.rows}
    found, expected = twins.bags(given), twins.of_plain(given)
    for each in (found, expected):
        each["t0"].mul_(3.0)
    torch.testing.assert_close(found.cat(), torch.cat(list(expected.values()), 1))
    found.cat().square().sum().backward()
    torch.cat(list(expected.values()), 1).square().sum().backward()
    twins.opt.step()
    twins.plain_opt.step()
    for name in twins.rows:
        torch.testing.assert_close(
            rows_of(twins.store[name]), twins.plain[name].weight.detach().cpu()
        )


@pytest.mark.variants(2)
@pytest.mark.parametrize("dims", [[6, 6, 6], [6, 3, 6]])
def test_a_feature_without_a_gradient_is_not_trained(place: Place, dims: list[int]) -> None:
    twins = Twins(place, [9, 30, 4], dims)
    opt = TieredOptimizer(torch.optim.Adam, [twins.bags], lr=0.1)
    ids = {name: place.ids(BATCH, 2, rows=count) for name, count in twins.rows.items()}
    for unused in ("t0", "t1"):
        twins.bags(ids).cat().sum().backward()
        opt.step()
        before = {name: rows_of(twins.store[name]) for name in twins.rows}
        steps = {name: dict(twins.store[name].scalars) for name in twins.rows}
        found = twins.bags(ids)
        torch.stack([found[name].sum() for name in ids if name != unused]).sum().backward()
        opt.step()
        for name in twins.rows:
            assert torch.equal(before[name], rows_of(twins.store[name])) == (name == unused)
            assert (steps[name] == twins.store[name].scalars) == (name == unused)


def test_an_empty_batch_and_bags_that_are_all_empty(place: Place) -> None:
    twins = Twins(place, [9, 30], modes=["sum", "max"])
    none = place.ids(0)
    empty = torch.zeros(BATCH, dtype=torch.int64).to(place.torch)
    twins.check(dict.fromkeys(twins.rows, (none, empty)))
    found = twins.bags(dict.fromkeys(twins.rows, (none, none)))
    assert found.cat().shape == (0, 12)
    found.cat().sum().backward()
    twins.opt.step()
    assert (
        twins.bags({name: place.ids(3, 0) for name in twins.rows}).cat().tolist() == [[0] * 12] * 3
    )


def test_a_bad_id_is_named(place: Place) -> None:
    twins = Twins(place, [9, 30, 4])
    ids = {name: place.ids(BATCH, 2, rows=count) for name, count in twins.rows.items()}
    ids["t2"][1, 1] = 4
    with pytest.raises(RowIndexError, match=r"t2.*4|4.*t2") as refused:
        twins.bags(ids)
        twins.store.commit()
    assert "3" in str(refused.value)  # its position


@pytest.mark.variants(1, 2)
@pairs(place=PLACES, dtype=["float16", "bfloat16", "float64"], mode=MODES)
def test_rows_of_other_types(place: Place, dtype: str, mode: Any) -> None:
    if (dtype, mode) == ("bfloat16", "max") and place.torch != "cpu":
        pytest.skip("torch has no gradient of maxima of bfloat16 on a GPU")
    twins = Twins(place, [9, 30], modes=mode, dtype=dtype)
    given = {name: twins.ragged(name) for name in twins.rows}
    found, expected = twins.bags(given), twins.of_plain(given)
    for name in twins.rows:
        torch.testing.assert_close(found[name], expected[name])
    wide = twins.bags.float()(given)
    assert wide.cat().dtype == torch.float32
    torch.testing.assert_close(wide["t1"], expected["t1"].float(), rtol=1e-2, atol=1e-2)
    wide.cat().sum().backward()
    torch.stack([each.float().sum() for each in expected.values()]).sum().backward()
    twins.opt.step()
    twins.plain_opt.step()
    close = {} if dtype == "float64" else {"rtol": 2e-2, "atol": 2e-2}  # torch sums in the type
    for name in twins.rows:
        torch.testing.assert_close(
            rows_of(twins.store[name]), twins.plain[name].weight.detach().cpu(), **close
        )


def expanded(emb: TieredEmbedding, ids: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """Pool bags from a row for each id, as a model without layers for bags would."""
    rows = emb(ids)
    places = torch.arange(len(ids), device=rows.device)
    return torch.nn.functional.embedding_bag(places, rows, offsets, mode=mode)


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("modes", ["sum", "mean", "max", "all"])
def test_in_order_the_bits_are_those_of_one_layer_a_table(place: Place, modes: str) -> None:
    """On a real GPU torch adds in parts that depend on where the ids of a row are among all."""
    on_gpu = place.torch != "cpu"
    if modes in ("max", "all") and on_gpu:
        pytest.skip("torch has no maximum in order on a GPU")
    equal = close if on_gpu else torch.equal
    every = list(MODES) if modes == "all" else modes
    twins, other = (Twins(place, [9, 30, 4], [6, 8, 6], every) for _ in range(2))
    layers = {name: TieredEmbedding(other.store[name]) for name in other.rows}
    opts = [
        TieredOptimizer(torch.optim.Adam, each, lr=0.1)
        for each in ([twins.bags], list(layers.values()))
    ]
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            given = {name: twins.ragged(name, batch=20) for name in twins.rows}
            found = twins.bags(given)
            each = {name: expanded(layers[name], *given[name], twins.modes[name]) for name in given}
            for out in (found, each):
                torch.stack([out[name].pow(3).sum() for name in given]).sum().backward()
            for name in given:
                assert equal(found[name], each[name]), name
            for opt in opts:
                opt.step()
                opt.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    for name in twins.rows:
        assert equal(rows_of(twins.store[name]), rows_of(other.store[name])), name


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_averages_are_pooled_too(place: Place) -> None:
    twins = Twins(place, [9, 30], modes=["sum", "mean"])
    opt = TieredOptimizer(torch.optim.SGD, [twins.bags], lr=0.1, ema=0.5)
    given = {name: twins.ragged(name) for name in twins.rows}
    for _ in range(2):
        twins.bags(given).cat().square().sum().backward()
        opt.step()
    found = twins.bags.averaged()(given)
    for name, (ids, offsets) in given.items():
        mean = torch.nn.functional.embedding_bag(
            ids,
            rows_of(twins.store[name], "ema").to(place.torch),
            offsets,
            mode=twins.modes[name],
        )
        trained = {name: rows_of(twins.store[name], "ema_step")[ids.cpu()] > 0}
        assert trained[name].all()
        torch.testing.assert_close(found[name], mean)


def test_a_graph_that_is_run_backward_twice(place: Place) -> None:
    twins = Twins(place, [9, 30], modes=["sum", "max"])
    given = {name: twins.ragged(name) for name in twins.rows}
    loss, plain = twins.bags(given).cat().sum(), torch.cat(list(twins.of_plain(given).values()), 1)
    for _ in range(2):
        loss.backward(retain_graph=True)
        twins.opt.step()
    plain.sum().backward()
    for _ in range(2):
        twins.plain_opt.step()
    for name in twins.rows:
        torch.testing.assert_close(
            rows_of(twins.store[name]), twins.plain[name].weight.detach().cpu()
        )


def test_a_copy_shares_the_tables(place: Place) -> None:
    twins = Twins(place, [9, 30])
    given = {name: twins.ragged(name) for name in twins.rows}
    assert torch.equal(copy.deepcopy(twins.bags)(given).cat(), twins.bags(given).cat())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels on records, and the expansions of rows, that leases on a GPU are asked for."""
    calls: list[str] = []
    launch, expand = DeviceLease.launch, DeviceLease.expand

    def noted(lease: DeviceLease, kernel: Any, *given: Any, **options: Any) -> None:
        calls.append(kernel.name)
        launch(lease, kernel, *given, **options)

    def noted_expand(lease: DeviceLease, field: str) -> Any:
        calls.append("expand")
        return expand(lease, field)

    monkeypatch.setattr(DeviceLease, "launch", noted)
    monkeypatch.setattr(DeviceLease, "expand", noted_expand)
    return calls


@pytest.mark.parametrize("tables", [1, 26])
def test_rows_are_not_expanded_and_launches_do_not_grow(
    place: Place, launched: list[str], tables: int, monkeypatch: Any
) -> None:
    if place.device == "cpu":
        pytest.skip("needs kernels")
    monkeypatch.setattr(autograd, "_LITTLE", 0)
    twins = Twins(place, [12] * tables, host_rows=12 * tables, gpu_rows=12 * tables)
    given = {name: twins.ragged(name) for name in twins.rows}
    twins.bags(given).cat().sum().backward()
    assert launched == ["pool", "clear", "scatter"]
    launched.clear()
    with torch.no_grad():
        twins.bags(given)
    assert launched == ["pool"]
    torch.use_deterministic_algorithms(True)
    try:
        twins.bags(given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched == ["pool", "expand"]


def calls_of_a_step(place: Place, tables: int) -> int:
    slots = {"host_rows": 12 * tables, "gpu_rows": 12 * tables}
    twins = Twins(place, [12] * tables, **slots)
    given, _ = keyed(twins, list(twins.rows))
    for _ in range(3):
        with Calls() as calls:
            twins.bags.cat(given).sum().backward()
            twins.opt.step()
    return calls.count


@pytest.mark.variants(1, 1)
@pytest.mark.slow("emulated")
def test_a_step_costs_the_same_for_any_number_of_tables(place: Place) -> None:
    few, many = calls_of_a_step(place, 26), calls_of_a_step(place, 100)
    assert many - few <= 4 * (100 - 26), (few, many)


def test_many_ids_are_read_as_distinct_rows(place: Place, monkeypatch: Any) -> None:
    twins = Twins(place, [9, 30, 5], [6, 3, 6], ["mean", "max", "sum"])
    given = {name: twins.ragged(name) for name in twins.rows}
    expected = twins.of_plain(given)
    monkeypatch.setattr(table, "_MUCH", 0)
    with torch.no_grad():
        found = twins.bags(given)
    for name in twins.rows:
        assert same(found[name], expected[name], place)


def test_a_large_gradient_waits_for_the_number_of_rows(place: Place, monkeypatch: Any) -> None:
    monkeypatch.setattr(pooled, "_LARGE", 0)
    twins = Twins(place, [9, 30])
    twins.check({name: twins.ragged(name) for name in twins.rows})


def test_ids_are_announced_and_state_is_a_pointer(place: Place) -> None:
    twins = Twins(place, [9, 30])
    batches = [{name: twins.ragged(name) for name in twins.rows} for _ in range(3)]
    announced = {twins.bags: lambda batch: batch}
    for batch in tierstore.loader.lookahead(batches, announced, depth=2):
        twins.check(batch)
    twins.store.commit()
    state, before = twins.bags.state_dict(), twins.bags(batches[0]).cat()
    twins.bags.load_state_dict(state)
    assert torch.equal(twins.bags(batches[0]).cat(), before)


def test_autocast_leaves_the_type_of_bags(place: Place) -> None:
    twins = Twins(place, [9, 30])
    given = {name: twins.ragged(name) for name in twins.rows}
    with torch.autocast(torch.device(place.torch).type, torch.bfloat16):
        found, expected = twins.bags(given), twins.of_plain(given)
        for name in found:
            assert found[name].dtype == expected[name].dtype
        (found.cat() @ torch.ones(12, 2, device=place.torch)).sum().backward()
    twins.opt.step()


def test_a_rollback_ends_what_was_pooled(place: Place) -> None:
    twins = Twins(place, [9, 30])
    loss = twins.bags({name: twins.ragged(name) for name in twins.rows}).cat().sum()
    twins.store.rollback()
    with pytest.raises(ClosedError, match="rolled back"):
        loss.backward()


def test_offsets_that_end_with_the_number_of_ids(place: Place) -> None:
    twins = Twins(place, [9, 30])
    given = {name: twins.ragged(name) for name in twins.rows}
    tables = {name: name for name in twins.rows}
    bags = TieredEmbeddingBagCollection(twins.store, tables, include_last_offset=True)
    ends = {
        name: (ids, torch.cat([offsets, offsets.new_tensor([len(ids)])]))
        for name, (ids, offsets) in given.items()
    }
    assert torch.equal(bags(ends).cat(), twins.bags(given).cat())


def test_offsets_that_are_wrong_reach_no_row_of_another_batch(place: Place) -> None:
    if place.device == "cpu":
        pytest.skip("torch refuses them on the host")
    table = place.table(torch.randn(20, 6))
    emb, ids = TieredEmbeddingBag(table, mode="sum"), place.ids(6, rows=20)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.5)
    rows = rows_of(table)[ids.cpu()].to(place.torch)
    found = emb(ids, torch.tensor([-3, 2, 99]).to(place.torch))
    torch.testing.assert_close(found[0], rows[:2].sum(0))
    torch.testing.assert_close(found[1], rows[2:].sum(0))
    assert not found[2].any()
    found.sum().backward()
    opt.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_transforms_are_refused(place: Place) -> None:
    twins = Twins(place, [9, 30])
    given = {name: twins.ragged(name) for name in twins.rows}

    def model(scale: Tensor) -> Tensor:
        return (twins.bags(given).cat() * scale).sum()

    scale = torch.tensor(2.0).to(place.torch)
    with pytest.raises(InvalidInputError, match=r"torch\.func"):
        torch.func.grad(model)(scale)
    with pytest.raises(InvalidInputError, match=r"torch\.jit\.trace"):
        torch.jit.trace(model, (scale,))


def test_what_a_collection_of_bags_does_not_take(place: Place) -> None:
    twins = Twins(place, [9, 30], modes=["sum", "mean"])
    ids, tables = place.ids(BATCH, 2, rows=4), {"t0": "t0"}
    with pytest.raises(InvalidInputError, match="median"):
        TieredEmbeddingBagCollection(twins.store, tables, "median")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="t9"):
        TieredEmbeddingBagCollection(twins.store, tables, {"t0": "sum", "t9": "sum"})
    for given, error, said in (
        ({"t0": ids, "t1": ids[:3]}, InvalidInputError, r"'t1' has 3 bags, 't0' has 5"),
        (
            {"t0": (ids[0], ids[0][:2] * 0), "t1": (ids[0], ids[0][:1] * 0)},
            InvalidInputError,
            "'t1' has 1 bags, 't0' has 2",
        ),
        ({"t0": ids, "t1": (ids[0], ids[0][:1] * 0)}, InvalidInputError, "'t1' has 1 bags"),
        ({"t0": (ids[0], ids[0][:1] * 0.0)}, InvalidInputError, "offsets are whole numbers"),
        ({"t0": (ids, ids[0][:1] * 0)}, InvalidInputError, "2-D ids with 1-D offsets"),
        ({"t0": ids.float()}, InvalidTypeError, "'t0' are torch.float32"),
        ({"t0": ids[0]}, InvalidInputError, "1-D ids with no offsets"),
        ({"t0": (ids[0], ids)}, InvalidInputError, "2-D offsets"),
        ({"t0": (ids[0],)}, InvalidInputError, "not 1 tensors"),
        ({"t0": ids.tolist()}, InvalidInputError, "not 5 tensors"),
        ({"t0": ids.cpu().numpy()}, InvalidTypeError, "'t0' are a tensor, not a ndarray"),
        ({"t1": (ids[0], ids[0][:1] * 0, ids[0].float())}, InvalidInputError, "'t1' is 'mean'"),
        ({"t0": (ids[0], ids[0][:1] * 0, ids.float())}, InvalidInputError, "weights of feature"),
        ({"t9": ids}, UnknownNameError, "t9"),
        ({}, InvalidInputError, "at least one feature"),
    ):
        with pytest.raises(error, match=said):
            twins.bags(given)


@pytest.mark.variants(6)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ends", [False, True])
def test_features_in_forms_of_their_own_are_as_in_one_form(
    place: Place, dtype: torch.dtype, ends: bool
) -> None:
    twins = Twins(place, [9, 30, 12], modes=["sum", "mean", "max"])
    bags = TieredEmbeddingBagCollection(
        twins.store, ["t0", "t1", "t2"], twins.bags.modes, include_last_offset=ends
    )
    ids, others = place.ids(7, rows=9), place.ids(5, rows=9)
    starts = torch.tensor([0, 2, 2, 6, 7] if ends else [0, 2, 2, 6]).to(place.torch, dtype)
    fewer = torch.tensor([0, 0, 4, 5, 5] if ends else [0, 0, 4, 5]).to(place.torch, dtype)
    whole = bags({"t0": (ids, starts), "t1": (others, fewer), "t2": (ids, starts)})
    for name, given, begins in (("t0", ids, starts), ("t1", others, fewer), ("t2", ids, starts)):
        alone = bags({name: (given.to(torch.int32), begins.to(torch.int64))})
        assert torch.equal(alone[name], whole[name])
    mixed = bags({"t0": (ids, starts), "t1": (others, fewer.to(torch.int32))})
    assert torch.equal(mixed.cat(), whole.cat(["t0", "t1"]))
