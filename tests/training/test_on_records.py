"""Steps on records in host memory, against torch's own code on copies of the rows."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests import inside
from tests.pairs import pairs
from tierstore import _core
from tierstore._table.host import HostLease
from tierstore.nn import TieredEmbedding
from tierstore.optim import RowWiseAdagrad, TieredOptimizer, on_host

ROWS = 3000
ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
SGD, ADAGRAD = torch.optim.SGD, torch.optim.Adagrad


def trained(path: Path, kind: Any, spec: Any, ids: Any, padding: int | None, **options: Any) -> Any:
    """Return every field after steps, and how many of them were taken in place."""
    slots, draw = options.pop("slots", ROWS), options.pop("draw", torch.randn)
    budget = tierstore.Budget(host_rows=slots)
    taken, update = [], HostLease.update
    rng = torch.Generator().manual_seed(1)
    with tierstore.create(path, {"t": spec}, budget=budget, device="cpu") as store:
        emb = TieredEmbedding(store["t"], padding_idx=padding)
        opt = TieredOptimizer(kind, [emb], lr=0.05, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                HostLease,
                "update",
                lambda *given: taken.append(update(*given)) or taken[-1],
            )
            for batch in ids:
                opt.zero_grad()
                given = draw(len(batch), spec.dim, generator=rng, dtype=torch.float64)
                emb(torch.from_numpy(batch)).backward(given.to(emb._dtype))
                opt.step()
        table = store["t"]
        everything = table.read(np.arange(ROWS), [name for name, _ in table.spec.layout.fields])
        counters = store.stats()
        store.rollback()
        return everything, sum(taken), counters


@pytest.mark.variants(4, 12)
@pytest.mark.parametrize("kind", [ADAM, RowWiseAdagrad, SGD])
@pytest.mark.parametrize("padding", [None, 5])
@pytest.mark.parametrize(("cores", "dim"), [(1, 16), (4, 16), (4, 72)])
@pytest.mark.slow("72")
def test_bits_do_not_depend_on_the_threads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    padding: int | None,
    cores: int,
    dim: int,
) -> None:
    """Of the pool that changes the records, nor on how many of them are changed at a time."""
    spec = tierstore.TableSpec(ROWS, dim, init=tierstore.normal(std=0.1, seed=3))
    rng = np.random.default_rng(5)
    ids = [rng.integers(0, ROWS, 4000) for _ in range(4)]
    alone = trained(tmp_path / "alone", kind, spec, ids, padding)
    monkeypatch.setattr(on_host, "_ALONE", 1000)
    monkeypatch.setattr(on_host, "threads_of_core", lambda: cores)
    runs, end = list[int](), _core.end_step
    monkeypatch.setattr(_core, "end_step", lambda *given: (runs.append(1), end(*given)))
    with inside.core_threads(cores):
        parted = trained(tmp_path / "parted", kind, spec, ids, padding)
    assert len(runs) > 2 * len(ids)
    assert alone[1] == parted[1] == len(ids)
    for name, values in alone[0].items():
        assert values.tobytes() == parted[0][name].tobytes()
    assert alone[2] == parted[2]


@pytest.mark.slow
def test_a_torch_that_rounds_otherwise_takes_its_own_steps() -> None:
    """As where it is told not to use what this processor has."""
    types = torch.float32, torch.float64
    asked = f"from tests import inside; print(*map(inside.rounds_as_torch(), {types}))"
    command, env = [sys.executable, "-c", f"import torch; {asked}"], os.environ.copy()
    env["ATEN_CPU_CAPABILITY"] = "default"
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
    assert [*map(inside.rounds_as_torch(), types)] == [bool(_core.FUSES)] * 2


def test_a_processor_that_does_not_multiply_and_add_at_once_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tierstore.TableSpec(ROWS, 16, init=tierstore.normal(std=0.1, seed=3))
    ids = [np.random.default_rng(5).integers(0, ROWS, 400)]
    with_it, taken, _ = trained(tmp_path / "with", ADAM, spec, ids, None)
    monkeypatch.setattr(_core, "FUSES", 0)
    inside.rounds_as_torch().cache_clear()
    try:
        without, none, _ = trained(tmp_path / "without", ADAM, spec, ids, None)
    finally:
        monkeypatch.undo()
        inside.rounds_as_torch().cache_clear()
    assert (taken, none) == (1, 0)
    for name, values in with_it.items():
        assert values.tobytes() == without[name].tobytes()


def test_a_step_in_inference_mode_leaves_nothing_that_others_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tierstore.TableSpec(ROWS, 16, init=tierstore.normal(std=0.1, seed=3))
    ids = [np.random.default_rng(5).integers(0, ROWS, 4000)] * 3
    plain = trained(tmp_path / "plain", ADAM, spec, ids, None)
    modes, step = itertools.cycle([True, False]), TieredOptimizer.step

    def in_turns(optimizer: Any) -> None:
        with torch.inference_mode(next(modes)):
            step(optimizer)

    monkeypatch.setattr(TieredOptimizer, "step", in_turns)
    mixed = trained(tmp_path / "mixed", ADAM, spec, ids, None)
    for name, values in plain[0].items():
        assert values.tobytes() == mixed[0][name].tobytes()


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (ADAM, {}),
    "decay": (ADAM, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "maximize": (ADAM, {"maximize": True, "eps": 1e-3}),
    "adamw": (ADAMW, {"weight_decay": 0.1}),
    "one by one": (ADAMW, {"foreach": False}),
    "averages": (ADAM, {"ema": 0.9}),
    "sgd": (SGD, {}),
    "sgd decay": (SGD, {"weight_decay": 0.1, "maximize": True}),
    "momentum": (SGD, {"momentum": 0.9, "dampening": 0.3}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adagrad": (ADAGRAD, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adagrad decay": (ADAGRAD, {"weight_decay": 0.1, "maximize": True, "eps": 1e-3}),
    "row-wise": (RowWiseAdagrad, {"initial_accumulator_value": 0.25, "lr_decay": 0.1}),
    "row-wise decay": (RowWiseAdagrad, {"weight_decay": 0.1, "maximize": True}),
}
SIGNS = torch.tensor([0.0, -0.0, 1.5, -2.0], dtype=torch.float64)


@pytest.mark.variants(20, 40)
@pairs(dim=[1, 3, 16, 33, 128], variant=list(VARIANTS), padding=[None, 5])
def test_bits_are_those_of_steps_on_copies(
    tmp_path: Path, dim: int, variant: str, padding: int | None
) -> None:
    kind, options = VARIANTS[variant]
    rng = np.random.default_rng([dim, len(options)])
    ids = [rng.integers(0, ROWS // 2, count) for count in (1, 40, 2500, 40)]
    ids[1][:3] = 5
    dtype: Any = "float64" if dim == 3 else "float32"
    spec = tierstore.TableSpec(ROWS, dim, dtype=dtype, init=tierstore.normal(seed=1))
    run = (kind, spec, ids, padding)
    here, taken, counted = trained(tmp_path / "a", *run, **options)
    copies, none, counted_too = trained(tmp_path / "b", *run, in_place=False, **options)
    assert taken == len(ids) and none == 0
    for name in copies:
        assert here[name].tobytes() == copies[name].tobytes(), name
    if padding is None and "ema" not in options:  # those read rows once more
        assert counted == counted_too


def signs(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers, half of them zeros of either sign."""
    return SIGNS[torch.randint(4, shape, generator=generator)].to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("beta", [0.0, 1e-9])
@pytest.mark.parametrize("options", [{}, {"maximize": True}])
def test_zeros_have_the_signs_of_steps_on_copies(
    tmp_path: Path, dtype: Any, beta: float, options: Any
) -> None:
    """Also where the average of gradients is the gradient itself, as with a `beta` of 0."""
    spec = tierstore.TableSpec(ROWS, 3, dtype=dtype, init=tierstore.normal(seed=1))
    ids = [np.random.default_rng(2).permutation(40) for _ in range(3)]
    runs = []
    for in_place in (True, False):
        given = {"betas": (beta, 0.9), "in_place": in_place, "draw": signs, **options}
        everything, *_ = trained(tmp_path / str(in_place), ADAM, spec, ids, None, **given)
        runs.append(everything)
    (average,) = [name for name in runs[1] if name.endswith("exp_avg")]
    assert (runs[1][average][:40] == 0).any()
    for name in runs[0]:
        assert runs[0][name].tobytes() == runs[1][name].tobytes(), name


def test_infinities_raise_no_warnings_of_numpy(tmp_path: Path) -> None:
    spec = tierstore.TableSpec(ROWS, 4, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "s", {"t": spec}, device="cpu") as store:
        emb = TieredEmbedding(store["t"])
        opt = TieredOptimizer(ADAM, [emb], betas=(0.9, 0.0))
        for _ in range(2):
            emb(torch.arange(3)).backward(torch.full((3, 4), torch.inf))
            with np.errstate(all="raise"):
                opt.step()
            opt.zero_grad()
        assert np.isnan(store["t"].read(np.arange(3))).all()
        store.rollback()


@pytest.mark.parametrize("slots", [0, 100, ROWS - 1])
def test_rows_without_a_slot_are_left_to_torch(tmp_path: Path, slots: int) -> None:
    rng = np.random.default_rng(slots)
    ids = [rng.integers(0, ROWS, count) for count in (20, 800, 20)]
    spec = tierstore.TableSpec(ROWS, 16, init=tierstore.normal(seed=1))
    here, taken, _ = trained(tmp_path / "a", ADAM, spec, ids, None, slots=slots)
    copies, *_ = trained(tmp_path / "b", ADAM, spec, ids, None, in_place=False)
    assert taken == {0: 0, 100: 2, ROWS - 1: 3}[slots]
    for name in copies:
        assert here[name].tobytes() == copies[name].tobytes(), name


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"foreach": True}, {"fused": True}])
def test_options_of_their_own_are_left_to_torch(tmp_path: Path, options: dict[str, Any]) -> None:
    spec = tierstore.TableSpec(ROWS, 16, init=tierstore.normal(seed=1))
    _, taken, _ = trained(tmp_path / "a", ADAM, spec, [np.arange(9)], None, **options)
    assert taken == 0
