"""How many files and functions of the library one batch passes through."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tierstore

ROWS = 4000
LIBRARY = str(Path(tierstore.__file__).parent)

LIMITS = {
    "a read of rows in memory": (8, 20),
    "a read of rows on disk": (15, 100),
    "a training step": (14, 90),
    "a commit": (24, 320),
}
"""Files in which a function runs, and calls. Where one grows, look for another shape first."""


def passed(work: Callable[[], object]) -> Counter[str]:
    """Return how many functions of each file of the library run, in this thread."""
    seen: Counter[str] = Counter()

    def note(frame: object, event: str, _: object) -> None:
        file = frame.f_code.co_filename  # type: ignore[attr-defined]
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


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    path = tmp_path_factory.mktemp("journeys") / "a.tier"
    tierstore.create(path, {"t": tierstore.TableSpec(ROWS, 16)}).close()
    hot, found = np.arange(256), {}
    values = np.random.default_rng(0).standard_normal((ROWS, 16), np.float32)
    with tierstore.open(path, "r+", budget=tierstore.Budget(host_rows=ROWS), device="cpu") as store:
        table = store["t"]
        table.write(np.arange(ROWS), values)
        store.commit()
        layer = tierstore.nn.TieredEmbedding(table)
        optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
        ids = torch.from_numpy(hot)

        def step() -> None:
            layer(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        table.read(hot)
        found["a read of rows in memory"] = passed(lambda: table.read(hot))
        found["a training step"] = passed(step)
        found["a commit"] = passed(lambda: store.commit(step=2))
    with tierstore.open(path, "r+", budget=tierstore.Budget(host_rows=512), device="cpu") as store:
        table = store["t"]
        table.read(hot)
        found["a read of rows on disk"] = passed(lambda: table.read(hot + ROWS // 2))
    return found


@pytest.mark.parametrize("name", LIMITS)
def test_a_journey_is_short(name: str, journeys: dict[str, Counter[str]]) -> None:
    files, calls = LIMITS[name]
    seen = journeys[name]
    assert 0 < len(seen) <= files, seen
    assert seen.total() <= calls, seen
