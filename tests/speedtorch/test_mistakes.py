"""What SpeedTorch 0.1.6 got wrong, one test each: it is right here."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
import tierstore.speedtorch as ours
from tests.speedtorch.conftest import DIM, ROWS, Model, Place
from tierstore import Budget

torch = pytest.importorskip("torch")

SOURCE = Path(tierstore.__file__).parent


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def step(swapped: list[Any], ids: Any, optimizer: Any, loss: Any) -> None:
    """One step of training; `loss` is a function without arguments."""
    for each in swapped:
        each.beforeForwardPass(ids)
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    for each in swapped:
        each.afterOptimizerStep(ids)


def looked_up(module: Any, count: int) -> Any:
    return module(torch.arange(count, device=module.weight.device))


# -- the memory-mapped classes


def test_memory_mapped_gadgets_can_be_made_and_written(rng: np.random.Generator) -> None:
    np.save("data.npy", rng.normal(size=(9, 2)))
    gadget = ours.DataGadgetMM("data.npy")
    gadget.gadgetInit()
    gadget.insertData(torch.ones(2, dtype=torch.float64), 4)
    assert gadget.getData([4]).tolist() == [[1, 1]]
    gadget.close()


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_mapped_classes_take_pinned_memory(rng: np.random.Generator, pinned: bool) -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    np.save("data.npy", rng.normal(size=(9, 2)))
    with (
        ours.ModelFactoryMM(model.u, ROWS, DIM, CPUPinn=pinned) as rows,
        ours.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "u", CPUPinn=pinned) as state,
        ours.DataGadgetMM("data.npy", CPUPinn=pinned) as gadget,
        ours.COMMM(ROWS, CPUPinn=pinned) as counts,
    ):
        rows.zerosInit()
        state.optInit()
        gadget.gadgetInit()
        counts.comInit()
        counts.addCounts([1], [2])
        step([rows, state], [3], optimizer, model.u.weight.sum)
        assert rows.getNumpyVersion()[3].all()
        assert counts.CUPYmemmap[1, 2] == 1


def test_memory_mapped_rows_are_on_the_disk_and_nothing_else_is() -> None:
    rows = ours.ModelFactoryMM(torch.nn.Embedding(1, DIM), ROWS, DIM, budget=Budget(host_rows=4))
    rows.zerosInit()
    rows.beforeForwardPass(np.arange(ROWS))
    rows.model_variable.weight.data += 5
    rows.afterOptimizerStep(np.arange(ROWS))
    rows.commit()
    with tierstore.open("variable") as reader:
        assert (reader["rows"].read(np.arange(ROWS)) == 5).all()
    rows.close()
    assert os.listdir() == ["variable"]


@pytest.mark.parametrize("name", ["ModelFactory", "ModelFactoryMM"])
@pytest.mark.parametrize("initializer", ["uniformDistributionInit", "normalDistributionInit"])
def test_no_row_is_left_zero(name: str, initializer: str) -> None:
    """The middle of tables above 100,000 rows was."""
    with getattr(ours, name)(torch.nn.Embedding(1, 2), 150_000, 2) as rows:
        getattr(rows, initializer)(1, 2)
        assert (rows.getNumpyVersion() != 0).all()


def test_memory_mapped_classes_keep_types_and_every_state() -> None:
    model = Model().double()
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    rows = ours.ModelFactoryMM(model.u, ROWS, DIM, datatype="float64")
    state = ours.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "u", dtype="float64")
    rows.zerosInit()
    state.optInit()
    step([rows, state], [3], optimizer, lambda: (model.u.weight - 1).pow(2).sum())
    assert rows.getNumpyVersion().dtype == np.float64
    rows.close()
    state.close()
    state.reopen()
    assert [array[3].any() for array in state.getNumpyVersion()] == [True, True, True]
    state.close()


# -- memory and the GPU


def test_cupys_allocator_is_left_alone() -> None:
    for path in [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.cu")]:
        assert "set_allocator" not in path.read_text()


@pytest.mark.slow
def test_filling_a_table_needs_no_second_one() -> None:
    rows = ours.ModelFactory(torch.nn.Embedding(1, 32), 400_000, 32)
    np.save("rows.npy", np.ones((400_000, 32), np.float32))
    tracemalloc.start()
    rows.uniformDistributionInit(0, 1)
    rows.loadCupy("rows.npy")
    rows.saveCupy("saved.npy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000 * 32 * 4 / 2
    rows.close()


def test_nothing_waits_for_the_whole_device(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: 1 / 0)
    rows = place.model(torch.nn.Embedding(1, DIM))
    rows.zerosInit()
    optimizer = torch.optim.SGD(rows.model_variable.parameters(), 1.0)
    step([rows], [1, 2], optimizer, rows.model_variable.weight.sum)
    assert (rows.table.read([1, 2]) == -1).all()


@pytest.mark.slow
def test_cupy_is_not_needed_and_nothing_prints() -> None:
    program = "import sys, tierstore.speedtorch; assert 'cupy' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# -- optimizers


def test_rprop_begins_with_the_first_step_and_keeps_step_sizes_by_row() -> None:
    model = Model()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    with (
        ours.ModelFactory(model.u, ROWS, DIM) as rows,
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u") as state,
    ):
        assert state.optVarList == ["prev", "step_size"]
        rows.zerosInit()
        state.optInit()
        for _ in range(3):
            step([rows, state], [5], optimizer, model.u.weight.sum)
        step([rows, state], [6], optimizer, model.u.weight.sum)
        np.testing.assert_allclose(rows.getNumpyVersion()[6], -0.1)
        np.testing.assert_allclose(rows.getNumpyVersion()[5], -(0.1 + 0.12 + 0.144), rtol=1e-6)
        assert state.getNumpyVersion()[1][7] == pytest.approx(0.1)


def test_two_factories_on_one_optimizer() -> None:
    for optimizer_class in (torch.optim.ASGD, torch.optim.Adam):
        model = Model()
        optimizer = optimizer_class(model.parameters())
        states = [ours.OptimizerFactory(optimizer, ROWS, DIM, model, key) for key in ("u", "v")]
        for state in states:
            state.optInit()
            state.beforeForwardPass([1, 2])
            assert state.optVarList
            state.close()


def test_momentum_stays_with_its_rows() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with (
        ours.ModelFactory(model.u, ROWS, DIM) as rows,
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u") as state,
    ):
        rows.zerosInit()
        state.optInit()
        step([rows, state], [1, 2], optimizer, model.u.weight.sum)
        step([rows, state], [3, 4], optimizer, lambda: 0 * model.u.weight.sum())
        assert not rows.getNumpyVersion()[[3, 4]].any()
        step([rows, state], [1], optimizer, lambda: 0 * model.u.weight.sum())
        np.testing.assert_allclose(rows.getNumpyVersion()[1], -0.1 - 0.09)


def test_a_row_that_comes_late_steps_as_with_sparse_adam() -> None:
    """The number of steps is the optimizer's, for all rows alike: scripts count on it."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    with (
        ours.ModelFactory(model.u, ROWS, DIM) as rows,
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u") as state,
    ):
        rows.zerosInit()
        state.optInit()
        state.beforeForwardPass([1])
        optimizer.state[model.u.weight]["step"] = torch.tensor(1e4)
        step([rows, state], [1], optimizer, model.u.weight.sum)
        np.testing.assert_allclose(rows.getNumpyVersion()[1], -0.00316, rtol=0.01)


# -- rows that come more than once


@pytest.mark.variants(9)
@pytest.mark.parametrize(("policy", "moved"), [("sum", 6), ("mean", 2), ("last", 3)])
@pytest.mark.parametrize("sparse", [False, True])
def test_no_update_of_a_row_is_lost(place: Place, policy: str, moved: float, sparse: bool) -> None:
    module = torch.nn.Embedding(1, DIM, sparse=sparse)
    rows = place.model(module, duplicates=policy)
    rows.zerosInit()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    weights = torch.tensor([1.0, 2.0, 3.0, 5.0])[:, None]
    with pytest.warns(UserWarning, match=r"50\.0% of the 4 rows") as caught:
        for _ in range(2):
            step(
                [rows],
                [8, 8, 8, 1],
                optimizer,
                lambda: (looked_up(module, 4) * weights.to(module.weight.device)).sum(),
            )
    assert len([each for each in caught if "copies" in str(each.message)]) == 1
    found = rows.getNumpyVersion()
    assert (found[8] == -2 * moved).all()
    assert (found[1] == -10).all()
    assert not np.delete(found, [1, 8], 0).any()


def test_sparse_gradients_of_part_of_the_batch() -> None:
    """Rows of the batch that the model did not look up are not touched, their copies are."""
    module = torch.nn.Embedding(1, DIM, sparse=True)
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
    model = torch.nn.ModuleDict({"u": module})
    with (
        ours.ModelFactory(module, ROWS, DIM) as rows,
        ours.OptimizerFactory(optimizer, ROWS, DIM, model, "u") as state,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        rows.zerosInit()
        state.optInit()
        step([rows, state], [4, 5, 4], optimizer, lambda: module(torch.tensor([0])).sum())
        assert rows.getNumpyVersion()[4].all()
        assert not rows.getNumpyVersion()[5].any()
        assert state.getNumpyVersion()[0].any(1).nonzero()[0].tolist() == [4]


# -- torch today


def test_a_batch_of_another_size_while_the_last_loss_is_alive(place: Place) -> None:
    module = torch.nn.Embedding(1, DIM)
    rows = place.model(module)
    rows.zerosInit()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    identity, kept = id(module.weight), []
    for count in (16, 8, 8, 30):
        rows.beforeForwardPass(range(count))
        loss = looked_up(module, count).sum()
        kept.append(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.afterOptimizerStep(range(count))
    assert id(module.weight) == identity
    np.testing.assert_array_equal(rows.getNumpyVersion()[[0, 10, 20, 31], 0], [-4, -2, -1, 0])


def test_hooks_of_others_stay(place: Place) -> None:
    module = torch.nn.Embedding(1, DIM)
    seen: list[int] = []
    module.weight.register_hook(lambda gradient: seen.append(len(gradient)))
    rows = place.model(module)
    rows.zerosInit()
    for count in (3, 3, 7):
        rows.beforeForwardPass(range(count))
        module.weight.sum().backward()
        module.weight.grad = None
    assert seen == [3, 3, 7]


def test_names_of_types_for_torchs_classes_too() -> None:
    for family in ("GPUPytorch", "CPUPytorch", "Pytorch"):
        make = getattr(ours, f"{family}ModelFactory")
        for dtype in ("float32", torch.float, np.float32):
            with make(torch.nn.Embedding(1, DIM), ROWS, DIM, dtype) as rows:
                rows.zerosInit()
                assert rows.getNumpyVersion().dtype == np.float32


def test_nothing_is_deprecated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ours.ModelFactory(torch.nn.Embedding(1, DIM), ROWS, DIM) as rows:
            rows.normalDistributionInit(0, 1)
            rows.beforeForwardPass(np.array([[1, 2]]), np.array([[3]]))
            rows.afterOptimizerStep(np.array([[1, 2]]), np.array([[3]]))
