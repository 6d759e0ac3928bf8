"""Every class saves and loads, in NumPy's and torch's files, and shows its rows as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore.speedtorch as ours
from tests.speedtorch.conftest import DIM, ROWS, Model
from tierstore.errors import FormatError, InvalidInputError
from tierstore.speedtorch.base import as_numpy

torch = pytest.importorskip("torch")

FAMILIES = ["{}", "{}MM", "GPUPytorch{}", "CPUPytorch{}", "Pytorch{}"]
ATTRIBUTES = {
    "{}": ("CUPYcorpus", "CUPYcorpi"),
    "{}MM": ("CUPYmemmap", "CUPYmemmap"),
    "GPUPytorch{}": ("pytorchGPUVar", "pytorchGPUVar"),
    "CPUPytorch{}": ("pytorchCPUVar", "pytorchCPUVar"),
    "Pytorch{}": ("pytorchGPUVar", "pytorchGPUVar"),
}

every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_factory(family: str, **options: Any) -> Any:
    name = family.format("ModelFactory")
    return getattr(ours, name)(torch.nn.Embedding(1, DIM), ROWS, DIM, **options)


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        np.testing.assert_array_equal(as_numpy(found), expected)


@every_family
def test_model_factories(family: str) -> None:
    with model_factory(family) as rows:
        rows.normalDistributionInit(0, 1)
        expected = np.array(rows.getNumpyVersion())
        assert expected.std() > 0.5
        for each in (rows.getCupyVar(), rows.getTorchVar(), getattr(rows, ATTRIBUTES[family][0])):
            same(each, expected)
        rows.saveCupy("rows")
        rows.saveTorch("rows.pt")
        np.testing.assert_array_equal(np.load("rows.npy"), expected)
        same(torch.load("rows.pt"), expected)
        rows.zerosInit()
        rows.loadCupy("rows.npy")
        same(rows.getNumpyVersion(), expected)
        rows.zerosInit()
        rows.loadTorch("rows.pt")
        same(rows.getNumpyVersion(), expected)
        np.save("rows.npy", expected.astype(np.float64)[::-1])
        rows.loadCupy("rows.npy")
        same(rows.getNumpyVersion(), expected[::-1])


@pytest.mark.variants(1, 3)
@every_family
def test_optimizer_factories(family: str) -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    given = optimizer, ROWS, DIM, model, "u"
    with getattr(ours, family.format("OptimizerFactory"))(*given) as state:
        state.optInit()
        for ids in ([1, 2, 3], [3, 4, 5]):
            state.beforeForwardPass(ids)
            model.u.weight.data = torch.randn(3, DIM)
            model.u.weight.grad = torch.randn(3, DIM)
            optimizer.step()
            state.afterOptimizerStep(ids)
        expected = [np.array(array) for array in state.getNumpyVersion()]
        assert [array.any(1).sum() for array in expected] == [5, 5]
        for each in (state.getCupyVar(), state.getTorchVar()):
            same(each, expected)
        same(getattr(state, ATTRIBUTES[family][1]), expected)
        state.saveCupy("state")
        state.saveTorch("state.pt")
        with np.load("state.npz") as archive:
            assert sorted(archive) == ["exp_avg", "exp_avg_sq", "step"]
            assert archive["step"] == 2
        for load, file in ((state.loadCupy, "state"), (state.loadTorch, "state.pt")):
            state.optInit()
            optimizer.state[model.u.weight]["step"] = torch.tensor(77.0)
            load(file)
            same(state.getNumpyVersion(), expected)
            assert float(optimizer.state[model.u.weight]["step"]) == 2
            state.beforeForwardPass([3, 9])
            same(optimizer.state[model.u.weight]["exp_avg"], expected[0][[3, 9]])


def test_state_of_another_optimizer_is_refused() -> None:
    model = Model()
    adam = torch.optim.Adam(model.parameters())
    adagrad = torch.optim.Adagrad(model.parameters())
    with (
        ours.OptimizerFactory(adam, ROWS, DIM, model, "u") as one,
        ours.OptimizerFactory(adagrad, ROWS, DIM, model, "u") as other,
    ):
        one.optInit()
        other.optInit()
        one.saveCupy("adam.npz")
        with pytest.raises(InvalidInputError, match="not sum"):
            other.loadCupy("adam.npz")
        assert not other.getNumpyVersion()[0].any()


@pytest.mark.parametrize("family", ["{}", "{}MM"])
def test_gadgets(family: str) -> None:
    array = np.arange(24).reshape(4, 3, 2)
    np.save("array.npy", array)
    with getattr(ours, family.format("DataGadget"))("array.npy") as gadget:
        gadget.gadgetInit()
        for each in (gadget.getCupyVar(), gadget.getTorchVar(), gadget.getNumpyVersion()):
            same(each, array)
        gadget.saveCupy("other.npy")
        gadget.saveTorch("other.pt")
        for load, file in ((gadget.loadCupy, "other.npy"), (gadget.loadTorch, "other.pt")):
            gadget.insertData(0, slice(None))
            assert not gadget.getNumpyVersion().any()
            load(file)
            same(gadget.getNumpyVersion(), array)
        np.save("other.npy", np.ones((2, 5), np.float16))
        gadget.loadCupy("other.npy")
        assert gadget.getData([0]).shape == (1, 5)


def test_a_file_that_does_not_fit_changes_nothing() -> None:
    with model_factory("{}") as rows:
        rows.normalDistributionInit(0, 1)
        expected = rows.getNumpyVersion()
        np.save("wide.npy", np.ones((ROWS, DIM + 1)))
        np.save("flat.npy", np.ones(ROWS))
        np.save("whole.npy", np.ones((ROWS, DIM), int))
        Path("text.npy").write_text("text")
        for name in ("wide", "flat", "whole", "text"):
            with pytest.raises((InvalidInputError, FormatError)):
                rows.loadCupy(f"{name}.npy")
        same(rows.getNumpyVersion(), expected)
        with pytest.raises(FileNotFoundError):
            rows.loadCupy("absent.npy")


def test_a_failed_save_leaves_the_file_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with model_factory("{}") as rows:
        rows.normalDistributionInit(0, 1)
        rows.saveCupy("rows.npy")
        before = Path("rows.npy").read_bytes()
        monkeypatch.setattr(type(rows.table), "read", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rows.saveCupy("rows.npy")
    assert Path("rows.npy").read_bytes() == before
    assert [path.name for path in Path().iterdir()] == ["rows.npy"]


def test_half_precision_in_files() -> None:
    with model_factory("{}", datatype=torch.bfloat16) as rows:
        rows.normalDistributionInit(0, 1)
        expected = rows.getNumpyVersion()
        rows.saveCupy("rows.npy")
        assert np.load("rows.npy").dtype == np.float32
        rows.zerosInit()
        rows.loadCupy("rows.npy")
        same(rows.getNumpyVersion(), expected)
        torch.save(torch.tensor(expected).bfloat16(), "rows.pt")
        rows.zerosInit()
        rows.loadTorch("rows.pt")
        same(rows.getNumpyVersion(), expected)
