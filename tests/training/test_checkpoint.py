"""Committing and resuming a training run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore
from tests.training import killed_run
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

REPOSITORY = Path(__file__).parent.parent.parent


def contents(path: Path) -> dict[str, bytes]:
    """Return every field of every table, the scalars and the payload, as bytes."""
    with tierstore.open(path) as store:
        found = {"step": str(store.step).encode()}
        for name, table in store.items():
            found[f"{name}/scalars"] = repr(sorted(table.scalars.items())).encode()
            for field in table.fields:
                found[f"{name}/{field}"] = table.read(np.arange(len(table)), field).tobytes()
        for name, value in store.payload.items():
            if name not in ("model", "tiered"):
                found[f"payload/{name}"] = value.read()
        tiered = store.payload["tiered"].state_dict()["param_groups"]
        found["tiered"] = repr(tiered).encode()
        state = store.payload["model"].state_dict()
        found["model"] = repr(
            [(key, state[key]) for key in sorted(state) if "_extra" not in key]
        ).encode()
        return found


def killed_at(path: Path, steps: int, last: int, *how: str) -> None:
    """Run a training in a process of its own and kill it once it has done step `last`."""
    command = [sys.executable, "-m", "tests.training.killed_run", str(path), str(steps), *how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= last:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("layers", killed_run.LAYERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.nightly("together")
def test_a_run_that_is_killed_goes_on_to_the_bytes_of_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, layers: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or matrix products vary
    killed_run.train(tmp_path / "whole.tier", 24, device, layers)
    killed_at(tmp_path / "killed.tier", 24, 12, device, layers)
    with tierstore.open(tmp_path / "killed.tier") as store:
        assert store.step in (10, 15, 20)
    killed_run.train(tmp_path / "killed.tier", 24, device, layers)
    assert contents(tmp_path / "killed.tier") == contents(tmp_path / "whole.tier")


def test_what_is_committed_comes_back(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "a.tier", {"a": tierstore.TableSpec(3, 2)}) as store:
        model = torch.nn.Linear(3, 2)
        run = tierstore.Checkpoint(store, model=model)
        assert run.resume() == 0
        before = model.weight.detach().clone()
        torch.manual_seed(5)
        np.random.seed(5)
        assert run.commit(12, reader={"epoch": 3, "ids": torch.arange(3)}) == store.version
        drawn = torch.rand(2), np.random.rand(2)
        model.weight.data.zero_()
        assert run.resume() == 12
        assert torch.equal(model.weight, before)
        assert run.extra["reader"]["epoch"] == 3
        assert torch.equal(run.extra["reader"]["ids"], torch.arange(3))
        assert torch.equal(torch.rand(2), drawn[0])
        assert np.array_equal(np.random.rand(2), drawn[1])
        with pytest.raises(InvalidInputError, match="lacks the state of other"):
            tierstore.Checkpoint(store, other=model).resume()


def test_what_it_does_not_take(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "a.tier", {"a": tierstore.TableSpec(3, 2)}) as store:
        with pytest.raises(InvalidTypeError, match="model has no state_dict"):
            tierstore.Checkpoint(store, model=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="random"):
            tierstore.Checkpoint(store, random=torch.nn.Linear(1, 1))
        run = tierstore.Checkpoint(store, model=torch.nn.Linear(1, 1))
        assert run.resume() == 0
        kept = run.commit(4)
        assert run.resume() == 4
        store.commit(step=20)
        with pytest.raises(InvalidInputError, match=rf"step 20 lacks .* model.*it: {kept};"):
            run.resume()
        store.restore(kept)
        assert run.resume() == 4


def test_a_plain_commit_keeps_step_and_state(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "a.tier", {"a": tierstore.TableSpec(3, 2)}) as store:
        model = torch.nn.Linear(3, 2)
        run = tierstore.Checkpoint(store, model=model)
        run.commit(5)
        before = model.weight.detach().clone()
        store["a"].write([1], np.full((1, 2), 3, np.float32))
        for _ in range(4):  # more than are kept
            store.commit()
        model.weight.data.zero_()
        assert run.resume() == 5
        assert torch.equal(model.weight, before)


def test_a_resumed_run_goes_on_with_another_class_of_optimizer(tmp_path: Path) -> None:
    path, spec = tmp_path / "store", {"t": tierstore.TableSpec(9, 8, init=1.0)}

    def model_over(store: tierstore.Store) -> torch.nn.Sequential:
        return torch.nn.Sequential(TieredEmbedding(store["t"]), torch.nn.Linear(8, 1))

    def trained(model: torch.nn.Sequential, opt: TieredOptimizer) -> None:
        model(torch.arange(5)).sum().backward()
        opt.step()

    with tierstore.create(path, spec) as store:
        model = model_over(store)
        opt = TieredOptimizer(torch.optim.Adam, model, lr=0.1)
        trained(model, opt)
        tierstore.Checkpoint(store, model=model, opt=opt).commit(1)
        rows, head = store["t"].read(np.arange(9)), model[1].weight.detach().clone()
    with tierstore.open(path, "r+") as store:
        model = model_over(store)
        opt = TieredOptimizer(torch.optim.Adagrad, model, lr=0.1, reset=True)
        with pytest.raises(InvalidInputError, match=r"leave it out.*reset=True"):
            tierstore.Checkpoint(store, model=model, opt=opt).resume()
        model = model_over(store)
        assert tierstore.Checkpoint(store, model=model).resume() == 1
        opt = TieredOptimizer(torch.optim.Adagrad, model, lr=0.1, reset=True)
        np.testing.assert_array_equal(store["t"].read(np.arange(9)), rows)
        assert torch.equal(model[1].weight, head)
        trained(model, opt)
        tierstore.Checkpoint(store, model=model, opt=opt).commit(2)
    with tierstore.open(path, "r+") as store:
        model = model_over(store)
        opt = TieredOptimizer(torch.optim.Adagrad, model, lr=0.1)
        assert tierstore.Checkpoint(store, model=model, opt=opt).resume() == 2
        assert store["t"].scalars["step"] == 1
