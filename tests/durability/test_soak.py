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
STAY = 200
"""Commits for which a reader stays, and no fold is possible."""

MOST_DELTAS = STAY + 64 + 3
"""Then an automatic fold takes what is more than 64, but for what the kept versions hold."""


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def soak(path: Path, commits: int) -> None:
    """Commit, with a payload now and then, beside a reader that follows; watch what piles up."""
    rng = np.random.default_rng(9)
    truth = np.zeros((ROWS, DIM), np.float32)
    spec = tierstore.TableSpec(ROWS, DIM)
    with (
        tierstore.create(path, {"t": spec}, budget=Budget(host_rows=200), keep=2) as store,
        tierstore.open(path, budget=Budget(host=0)) as following,
    ):
        reader, mapped = following, mappings()
        base = disk_bytes(path) + (100 << 10)  # manifests and payloads
        for step in range(commits):
            ids = rng.integers(0, ROWS, BATCH)
            rows = rng.standard_normal((BATCH, DIM)).astype(np.float32)
            store["t"].write(ids, rows)
            for row, value in zip(ids, rows, strict=True):
                truth[row] = value
            payload = {"model": {"w": truth[:5], "step": step}} if step % 3 == 0 else None
            store.commit(step=step, payload=payload)
            if step % 50 == 49:
                reader.refresh()
                assert np.array_equal(reader["t"].read(np.arange(ROWS)), truth)
            if step % STAY == 150:  # for one commit nobody reads
                reader.close()
                store.commit()
                reader = tierstore.open(path, budget=Budget(host=0))
            if step == 2 * STAY:
                resident, opened = resident_bytes(), descriptors()
            if step > 2 * STAY and step % 100 == 0:
                assert descriptors() <= opened + 2, step
                assert resident_bytes() <= resident + (16 << 20), step
                assert mappings() <= mapped + 2 * MOST_DELTAS, step
                assert len(list((path / "t").rglob("delta-*"))) <= MOST_DELTAS, step
                assert disk_bytes(path) <= base + MOST_DELTAS * (BATCH * RECORD + 1000), step
        reader.close()
        assert np.array_equal(store["t"].read(np.arange(ROWS)), truth)
        assert store.verify().ok


@pytest.mark.fault(22, 34)
def test_a_thousand_commits_leave_nothing_behind() -> None:
    with scratch() as root:
        soak(root / "s", 1000)


@pytest.mark.torture
def test_a_hundred_thousand_commits_leave_nothing_behind() -> None:
    with scratch() as root:
        soak(root / "s", 100_000)
