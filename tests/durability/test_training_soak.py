"""A trainer that runs for hours: memory, descriptors, threads and disk space stay flat.

`make torture SOAK=7200` trains for two hours. Rows 22 and 34 of docs/faults.md.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tierstore
from tests.durability.crash import scratch

torch = pytest.importorskip("torch")

ROWS, DIM, BATCH = 4000, 16, 128
CALLS = 10**6


class Weight(NamedTuple):
    """What a process holds, and its store on the disk."""

    resident: int
    private: int
    descriptors: int
    threads: int
    disk: int


ROOM = Weight(resident=24 << 20, private=12 << 20, descriptors=4, threads=2, disk=4 << 20)
"""By how much the most of a later part may be above the most of the first."""


def weighed(path: Path) -> Weight:
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup}
    return Weight(
        resident=kib["Rss"] << 10,
        private=kib["Anonymous"] << 10,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        disk=sum(each.stat().st_size for each in path.rglob("*") if each.is_file()),
    )


def most(weights: list[Weight]) -> Weight:
    return Weight(*map(max, zip(*weights, strict=True)))


def assert_flat(weights: list[Weight]) -> None:
    """Compare the most of the last half with the most of the second quarter, after warming up."""
    quarter = len(weights) // 4
    before, after = most(weights[quarter : 2 * quarter]), most(weights[2 * quarter :])
    for name, was, now, room in zip(Weight._fields, before, after, ROOM, strict=True):
        assert now <= was + room, f"{name}: {was:,}, then {now:,}, which is more than {room:,} more"


def train(path: Path, seconds: float) -> list[Weight]:
    """Train, commit, fold, look ahead and follow; return what was held, at equal distances."""
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.1, seed=3))
    budget = tierstore.Budget(host_rows=ROWS // 4)
    rng, weights = np.random.default_rng(9), []
    tierstore.create(path, {"t": spec}).close()
    with (
        tierstore.open(path, "r+", budget=budget, device="cpu", keep=3) as store,
        tierstore.open(path, budget=budget, device="cpu") as follows,
    ):
        layer = tierstore.nn.TieredEmbedding(store["t"])
        optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
        begin, step, next_weighing = time.monotonic(), 0, 0.0
        while (now := time.monotonic() - begin) < seconds or len(weights) < 8:
            ids = torch.from_numpy(rng.integers(0, ROWS, BATCH))
            layer(ids).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 5 == 0:
                store.commit(step=step, payload={"step": step, "w": rng.random(100)})
                follows.refresh()
                rows = np.arange(0, ROWS, 7)
                assert np.array_equal(follows["t"].read(rows), store["t"].read(rows))
            if step % 50 == 0:
                store.fold()
            if now >= next_weighing and step % 50 == 0:
                weights.append(weighed(path))
                next_weighing = now + seconds / 40
        store.commit(step=step)
        assert store.verify().ok
    return weights


@pytest.mark.nightly
@pytest.mark.fault(22, 34)
@pytest.mark.slow
def test_a_trainer_holds_no_more_after_seconds() -> None:
    with scratch() as root:
        assert_flat(train(root / "s", 4))


@pytest.mark.torture
def test_a_trainer_holds_no_more_after_hours() -> None:
    with scratch() as root:
        assert_flat(train(root / "s", float(os.environ.get("TIERSTORE_SOAK_SECONDS", 3600))))


def test_what_piles_up_is_seen() -> None:
    flat = [Weight(10 << 20, 5 << 20, 10, 3, 1000)] * 16
    assert_flat(flat)
    for at, room in enumerate(ROOM):
        leaking = [
            Weight(*(n + (room * number // 4 if at == i else 0) for i, n in enumerate(each)))
            for number, each in enumerate(flat)
        ]
        with pytest.raises(AssertionError, match=Weight._fields[at]):
            assert_flat(leaking)


def records() -> dict[str, Any]:
    """Return arrays that functions of the core take, by name."""
    rng = np.random.default_rng(3)
    return {
        "rows": np.arange(5),
        "records": rng.integers(0, 256, (5, 24), np.uint8),
        "sums": rng.integers(0, 2**32, 5, np.uint32),
        "out": np.empty((5, 24), np.uint8),
        "bad": np.empty(5, np.int64),
    }


EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "crc32c": lambda: (bytes(range(200)), 7),
    "sum_rows": lambda: given("rows", "records", "sums"),
    "check_rows": lambda: given("rows", "records", "sums", False, "bad"),
    "copy_rows": lambda: given("records", "rows", "rows", "sums", False, "out", None, "bad"),
}
"""Arguments of each function of the compiled core, by name."""


def given(*names: Any) -> tuple[Any, ...]:
    """Return the arrays of these names, and what is no name as it is."""
    arrays = records()
    return tuple(arrays[each] if isinstance(each, str) else each for each in names)


def exported() -> dict[str, Callable[..., object]]:
    """Return the functions and types of the compiled core; skip where there is none."""
    if importlib.util.find_spec("tierstore._core") is None:
        pytest.skip("tierstore has no compiled core")
    core = importlib.import_module("tierstore._core.compiled")
    found = {
        name: value
        for name, value in vars(core).items()
        if not name.startswith("_") and (inspect.isbuiltin(value) or inspect.isclass(value))
    }
    assert found, "the compiled core has no functions"
    return found


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous"))


def assert_no_leak(call: Callable[[], object], times: int) -> None:
    """Call it often; a leak of two bytes a call is seen."""
    for _ in range(times // 10):
        call()
    before = private_bytes()
    for _ in range(times):
        call()
    assert private_bytes() <= before + max(1 << 20, 2 * times)


def refused(function: Callable[..., object]) -> Callable[[], None]:
    """Return a call that the function refuses, for what its errors leave behind."""

    def call() -> None:
        try:
            function(object(), object(), object(), nonsense=1)
        except (TypeError, ValueError):
            return
        raise AssertionError(f"{function} takes anything")

    return call


@pytest.mark.torture
def test_no_native_function_leaks() -> None:
    functions = exported()
    for function in functions.values():
        assert_no_leak(refused(function), CALLS)
    for name, arguments in EXAMPLES.items():
        assert_no_leak(functools.partial(functions[name], *arguments()), CALLS)
    assert functions.keys() == EXAMPLES.keys(), "each native function needs arguments in EXAMPLES"


@pytest.mark.slow
def test_no_native_function_leaks_at_once() -> None:
    functions = exported()
    for function in functions.values():
        assert_no_leak(refused(function), CALLS // 50)
    for name in functions.keys() & EXAMPLES.keys():
        assert_no_leak(functools.partial(functions[name], *EXAMPLES[name]()), CALLS // 50)


def test_a_leak_is_seen() -> None:
    kept: list[bytes] = []
    with pytest.raises(AssertionError):
        # 100 MB: more than what is free in the heap of a process that has run many other tests.
        assert_no_leak(lambda: kept.append(b"x" * (10_000 + len(kept) % 2)), CALLS // 100)
    kept.clear()
    assert_no_leak(lambda: b"x" * (10_000 + len(kept)), CALLS // 100)
