"""Store.follow: each version that a trainer commits, with the rows that changed."""

import os
import signal
import threading
from unittest import mock

import numpy as np
import pytest

import tierstore
from tierstore import _io
from tierstore._store import following
from tierstore._store import store as stores
from tierstore.errors import ClosedError, InvalidInputError

ROWS, DIM = 300, 4
NONE = tierstore.Budget(host=0)


class Trainer:
    """A writer, and what its tables hold."""

    def __init__(self, path):
        self.path, self.rng = path, np.random.default_rng(3)
        spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1))
        self.store = tierstore.create(path, {"item": spec, "user": spec}, budget=NONE)
        self.truth = {name: self.store[name].read(np.arange(ROWS)) for name in self.store}

    def commit(self, names=("item",), count=7):
        changed = {}
        for name in names:
            ids = np.sort(self.rng.choice(ROWS, count, replace=False))
            self.write(name, ids)
            changed[name] = ids
        self.store.commit(step=self.store.version)
        return changed

    def write(self, name, ids):
        self.truth[name][ids] = self.rng.normal(size=(len(ids), DIM)).astype("f4")
        self.store[name].write(ids, self.truth[name][ids])


@pytest.fixture
def trainer(tmp_path):
    trainer = Trainer(tmp_path / "s.tier")
    yield trainer
    trainer.store.close()


@pytest.fixture(params=[0, 20, ROWS])
def reader(request, trainer):
    budget = tierstore.Budget(host_rows=request.param)
    with tierstore.open(trainer.path, budget=budget) as reader:
        yield reader


class Clock:
    """A time that goes on with each sleep, and what is done then."""

    def __init__(self, *acts):
        self.now, self.acts = 100.0, iter(acts)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        next(self.acts, lambda: None)()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(following, "time", clock)
    return clock


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def test_each_version_with_the_rows_that_changed(trainer, reader):
    new = reader.follow(timeout=30, every=0.01)
    for names in (["item"], ["user"], ["item", "user"], []):
        changed = trainer.commit(names)
        found = next(new)
        assert (found.version, found.since) == (reader.version, reader.version - 1)
        assert (found.step, reader.step) == (found.since, found.since)
        assert same(found.rows, changed)
        for name, ids in found.rows.items():
            assert np.array_equal(reader[name].read(ids), trainer.truth[name][ids])


@pytest.mark.variants(0, 1)
def test_beside_a_trainer_that_commits_all_the_time(trainer, reader):
    seen = {name: reader[name].read(np.arange(ROWS)) for name in reader}

    def train():
        for _ in range(60):
            trainer.commit(["item", "user"], 3)

    thread = threading.Thread(target=train)
    thread.start()
    versions = []
    for new in reader.follow(timeout=30, every=0.005):
        versions.append(new.version)
        for name, ids in new.rows.items():
            seen[name][ids] = reader[name].read(ids)
        if new.version == 61:
            break
    thread.join()
    assert versions == sorted(set(versions))
    assert same(seen, trainer.truth)


def test_versions_that_were_missed_come_as_one(trainer, reader):
    one, other = trainer.commit(), trainer.commit()
    (new,) = reader.follow(timeout=0)
    assert (new.since, new.version) == (1, 3)
    assert same(new.rows, {"item": np.union1d(one["item"], other["item"])})
    assert list(reader.follow(timeout=0)) == []
    assert list(reader.follow(timeout=0.02, every=0.01)) == []


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_a_commit_while_rows_are_compared(trainer, monkeypatch, protected):
    """A row that is as before two versions later was something else in between."""
    before = trainer.truth["item"][[5]].copy()
    trainer.store.close()
    trainer.store = tierstore.open(trainer.path, "r+", keep=9, budget=NONE)
    compare, calls = stores.changed_rows, []

    def comparing(old, new):
        found = compare(old, new)
        calls.append((old.version, new.version))
        if len(calls) == 1:
            trainer.store["item"].write([5], before)
            trainer.commit(["user"])
        return found

    monkeypatch.setattr(stores, "changed_rows", comparing)
    if not protected:
        monkeypatch.setattr(stores, "union", lambda one, other: compare(*reversed_pair))
    with (
        tierstore.open(trainer.path) as reader,
        tierstore.open(trainer.path) as reversed_first,
    ):
        trainer.write("item", [5])
        trainer.store.commit()
        reversed_pair = (reversed_first, trainer.store)
        (new,) = reader.follow(timeout=0)
        assert (new.since, new.version) == (1, 3)
        assert calls == [(1, 2), (2, 3)]
        assert ("item" in new.rows) == protected
        assert "user" in new.rows
        trainer.truth["item"][5] = before


def test_waiting_looks_at_the_time_of_the_directory_alone(trainer, reader, monkeypatch, clock):
    monkeypatch.setattr(following, "_COARSEST_SECONDS", 0)
    assert list(reader.follow(timeout=0)) == []
    done, listed = [], []
    calls = _io.system.calls

    class Counted:
        def __getattr__(self, name):
            done.append(name)
            if name == "listdir":
                listed.append(len(done))
            return getattr(calls, name)

    with mock.patch.object(_io.system, "calls", Counted()):
        assert list(reader.follow(timeout=30)) == []
    after = done[listed[-1] :]
    assert after.count("fstat") >= 50 and not {"listdir", "open", "pread"} & set(after[5:-5])


@pytest.mark.parametrize("coarsest", [2.5, 0], ids=["", "negative control"])
def test_a_file_system_with_coarse_times(trainer, monkeypatch, clock, coarsest):
    """Two commits at what is the same time to the file system."""
    monkeypatch.setattr(following, "_COARSEST_SECONDS", coarsest)
    monkeypatch.setattr(_io.Directory, "changed_ns", 7)
    clock.acts = iter([trainer.commit])
    with tierstore.open(trainer.path) as reader:
        assert len(list(reader.follow(timeout=5))) == (1 if coarsest else 0)


def test_ctrl_c_ends_the_wait(trainer, reader):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        list(reader.follow())
    timer.join()
    trainer.commit()
    assert [new.version for new in reader.follow(timeout=0)] == [2]


def test_tables_that_come_and_go(trainer, reader):
    trainer.store.create_table("tag", tierstore.TableSpec(9, 2, init=tierstore.normal(seed=4)))
    trainer.store.drop("user")
    (new,) = reader.follow(timeout=0)
    assert same(new.rows, {"tag": np.arange(9)})
    assert list(reader) == ["item", "tag"]


def test_folds_and_restored_versions(trainer, reader):
    trainer.commit()
    list(reader.follow(timeout=0))
    trainer.store.fold()
    assert list(reader.follow(timeout=0)) == []
    changed = trainer.commit()
    trainer.store.restore(2)
    (new,) = reader.follow(timeout=0)
    assert (new.since, new.version, new.rows) == (2, 4, {})
    assert changed


def test_what_cannot_be_followed(trainer, reader, tmp_path):
    with pytest.raises(InvalidInputError, match="only readers"):
        trainer.store.follow()
    for wrong in ({"timeout": -1}, {"every": 0}, {"every": float("nan")}):
        with pytest.raises(InvalidInputError):
            reader.follow(**wrong)
    new = reader.follow(timeout=0)
    reader.close()
    with pytest.raises(ClosedError):
        next(new)
    with pytest.raises(ClosedError):
        reader.follow()


def test_objects_never_change(trainer):
    zarr = pytest.importorskip("zarr")
    place = zarr.storage.MemoryStore()
    trainer.store.save(place)
    with tierstore.open(place) as reader, pytest.raises(InvalidInputError, match="on a disk"):
        reader.follow()


def test_partitions(tmp_path):
    path, rng = tmp_path / "p.tier", np.random.default_rng(4)
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=2))
    tierstore.distributed.create(path, {"item": spec}, partitions=3).close()
    with tierstore.distributed.open(path, "r+") as store, tierstore.open(path) as reader:
        for _ in range(3):
            ids = np.sort(rng.choice(ROWS, 20, replace=False))
            store["item"].write(ids, rng.normal(size=(20, DIM)).astype("f4"))
            store.commit()
            (new,) = reader.follow(timeout=0)
            assert same(new.rows, {"item": ids})
            assert np.array_equal(reader["item"].read(ids), store["item"].read(ids))
