"""Everything at once in one process, for long: its memory and what it holds do not grow.

Row 33 and 34 of docs/faults.md.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.crash import scratch
from tierstore.budget import Budget

ROWS = {"plain": 20_000, "chunks": 5_000}
DIM, BATCH = 16, 200
SPECS = {
    "plain": tierstore.TableSpec(ROWS["plain"], DIM, init=tierstore.normal(seed=1)),
    "chunks": tierstore.TableSpec(
        ROWS["chunks"], DIM, init=tierstore.normal(seed=2), backend="zarr"
    ),
}


def resident_bytes() -> int:
    """Memory of this process but for pages of files, when what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Load:
    """A trainer with its readers, backups and checks, in one process."""

    def __init__(self, root: Path) -> None:
        self.rng = np.random.default_rng(7)
        self.root = root
        budget = Budget(host_rows={"plain": 4000, "chunks": 1000})
        self.store = tierstore.create(root / "s", SPECS, budget=budget, keep=3)
        self.truth = {name: table.read(np.arange(table.rows)) for name, table in self.store.items()}

    def step(self, number: int) -> None:
        """Train a batch of each table; every so often commit, read, save and check."""
        for name, table in self.store.items():
            ids = (ROWS[name] * self.rng.random(BATCH) ** 3).astype(np.int64)
            table.prefetch(ids)
            with table.lease(ids) as lease:
                rows = lease.read("weight") + self.rng.standard_normal(1, np.float32)
                lease.write("weight", rows)
                self.truth[name][lease.rows] = rows
        if number % 3 == 0:
            tree = {"step": number, "w": self.rng.standard_normal(1000)}
            if number % 2:
                self.store.commit_async(step=number, payload={"model": tree})
            else:
                self.store.commit(step=number, payload={"model": tree})
        if number % 40 == 0:
            self._read()
        if number % 150 == 0:
            assert self.store.verify().ok
        if number % 300 == 0:
            self._save(number)

    def _read(self) -> None:
        self.store.commit()
        with tierstore.open(self.root / "s", budget=Budget(host_rows=100)) as reader:
            for name, rows in self.truth.items():
                ids = self.rng.integers(0, ROWS[name], 500)
                assert np.array_equal(reader[name].read(ids), rows[ids])

    def _save(self, number: int) -> None:
        self.store.commit()
        copy = self.root / f"copy{number % 2}"
        if copy.exists():
            for path in sorted(copy.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            copy.rmdir()
        self.store.save(copy)
        with tierstore.open(copy, budget=Budget(host=0)) as saved:
            for name, rows in self.truth.items():
                assert np.array_equal(saved[name].read(np.arange(ROWS[name])), rows)

    def close(self) -> None:
        """Close the store, and see that it holds what was trained."""
        self.store.commit()
        self.store.close()
        with tierstore.open(self.root / "s") as reader:
            for name, rows in self.truth.items():
                assert np.array_equal(reader[name].read(np.arange(ROWS[name])), rows)


def within(found: int, before: int) -> bool:
    """Whether memory is within a fifth of what it was; 4 MiB more are of the interpreter."""
    return found <= 1.2 * before + (4 << 20)


@pytest.mark.fault(22, 33, 34)
@pytest.mark.slow
@pytest.mark.nightly
def test_a_mixed_load_takes_no_more_than_after_warming_up() -> None:
    with scratch() as root, warnings.catch_warnings():
        warnings.simplefilter("error")
        load = Load(root)
        for number in range(1, 601):
            load.step(number)
        before, opened = resident_bytes(), descriptors()
        for number in range(601, 1201):
            load.step(number)
        assert descriptors() <= opened + 2
        assert within(resident_bytes(), before)
        load.close()


@pytest.mark.torture
def test_half_an_hour_of_mixed_load() -> None:
    with scratch() as root, warnings.catch_warnings():
        warnings.simplefilter("error")
        load, number, end = Load(root), 0, time.monotonic() + 1800
        while time.monotonic() < end:
            number += 1
            load.step(number)
            if number == 3000:
                before, opened = resident_bytes(), descriptors()
            if number > 3000 and number % 600 == 0:
                assert descriptors() <= opened + 2
                assert within(resident_bytes(), before), number
        assert number > 3600
        load.close()
