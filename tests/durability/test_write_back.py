"""Evicted rows wait for a thread to write them; what it meets is told the caller, none is lost."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests.durability.crash import small_deltas
from tierstore import _io
from tierstore._io.system import Calls
from tierstore.budget import Budget
from tierstore.errors import StoreFullError, StoreIOError

ROWS, DIM, SLOTS = 300, 8, 40


class Disk:
    """Does what `os` does, but for writes while `error` is set; knows which threads wrote."""

    def __init__(self) -> None:
        self.error: int | None = None
        self.threads: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(Calls, name)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return os.pwrite(fd, data, offset)


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("error", "raised"), [(errno.ENOSPC, StoreFullError), (errno.EIO, StoreIOError)]
)
@pytest.mark.fault(43)
def test_what_a_thread_cannot_write_waits(tmp_path: Path, error: int, raised: type) -> None:
    """Training goes on whenever the disk does, and the next commit has all of it."""
    rng, disk, failures = np.random.default_rng(error), Disk(), 0
    oracle = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(oracle))
    tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host=0)).close()
    with (
        small_deltas(threads=True),
        tierstore.open(tmp_path / "s", "r+", budget=Budget(host_rows=SLOTS)) as store,
        mock.patch.object(_io.system, "calls", disk),
    ):
        table = store["t"]

        def insist(work: Any) -> Any:
            nonlocal failures
            try:
                return work()
            except raised as caught:
                assert "delta-" in str(caught)
                failures, disk.error = failures + 1, None
                return work()

        for step in range(150):
            disk.error = error if rng.random() < 0.3 else None
            ids = rng.permutation(ROWS)[: rng.integers(1, 30)]
            values = rng.standard_normal((ids.size, DIM)).astype(np.float32)
            insist(lambda ids=ids, values=values: table.write(ids, values))
            oracle[ids] = values
            if step % 5 == 0:
                wanted = rng.integers(0, ROWS, 60)
                assert np.array_equal(
                    insist(lambda wanted=wanted: table.read(wanted)), oracle[wanted]
                )
            if step % 50 == 49:
                insist(store.commit)
                with tierstore.open(tmp_path / "s", budget=Budget(host=0)) as reader:
                    assert np.array_equal(reader["t"].read(np.arange(ROWS)), oracle)
    assert failures > 10 and "tierstore-write" in disk.threads


@pytest.mark.parametrize("full", [False, True])
def test_a_large_commit_goes_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, full: bool
) -> None:
    """What it cannot write, on a full disk, it tells, and the next commit does."""
    rng, rows, past, room = np.random.default_rng(int(full)), 3000, set[str](), True
    monkeypatch.setattr("tierstore._disk.delta._CACHED_BYTES", 100_000)
    monkeypatch.setattr("tierstore._disk.write_queue._MIN_QUEUED_BYTES", 10_000)
    write = _io.direct.write

    def traced(*given: Any) -> None:
        past.add(threading.current_thread().name)
        if not room:
            raise StoreFullError("no space to write delta-")
        write(*given)

    monkeypatch.setattr(_io.direct, "write", traced)
    spec = tierstore.TableSpec(rows, 100, init=tierstore.zeros())
    tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host=0)).close()
    with tierstore.open(tmp_path / "s", "r+", budget=Budget(host_rows=rows - 1)) as store:
        for _ in range(3):
            chosen = rng.permutation(rows)[: rows - 100]
            values = rng.standard_normal((chosen.size, 100)).astype(np.float32)
            store["t"].write(chosen, values)
            expected = store["t"].read(np.arange(rows))
            if full:
                room = False
                with pytest.raises(StoreFullError):
                    store.commit()
                room = True
            store.commit()
            with tierstore.open(tmp_path / "s", budget=Budget(host=0)) as reader:
                assert np.array_equal(reader["t"].read(np.arange(rows)), expected)
                assert np.array_equal(reader["t"].read(chosen), values)
        store.fold()
        assert store.verify().ok
    assert "tierstore-write" in past


def test_readers_and_stores_without_a_cache_have_no_thread(tmp_path: Path) -> None:
    disk, values = Disk(), np.random.default_rng(1).standard_normal((ROWS, DIM)).astype(np.float32)
    with small_deltas(threads=True), mock.patch.object(_io.system, "calls", disk):
        spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(values))
        with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host=0)) as store:
            store["t"].write(np.arange(ROWS), values[::-1])
            store.commit()
        with tierstore.open(tmp_path / "s", budget=Budget(host_rows=SLOTS)) as reader:
            assert np.array_equal(reader["t"].read(np.arange(ROWS)), values[::-1])
    assert disk.threads == {threading.current_thread().name}
