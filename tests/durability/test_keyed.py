"""Tables by key through power cuts and faults: the last version, each key with its own row."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch, small_deltas
from tests.durability.disk import Disk, Event, Mark, Sync
from tests.durability.faults import FAULTS, Fault, Faulty
from tests.durability.recorder import Recorder, lay
from tierstore import _io
from tierstore.budget import Budget
from tierstore.errors import TierStoreError

Truth = dict[object, bytes]

DIM = 4
SPECS = {
    "int64": tierstore.TableSpec(64, DIM, keys="int64", init=tierstore.normal(seed=1)),
    "text": tierstore.TableSpec(64, DIM, keys="text", init=tierstore.normal(seed=1)),
    "expiring": tierstore.TableSpec(64, DIM, keys="int64", track_uses=True),
    "growing": tierstore.TableSpec(dim=DIM, keys="int64", init=tierstore.normal(seed=1)),
}


def keys_of(kind: str, numbers: range) -> list:
    return [f"{n} 🙂" * n if kind == "text" else n * 977 - 9 for n in numbers]


def grow(table: tierstore.KeyedTable) -> None:
    """Add an extent, as if the keys were too many for the table."""
    with inside.owner(table).door.use(write=True):
        table._grow(table.capacity + 1)


def expire(table: tierstore.KeyedTable, truth: Truth) -> None:
    """Remove all but seven keys."""
    for keys, _ in table.expire(keep_at_most=7):
        for key in keys.tolist():
            truth.pop(key, None)


def write(table: tierstore.Table, truth: Truth, numbers: range, seed: int) -> None:
    new = drawn(table.spec.keys, numbers, seed)
    if table.spec.grows:
        grow(table)
    table.write(list(new), np.frombuffer(b"".join(new.values()), np.float32).reshape(-1, DIM))
    truth |= new


def drawn(kind: str, numbers: range, seed: int) -> Truth:
    keys = keys_of(kind, numbers)
    rows = np.random.default_rng(seed).standard_normal((len(keys), DIM), np.float32)
    return {key: row.tobytes() for key, row in zip(keys, rows, strict=True)}


def found(table: tierstore.Table) -> Truth:
    """Return the rows by key, and check that both ways lead to them."""
    keys = list(table.keys)
    if not keys:
        return {}
    rows = table.read(keys)
    assert np.array_equal(rows, table.by_row.read(np.arange(len(keys))))
    return {key: row.tobytes() for key, row in zip(keys, rows, strict=True)}


def work(path: Path, mark) -> list[dict[str, Truth]]:
    """Commit, roll back and go back; return the truth of each state, by the number of its mark."""
    states: list[dict[str, Truth]] = [{kind: {} for kind in SPECS}]
    mark("begin", "s", 0)
    store = tierstore.create(path, SPECS, budget=Budget(host_rows=4), keep=7)
    mark("done", "s", 0)
    first = store.version

    def commit(steps, act) -> None:
        truth = {kind: dict(states[-1][kind]) for kind in SPECS}
        for kind, numbers in steps:
            write(store[kind], truth[kind], numbers, len(states))
            if kind == "expiring":
                expire(store[kind], truth[kind])
        mark("begin", "s", len(states))
        act()
        states.append(truth)
        mark("done", "s", len(states) - 1)

    commit([("int64", range(6)), ("text", range(5))], store.commit)
    commit([("int64", range(3, 12)), ("growing", range(5))], store.commit)
    write(store["text"], {}, range(20, 25), 99)
    write(store["growing"], {}, range(20, 25), 99)
    store.rollback()
    commit([("text", range(4, 9)), ("int64", range(20, 23))], store.commit)
    commit([("growing", range(3, 12)), ("expiring", range(9))], store.commit)
    commit([("expiring", range(15))], store.commit)
    mark("begin", "s", len(states))
    store.restore(first + 1)
    states.append(states[1])
    mark("done", "s", len(states) - 1)
    commit([(kind, range(30, 34)) for kind in SPECS], store.commit)
    store.close()
    return states


@cache
def recorded() -> tuple[list[Event], list[dict[str, Truth]]]:
    with scratch() as root, small_deltas():
        recorder = Recorder(root)
        with mock.patch.object(_io.system, "calls", recorder):
            states = work(root / "s", recorder.mark)
        return recorder.log, states


def first_loss(log: list[Event], states: list[dict[str, Truth]]) -> str:
    """Cut the power at many moments; return what is wrong after one of them, or ""."""
    rng = random.Random(7)
    marks = [number for number, event in enumerate(log) if isinstance(event, Mark)]
    for cut in sorted({*rng.sample(range(len(log)), 120), *(mark + 1 for mark in marks)}):
        done, begun = None, None
        for event in log[:cut]:
            if isinstance(event, Mark):
                done = event.number if event.kind == "done" else done
                begun = event.number if event.kind == "begin" else None
        image = Disk(log[:cut]).crash(rng, hostile=True)
        allowed = [states[number] for number in (done, begun) if number is not None]
        with scratch() as place:
            lay(image, place)
            if done is not None or (place / "s").exists():
                try:
                    check(place / "s", allowed)
                except (AssertionError, TierStoreError) as error:
                    return f"cut after event {cut}: {error!r}"
    return ""


def check(path: Path, allowed: list[dict[str, Truth]]) -> None:
    """Open a store that is in one of these states, and go on with it."""
    with tierstore.open(path, "r+", budget=Budget(host=0)) as store:
        seen = {kind: found(store[kind]) for kind in SPECS}
        assert seen in allowed
        assert store.verify().ok
        for kind in SPECS:
            write(store[kind], seen[kind], range(50, 53), 1)
        store.commit()
    with tierstore.open(path) as store:
        assert {kind: found(store[kind]) for kind in SPECS} == seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_power_cut_leaves_each_key_its_own_row():
    assert not first_loss(*recorded())


@pytest.mark.variants(0, 1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["int64", "text"])
def test_a_crash_at_any_call_of_a_commit_that_adds_expires_and_reuses(kind: str):
    """At every write, sync and name of it, power cuts and the death of the process."""
    spec = tierstore.TableSpec(64, DIM, keys=kind, track_uses=True)
    truth: Truth = {}
    with scratch() as root, small_deltas():
        recorder = Recorder(root)
        with (
            mock.patch.object(_io.system, "calls", recorder),
            tierstore.create(root / "s", {"t": spec}, budget=Budget(host_rows=4)) as store,
        ):
            write(store["t"], truth, range(12), 1)
            store.commit()
            before, first = dict(truth), len(recorder.log)
            write(store["t"], truth, range(8, 17), 2)
            expire(store["t"], truth)
            freed = store["t"].rows
            write(store["t"], truth, range(20, 26), 3)
            assert len(truth) == store["t"].rows == freed + 6 < 17
            store.commit()
            last = len(recorder.log)
        rng, seen = random.Random(5), set()
        for cut in range(first, last + 1):
            disk = Disk(recorder.log[:cut])
            for image in (disk.crash(rng, hostile=True), disk.image()):
                with scratch() as place:
                    lay(image, place)
                    with tierstore.open(place / "s", "r+", budget=Budget(host=0)) as store:
                        rows = found(store["t"])
                        assert rows in (before, truth), f"after event {cut}"
                        assert store.verify().ok
                        seen.add(len(rows))
                        write(store["t"], rows, range(30, 33), 4)
                        store.commit()
                        assert found(store["t"]) == rows
        assert seen == {len(before), len(truth)}


@pytest.mark.variants(0, 1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "site",
    ["append_keys > File.sync", "_write > Directory.write_file", "RecordFiles.grow > File.sync"],
)
def test_without_a_sync_keys_are_lost(site):
    """A negative control: the cuts are those from which the syncs of keys and growth protect."""
    log, states = recorded()
    kept = [event for event in log if not (isinstance(event, Sync) and site in event.site)]
    assert len(kept) < len(log)
    assert first_loss(kept, states)


@pytest.mark.variants(1, 1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_leaves_a_committed_state(fault: Fault):
    with scratch() as root, small_deltas():
        states = work(root / "s", lambda *_: None)
        for number in random.Random(fault.name).sample(range(1, 60), 2):
            place = root / "t"
            shutil.copytree(root / "s", place)
            _strike(place, states[-1], fault, number)
            shutil.rmtree(place)


def _strike(path: Path, before: dict[str, Truth], fault: Fault, number: int) -> None:
    """Make one operation of a commit fail, then commit again where that can be."""
    after = {kind: dict(before[kind]) for kind in SPECS}
    for kind in SPECS:
        after[kind] |= drawn(kind, range(38, 44), 5)
    store = tierstore.open(path, "r+", budget=Budget(host_rows=3))

    def act() -> None:
        for kind in SPECS:
            write(store[kind], {}, range(38, 44), 5)
        store.commit()

    failed = False
    with mock.patch.object(_io.system, "calls", Faulty(fault, number)):
        try:
            act()
        except (TierStoreError, KeyboardInterrupt, MemoryError, OSError):
            failed = True
    if failed and not inside.door(store).closed and number % 2:
        store.rollback()
        act()
        failed = False
    store.close()
    with tierstore.open(path, "r+", budget=Budget(host=0)) as again:
        seen = {kind: found(again[kind]) for kind in SPECS}
        assert seen in ([before, after] if failed else [after])
        assert again.verify().ok
