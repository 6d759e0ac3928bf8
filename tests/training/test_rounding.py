"""Stochastic rounding: what a row rounds to depends on the row and the step alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.training.conftest import ROWS, Place, rows_of
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding
from tierstore.optim import RowWiseAdagrad, TieredOptimizer
from tierstore.optim.rounding import rounded_at_random

DIM = 8
SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.fixture(autouse=True)
def ordered() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def oracle(values: np.ndarray, rows: np.ndarray, step: int, column: int = 0) -> np.ndarray:
    """Round one number at a time, to the neighbour that is drawn; return float32."""
    out = np.empty_like(values)
    for (k, element), value in np.ndenumerate(values):
        if not np.isfinite(value):
            out[k, element] = value
            continue
        row = int(rows[k])
        key = mixed((mixed((row + step * 0x9E3779B9) % 2**32) + (row >> 32)) % 2**32)
        drawn = (mixed(key ^ (column + element) * 0x9E3779B9 % 2**32) >> 16) / 2**16
        below = (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        beyond = (below.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
        part = (np.float64(value) - np.float64(below)) / (np.float64(beyond) - np.float64(below))
        out[k, element] = beyond if part + drawn >= 1 else below
    return out


def test_the_neighbour_is_the_one_that_is_drawn() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 9)).astype(np.float32) * 10.0 ** rng.integers(
        -30, 30, (40, 1)
    )
    values = values.astype(np.float32)
    values[0, :4] = np.inf, -np.inf, np.nan, 0
    # NaNs that would become an infinity without their low half, or zero by a carry
    values.view(np.uint32)[1] = np.resize([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], 9)
    rows = np.concatenate([rng.integers(0, 2**40, 39), [2**40 - 1]])
    found = rounded_at_random(torch.from_numpy(values), torch.from_numpy(rows), 2**31 + 5)
    expected = oracle(values, rows, 2**31 + 5)
    np.testing.assert_array_equal(found.float().numpy(), expected)
    assert (expected != values).mean() > 0.9


def test_small_steps_add_up() -> None:
    """1000 steps of 2^-12 each, none of which bfloat16 can tell from nothing beside 1."""
    weights = torch.ones(500, 16)
    rows = torch.arange(500)
    for step in range(1000):
        weights = rounded_at_random(weights + 2**-12, rows, step).float()
    assert (torch.ones(1) + 2**-12).bfloat16() == 1
    # the deviation of one weight is below sqrt(1000 * 2^-12 * 2^-7) = 0.044, of the mean 0.0005
    assert abs(float(weights.mean()) - 1 - 1000 * 2**-12) < 0.0025
    assert float(weights.std()) < 0.05


def trained(
    table: Any, optimizer: Any, batches: list[tuple[Tensor, Tensor]], **options: Any
) -> Any:
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(optimizer, [emb], stochastic_rounding=True, **options)
    for ids, factors in batches:
        rows = emb(ids)
        (rows * factors.to(rows)).sum().backward()
        opt.step()
    return table


def drawn(place: Place, steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(place.ids(3, 7), torch.randn(3, 7, DIM).to(place.torch)) for _ in range(steps)]


@pytest.mark.parametrize("optimizer", [SGD, ADAM, RowWiseAdagrad])
@pytest.mark.slow("emulated")
def test_any_budget_gives_the_same_bits(place: Place, optimizer: Any) -> None:
    weights, batches = torch.randn(ROWS, DIM).bfloat16(), drawn(place)
    budgets = [{"host_rows": ROWS, "gpu_rows": ROWS}, {"host_rows": 3, "gpu_rows": 1}, {}]
    if place.device == "cpu":
        budgets = [{"host_rows": ROWS}, {"host_rows": 1}, {}]
    tables = [place.table(weights, **budget) for budget in budgets]
    for table in tables:
        trained(table, optimizer, batches, lr=0.01)
    assert all(
        torch.equal(rows_of(table, name), rows_of(tables[0], name))
        for table in tables
        for name in tables[0].fields
    )
    assert tables[0].fields["weight"].dtype == "bfloat16"
    states = tables[0].fields.keys() - {"weight"}
    assert all(tables[0].fields[name].dtype == "float32" for name in states)


@pytest.mark.variants(1, 1)
@pytest.mark.slow("emulated")
def test_both_ways_give_the_same_bits(place: Place) -> None:
    weights, batches = torch.randn(ROWS, DIM).bfloat16(), drawn(place)
    for optimizer, flags in ((ADAM, {"foreach": True}), (RowWiseAdagrad, {})):
        tables = [place.table(weights) for _ in range(2)]
        for table, in_place in zip(tables, (True, False), strict=True):
            trained(table, optimizer, batches, lr=0.01, in_place=in_place, **flags)
        found, expected = (rows_of(table, "weight") for table in tables)
        if place.torch == place.device:
            assert torch.equal(found, expected)
        else:  # where torch's own float32 is rounded otherwise, a draw goes the other way at times
            assert (found == expected).float().mean() > 0.99
            torch.testing.assert_close(found, expected)


def test_a_step_is_the_step_in_float32_rounded(place: Place) -> None:
    """SGD by hand: products of powers of two are exact in every order of operations."""
    weights = torch.randn(ROWS, DIM).bfloat16()
    table = place.table(weights)
    ids, factors = place.ids(3, 7), 2.0 ** torch.randint(-6, 3, (3, 7, DIM))
    trained(table, SGD, [(ids, factors.to(place.torch))], lr=2**-9)
    rows, positions = np.unique(ids.cpu().numpy().ravel(), return_inverse=True)
    gradient = np.zeros((len(rows), DIM), np.float32)
    np.add.at(gradient, positions, factors.reshape(-1, DIM).numpy())
    gradient = torch.from_numpy(gradient).bfloat16().float().numpy()  # as it is summed
    before = weights.float().numpy()
    after = before.copy()
    after[rows] = oracle(before[rows] - np.float32(2**-9) * gradient, rows, 1)
    np.testing.assert_array_equal(rows_of(table).float().numpy(), after)


def test_padding_stays(place: Place) -> None:
    weights = torch.randn(ROWS, DIM).bfloat16()
    table = place.table(weights)
    emb = TieredEmbedding(table, padding_idx=2)
    opt = TieredOptimizer(ADAM, [emb], lr=0.5, stochastic_rounding=True)
    emb(torch.arange(5, device=emb.rows.device)).sum().backward()
    opt.step()
    moved = (rows_of(table, "weight") != weights).any(1)
    assert moved.tolist() == [True, True, False, True, True] + [False] * (ROWS - 5)


def test_clipping_sees_float32(place: Place) -> None:
    table = place.table(torch.randn(ROWS, DIM).bfloat16())
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(ADAM, [emb], lr=0.5, stochastic_rounding=True)
    emb(torch.arange(5, device=emb.rows.device)).sum().backward()
    (parameter,) = opt.parameters()
    assert parameter.dtype == parameter.grad.dtype == torch.float32
    opt.step()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_types_are_refused(place: Place, dtype: str) -> None:
    spec = tierstore.TableSpec(ROWS, DIM, dtype, init=tierstore.normal(seed=5))
    table = place.store({"item": spec})["item"]
    with pytest.raises(InvalidInputError, match=f"for bfloat16; field 'weight' of .*is {dtype}"):
        TieredOptimizer(SGD, [TieredEmbedding(table)], lr=0.1, stochastic_rounding=True)
