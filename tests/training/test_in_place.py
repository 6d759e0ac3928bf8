"""Steps in the slots are the steps of torch's optimizers over lists of tensors."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests import inside
from tests.training import strangers
from tests.training.conftest import ROWS, Place, rows_of
from tierstore.nn import TieredEmbedding
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

ADAM, SGD, RMSPROP = torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd decay": (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "sgd momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd nesterov": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (ADAM, {"lr": 0.01}),
    "adam slow": (ADAM, {"lr": 0.01, "betas": (0.3, 0.6), "maximize": True, "eps": 1e-4}),
    "adam amsgrad": (ADAM, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    "rmsprop": (RMSPROP, {"lr": 0.01}),
    "rmsprop momentum": (RMSPROP, {"lr": 0.01, "momentum": 0.9}),
    "rmsprop centered": (RMSPROP, {"lr": 0.01, "centered": True, "weight_decay": 0.1}),
    "rmsprop both": (RMSPROP, {"lr": 0.01, "centered": True, "momentum": 0.9, "alpha": 0.3}),
    "row-wise": (RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "row-wise decay": (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
}


pytestmark = pytest.mark.parametrize(
    "place", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@pytest.fixture(autouse=True)
def ordered() -> Iterator[None]:
    """Have both ways sum the gradient in the same order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def forbid(opt: TieredOptimizer) -> None:
    """Make the torch optimizer raise if its step is called."""

    def fail(_: object) -> None:
        raise RuntimeError("this step was not taken in the slots")

    opt._inner_step = fail


def is_in_place(opt: TieredOptimizer, emb: TieredEmbedding) -> bool:
    """Take a step, and tell who took it."""
    forbid(opt)
    emb(torch.arange(3, device=emb.rows.device)).sum().backward()
    try:
        opt.step()
    except RuntimeError as error:
        if not re.search("not taken in the slots", str(error)):
            raise
        return False
    return True


def check(place: Place, tables: list[Any], optimizer: Any, **options: Any) -> None:
    """Train two tables of the same rows, one of them in the slots, and compare all they hold."""
    layers = [TieredEmbedding(table) for table in tables]
    flag = {} if optimizer is RowWiseAdagrad else {"foreach": True}
    opts = [
        TieredOptimizer(optimizer, [layers[0]], **options),
        TieredOptimizer(optimizer, [layers[1]], in_place=False, **flag, **options),
    ]
    forbid(opts[0])
    for _ in range(3):
        ids = place.ids(3, 7)
        factors = torch.randn(3, 7, layers[0].embedding_dim).to(place.torch)
        for emb, opt in zip(layers, opts, strict=True):
            rows = emb(ids)
            (rows * factors.to(rows)).sum().backward()
            opt.step()
    assert tables[0].scalars == tables[1].scalars
    for field in tables[0].fields:
        found, expected = rows_of(tables[0], field), rows_of(tables[1], field)
        if place.torch == "cpu":  # torch rounds otherwise there, and not the same on all processors
            exact = found.dtype == torch.float32
            torch.testing.assert_close(
                found, expected, rtol=1e-5 if exact else 0.03, atol=1e-6 if exact else 4e-3
            )
        else:
            assert torch.equal(found, expected), field


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(
    ("variant", "dim"), list(zip(VARIANTS, itertools.cycle([8, 6]), strict=False))
)
def test_the_same_to_the_bit(place: Place, variant: str, dim: int) -> None:
    optimizer, options = VARIANTS[variant]
    weights = torch.randn(ROWS, dim)
    check(place, [place.table(weights), place.table(weights)], optimizer, **options)


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("sgd nesterov", torch.bfloat16),
        ("adam", torch.bfloat16),
        ("adamw", torch.float16),
        ("adagrad", torch.bfloat16),
        ("rmsprop both", torch.float16),
        ("row-wise decay", torch.bfloat16),
    ],
)
@pytest.mark.slow("emulated")
def test_half_types_are_rounded_where_torch_stores_them(
    place: Place, variant: str, dtype: torch.dtype
) -> None:
    optimizer, options = VARIANTS[variant]
    options = {**options, "eps": 1e-4} if "adam" in variant else options
    weights = torch.randn(ROWS, 8).to(dtype)
    check(place, [place.table(weights), place.table(weights)], optimizer, **options)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("dim", [1, 32, 70])
def test_row_wise_sums_of_any_width(place: Place, dim: int) -> None:
    weights = torch.randn(ROWS, dim)
    check(place, [place.table(weights), place.table(weights)], RowWiseAdagrad, lr=0.1)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("budget", [(ROWS, 1), (ROWS, ROWS), (3, 2), (ROWS, 30)])
def test_rows_outside_the_slots(place: Place, budget: tuple[int, int]) -> None:
    weights = torch.randn(ROWS, 8)
    host, gpu = budget
    tables = [place.table(weights, host_rows=host, gpu_rows=gpu) for _ in range(2)]
    check(place, tables, torch.optim.Adam, lr=0.1)


def test_states_narrower_than_the_weights(place: Place) -> None:
    fields = {
        "weight": tierstore.Field(8, init=tierstore.normal(seed=1)),
        "exp_avg": tierstore.Field(8, "bfloat16"),
        "exp_avg_sq": tierstore.Field(8, "float16"),
    }
    spec = tierstore.TableSpec(ROWS, fields=fields)
    tables = [place.store({"item": spec})["item"] for _ in range(2)]
    check(place, tables, torch.optim.Adam, lr=0.1)


def test_fields_at_odd_places(place: Place) -> None:
    fields = {
        "mark": tierstore.Field(1, "float16"),
        "weight": tierstore.Field(8, init=tierstore.normal(seed=1)),
    }
    spec = tierstore.TableSpec(ROWS, fields=fields)
    tables = [place.store({"item": spec})["item"] for _ in range(2)]
    for table in tables:
        emb = TieredEmbedding(table, "weight")
        opt = TieredOptimizer(torch.optim.Adagrad, [emb], lr=0.1)
        assert "weight_sum" in table.fields
        assert is_in_place(opt, emb)


def test_a_field_that_is_not_the_first(place: Place) -> None:
    fields = {name: tierstore.Field(8, init=tierstore.normal(seed=1)) for name in ("a", "b")}
    table = place.store({"item": tierstore.TableSpec(ROWS, fields=fields)})["item"]
    before = rows_of(table, "a"), rows_of(table, "b")
    emb = TieredEmbedding(table, "b")
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    assert is_in_place(opt, emb)
    assert torch.equal(rows_of(table, "a"), before[0])
    assert bool((rows_of(table, "b")[:3] != before[1][:3]).all())
    assert torch.equal(rows_of(table, "b")[3:], before[1][3:])
    assert table.scalars["b_step"] == 1
    assert table.scalars.keys() == {"b_step", "b_optimizer"}


class Own(torch.optim.Adam):
    """Might do anything."""


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ADAM, {"foreach": False}),
        (ADAM, {"in_place": False}),
        (Own, {}),
        (strangers.Lion, {}),
        (torch.optim.Adamax, {}),
    ],
)
def test_what_is_left_to_torch(place: Place, weights: Tensor, optimizer: Any, options: Any) -> None:
    emb = TieredEmbedding(place.table(weights))
    assert not is_in_place(TieredOptimizer(optimizer, [emb], lr=0.1, **options), emb)


def test_float64_is_left_to_torch(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights.double()))
    assert not is_in_place(TieredOptimizer(ADAM, [emb], lr=0.1), emb)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_what_is_not(place: Place, weights: Tensor, options: Any) -> None:
    emb = TieredEmbedding(place.table(weights))
    assert is_in_place(TieredOptimizer(ADAM, [emb], lr=0.1, **options), emb)


def test_changed_options_hold_from_the_next_step(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    opt = TieredOptimizer(SGD, [emb], lr=0.5)
    ids = torch.arange(4).to(place.torch)
    emb(ids).sum().backward()
    opt.step()
    opt.param_groups[0].update(lr=0.25, maximize=True)
    emb(ids).sum().backward()
    opt.step()
    torch.testing.assert_close(rows_of(emb.table)[:4], weights[:4] - 0.25)


def test_gradients_as_they_come_are_summed_closely(place: Place, weights: Tensor) -> None:
    """Without an order, by the kernel that adds them up."""
    torch.use_deterministic_algorithms(False)
    for rows in (weights, torch.randn(ROWS, 8)):
        emb = TieredEmbedding(place.table(rows))
        opt = TieredOptimizer(SGD, [emb], lr=1.0)
        ids, factors = place.ids(300), torch.randn(300, rows.shape[1])
        (emb(ids) * factors.to(place.torch)).sum().backward()
        opt.step()
        expected = rows.double().index_add(0, ids.cpu(), -factors.double()).float()
        torch.testing.assert_close(rows_of(emb.table), expected, rtol=1e-5, atol=1e-5)


def test_what_a_rank_tells_of_its_gradient_waits_for_no_device(place: Place) -> None:
    """The rows after the distinct ones, whose number only the device knows, do not count."""
    emb = TieredEmbedding(place.table(torch.randn(ROWS, 8), host_rows=ROWS, gpu_rows=ROWS))
    opt = TieredOptimizer(ADAM, [emb], lr=0.1)
    for _ in range(3):
        ids = place.ids(20)
        emb(ids).square().sum().backward()
        gradient = emb.rows.gathered()
        assert gradient is not None
        distinct = len(ids.unique())  # which the host knows sooner or later
        assert len(gradient.values) == 20 or (
            place.torch != "cpu" and len(gradient.values) == distinct
        )
        gradient.values[distinct:] = torch.nan
        before = getattr(place.device, "waits", 0)
        norm = inside.norm_here(emb.rows)
        assert getattr(place.device, "waits", 0) == before
        assert emb.rows.grad is not None
        torch.testing.assert_close(norm, emb.rows.grad.double().norm())
        opt.zero_grad()


@pytest.mark.variants(1)
@pytest.mark.parametrize("options", [{}, {"ema": 0.9}])
def test_no_step_waits_for_the_device(
    tmp_path: Path, place: Place, options: dict[str, Any]
) -> None:
    """Where the host tier holds every row; the count of distinct rows is not waited for."""
    if place.torch != "cpu":
        pytest.skip("counted on the emulator; bench_gpu_step_syncs counts what the driver is asked")
    weights = torch.randn(ROWS, 8)
    table = place.table(weights, host_rows=ROWS, gpu_rows=ROWS)
    emb = TieredEmbedding(table)
    head = torch.nn.Linear(8, 1)
    opt = TieredOptimizer(ADAM, [emb, head], lr=0.1, **options)
    waits = []
    for _ in range(4):
        before = place.device.waits
        head(emb(place.ids(20))).sum().backward()
        opt.step()
        opt.zero_grad()
        waits.append(place.device.waits - before)
    assert waits[1:] == [0, 0, 0]
