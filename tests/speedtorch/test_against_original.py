"""The same script gives the same numbers as with SpeedTorch 0.1.6, where that still runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tierstore.speedtorch as ours
from tests.speedtorch.conftest import DIM, ROWS, Model

torch = pytest.importorskip("torch")

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.3}, False),
    "sparse SGD": (torch.optim.SGD, {"lr": 0.3}, True),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.2, "initial_accumulator_value": 0.0}, False),
    "sparse Adagrad": (torch.optim.Adagrad, {"lr": 0.2}, True),
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.05}, True),
}


def train(
    library: Any, name: str, batches: list[Any], start: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Train as the notebooks do, with the classes of a library; return what all rows are then."""
    optimizer_class, given, sparse = OPTIMIZERS[name]
    model = Model(sparse=sparse)
    optimizer = optimizer_class(model.parameters(), **given)
    rows, state = {}, {}
    for key in ("u", "v"):
        rows[key] = library.PytorchModelFactory(
            getattr(model, key), ROWS, DIM, deviceType="cpu", **options
        )
        rows[key].customInit(lambda table, key=key: table.copy_(start[key]))
        if "SGD" not in name:
            state[key] = library.PytorchOptimizerFactory(
                optimizer, ROWS, DIM, model, key, deviceType="cpu"
            )
            state[key].optInit()
    losses = []
    for positives, negatives in batches:
        left, right = rows["u"].variableTransformer(
            len(positives), positives.shape[1], negatives.shape[1]
        )
        swapped = [*rows.values(), *state.values()]
        for each in swapped:
            each.beforeForwardPass(positives, negatives)
        pairs = torch.from_numpy(left), torch.from_numpy(left[:, ::-1].copy())
        loss = (model(*pairs) - 1).pow(2).sum()
        loss = loss + model(torch.from_numpy(right), torch.from_numpy(right)).pow(2).sum()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for each in swapped:
            each.afterOptimizerStep(positives, negatives)
    found = {key: each.pytorchGPUVar.numpy() for key, each in rows.items()}
    for key, each in state.items():
        for position, kept in enumerate(each.optVarList):
            found[f"{key} {kept}"] = each.pytorchGPUVar[position].numpy()
    return {**found, "loss": np.array(losses)}


def batches(rng: np.random.Generator, *, unique: bool) -> list[Any]:
    made = []
    for _ in range(12):
        ids = rng.permutation(ROWS)[:60] if unique else rng.integers(0, ROWS, 60)
        made.append((ids[:20].reshape(10, 2), ids[20:].reshape(10, 4)))
    return made


@pytest.mark.filterwarnings("ignore:.*Sparse invariant")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["sum", "last"])
def test_training_gives_the_same_rows_state_and_losses(
    on_cpu: Any, rng: np.random.Generator, name: str, policy: str
) -> None:
    """Where no row comes twice in a batch, for every policy; with `last` for any batch."""
    given = batches(rng, unique=policy != "last")
    start = {key: torch.randn(ROWS, DIM) for key in ("u", "v")}
    expected = train(on_cpu, name, given, start)
    with pytest.warns(UserWarning, match="copies") if policy == "last" else _nothing():
        found = train(ours, name, given, start, duplicates=policy)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_files_of_either_open_in_the_other(on_cpu: Any, tmp_path: Any) -> None:
    module = torch.nn.Embedding(1, DIM)
    theirs = on_cpu.PytorchModelFactory(module, ROWS, DIM, deviceType="cpu")
    theirs.normalDistributionInit(0, 1)
    theirs.saveTorch(tmp_path / "rows.pt")
    own = ours.PytorchModelFactory(module, ROWS, DIM, deviceType="cpu")
    own.loadTorch(tmp_path / "rows.pt")
    np.testing.assert_array_equal(own.getNumpyVersion(), theirs.pytorchGPUVar.numpy())
    own.customInit(torch.nn.init.uniform_, 2, 3)
    own.saveTorch(tmp_path / "own.pt")
    theirs.loadTorch(tmp_path / "own.pt")
    np.testing.assert_array_equal(own.getNumpyVersion(), theirs.pytorchGPUVar.numpy())
