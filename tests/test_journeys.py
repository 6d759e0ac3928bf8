"""How many files and functions of the library one batch passes through.

Counted is what runs in the thread that calls, once everything is warm; rows of 64 bytes, 256 ids.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.distributed.ranks import run, values
from tierstore import distributed

ROWS, DIM = 20_000, 16
HOT = np.arange(256)
SPEC = {"t": tierstore.TableSpec(ROWS, DIM)}
LIBRARY = str(Path(tierstore.__file__).parent)

LIMITS = {
    "a read, a slot for each row": (4, 5),
    "a read of rows in a cache": (5, 6),
    "a read of rows on disk, slots free": (16, 94),
    "a read of rows on disk, the cache full of changed ones": (30, 338),
    "a training step": (15, 83),  # a step on the host has a file of its own
    "a commit": (25, 266),
}
"""Files in which a function runs, and calls. They only fall: lower one with what lowers it, and
where one would rise, look for another shape first."""

OF_RANKS = {
    "a training step on two ranks": (28, 279),
    "a commit of two ranks": (33, 386),
}


def passed(work: Callable[[], object]) -> Counter[str]:
    """Return how many functions of each file of the library run, in this thread."""
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(LIBRARY):
            seen[file.removeprefix(LIBRARY)] += 1

    gc.disable()  # which calls what is to be called when something is gone
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return seen


def not_sampled(work: Callable[[], object]) -> Counter[str]:
    """Return the calls of a batch that is not one of those whose distinct ids are counted."""
    return min((passed(work) for _ in range(8)), key=Counter.total)


def drawn(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, DIM), np.float32)


def training(table: Any) -> Callable[[], None]:
    """Return a step of Adam, which has been taken twice."""
    layer = tierstore.nn.TieredEmbedding(table)
    optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
    ids = torch.from_numpy(HOT)

    def step() -> None:
        layer(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


def with_a_slot_for_each_row(path: Path) -> dict[str, Counter[str]]:
    found = {}
    budget = tierstore.Budget(host_rows=ROWS)
    tierstore.create(path, SPEC).close()
    with tierstore.open(path, "r+", budget=budget, device="cpu") as store:
        table = store["t"]
        table.write(np.arange(ROWS), drawn(ROWS))
        store.commit()
        step = training(table)
        found["a read, a slot for each row"] = not_sampled(lambda: table.read(HOT))
        found["a training step"] = passed(step)
        store.commit(step=1)  # the first of these rows, for which maps grow
        step()
        found["a commit"] = passed(lambda: store.commit(step=2))
    return found


def of_a_cache(path: Path) -> dict[str, Counter[str]]:
    budget = tierstore.Budget(host_rows=ROWS // 2)
    with tierstore.create(path, SPEC, budget=budget, device="cpu") as store:
        table = store["t"]
        table.read(HOT)
        return {"a read of rows in a cache": not_sampled(lambda: table.read(HOT))}


def of_free_slots(path: Path) -> dict[str, Counter[str]]:
    with tierstore.open(path, budget=tierstore.Budget(host_rows=ROWS - 1), device="cpu") as store:
        table = store["t"]
        table.read(HOT)
        places = iter(range(2 * HOT.size, ROWS, HOT.size))
        found = not_sampled(lambda: table.read(HOT + next(places)))
        return {"a read of rows on disk, slots free": found}


def of_a_full_cache(path: Path) -> dict[str, Counter[str]]:
    """Read 1,000 rows, half of them in a delta, while every row in the cache has changed."""
    slots = 2048
    budget = tierstore.Budget(host_rows=slots)
    tierstore.create(path, SPEC).close()
    with tierstore.open(path, "r+", budget=budget, device="cpu") as store:
        table = store["t"]
        table.write(np.arange(0, ROWS, 2), drawn(ROWS // 2))
        store.commit()
        table.write(np.arange(slots), drawn(slots))
        far = np.random.default_rng(0).choice(np.arange(4000, ROWS), 1000, replace=False)
        table.read(np.arange(4))
        found = passed(lambda: table.read(far))
        store.rollback()
    return {"a read of rows on disk, the cache full of changed ones": found}


def of_two_ranks() -> dict[str, Counter[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "d.tier"))
        distributed.create(path, SPEC, partitions=2).close()
        return values(run(2, on_a_rank, path))[0]


def on_a_rank(_: int, path: str) -> dict[str, Counter[str]]:
    budget = tierstore.Budget(host_rows=ROWS)
    with distributed.open(path, "r+", budget=budget, device="cpu") as store:
        step = training(store["t"])
        step()
        store.commit(step=1)
        step()
        return {
            "a training step on two ranks": passed(step),
            "a commit of two ranks": passed(lambda: store.commit(step=2)),
        }


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    path = tmp_path_factory.mktemp("journeys")
    return {
        **with_a_slot_for_each_row(path / "a.tier"),
        **of_free_slots(path / "a.tier"),
        **of_a_cache(path / "b.tier"),
        **of_a_full_cache(path / "c.tier"),
    }


def test_every_journey_is_short(journeys: dict[str, Counter[str]]) -> None:
    assert journeys.keys() == LIMITS.keys()
    for name, seen in journeys.items():
        assert_short(name, seen, LIMITS[name])


@pytest.mark.slow
def test_journeys_of_ranks_are_short() -> None:
    found = of_two_ranks()
    assert found.keys() == OF_RANKS.keys()
    for name, seen in found.items():
        assert_short(name, seen, OF_RANKS[name])


def assert_short(name: str, seen: Counter[str], limit: tuple[int, int]) -> None:
    files, calls = limit
    assert 0 < len(seen) <= files, f"{name}: {len(seen)} files, {seen}"
    assert seen.total() <= calls, f"{name}: {seen.total()} calls, {seen}"
