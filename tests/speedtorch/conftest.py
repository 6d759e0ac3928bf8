"""What the tests of SpeedTorch's classes share: the original, places to keep rows, and models."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tierstore.speedtorch as ours  # noqa: E402
from tests.gpu.emulator import EmulatedDevice  # noqa: E402

ROWS, DIM = 150, 6


class Model(torch.nn.Module):
    """Two embeddings and their products, as both notebooks have it."""

    def __init__(self, rows: int = 1, dim: int = DIM, *, sparse: bool = False) -> None:
        super().__init__()
        self.u = torch.nn.Embedding(rows, dim, sparse=sparse)
        self.v = torch.nn.Embedding(rows, dim, sparse=sparse)

    def forward(self, left: Any, right: Any) -> Any:
        return (self.u(left) * self.v(right)).sum(-1)


@pytest.fixture(scope="session")
def original() -> Any:
    """SpeedTorch 0.1.6, if it is installed, with what its CPU classes need of a GPU stubbed."""
    if importlib.util.find_spec("SpeedTorch") is None:
        pytest.skip("SpeedTorch 0.1.6 is not installed")
    patch = pytest.MonkeyPatch()
    if importlib.util.find_spec("cupy") is None:
        cupy: Any = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(memory=types.SimpleNamespace(BaseMemory=object))
        patch.setitem(sys.modules, "cupy", cupy)
    module = importlib.import_module("SpeedTorch")
    patch.undo()
    return module


@pytest.fixture
def on_cpu(original: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The original, fit to run on the CPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return original


class Place:
    """Makes factories whose rows are in one kind of place, and closes them."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind.removeprefix("cuda ")
        emulated = kind in ("pinned", "resident")
        self.on_gpu = kind != self.kind
        self.device: Any = "cuda:0" if self.on_gpu else EmulatedDevice() if emulated else "cpu"
        self._path = path
        self._made: list[Any] = []

    def model(self, module: Any, rows: int = ROWS, dim: int = DIM, **options: Any) -> Any:
        return self._keep("ModelFactory", (module, rows, dim), options)

    def optimizer(
        self, optimizer: Any, model: Any, name: str, rows: int = ROWS, dim: int = DIM
    ) -> Any:
        return self._keep("OptimizerFactory", (optimizer, rows, dim, model, name), {})

    def gadget(self, source: Any) -> Any:
        return self._keep("DataGadget", (source,), {})

    def _keep(self, name: str, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
        options["device"] = self.device
        if self.kind == "disk":
            name += "MM"
            options["diskname"] = str(self._path / f"{len(self._made)}.tier")
        else:
            options["CPUPinn"] = self.kind == "pinned"
        self._made.append(getattr(ours, name)(*given, **options))
        return self._made[-1]

    def close(self) -> None:
        for each in self._made:
            each.close()


PLACES = ["cpu", "pinned", "resident", "disk"]
ON_GPU = [pytest.param(f"cuda {kind}", marks=pytest.mark.gpu) for kind in PLACES[1:]]


@pytest.fixture(params=[*PLACES, *ON_GPU])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each kind of place for rows; those on a GPU are on an emulated one and on a real one."""
    if request.param in ("pinned", "resident") and shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    here = Place(request.param, tmp_path)
    yield here
    here.close()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Use one thread: for small tensors, others only cost time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not about a GPU does the same where there is one."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
