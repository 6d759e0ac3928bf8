"""The thread that writes rows behind the callers: one for each store, as long as that is open."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import Budget, TableSpec


class Writers:
    """Threads that write behind, without those that were there before."""

    def __init__(self) -> None:
        self._before = threading.enumerate()

    def __call__(self) -> list[threading.Thread]:
        return [
            each
            for each in threading.enumerate()
            if each.name == "tierstore-write" and each not in self._before
        ]


@pytest.fixture(autouse=True)
def all_of_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore._disk.write_queue._MIN_QUEUED_BYTES", 1)
    monkeypatch.setattr("tierstore._tiers.slots._QUEUE_SHARE", 1)


@pytest.mark.slow
def test_a_store_has_one_thread_over_tables_and_commits(tmp_path: Path) -> None:
    rng, writers = np.random.default_rng(0), Writers()
    specs = {name: TableSpec(4000, dim) for name, dim in (("a", 8), ("b", 12))}
    oracle = {name: np.zeros((4000, spec.dim), "f4") for name, spec in specs.items()}
    seen = set[threading.Thread]()
    with tierstore.create(tmp_path / "s", specs, budget=Budget(host=64 << 10)) as store:
        for step in range(6):
            for name, table in store.items():
                rows = rng.permutation(4000)[:900]
                oracle[name][rows] = values = rng.normal(size=(900, table.dim)).astype("f4")
                table.write(rows, values)
                seen.update(writers())
            if step % 5 == 4:
                store.commit()
        assert len(seen) == 1
        for name, table in store.items():
            assert np.array_equal(table.read(np.arange(4000)), oracle[name])
        store.commit()
        assert len(writers()) == 1
    assert not writers()
    with tierstore.open(tmp_path / "s") as store:
        assert store.verify().ok
        for name, table in store.items():
            assert np.array_equal(table.read(np.arange(4000)), oracle[name])


def test_a_forked_child_neither_has_the_thread_nor_waits_for_it(tmp_path: Path) -> None:
    spec, writers = TableSpec(4000, 8), Writers()
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host=64 << 10)) as store:
        store["t"].write(np.arange(4000), np.ones((4000, 8), "f4"))
        (thread,) = writers()
        if (child := os.fork()) == 0:
            ok = not writers() and not inside.state(store)._behind.alive
            inside.state(store)._behind.close()
            os._exit(not ok)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.rollback()
        assert thread.is_alive()
    assert not thread.is_alive()
