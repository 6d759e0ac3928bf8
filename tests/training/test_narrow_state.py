"""State of rows in fewer bits: computed in float32, rounded by seed, step, row and column alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.gpu.emulator import EmulatedDevice
from tests.training.conftest import ROWS, Place, rows_of
from tests.training.test_rounding import mixed, oracle
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding
from tierstore.optim import RowWiseAdagrad, TieredOptimizer
from tierstore.optim.float8 import SIGNED, SIZES, Float8

DIM = 8
ADAM = torch.optim.Adam
COLUMNS = 1 << 24
TYPES = {
    "bfloat16": ["float32", "bfloat16", "bfloat16"],
    "float8": ["float32", "float8_e4m3fn", "float8_e5m2"],
}
F8 = TYPES["float8"][1:]
FORMS = {"exp_avg": SIGNED, "exp_avg_sq": SIZES}
every_type = pytest.mark.parametrize("narrow", ["bfloat16", "float8"])
Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def ordered() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(place: Place, steps: int = 4) -> Batches:
    return [(place.ids(3, 7), torch.randn(3, 7, DIM).to(place.torch)) for _ in range(steps)]


def trained(
    table: Any, optimizer: Any, batches: Batches, narrow: str, **options: Any
) -> TieredOptimizer:
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(optimizer, [emb], state_dtype=narrow, **options)
    go_on(emb, opt, batches)
    return opt


def go_on(emb: TieredEmbedding, opt: TieredOptimizer, batches: Batches) -> None:
    for ids, factors in batches:
        rows = emb(ids)
        (rows * factors.to(rows)).sum().backward()
        opt.step()


def contents(table: Any) -> dict[str, Tensor]:
    """Every field as it is stored."""
    rows = np.arange(table.rows)
    return {name: torch.from_numpy(table.read(rows, name, raw=True)) for name in table.fields}


def values_of(table: Any) -> dict[str, Tensor]:
    return {name: rows_of(table, name).float() for name in table.fields}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_float8(values: np.ndarray, rows: Any, step: int, form: Float8, column: int) -> np.ndarray:
    """Round one number at a time between the neighbours that torch has; return float32."""
    codes = torch.arange(128, dtype=torch.uint8).view(getattr(torch, form.name)).double()
    grid = np.sort(codes[codes.isfinite()].numpy())
    bits, out = 23 - form.mantissa, np.empty_like(values)
    for k, row in enumerate(map(int, rows)):
        finite = np.abs(values[k][np.isfinite(values[k])]).max(initial=0)
        scale = next((s for s in 2.0 ** np.arange(-126, 127) if finite / s <= grid[-1]), 1)
        scale = scale if finite else 1
        key = mixed((mixed((row + step * 0x9E3779B9) % 2**32) + (row >> 32)) % 2**32)
        for element, value in enumerate(values[k]):
            if not np.isfinite(value):
                kept = np.isnan(value) or form is SIZES
                out[k, element] = value if kept else np.nan
                continue
            part = abs(np.float64(value)) / scale
            below = int(np.searchsorted(grid, part, "right")) - 1
            if below + 1 < len(grid):
                way = (part - grid[below]) / (grid[below + 1] - grid[below])
                drawn = mixed(key ^ (column + element) * 0x9E3779B9 % 2**32) >> (32 - bits)
                below += int(way * 2**bits) + drawn >= 2**bits
            if form is SIZES and value and not below:
                below = 1
            out[k, element] = np.copysign(grid[below] * scale, value)
    return out


@pytest.mark.parametrize("form", [SIGNED, SIZES])
def test_the_neighbour_in_float8_is_the_one_that_is_drawn(form: Float8) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((60, 9)) * 10.0 ** rng.integers(-30, 30, (60, 1))
    values = (values * 10.0 ** -rng.integers(0, 10, (60, 9))).astype(np.float32)
    values = np.abs(values) if form is SIZES else values
    values[0, :3] = np.inf, np.nan, 0
    values[1], values[2] = 0, 1e-42
    values[3] = 448 * 2.0**-20, *(np.nextafter(np.float32(448), np.float32(x)) for x in range(8))
    rows = np.concatenate([rng.integers(0, 2**40, 59), [2**40 - 1]])
    step, column = 2**31 + 5, 2 * COLUMNS
    found = form.rounded(
        torch.from_numpy(values), torch.from_numpy(rows), step, seed=0, column=column
    )
    expected = in_float8(values, rows, step, form, column)
    np.testing.assert_array_equal(form.values(found, 9).numpy(), expected)
    field = form.field(9, 0.0)
    np.testing.assert_array_equal(field.scaled.decode(found.numpy()), expected)
    assert (expected != values).mean() > 0.7
    again = form.rounded(
        torch.from_numpy(expected), torch.from_numpy(rows), step + 1, seed=0, column=column
    )
    np.testing.assert_array_equal(form.values(again, 9).numpy(), expected)  # it is there already


def test_a_size_never_becomes_zero() -> None:
    values = torch.tensor([[1.0, 1e-30, 0.0, 1e-12]]).repeat(2000, 1)
    rows = torch.arange(2000)
    kept = SIZES.values(SIZES.rounded(values, rows, 1, seed=0, column=0), 4)
    assert (kept[:, [0, 1, 3]] > 0).all() and not kept[:, 2].any()
    lost = SIGNED.values(SIGNED.rounded(values, rows, 1, seed=0, column=0), 4)
    assert not lost[:, 1:].any()


def in_plain_torch(weights: Tensor, batches: Batches, lr: float, narrow: str) -> dict[str, Tensor]:
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
            exact, first = opt.state[copy][name].numpy(), number * COLUMNS
            if narrow == "float8":
                wide = in_float8(exact, rows, step, FORMS[name], first)
            else:
                wide = oracle(exact, rows.numpy(), step, first)
            kept[name][rows] = torch.from_numpy(wide)
    return kept


@pytest.mark.variants(1, 2)
@every_type
def test_it_is_torch_with_rounded_moments(place: Place, narrow: str) -> None:
    weights, batches = torch.randn(ROWS, DIM), drawn(place)
    table = place.table(weights)
    trained(table, ADAM, batches, narrow, lr=0.01)
    assert [item.dtype for item in table.fields.values()] == TYPES[narrow]
    on_host = [(ids.cpu(), factors.cpu()) for ids, factors in batches]
    expected = in_plain_torch(weights, on_host, 0.01, narrow)
    for name, found in values_of(table).items():
        if place.device == "cpu":
            assert torch.equal(found, expected[name]), name
        else:  # a draw goes the other way where the device rounds float32 otherwise
            close = torch.isclose(found, expected[name], rtol=0.02, atol=1e-3)
            assert close.float().mean() > (0.98 if narrow == "float8" else 0.9999), name


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "optimizer",
    [ADAM, RowWiseAdagrad, pytest.param(torch.optim.NAdam, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@every_type
@pytest.mark.slow("emulated")
@pytest.mark.nightly("dtype1")
def test_any_budget_gives_the_same_bits(
    place: Place, optimizer: Any, dtype: torch.dtype, narrow: str
) -> None:
    weights, batches = torch.randn(ROWS, DIM).to(dtype), drawn(place)
    budgets = [{"host_rows": ROWS, "gpu_rows": ROWS}, {"host_rows": 3, "gpu_rows": 1}, {}]
    if place.device == "cpu":
        budgets = [{"host_rows": ROWS}, {"host_rows": 1}, {}]
    options = {"lr": 0.01, "stochastic_rounding": dtype == torch.bfloat16}
    found = []
    for budget in budgets:
        table = place.table(weights, **budget)
        trained(table, optimizer, batches, narrow, **options)
        found.append(contents(table))
    assert all(same(found[0], each) for each in found)
    narrowed = {"bfloat16"} if narrow == "bfloat16" or optimizer is RowWiseAdagrad else set(F8)
    assert {table.fields[name].dtype for name in found[0].keys() - {"weight"}} == narrowed


SIMILAR: list[tuple[Any, dict[str, Any]]] = [
    (ADAM, {"foreach": True, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    (torch.optim.Adagrad, {"foreach": True, "initial_accumulator_value": 0.1}),
]
KERNELS: list[Any] = [
    (ADAM, {"foreach": True}),
    (torch.optim.RMSprop, {"foreach": True, "centered": True, "momentum": 0.5}),
    (RowWiseAdagrad, {}),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SIMILAR),
]


@every_type
@pytest.mark.parametrize(("optimizer", "flags"), KERNELS)
@pytest.mark.parametrize("dim", [pytest.param(DIM, marks=pytest.mark.slow), 70])
@pytest.mark.slow("emulated")
@pytest.mark.nightly("70")
def test_both_ways_give_the_same_bits(
    place: Place, optimizer: Any, flags: dict[str, Any], narrow: str, dim: int
) -> None:
    weights = torch.randn(ROWS, dim)
    batches = [(ids, torch.randn(3, 7, dim).to(ids.device)) for ids, _ in drawn(place)]
    found, tables = [], []
    for in_place in (True, False):
        table = place.table(weights)
        flags = {**flags, "in_place": in_place}
        emb = TieredEmbedding(table)
        opt = TieredOptimizer(optimizer, [emb], state_dtype=narrow, lr=0.01, **flags)
        if in_place and place.device != "cpu":
            opt._inner_step = None  # type: ignore[assignment]
        go_on(emb, opt, batches)
        tables.append(table)
        found.append(contents(table))
    if place.torch == place.device or place.device == "cpu":
        assert same(*found)
    else:  # torch's own float32 is rounded otherwise there
        for name in found[0]:
            one, other = (rows_of(table, name).float() for table in tables)
            close = torch.isclose(one, other, rtol=0.02, atol=1e-3)
            assert close.float().mean() > 0.98, name


@every_type
def test_the_seed_decides(place: Place, narrow: str) -> None:
    weights, batches = torch.randn(ROWS, DIM), drawn(place)
    found = []
    for seed in (0, 2**32 - 1, 2**32 - 1):
        table = place.table(weights)
        trained(table, ADAM, batches, narrow, rounding_seed=seed)
        found.append(contents(table))
    assert same(found[1], found[2])
    assert not torch.equal(found[0]["exp_avg"], found[1]["exp_avg"])


@pytest.mark.variants(0, 1)
@every_type
def test_second_moments_are_right_on_average(place: Place, narrow: str) -> None:
    """A thousandth of the way a step: nearest rounding would never take it."""
    if isinstance(place.device, EmulatedDevice):
        pytest.skip("takes 300 steps, whose bits other tests compare")
    table = place.table(torch.randn(ROWS, DIM))
    ids = torch.arange(ROWS, device=place.torch)
    batches = [(ids, torch.ones(ROWS, DIM, device=place.torch))] * 300
    trained(table, ADAM, batches, narrow)
    expected, kind = 1 - 0.999**300, table.fields["exp_avg_sq"].dtype
    most = 0.005 if narrow == "bfloat16" else 0.03
    assert abs(float(rows_of(table, "exp_avg_sq").float().mean()) / expected - 1) < most
    stuck = torch.tensor(0.0)
    for _ in range(300):
        stuck = (stuck * 0.999 + 0.001).to(getattr(torch, kind)).float()
    assert abs(float(stuck) / expected - 1) > 2 * most


@every_type
def test_a_run_goes_on_to_the_bit(tmp_path: Path, narrow: str) -> None:
    weights = torch.randn(ROWS, DIM)
    batches = drawn(Place(tmp_path), 6)
    found = []
    for stops in ((6,), (3, 6)):
        path, first = tmp_path / f"{len(stops)}.tier", 0
        spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(weights))
        tierstore.create(path, {"item": spec}).close()
        for stop in stops:
            with tierstore.open(path, "r+") as store:
                trained(store["item"], ADAM, batches[first:stop], narrow)
                store.commit()
            first = stop
        with tierstore.open(path) as store:
            found.append(contents(store["item"]))
    assert same(*found)


SIZES_OF_128 = [(torch.float32, "bfloat16", 1024), (torch.float32, "float8", 784)]
SIZES_OF_128 += [(torch.bfloat16, "bfloat16", 768), (torch.bfloat16, "float8", 528)]


@pytest.mark.parametrize(("weights", "narrow", "nbytes"), SIZES_OF_128)
def test_records_of_128_elements(
    place: Place, weights: torch.dtype, narrow: str, nbytes: int
) -> None:
    table = place.table(torch.randn(ROWS, 128).to(weights))
    layers, rounds = [TieredEmbedding(table)], weights == torch.bfloat16
    TieredOptimizer(ADAM, layers, state_dtype=narrow, stochastic_rounding=rounds)
    assert table.spec.layout.record_bytes == nbytes


@every_type
def test_other_state_is_not_taken_for_it(place: Place, narrow: str) -> None:
    batches = drawn(place, 1)
    table = place.table(torch.randn(ROWS, DIM))
    opt = trained(table, ADAM, batches, narrow)
    table.store.commit()
    state, emb = opt.state_dict(), TieredEmbedding(table)
    other = "float8" if narrow == "bfloat16" else "bfloat16"
    for asked in (None, other):
        with pytest.raises(
            InvalidInputError, match=f"state_dtype='{narrow}', which state_dtype={asked!r}"
        ):
            TieredOptimizer(ADAM, [emb], state_dtype=asked)
    wide = TieredOptimizer(ADAM, [emb], reset=True)
    assert table.fields["exp_avg"].dtype == "float32"
    with pytest.raises(InvalidInputError):
        wide.load_state_dict(state)
    with pytest.raises(InvalidInputError, match="is float32, and state_dtype"):
        TieredOptimizer(ADAM, [emb], state_dtype=narrow)
    TieredOptimizer(ADAM, [emb], state_dtype=narrow, reset=True)
    assert table.fields["exp_avg"].dtype == TYPES[narrow][1]


@every_type
def test_state_is_taken_over_and_reset(place: Place, narrow: str) -> None:
    weights = torch.randn(ROWS, DIM)
    plain = torch.nn.Embedding.from_pretrained(weights.clone(), freeze=False)
    before = ADAM(plain.parameters())
    plain(torch.arange(5)).sum().backward()
    before.step()
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(ADAM, [emb], state_dtype=narrow)
    opt.load_rows_state(emb, before.state_dict()["state"][0])
    expected = before.state[plain.weight]["exp_avg"]
    most = 2.0 ** (-9 if narrow == "bfloat16" else -4)
    torch.testing.assert_close(rows_of(table, "exp_avg").float(), expected, rtol=most, atol=0)
    opt.reset_state()
    assert not rows_of(table, "exp_avg").any()


@pytest.mark.variants(2, 4)
@every_type
@pytest.mark.parametrize("in_place", [True, False])
def test_padding_keeps_its_state(place: Place, narrow: str, in_place: bool) -> None:
    table = place.table(torch.randn(ROWS, DIM))
    emb = TieredEmbedding(table, padding_idx=2)
    opt = TieredOptimizer(
        torch.optim.Adagrad,
        [emb],
        state_dtype=narrow,
        in_place=in_place,
        initial_accumulator_value=0.1,
    )
    before = contents(table)["sum"]
    emb(torch.arange(5, device=emb.rows.device)).sum().backward()
    opt.step()
    moved = (contents(table)["sum"] != before).any(1)
    assert moved.tolist() == [True, True, False, True, True] + [False] * (ROWS - 5)


@pytest.mark.parametrize("asked", ["float8_e4m3fn", "float32", torch.bfloat16, 16])
def test_other_types_are_refused(place: Place, asked: Any) -> None:
    emb = TieredEmbedding(place.table(torch.randn(ROWS, DIM)))
    with pytest.raises(InvalidInputError, match="state_dtype is 'bfloat16', 'float8', or None"):
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
        TieredOptimizer(ADAM, [emb], state_dtype="float8", rounding_seed=seed)


@pytest.mark.variants(3)
@pytest.mark.parametrize(("kept", "asked"), [(None, "bfloat16"), ("bfloat16", None)])
def test_an_earlier_optimizer_of_other_state_does_not_go_on(
    place: Place, kept: Any, asked: Any
) -> None:
    batches = drawn(place, 1)
    table = place.table(torch.randn(ROWS, DIM))
    first = trained(table, ADAM, batches, kept)
    table.store.commit()
    trained(table, ADAM, batches, asked, reset=True)
    rows = values_of(table)
    with pytest.raises(InvalidInputError, match=f"dtype={asked!r}, which state_dtype={kept!r}"):
        first.step()
    assert same(values_of(table), rows)
