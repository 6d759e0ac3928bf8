"""Training through the factories is training of a whole `torch.nn.Embedding`, wherever rows are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
import tierstore.speedtorch as ours
from tests.speedtorch.conftest import DIM, ROWS, Model, Place
from tierstore.errors import InvalidInputError, RowIndexError, UnknownNameError
from tierstore.speedtorch.base import as_numpy

torch = pytest.importorskip("torch")

EVERY_ROW = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "dampened": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "fused Adam": (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 3}),
}
SOME_ROWS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, False),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, False),
    "sparse Adagrad": (torch.optim.Adagrad, {"lr": 0.1}, True),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.01}, True),
}

quiet = pytest.mark.filterwarnings("ignore:.*are copies of others", "ignore:.*Sparse invariant")


def loss_of(model: Any, left: Any, right: Any) -> Any:
    return (model(left, right) - 1).pow(2).sum()


def train_whole(
    optimizer_class: Any, given: dict[str, Any], start: Any, batches: list[Any], *, sparse: bool
) -> dict[str, Any]:
    """Train whole embeddings with plain torch."""
    model = Model(ROWS, sparse=sparse)
    for key in ("u", "v"):
        getattr(model, key).weight.data.copy_(start[key])
    optimizer = optimizer_class(model.parameters(), **given)
    for ids in batches:
        left, right = torch.from_numpy(ids).unbind(1)
        optimizer.zero_grad()
        loss_of(model, left, right).backward()
        optimizer.step()
    return {key: getattr(model, key).weight.detach().numpy() for key in ("u", "v")}


def train_swapped(
    place: Place,
    optimizer_class: Any,
    given: dict[str, Any],
    start: Any,
    batches: list[Any],
    *,
    sparse: bool,
) -> dict[str, Any]:
    """Train the same with two model factories and two optimizer factories."""
    model = Model(sparse=sparse)
    optimizer = optimizer_class(model.parameters(), **given)
    rows = {key: place.model(getattr(model, key)) for key in ("u", "v")}
    state = [place.optimizer(optimizer, model, key) for key in ("u", "v")]
    for key, each in rows.items():
        each.customInit(lambda table, key=key: table.copy_(start[key]))
    for each in state:
        each.optInit()
    for ids in batches:
        dummies = torch.from_numpy(rows["u"].variableTransformer(*ids.shape))
        swapped = [*rows.values(), *state]
        for each in swapped:
            each.beforeForwardPass(ids)
        loss = loss_of(model, *dummies.to(model.u.weight.device).unbind(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for each in swapped:
            each.afterOptimizerStep(ids)
    return {key: each.getNumpyVersion() for key, each in rows.items()}


def check_same(
    place: Place, entry: tuple[Any, ...], batches: list[Any], *, sparse: bool, **swapped: bool
) -> None:
    """Train both ways; `swapped` are options for the factories' optimizer alone."""
    start = {key: torch.randn(ROWS, DIM) for key in ("u", "v")}
    optimizer_class, given = entry
    expected = train_whole(optimizer_class, given, start, batches, sparse=sparse)
    given = {**given, **swapped}
    found = train_swapped(place, optimizer_class, given, start, batches, sparse=sparse)
    for key, value in expected.items():
        slack = 10 if place.on_gpu else 1  # sums come in another order
        np.testing.assert_allclose(found[key], value, rtol=slack * 1e-5, atol=slack * 1e-6)
        assert np.abs(value - start[key].numpy()).max() > 1e-3


@pytest.mark.variants(5)
@quiet
@pytest.mark.parametrize("name", EVERY_ROW)
def test_every_optimizer_where_every_batch_has_every_row(
    tmp_path: Path, rng: np.random.Generator, name: str
) -> None:
    check_same(Place("cpu", tmp_path), EVERY_ROW[name], whole_batches(rng), sparse=False)


def whole_batches(rng: np.random.Generator) -> list[Any]:
    """Every row in each, and copies of some, so that this is about them too."""
    batches = []
    for _ in range(5):
        ids = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, 50)])
        batches.append(np.stack([ids, rng.permutation(ids)], 1))
    return batches


@quiet
@pytest.mark.gpu
@pytest.mark.parametrize("name", [*EVERY_ROW, "capturable Adam"])
def test_every_optimizer_on_a_gpu(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    """Fused and capturable ones count their steps there."""
    place, kind = Place("cuda pinned", tmp_path), name.removeprefix("capturable ")
    swapped = {} if kind == name else {"capturable": True}
    check_same(place, EVERY_ROW[kind], whole_batches(rng), sparse=False, **swapped)
    place.close()


@pytest.mark.variants(1, 5)
@quiet
@pytest.mark.parametrize("name", SOME_ROWS)
def test_optimizers_that_leave_other_rows_alone(
    place: Place, rng: np.random.Generator, name: str
) -> None:
    """Batches of changing size, some ids many times; the last loss is alive when the next comes."""
    batches = [rng.integers(0, ROWS // 3, (int(rng.integers(3, 40)), 2)) for _ in range(7)]
    *entry, sparse = SOME_ROWS[name]
    check_same(place, tuple(entry), batches, sparse=sparse)


@quiet
def test_state_of_a_whole_batch_is_that_of_the_optimizer(rng: np.random.Generator) -> None:
    """State moves with its rows: after a step it can be read back for each row."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    rows = ours.ModelFactory(model.u, ROWS, DIM)
    rows.normalDistributionInit(0, 1)
    state = ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u", dtype="float32")
    state.optInit()
    assert state.optVarList == ["exp_avg", "exp_avg_sq"]
    ids = rng.permutation(ROWS)[:20]
    rows.beforeForwardPass(ids)
    state.beforeForwardPass(ids)
    model.u.weight.pow(3).sum().backward()
    optimizer.step()
    rows.afterOptimizerStep(ids)
    state.afterOptimizerStep(ids)
    kept = optimizer.state[model.u.weight]
    assert float(kept["step"]) == 1
    for position, key in enumerate(state.optVarList):
        np.testing.assert_array_equal(state.getNumpyVersion()[position][ids], kept[key].numpy())
        assert not np.delete(state.getNumpyVersion()[position], ids, 0).any()


def test_the_parameter_is_found_by_identity_not_by_order() -> None:
    """Of a subset, in another order, nested and under a name of its own."""
    model = torch.nn.ModuleDict({"deep": Model(), "other": torch.nn.Linear(3, 2)})
    order = [model["deep"].v.weight, model["deep"].u.weight]
    optimizer = torch.optim.Adagrad(order)
    for name in ("deep.u", "deep.v", "deep.u.weight"):
        state = ours.OptimizerFactory(optimizer, ROWS, DIM, model, name)
        state.optInit()
        state.beforeForwardPass([1, 2, 3])
        parameter = model.get_parameter(f"{name.removesuffix('.weight')}.weight")
        assert optimizer.state[parameter]["sum"].shape == (3, DIM)
        optimizer.state[parameter]["sum"] = torch.zeros(1, DIM)
    with pytest.raises(UnknownNameError, match=r"deep\.u\.weight"):
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u")
    with pytest.raises(InvalidInputError, match="does not train 'other'"):
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "other")


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "Adafactor"])
def test_optimizers_that_need_the_whole_table_are_refused(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    model = Model()
    optimizer = getattr(torch.optim, name)(list(model.parameters()))
    with pytest.raises(InvalidInputError, match=f"{name} cannot train"):
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u")


@pytest.mark.variants(11)
@pytest.mark.parametrize(
    "kind",
    [np.int32, ">i8", np.uint16, list, torch.int64, torch.int32, "read-only", "strided", "scalar"],
)
def test_ids_of_every_kind(place: Place, rng: np.random.Generator, kind: Any) -> None:
    rows = place.model(torch.nn.Embedding(1, DIM))
    rows.uniformDistributionInit(-1, 1)
    ids = rng.integers(0, ROWS, (4, 3))
    given: Any = ids
    if kind is list:
        given = ids.tolist()
    elif kind == "read-only":
        given = ids.copy()
        given.flags.writeable = False
    elif kind == "strided":
        given = np.repeat(ids, 2, 1)[::-1, ::2][::-1]
    elif kind == "scalar":
        given, ids = 7, np.array([7])
    elif isinstance(kind, torch.dtype):
        given = torch.from_numpy(ids).to(kind)
    else:
        given = ids.astype(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows.beforeForwardPass(given, np.array([[5], [6]]))
    expected = rows.getNumpyVersion()[[*ids.reshape(-1), 5, 6]]
    np.testing.assert_array_equal(as_numpy(rows.model_variable.weight), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("GPUPytorch{}", {}),
        ("CPUPytorch{}", {}),
        ("Pytorch{}", {}),
        ("Pytorch{}", {"deviceType": "cpu"}),
        ("Pytorch{}", {"deviceType": "cpu", "pinType": True}),
    ],
)
def test_torchs_families_serve_a_module_on_the_gpu(family: str, options: dict[str, Any]) -> None:
    """Wherever the rows are; with rows on the CPU, SpeedTorch gave the module those."""
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    make = getattr(ours, family.format("ModelFactory"))
    make_state = getattr(ours, family.format("OptimizerFactory"))
    with (
        make(model.u, ROWS, DIM, **options) as rows,
        make_state(optimizer, ROWS, DIM, model, "u", **options) as state,
    ):
        rows.zerosInit()
        state.optInit()
        for ids in ([1, 2, 3], [3, 5]):
            rows.beforeForwardPass(ids)
            state.beforeForwardPass(ids)
            assert model.u.weight.is_cuda
            model.u.weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.afterOptimizerStep(ids)
            state.afterOptimizerStep(ids)
        found = rows.getNumpyVersion()[:, 0]
        assert found[[1, 2, 3, 5]].tolist() == pytest.approx([-0.5, -0.5, -1.0, -0.5], abs=0.3)
        assert np.flatnonzero(found).tolist() == [1, 2, 3, 5]
        assert np.flatnonzero(state.getNumpyVersion()[0].any(1)).tolist() == [1, 2, 3, 5]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["cupy", "cuda"])
def test_ids_that_are_on_the_gpu(tmp_path: Path, rng: np.random.Generator, kind: str) -> None:
    import cupy

    place = Place("cuda pinned", tmp_path)
    rows = place.model(torch.nn.Embedding(1, DIM))
    rows.uniformDistributionInit(-1, 1)
    ids = rng.integers(0, ROWS, (4, 3))
    given = cupy.asarray(ids) if kind == "cupy" else torch.from_numpy(ids).cuda()
    rows.beforeForwardPass(given, np.array([[5], [6]]))
    expected = rows.getNumpyVersion()[[*ids.reshape(-1), 5, 6]]
    np.testing.assert_array_equal(as_numpy(rows.model_variable.weight), expected)
    place.close()


def test_ids_may_change_before_the_backward_pass(place: Place) -> None:
    """As where batches are drawn into one array."""
    module = torch.nn.Embedding(1, DIM)
    rows = place.model(module)
    rows.zerosInit()
    ids = np.array([1, 1, 2])
    rows.beforeForwardPass(ids)
    ids[:] = [3, 4, 5]
    module.weight.sum().backward()
    assert module.weight.grad[:, 0].tolist() == [2, 2, 1]


def test_bad_ids_are_refused(place: Place) -> None:
    rows = place.model(torch.nn.Embedding(1, DIM))
    rows.zerosInit()
    if not isinstance(place.device, str):
        pytest.skip("ids on an emulated GPU cannot be told from those on the host")
    for bad in ([0, ROWS], [-1]):
        with pytest.raises(RowIndexError, match=str(bad[-1])):
            rows.beforeForwardPass(bad)
    for wrong in ([0.5], np.array([True])):
        with pytest.raises(TypeError, match="whole numbers"):
            rows.beforeForwardPass(wrong)
    rows.beforeForwardPass([])
    assert rows.model_variable.weight.shape == (0, DIM)


@pytest.mark.variants(10)
@pytest.mark.parametrize("dtype", ["float16", np.float32, np.dtype("f8"), torch.bfloat16])
def test_types_of_every_kind(place: Place, dtype: Any) -> None:
    rows = place.model(torch.nn.Embedding(1, DIM), ROWS, DIM, datatype=dtype)
    rows.normalDistributionInit(0, 1)
    rows.beforeForwardPass([3, 4])
    name = str(dtype).removeprefix("torch.") if "torch" in str(dtype) else np.dtype(dtype).name
    assert rows.model_variable.weight.dtype == getattr(torch, name)
    rows.model_variable.weight.data += 1
    rows.afterOptimizerStep([3, 4])
    expected = as_numpy(rows.model_variable.weight.double())
    np.testing.assert_array_equal(rows.getNumpyVersion()[[3, 4]], expected)


def test_first_values(place: Place) -> None:
    rows = place.model(torch.nn.Embedding(1, DIM))
    rows.zerosInit()
    assert not rows.getNumpyVersion().any()
    rows.uniformDistributionInit(2, 3)
    drawn = rows.getNumpyVersion()
    assert drawn.shape == (ROWS, DIM)
    assert 2 <= drawn.min() < drawn.max() < 3
    torch.manual_seed(1)
    rows.normalDistributionInit(5, 0.1)
    normal = rows.getNumpyVersion()
    assert abs(normal.mean() - 5) < 0.05
    torch.manual_seed(1)
    rows.normalDistributionInit(5, 0.1)
    np.testing.assert_array_equal(rows.getNumpyVersion(), normal)
    rows.customInit(torch.nn.init.constant_, 7.0)
    assert (rows.getNumpyVersion() == 7).all()


def test_a_table_is_one_of_the_librarys(place: Place) -> None:
    rows = place.model(torch.nn.Embedding(1, DIM))
    with pytest.raises(InvalidInputError, match="zerosInit"):
        rows.beforeForwardPass([1])
    rows.normalDistributionInit(0, 1)
    assert isinstance(rows.table, tierstore.Table)
    whole = rows.getNumpyVersion()
    np.testing.assert_array_equal(rows.table.read([5, 7]), whole[[5, 7]])
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 1
    name = "CUPYmemmap" if hasattr(rows, "CUPYmemmap") else "CUPYcorpus"
    np.testing.assert_array_equal(as_numpy(getattr(rows, name)), whole)
    with pytest.raises(AttributeError):
        setattr(rows, name, whole)
    with pytest.raises(InvalidInputError, match="'sum', 'mean' or 'last'"):
        place.model(torch.nn.Embedding(1, DIM), duplicates="first")
