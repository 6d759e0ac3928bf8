"""Every operation of the disk fails once, and from then on, in everything that changes a store.

The error is a typed one, the store is at its last commit or at the next, nothing is left over, no
descriptor leaks, and once the fault is gone the same process can do what it wanted to.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch, small_deltas
from tests.durability.faults import FAULTS, Fault, Faulty
from tests.durability.judge import check_files
from tests.durability.recorder import lay
from tests.durability.twin import State, Twin, observe
from tierstore import _io
from tierstore._disk import readahead
from tierstore.budget import Budget
from tierstore.errors import StoreIOError, TierStoreError

Act = Callable[[tierstore.Store], None]


def rows(count: int, dim: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 100, (count, dim)).astype(np.float32)


def commit(store: tierstore.Store) -> None:
    for seed, table in enumerate(store.values()):
        for name, item in table.fields.items():
            dtype = item.element.numpy
            table.write([0, table.rows - 1, 0], rows(3, item.dim, seed).astype(dtype), name)
    store.commit(step=5, payload={"model": b"weights" * 300, "reader": b"7"})


def rewrite(store: tierstore.Store) -> None:
    """Write rows that are in the live delta already."""
    commit_later = next(iter(store.values()))
    name, item = next(iter(commit_later.fields.items()))
    dtype = item.element.numpy
    for seed in range(3):
        commit_later.write([0], rows(1, item.dim, seed).astype(dtype), name)
    store.commit(step=6)


def fold(store: tierstore.Store) -> None:
    store.fold()


def fold_behind(store: tierstore.Store) -> None:
    """Commit, which begins a fold, and close, which waits for it."""
    with (
        mock.patch("tierstore._store.compaction._MOST_DELTAS", 0),
        mock.patch("tierstore._disk.merging._STEP_BYTES", 256),
    ):
        commit(store)
        store.close()


def create_table(store: tierstore.Store) -> None:
    if "new" not in store:
        spec = tierstore.TableSpec(9, 5, init=tierstore.from_array(rows(9, 5, 3)), backend="zarr")
        store.create_table("new", spec)


def add_fields(store: tierstore.Store) -> None:
    table = next(iter(store.values()))
    if "more" not in table.fields:
        initializer = tierstore.from_array(rows(table.rows, 2, 4))
        store.add_fields(table.name, {"more": tierstore.Field(2, init=initializer)})


def set_keys(store: tierstore.Store) -> None:
    table = next(iter(store.values()))
    table.store.set_keys(table.name, [f"key {row}" for row in range(table.rows)])


def grow(store: tierstore.Store) -> None:
    table = next(iter(store.values()))
    if table.rows < 60:
        table.store.grow(table.name, 60)


def confirm(store: tierstore.Store) -> None:
    store.confirm(store.version)


def save(store: tierstore.Store) -> None:
    target = Path(store.path).parent / "copy"
    if not target.exists():
        store.save(target)


def create(store: tierstore.Store) -> None:
    target = Path(store.path).parent / "copy"
    if not target.exists():
        spec = tierstore.TableSpec(9, 5, init=tierstore.from_array(rows(9, 5, 3)), backend="zarr")
        tierstore.create(target, {"t": spec}).close()


def close(store: tierstore.Store) -> None:
    store.close()


def restore(store: tierstore.Store) -> None:
    if inside.manifest(store).restored is None:  # else it was done: the oldest is another
        store.restore(store.versions()[0].version)


def keep(store: tierstore.Store) -> None:
    store.keep(store.versions()[0].version, "best")


def go_back(store: tierstore.Store) -> None:
    """Open an older version for writing."""
    path, older = store.path, store.versions()[0].version
    store.close()
    with tierstore.open(path, "r+", version=older, discard_newer=True, budget=Budget(host=0)):
        pass


ACTS: dict[str, Act] = {
    act.__name__: act
    for act in (
        commit, rewrite, fold, fold_behind, create_table, add_fields, set_keys, grow, confirm, save,
        create, close, go_back, restore, keep,
    )
}  # fmt: skip


@cache
def _prepared(kind: str) -> dict[str, bytes | None]:
    """A small store of several versions, as a killed process leaves it."""
    with scratch() as root, small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend, seed = {"plain": ("memmap", 7), "packed": ("zstd", 8)}[kind]
        twin = Twin(root, lambda *_: None, seed, backend=backend)
        twin.run(["create", "write", "commit", "write", "commit", "write", "write", "commit"])
        image = {
            str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
            for path in sorted(root.rglob("*"))
        }
        twin.close()
        return image


@cache
def _clean(kind: str, name: str) -> list[State]:
    """The states before and after an act in which nothing fails."""
    states = []
    with scratch() as root, small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lay(_prepared(kind), root)
        with tierstore.open(root / "s") as reader:
            states.append(observe(reader))
        store = tierstore.open(root / "s", "r+", budget=Budget(host=0))
        ACTS[name](store)
        store.close()
        with tierstore.open(root / "s") as reader:
            states.append(observe(reader))
    return states


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def expected(error: BaseException, fault: Fault) -> bool:
    """Whether an act may end with this error."""
    return isinstance(
        error, TierStoreError | (fault.make if fault.is_interrupt else TierStoreError)
    )


def strike(kind: str, name: str, fault: Fault, number: int, host: int) -> bool:
    """Make an operation of an act fail; return whether an operation of that number exists."""
    before, after = _clean(kind, name)
    threads = number % 4 < 2  # write what waits
    recorded = warnings.catch_warnings(record=True)
    with scratch() as root, small_deltas(threads=threads), recorded as told:
        warnings.simplefilter("always")
        lay(_prepared(kind), root)
        store = tierstore.open(root / "s", "r+", budget=Budget(host_rows=host))
        faulty = Faulty(fault, number)
        with mock.patch.object(_io.system, "calls", faulty):
            try:
                ACTS[name](store)
                error = None
            except BaseException as caught:
                error = caught
        if error is not None:
            assert expected(error, fault), repr(error)
            error.__traceback__ = None
        else:
            before = after
        if error is not None and not inside.door(store).closed and number % 2:
            _go_on(store, name)
            before = after
        store.close()
        _remove_what_was_named(root, [str(warning.message) for warning in told])
        _check_outcome(root, before, after)
    return faulty.struck > 0


def _go_on(store: tierstore.Store, name: str) -> None:
    """The fault is gone: the same process does what it wanted to.

    Only where a write broke off over rows that were not committed either, these are given up first.
    """
    try:
        ACTS[name](store)
    except StoreIOError as error:
        assert "write them again, or roll back" in str(error)
        store.rollback()
        ACTS[name](store)


def _remove_what_was_named(root: Path, told: list[str]) -> None:
    """Remove what a warning says is left over and to be removed."""
    for path in root.glob(".*.partial"):
        assert any(message.startswith(f"{path} is left over") for message in told), told
        shutil.rmtree(path)


def _check_outcome(root: Path, before: State, after: State) -> None:
    with tierstore.open(root / "s", "r+", budget=Budget(host=0)) as writer:
        found = observe(writer)
        assert _content(found) in (_content(before), _content(after))
        assert found["version"] in {before["version"], after["version"], after["version"] + 1}
        assert writer.verify().ok
        check_files(root / "s", writer)
    left = {path.name for path in root.iterdir()} - {"s"}
    if left:
        assert left == {"copy"}
        with tierstore.open(root / "copy") as copy:
            assert copy.verify().ok
            assert copy.parent is None or _content(observe(copy)) == _content(before)


def _content(state: State) -> State:
    return {**state, "version": None}


def sweep(kind: str, name: str, fault: Fault, host: int, share: float) -> int:
    """Make each operation of an act fail, or a random sample of them; return how many failed."""
    rng = random.Random(f"{kind} {name} {fault.name} {host}")
    strike(kind, name, fault, 1 << 30, host)
    readahead.method()  # opens a descriptor that lives as long as the process
    open_before = descriptors()
    count = 0
    for number in range(1, 1000):
        if rng.random() < share:
            if not strike(kind, name, fault, number, host):
                break
            count += 1
    assert descriptors() == open_before
    return count


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ACTS)
@pytest.mark.fault(28, 33, 43, 45, 46)
@pytest.mark.slow
@pytest.mark.nightly(
    *sorted(set(FAULTS) - {"EIO", "EIO although done", "ENOSPC", "short", "KeyboardInterrupt"})
)
def test_a_fault_leaves_a_committed_state(name: str, fault: Fault) -> None:
    assert sweep("plain", name, fault, host=2, share=0.06) >= 0


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a fault in __del__
@pytest.mark.parametrize("host", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ACTS)
def test_every_fault_leaves_a_committed_state(
    name: str, fault: Fault, kind: str, host: int
) -> None:
    assert sweep(kind, name, fault, host, share=1) >= 0
