"""A trainer that runs for days: descriptors, memory, deltas and disk space stay bounded.

Rows 22 and 34 of docs/faults.md.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.crash import scratch
from tierstore.budget import Budget

ROWS, DIM, BATCH, RECORD = 3000, 8, 40, 44
MOST_DELTAS = 4 * 64
"""At 64 something is done about them, and it is waited for when twice as many came meanwhile."""

MOST_RECORDS = 5 * ROWS
"""Where nothing can be folded, deltas hold each row a few times."""


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def anonymous_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in rollup if line.startswith("Anonymous"))


def soak(path: Path, commits: int) -> None:
    """Commit beside a reader of version 1 and one that follows; watch what piles up."""
    rng = np.random.default_rng(9)
    first = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    truth = first.copy()
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(first))
    with (
        tierstore.create(path, {"t": spec}, budget=Budget(host_rows=200), keep=2) as store,
        tierstore.open(path, version=1, budget=Budget(host=0)) as stays,
        tierstore.open(path, budget=Budget(host_rows=200)) as follows,
    ):
        mapped, base = mappings(), disk_bytes(path) + (100 << 10)  # manifests and payloads
        warm = min(commits // 3, 5000)
        for step in range(commits):
            ids = rng.integers(0, ROWS, BATCH)
            rows = rng.standard_normal((BATCH, DIM)).astype(np.float32)
            store["t"].write(ids, rows)
            for row, value in zip(ids, rows, strict=True):
                truth[row] = value
            payload = {"model": {"w": truth[:5], "step": step}} if step % 3 == 0 else None
            store.commit(step=step, payload=payload)
            follows.refresh()
            if step % 50 == 49:
                assert np.array_equal(follows["t"].read(np.arange(ROWS)), truth)
                assert np.array_equal(stays["t"].read(np.arange(ROWS)), first)
            if step == warm:
                resident, anonymous, opened = resident_bytes(), anonymous_bytes(), descriptors()
            if step > warm and step % 100 == 0:
                assert descriptors() <= opened + 2, step
                assert resident_bytes() <= resident + (16 << 20), step
                assert anonymous_bytes() <= anonymous + (8 << 20), step
            if step % 100 == 0:
                most = MOST_DELTAS * (BATCH * RECORD + 1000) + 2 * MOST_RECORDS * RECORD
                assert mappings() <= mapped + 2 * 2 * MOST_DELTAS, step  # the writer's, a reader's
                assert len(list((path / "t").rglob("delta-*"))) <= 2 * MOST_DELTAS, step
                assert disk_bytes(path) <= base + 2 * most, step
        stays.close()
        for _ in range(2 * MOST_DELTAS):  # now folds can go on
            store.commit()
            follows.refresh()
        follows.close()
        store.fold()
        assert not list((path / "t").rglob("delta-*"))
        assert np.array_equal(store["t"].read(np.arange(ROWS)), truth)
        assert store.verify().ok


@pytest.mark.fault(22, 34)
@pytest.mark.slow
@pytest.mark.nightly
def test_two_thousand_commits_leave_nothing_behind() -> None:
    with scratch() as root:
        soak(root / "s", 2000)


@pytest.mark.torture
def test_a_hundred_thousand_commits_leave_nothing_behind() -> None:
    with scratch() as root:
        soak(root / "s", 100_000)
