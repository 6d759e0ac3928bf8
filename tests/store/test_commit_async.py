"""Commits that go on behind the caller."""

import contextlib
import errno
import os
import threading
import warnings

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import _io
from tierstore._store import commit
from tierstore._store.ledger import Ledger
from tierstore._threads import Worker
from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    ForkedStoreError,
    InvalidInputError,
    InvalidTypeError,
    ReadOnlyError,
    StoreFullError,
)

ROWS, DIM = 300, 6
SPEC = tierstore.TableSpec(ROWS, DIM, init=tierstore.uniform(-1, 1, seed=3))


@pytest.fixture(params=["no host tier", "some slots", "every row"])
def store(request, tmp_path):
    budget = {"no host tier": 0, "some slots": 24 << 10, "every row": 1 << 24}[request.param]
    store = tierstore.create(
        tmp_path / "s", {"t": SPEC, "u": SPEC}, budget=tierstore.Budget(host=budget), keep=50
    )
    yield store
    with contextlib.suppress(Exception):
        store.close()


class Gate:
    """Holds the publication of every version until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.open = threading.Event(), threading.Event()
        publish = Ledger.publish

        def wait_and_publish(ledger, manifest, make_durable):
            self.reached.set()
            assert self.open.wait(60)
            publish(ledger, manifest, make_durable)

        monkeypatch.setattr(Ledger, "publish", wait_and_publish)


@pytest.fixture
def gate(monkeypatch, store):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def contents(path, version):
    with tierstore.open(path, version=version) as reader:
        return {name: table.read(np.arange(ROWS)) for name, table in reader.items()}


@pytest.mark.variants(0, 1)
def test_every_version_is_what_was_written_before_its_commit(store):
    rng = np.random.default_rng(1)
    truth = {name: table.read(np.arange(ROWS)) for name, table in store.items()}
    expected, pending = {}, []
    for step in range(12):
        for name, table in store.items():
            rows = rng.permutation(ROWS)[: int(rng.integers(1, ROWS))]
            values = rng.standard_normal((rows.size, DIM), np.float32)
            table.write(rows, values)
            truth[name][rows] = values
        if rng.random() < 0.7:
            pending.append(store.commit_async(step=step, payload={"at": {"step": step}}))
            version = len(expected) + 2
        else:
            version = store.commit(step=step, payload={"at": {"step": step}})
            assert all(each.done() for each in pending)
        expected[version] = step, {name: rows.copy() for name, rows in truth.items()}
    versions = [each.result() for each in pending]
    assert versions == sorted(set(versions))
    assert set(versions) <= set(expected)
    store.close()
    for version, (step, rows) in expected.items():
        found = contents(store.path, version)
        assert all(np.array_equal(found[name], rows[name]) for name in rows)
        with tierstore.open(store.path, version=version) as reader:
            assert reader.step == step
            assert reader.payload["at"].tree() == {"step": step}


def test_the_caller_goes_on_while_the_version_is_published(store, gate):
    model = np.arange(3.0)
    store["t"].write([5], np.full((1, DIM), 5, np.float32))
    store["t"].scalars["n"] = 1
    pending = store.commit_async(step=1, payload={"model": {"w": model}})
    assert gate.reached.wait(60)
    assert not pending.done()
    model += 100
    store["t"].scalars["n"] = 2
    written = threading.Event()

    def write():
        store["t"].write([5], np.full((1, DIM), 6, np.float32))
        written.set()

    other = threading.Thread(target=write)
    other.start()
    assert not written.wait(0.2)  # the store is in use until the version is there
    gate.open.set()
    other.join()
    assert pending.result() == 2
    assert store["t"].read([5])[0, 0] == 6
    store.rollback()
    assert store["t"].read([5])[0, 0] == 5
    with tierstore.open(store.path, version=2) as reader:
        assert reader["t"].read([5])[0, 0] == 5
        assert reader["t"].scalars == {"n": 1}
        assert np.array_equal(reader.payload["model"].tree()["w"], np.arange(3.0))


def test_a_close_waits_for_the_version(store, gate):
    store["t"].write([1], np.full((1, DIM), 7, np.float32))
    store.commit_async(step=3)
    threading.Timer(0.1, gate.open.set).start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.close()
    assert contents(store.path, 2)["t"][1, 0] == 7


def fail(monkeypatch, error):
    def publish(ledger, manifest, make_durable):
        raise error

    monkeypatch.setattr(Ledger, "publish", publish)


def test_what_goes_wrong_is_told_by_the_result_and_nothing_is_lost(store, monkeypatch):
    store["t"].write([1], np.full((1, DIM), 8, np.float32))
    with monkeypatch.context() as patch:
        fail(patch, StoreFullError("no space"))
        pending = store.commit_async(step=1, payload={"model": b"m"})
        with pytest.raises(StoreFullError, match="no space"):
            pending.result()
        assert isinstance(pending.exception(), StoreFullError)
    assert not [name for name in os.listdir(store.path) if name.startswith("payload-")]
    assert store.commit(step=2) == 2
    store.close()
    assert contents(store.path, 2)["t"][1, 0] == 8


def test_an_error_that_was_asked_for_is_not_raised_again(store, monkeypatch):
    store["t"].write([1], np.full((1, DIM), 8, np.float32))
    with monkeypatch.context() as patch:
        fail(patch, StoreFullError("no space"))
        assert isinstance(store.commit_async().exception(), StoreFullError)
    assert store.commit() == 2
    store.close()


@pytest.mark.parametrize("asked_by", ["commit", "commit_async", "close"])
def test_an_error_not_asked_for_is_raised_later_and_once(store, monkeypatch, asked_by):
    store["t"].write([1], np.full((1, DIM), 8, np.float32))
    with monkeypatch.context() as patch:
        fail(patch, StoreFullError("no space"))
        store.commit_async()
        with pytest.raises(StoreFullError, match="no space"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(store, asked_by)()
    if asked_by == "close":
        assert store.closed
    else:
        assert store.commit() == 2


def test_after_a_failed_sync_the_store_is_closed(store, monkeypatch):
    store["t"].write([1], np.full((1, DIM), 8, np.float32))

    def fsync(fd):
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(_io.system.calls, "fsync", fsync)
    pending = store.commit_async()
    with pytest.raises(CommitFailedError, match="the disk is gone"):
        pending.result()
    with pytest.raises(ClosedError):
        store["t"].read([1])


def test_what_cannot_be_committed_is_refused_at_once(store, tmp_path):
    before = sorted(os.listdir(store.path))
    with pytest.raises(InvalidTypeError):
        store.commit_async(step=1.5)
    with pytest.raises(InvalidTypeError):
        store.commit_async(payload={"model": object()})
    with pytest.raises(InvalidInputError):
        store.commit_async(payload={"../model": b""})
    assert sorted(os.listdir(store.path)) == before
    with tierstore.open(store.path) as reader, pytest.raises(ReadOnlyError):
        reader.commit_async()
    assert store.commit() == 2
    store.close()
    with pytest.raises(ClosedError):
        store.commit_async()


def test_not_from_within_another_call(store):
    def progress(done, total):
        store.commit_async()

    with pytest.raises(InvalidInputError, match="within another call"):
        store.create_table("new", SPEC, progress=progress)
    assert store.commit_async().result() == 2


def test_a_full_disk_while_rows_are_handed_down_is_told_at_once(store, monkeypatch):
    store["t"].write(np.arange(ROWS), np.ones((ROWS, DIM), np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(
            inside.space(store["u"]), "flush", lambda: (_ for _ in ()).throw(StoreFullError("full"))
        )
        with pytest.raises(StoreFullError, match="full"):
            store.commit_async(payload={"model": b"m"})
    assert not [name for name in os.listdir(store.path) if name.startswith("payload-")]
    assert store.commit_async().result() == 2
    store.close()
    assert (contents(store.path, 2)["t"] == 1).all()


def test_a_payload_survives_the_commit_of_another_thread_in_between(store, monkeypatch):
    """Between the payload and the rows another thread may commit, and sweep."""

    def start_late(work, purpose):
        store.commit(step=1)
        return Worker(work, purpose)

    monkeypatch.setattr(commit, "Worker", start_late)
    store["t"].write([1], np.full((1, DIM), 8, np.float32))
    assert store.commit_async(step=2, payload={"model": b"m" * 1000}).result() == 3
    store.close()
    with tierstore.open(store.path) as reader:
        assert (reader.step, reader.payload["model"].read()) == (2, b"m" * 1000)


def test_a_state_that_names_a_version_of_another_thread_is_not_committed(store, monkeypatch):
    """A pointer in the payload names the coming version, which would have other rows."""

    class Model:
        def state_dict(self):
            return store.state_dict()

    def start_late(work, purpose):
        store.commit(step=1)
        return Worker(work, purpose)

    with monkeypatch.context() as late:
        late.setattr(commit, "Worker", start_late)
        store["t"].write([1], np.full((1, DIM), 8, np.float32))
        with pytest.raises(InvalidInputError, match="version 2 was committed by another thread"):
            store.commit_async(step=2, payload={"model": Model()}).result()
    assert not [name for name in os.listdir(store.path) if name.startswith("payload-")]
    assert store.commit(step=2, payload={"model": Model()}) == 3
    store["t"].write([1], np.full((1, DIM), 9, np.float32))
    assert store.commit() == 4, "which keeps the payload"
    store.load_state_dict(store.payload["model"].tree())
    assert store.version == 4 and (store["t"].read([1]) == 9).all(), "it is that of this version"
    store.close()


@pytest.mark.variants(0, 1)
def test_threads_that_write_and_commit_meanwhile_are_never_torn(store):
    """One thread writes both tables in turn; in every version they are at most a round apart."""
    stop, failures = threading.Event(), []

    def write_round(number):
        for table in store.values():
            table.write(np.arange(ROWS), np.full((ROWS, DIM), number, np.float32))

    def write():
        number = 1
        while not stop.is_set():
            write_round(number)
            number += 1

    write_round(0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        versions = [store.commit_async().result() for _ in range(15)]
    finally:
        stop.set()
        writer.join()
    store.rollback()
    store.close()
    assert versions == list(range(2, 17))
    for version in versions:
        found = contents(store.path, version)
        for rows in found.values():  # a write of a table is whole
            assert (rows == rows[0, 0]).all()
        if not 0 <= found["t"][0, 0] - found["u"][0, 0] <= 1:
            failures.append(version)
    assert not failures


def test_a_forked_child_does_not_wait_for_its_parents_commit(store, gate):
    store["t"].write([1], np.full((1, DIM), 8, np.float32))
    pending = store.commit_async()
    assert gate.reached.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            store.commit()
        except ForkedStoreError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    gate.open.set()
    assert pending.result() == 2
