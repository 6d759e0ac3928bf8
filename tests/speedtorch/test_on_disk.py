"""The MM classes are a disk tier: rows persist, and memory holds as many as it may."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
import tierstore.speedtorch as ours
from tests.speedtorch.conftest import DIM, ROWS, Model
from tierstore import Budget
from tierstore.errors import ClosedError, ExistsError, InvalidInputError, NotAStoreError
from tierstore.speedtorch.base import as_numpy

torch = pytest.importorskip("torch")

SOME = Budget(host_rows=10)
OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {"lr": 0.05}),
    "dampened SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
}


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Training:
    """A model, an optimizer and its factories on disk; goes on with them where they are there."""

    def __init__(self, name: str) -> None:
        optimizer_class, options = OPTIMIZERS[name]
        self.model = Model()
        self.optimizer = optimizer_class(self.model.parameters(), **options)
        self.rows = ours.ModelFactoryMM(self.model.u, ROWS, DIM, "variable", budget=SOME)
        self.state = ours.OptimizerFactoryMM(
            self.optimizer, ROWS, DIM, self.model, "u", budget=SOME
        )
        if Path("variable").exists():
            self.rows.reopen()
            self.state.reopen()
        else:
            self.rows.normalDistributionInit(0, 1)
            self.state.optInit()

    def run(self, batches: list[Any]) -> None:
        for ids in batches:
            for each in (self.rows, self.state):
                each.beforeForwardPass(ids)
            self.optimizer.zero_grad()
            (self.model.u(torch.arange(len(ids))) - 1).pow(2).sum().backward()
            self.optimizer.step()
            for each in (self.rows, self.state):
                each.afterOptimizerStep(ids)

    def close(self) -> None:
        self.rows.close()
        self.state.close()


@pytest.mark.variants(1)
@pytest.mark.filterwarnings("ignore:.*are copies of others")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_going_on_is_as_if_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, name: str
) -> None:
    batches = [rng.integers(0, ROWS, 25) for _ in range(6)]
    found = []
    for where, parts in (("whole", [batches]), ("halves", [batches[:3], batches[3:]])):
        (tmp_path / where).mkdir()
        monkeypatch.chdir(tmp_path / where)
        torch.manual_seed(0)
        for part in parts:
            training = Training(name)
            training.run(part)
            values = training.rows.getNumpyVersion()
            training.close()
        found.append(values)
    np.testing.assert_array_equal(found[0], found[1])


def test_init_makes_a_store_and_refuses_one_that_is_there() -> None:
    module = torch.nn.Embedding(1, DIM)
    rows = ours.ModelFactoryMM(module, ROWS, DIM)
    with pytest.raises(NotAStoreError):
        rows.reopen()
    rows.normalDistributionInit(0, 1)
    values = rows.getCupyMM()
    rows.close()
    with pytest.raises(ExistsError, match="reopen"):
        rows.zerosInit()
    for rows_, dim, dtype in ((ROWS + 1, DIM, "float32"), (ROWS, 3, "float32"), (ROWS, DIM, "f8")):
        other = ours.ModelFactoryMM(module, rows_, dim, datatype=np.dtype(dtype))
        with pytest.raises(InvalidInputError, match=f"expected {rows_} rows, weight {dim}"):
            other.reopen()
    rows.reopen()
    np.testing.assert_array_equal(as_numpy(rows.CUPYmemmap), as_numpy(values))
    rows.zerosInit()
    assert not rows.getNumpyVersion().any()
    with tierstore.open("variable") as store:
        assert store.version == 3
    rows.store.fold()
    rows.close()
    assert not np.load("variable/rows/" + _generation() + "/rows.npy", mmap_mode="r").any()


def _generation() -> str:
    return next(path.name for path in Path("variable/rows").iterdir())


def test_stores_have_the_names_that_files_had(rng: np.random.Generator) -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    np.save("data.npy", rng.normal(size=(5, 2)))
    made = [
        ours.ModelFactoryMM(model.u, ROWS, DIM),
        ours.ModelFactoryMM(model.v, ROWS, DIM, "v rows"),
        ours.OptimizerFactoryMM(optimizer, ROWS, DIM, model, "u"),
        ours.COMMM(ROWS),
        ours.DataGadgetMM("data.npy"),
    ]
    for each, init in zip(
        made, ("zerosInit", "zerosInit", "optInit", "comInit", "gadgetInit"), strict=True
    ):
        getattr(each, init)()
    names = ["variable", "v rows", "uAdagrad", "COM", "data.npy.tier"]
    assert [each.diskname for each in made] == names
    for each in made:
        each.commit()
        assert each.store.verify().ok
        each.close()
    for name in names:
        tierstore.open(name).close()
    with pytest.raises(InvalidInputError, match="diskname"):
        ours.DataGadgetMM(np.ones(3))


def test_an_array_on_disk_keeps_what_was_inserted(rng: np.random.Generator) -> None:
    array = rng.integers(0, 100, (300, 3))
    np.save("data.npy", array)
    gadget = ours.DataGadgetMM("data.npy", budget=SOME)
    gadget.gadgetInit()
    order = rng.permutation(300)
    gadget.insertData(torch.from_numpy(array[order] * 2), order)
    np.testing.assert_array_equal(gadget.getData([1], [[2, 3]]).numpy(), array[[1, 2, 3]] * 2)
    gadget.close()
    again = ours.DataGadgetMM("data.npy")
    again.reopen()
    np.testing.assert_array_equal(again.getNumpyVersion(), array * 2)
    np.testing.assert_array_equal(np.load("data.npy"), array)
    again.close()
    wrong = ours.COMMM(300, "data.npy.tier")
    with pytest.raises(InvalidInputError, match="does not hold counts"):
        wrong.reopen()
    model = ours.ModelFactoryMM(torch.nn.Embedding(1, DIM), ROWS, DIM, "m")
    model.zerosInit()
    model.close()
    gadget = ours.DataGadgetMM(array, diskname="m")
    with pytest.raises(InvalidInputError, match="does not hold an array"):
        gadget.reopen()


def test_memory_holds_what_it_may(rng: np.random.Generator) -> None:
    rows = ours.ModelFactoryMM(torch.nn.Embedding(1, DIM), 5000, DIM, budget=Budget(host="64"))
    with pytest.raises(tierstore.errors.CapacityError):
        rows.zerosInit()
    rows.close()
    rows = ours.ModelFactoryMM(
        torch.nn.Embedding(1, DIM), 5000, DIM, "other", budget=Budget(host="64KiB")
    )
    rows.normalDistributionInit(0, 1)
    (tier,) = rows.store.info().tables[0].tiers
    assert tier.nbytes <= 64 << 10
    expected = np.array(rows.getNumpyVersion())
    for _ in range(10):
        ids = rng.permutation(5000)[:700]
        rows.beforeForwardPass(ids)
        rows.model_variable.weight.data *= 2
        rows.afterOptimizerStep(ids)
        expected[ids] *= 2
    np.testing.assert_array_equal(rows.getNumpyVersion(), expected)
    assert rows.table.stats()["host"].write_backs
    rows.close()


def test_what_is_dropped_is_committed_too() -> None:
    rows = ours.ModelFactoryMM(torch.nn.Embedding(1, DIM), ROWS, DIM)
    rows.zerosInit()
    rows.beforeForwardPass([5])
    rows.model_variable.weight.data += 3
    rows.afterOptimizerStep([5])
    del rows
    gc.collect()
    with tierstore.open("variable") as store:
        assert (store["rows"].read([5]) == 3).all()


PROGRAM = """
import sys, torch, tierstore.speedtorch as SpeedTorch
model = torch.nn.ModuleDict({"u": torch.nn.Embedding(1, 4)})
optimizer = torch.optim.Adam(model.parameters())
rows = SpeedTorch.ModelFactoryMM(model["u"], 100, 4)
state = SpeedTorch.OptimizerFactoryMM(optimizer, 100, 4, model, "u")
rows.zerosInit()
state.optInit()
for each in (rows, state):
    each.beforeForwardPass([7, 9])
model["u"](torch.arange(2)).sum().backward()
optimizer.step()
for each in (rows, state):
    each.afterOptimizerStep([7, 9])
if sys.argv[1:]:
    raise SystemExit("an error in the script")
"""


@pytest.mark.parametrize("arguments", [[], ["fail"]])
@pytest.mark.slow
@pytest.mark.nightly("arguments1")
def test_the_end_of_a_script_commits(arguments: list[str]) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *arguments]
    without = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=without)
    assert done.returncode == bool(arguments)
    assert done.stderr == ("an error in the script\n" if arguments else "")
    with tierstore.open("variable") as store:
        assert (store["rows"].read([7, 9]) != 0).all()
        assert not store["rows"].read([8]).any()
    with tierstore.open("uAdam") as store:
        assert store["rows"].scalars["shared"]["step"] == 1


def test_a_closed_factory_says_so() -> None:
    for name, given in (("ModelFactoryMM", {}), ("ModelFactory", {})):
        rows = getattr(ours, name)(torch.nn.Embedding(1, DIM), ROWS, DIM, **given)
        rows.zerosInit()
        table = rows.table
        with rows:
            rows.beforeForwardPass([1])
        rows.close()
        with pytest.raises(InvalidInputError, match="no rows yet"):
            rows.afterOptimizerStep([1])
        with pytest.raises(ClosedError):
            table.read([1])
