"""Several processes that make a store at one path at once: one does, nothing is half made."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests.durability.crash import scratch
from tierstore._store import opening
from tierstore._store.store import Store
from tierstore.errors import ExistsError, LockedError
from tierstore.importing import import_table
from tierstore_cli.main import cli

PROCESSES = 4
SPECS = {"t": tierstore.TableSpec(200, 4, init=tierstore.normal(seed=3))}


def at_once(work: Callable[[int], int]) -> list[int]:
    """Call `work` in forked processes that begin together; return what each returned."""
    reading, writing = os.pipe()
    children = []
    for number in range(PROCESSES):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                os.close(writing)
                os.read(reading, 1)  # ends when the parent closes the pipe
                code = work(number)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    os.close(reading)
    os.close(writing)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def opens(path: Path) -> int:
    """Add one to a counter in the store, whoever makes it."""
    for _ in range(1000):
        try:
            with tierstore.open_or_create(path, SPECS) as store:
                return store.commit(step=(store.step or 0) + 1) and 0
        except LockedError:
            time.sleep(0.005)
    return 1


def creates(path: Path) -> int:
    try:
        tierstore.create(path, SPECS).close()
    except ExistsError as error:
        return 3 if "open it" in str(error) else 4
    return 0


def check(root: Path) -> tierstore.Store:
    assert [each.name for each in root.iterdir() if each.suffix != ".npy"] == ["s"]
    store = tierstore.open(root / "s")
    assert store.verify().ok
    return store


often = pytest.mark.parametrize("rounds", [2, pytest.param(12, marks=pytest.mark.slow)])


@often
def test_each_process_gets_the_store(rounds: int) -> None:
    for _ in range(rounds):
        with scratch() as root:
            assert at_once(lambda _, root=root: opens(root / "s")) == [0] * PROCESSES
            with check(root) as store:
                assert store.step == PROCESSES


@often
def test_one_process_creates_it(rounds: int) -> None:
    for _ in range(rounds):
        with scratch() as root:
            found = at_once(lambda _, root=root: creates(root / "s"))
            assert sorted(found) == [0] + [3] * (PROCESSES - 1)
            check(root).close()


def test_its_creator_has_the_lock_before_others_find_it() -> None:
    def others_come(*given: Any) -> tierstore.Store:
        if len(given) > 1:  # its creator's, which holds the lock
            with pytest.raises(LockedError, match="this very process"):
                tierstore.open(given[0].path, "r+")
        return Store(*given)

    with scratch() as root, mock.patch.object(opening, "Store", others_come):
        with tierstore.create(root / "s", SPECS) as store:
            store.commit(step=1)
        check(root).close()


def test_what_another_process_has_written_is_not_removed() -> None:
    def another_is_first(options: Any, *locks: Any) -> tierstore.Store:
        if not locks:
            return Store(options)
        locks[0].close()
        with tierstore.open(options.path, "r+") as other:
            other.commit(step=7)
        raise MemoryError

    with scratch() as root, mock.patch.object(opening, "Store", another_is_first):
        with pytest.raises(MemoryError) as caught:
            tierstore.create(root / "s", SPECS)
        assert "another process has written to it" in caught.value.__notes__[0]
        with check(root) as store:
            assert store.step == 7


@pytest.mark.variants(1, 2)
@often
@pytest.mark.parametrize("by", ["import_table", "load"])
def test_each_process_loads_its_table(by: str, rounds: int) -> None:
    for seed in range(rounds):
        rows = np.random.default_rng(seed).standard_normal((PROCESSES, 50, 4), np.float32)
        with scratch() as root:
            for number in range(PROCESSES):
                np.save(root / f"{number}.npy", rows[number])

            def load(number: int, root: Path = root) -> int:
                source, table = str(root / f"{number}.npy"), f"t{number}"
                if by == "load":
                    given = ["load", str(root / "s"), source, "--table", table, "--wait", "20"]
                    cli(given, standalone_mode=False)
                    return 0
                for _ in range(1000):
                    try:
                        import_table(root / "s", source, table=table)
                        return 0
                    except LockedError:
                        time.sleep(0.005)
                return 1

            assert at_once(load) == [0] * PROCESSES
            with check(root) as store:
                for number in range(PROCESSES):
                    assert np.array_equal(store[f"t{number}"][:], rows[number])
