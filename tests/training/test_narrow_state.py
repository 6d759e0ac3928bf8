"""State of rows in bfloat16: computed in float32, rounded by seed, step, row and column alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.training.conftest import ROWS, Place, rows_of
from tests.training.test_rounding import oracle
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

DIM = 8
ADAM = torch.optim.Adam
COLUMNS = 1 << 24
Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def ordered() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(place: Place, steps: int = 4) -> Batches:
    return [(place.ids(3, 7), torch.randn(3, 7, DIM).to(place.torch)) for _ in range(steps)]


def trained(table: Any, optimizer: Any, batches: Batches, **options: Any) -> TieredOptimizer:
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(optimizer, [emb], state_dtype="bfloat16", **options)
    for ids, factors in batches:
        rows = emb(ids)
        (rows * factors.to(rows)).sum().backward()
        opt.step()
    return opt


def contents(table: Any) -> dict[str, Tensor]:
    return {name: rows_of(table, name) for name in table.fields}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_plain_torch(weights: Tensor, batches: Batches, lr: float) -> dict[str, Tensor]:
    """Adam over copies of the rows of each batch, whose moments the oracle rounds."""
    kept = {"weight": weights.clone(), "exp_avg": torch.zeros_like(weights)}
    kept["exp_avg_sq"] = torch.zeros_like(weights)
    for step, (ids, factors) in enumerate(batches, 1):
        rows, positions = torch.unique(ids, return_inverse=True)
        copy = torch.nn.Parameter(kept["weight"][rows])
        copy.grad = torch.zeros_like(copy).index_add_(
            0, positions.reshape(-1), factors.reshape(-1, DIM)
        )
        opt = ADAM([copy], lr=lr)
        opt.state[copy] = {
            "step": torch.tensor(float(step - 1)),
            **{name: kept[name][rows] for name in ("exp_avg", "exp_avg_sq")},
        }
        opt.step()
        kept["weight"][rows] = copy.detach()
        for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            exact = opt.state[copy][name].numpy()
            wide = np.zeros((len(rows), DIM), np.float32)
            for element in range(DIM):
                wide[:, element] = column(exact[:, element], rows, step, number, element)
            kept[name][rows] = torch.from_numpy(wide)
    return kept


def column(values: np.ndarray, rows: Tensor, step: int, number: int, element: int) -> np.ndarray:
    return oracle(values[:, None], rows.numpy(), step, number * COLUMNS + element)[:, 0]


def test_it_is_torch_with_rounded_moments(place: Place) -> None:
    weights, batches = torch.randn(ROWS, DIM), drawn(place)
    table = place.table(weights)
    trained(table, ADAM, batches, lr=0.01)
    on_host = [(ids.cpu(), factors.cpu()) for ids, factors in batches]
    expected = in_plain_torch(weights, on_host, 0.01)
    for name, found in contents(table).items():
        assert found.dtype == (torch.float32 if name == "weight" else torch.bfloat16)
        if place.device == "cpu":
            assert torch.equal(found.float(), expected[name]), name
        else:  # a draw goes the other way where the device rounds float32 otherwise
            torch.testing.assert_close(found.float(), expected[name], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("optimizer", [ADAM, RowWiseAdagrad, torch.optim.NAdam])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_budget_gives_the_same_bits(place: Place, optimizer: Any, dtype: torch.dtype) -> None:
    weights, batches = torch.randn(ROWS, DIM).to(dtype), drawn(place)
    budgets = [{"host_rows": ROWS, "gpu_rows": ROWS}, {"host_rows": 3, "gpu_rows": 1}, {}]
    if place.device == "cpu":
        budgets = [{"host_rows": ROWS}, {"host_rows": 1}, {}]
    options = {"lr": 0.01, "stochastic_rounding": dtype == torch.bfloat16}
    found = []
    for budget in budgets:
        table = place.table(weights, **budget)
        trained(table, optimizer, batches, **options)
        found.append(contents(table))
    assert all(same(found[0], each) for each in found)
    states = found[0].keys() - {"weight"}
    assert states and all(found[0][name].dtype == torch.bfloat16 for name in states)


def test_both_ways_give_the_same_bits(place: Place) -> None:
    weights, batches = torch.randn(ROWS, DIM), drawn(place)
    for optimizer, flags in ((ADAM, {"foreach": True}), (RowWiseAdagrad, {})):
        found = []
        for in_place in (True, False):
            table = place.table(weights)
            trained(table, optimizer, batches, lr=0.01, in_place=in_place, **flags)
            found.append(contents(table))
        if place.torch == place.device:
            assert same(*found)
        else:
            for name in found[0]:
                one, other = (each[name].float() for each in found)
                torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)


def test_the_seed_decides(place: Place) -> None:
    weights, batches = torch.randn(ROWS, DIM), drawn(place)
    found = []
    for seed in (0, 2**32 - 1, 2**32 - 1):
        table = place.table(weights)
        trained(table, ADAM, batches, rounding_seed=seed)
        found.append(contents(table))
    assert same(found[1], found[2])
    assert not torch.equal(found[0]["exp_avg"], found[1]["exp_avg"])


@pytest.mark.slow
def test_second_moments_are_right_on_average(place: Place) -> None:
    """A thousandth of the way a step: nearest rounding would never take it."""
    table = place.table(torch.randn(ROWS, DIM))
    ids = torch.arange(ROWS, device=place.torch)
    batches = [(ids, torch.ones(ROWS, DIM, device=place.torch))] * 300
    trained(table, ADAM, batches)
    expected = 1 - 0.999**300
    assert abs(float(rows_of(table, "exp_avg_sq").float().mean()) / expected - 1) < 0.005
    stuck = torch.tensor(0.0)
    for _ in range(300):
        stuck = (stuck * 0.999 + 0.001).bfloat16().float()
    assert abs(float(stuck) / expected - 1) > 0.01


@pytest.mark.parametrize("device", ["cpu"])
def test_a_run_goes_on_to_the_bit(tmp_path: Path, device: str) -> None:
    weights = torch.randn(ROWS, DIM)
    batches = drawn(Place(tmp_path), 6)
    found = []
    for stops in ((6,), (3, 6)):
        path, first = tmp_path / f"{len(stops)}.tier", 0
        spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(weights))
        tierstore.create(path, {"item": spec}).close()
        for stop in stops:
            with tierstore.open(path, "r+", device=device) as store:
                trained(store["item"], ADAM, batches[first:stop])
                store.commit()
            first = stop
        with tierstore.open(path) as store:
            found.append(contents(store["item"]))
            assert store["item"].spec.layout.record_bytes == DIM * (4 + 2 + 2)
    assert same(*found)


def test_a_record_of_128_takes_1024_bytes(place: Place) -> None:
    table = place.table(torch.randn(ROWS, 128))
    TieredOptimizer(ADAM, [TieredEmbedding(table)], state_dtype="bfloat16")
    assert table.spec.layout.record_bytes == 512 + 2 * 256


def test_other_state_is_not_taken_for_it(place: Place) -> None:
    batches = drawn(place, 1)
    table = place.table(torch.randn(ROWS, DIM))
    narrow = trained(table, ADAM, batches)
    table.store.commit()
    state, emb = narrow.state_dict(), TieredEmbedding(table)
    with pytest.raises(InvalidInputError, match="state_dtype='bfloat16', which state_dtype=None"):
        TieredOptimizer(ADAM, [emb])
    wide = TieredOptimizer(ADAM, [emb], reset=True)
    assert table.fields["exp_avg"].dtype == "float32"
    with pytest.raises(InvalidInputError):
        wide.load_state_dict(state)
    with pytest.raises(InvalidInputError, match="is float32, and state_dtype"):
        TieredOptimizer(ADAM, [emb], state_dtype="bfloat16")
    TieredOptimizer(ADAM, [emb], state_dtype="bfloat16", reset=True)
    assert table.fields["exp_avg"].dtype == "bfloat16"


def test_state_is_taken_over_and_reset(place: Place) -> None:
    weights = torch.randn(ROWS, DIM)
    plain = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False)
    before = ADAM(plain.parameters())
    plain(torch.arange(5)).sum().backward()
    before.step()
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(ADAM, [emb], state_dtype="bfloat16")
    opt.load_rows_state(emb, before.state_dict()["state"][0])
    expected = before.state[plain.weight]["exp_avg"].bfloat16()
    assert torch.equal(rows_of(table, "exp_avg"), expected)
    opt.reset_state()
    assert not rows_of(table, "exp_avg").any()


def test_padding_keeps_its_state(place: Place) -> None:
    table = place.table(torch.randn(ROWS, DIM))
    emb = TieredEmbedding(table, padding_idx=2)
    opt = TieredOptimizer(ADAM, [emb], state_dtype="bfloat16")
    emb(torch.arange(5, device=emb.rows.device)).sum().backward()
    opt.step()
    moved = rows_of(table, "exp_avg").any(1)
    assert moved.tolist() == [True, True, False, True, True] + [False] * (ROWS - 5)


@pytest.mark.parametrize("asked", ["float8", "float8_e4m3fn", "float32", torch.bfloat16, 16])
def test_other_types_are_refused(place: Place, asked: Any) -> None:
    emb = TieredEmbedding(place.table(torch.randn(ROWS, DIM)))
    with pytest.raises(InvalidInputError, match="state_dtype is 'bfloat16', or None"):
        TieredOptimizer(ADAM, [emb], state_dtype=asked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_state_is_computed_in_float32(place: Place, dtype: torch.dtype) -> None:
    emb = TieredEmbedding(place.table(torch.randn(ROWS, DIM).to(dtype)))
    with pytest.raises(InvalidInputError, match="computed in float32"):
        TieredOptimizer(ADAM, [emb], state_dtype="bfloat16")


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True])
def test_bad_seeds_are_refused(place: Place, seed: Any) -> None:
    emb = TieredEmbedding(place.table(torch.randn(ROWS, DIM)))
    with pytest.raises(InvalidInputError, match="rounding_seed"):
        TieredOptimizer(ADAM, [emb], state_dtype="bfloat16", rounding_seed=seed)
