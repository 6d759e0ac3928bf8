"""Threads that cannot start, or die before they have said so, leave nothing waiting."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import _threads
from tierstore._disk.readahead import paced
from tierstore._store import commit
from tierstore._threads import Condition, Worker
from tierstore.budget import Budget
from tierstore.errors import ClosedError, InternalError, StoreIOError, UpkeepWarning

DIM, ROWS = 4, 300
SPEC = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tierstore.Store]:
    store = tierstore.create(tmp_path / "s", {"t": SPEC}, budget=Budget(host_rows=40), keep=9)
    yield store
    with contextlib.suppress(tierstore.errors.TierStoreError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.close()


def start_none(*_: object) -> int:
    raise RuntimeError("can't start new thread")


def start_dead(*_: object) -> int:
    """Start a thread that ends before its first instruction, as it does without memory."""
    return _start(lambda: None, ())


_start = _thread.start_new_thread


def in_time(work: Callable[[], object]) -> object:
    """Return what work returns or raises; fail where it does not end."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert outcome, "it hangs"
    return outcome[0]


def test_a_worker_works() -> None:
    done: list[int] = []
    worker = Worker(lambda: done.append(1), "test")
    worker.join()
    worker.join()
    assert done == [1]
    while worker.alive:
        pass


def test_one_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", start_none)
    with pytest.raises(StoreIOError, match=r"to knit .*ulimit -u"):
        Worker(lambda: None, "knit")


def test_one_that_dies_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", start_dead)
    worker = Worker(lambda: None, "knit")
    assert not worker.wait(threading.Event())
    worker.join()
    assert not worker.alive


def test_a_thread_of_the_library_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: `Thread.start` waits for a thread that dies so."""
    monkeypatch.setattr(threading, "_start_new_thread", start_dead)
    begun = threading.Event()

    def start() -> None:
        begun.set()
        threading.Thread(target=lambda: None, daemon=True).start()

    _start(start, ())
    assert begun.wait(60)
    assert not begun.clear() and not begun.wait(0.2)


def test_waiting_can_be_interrupted() -> None:
    over, event = threading.Event(), threading.Event()
    worker = Worker(over.wait, "wait")
    for wait in (worker.join, lambda: worker.wait(event)):
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            wait()
        timer.join()
    worker.join(timeout=0.01)
    assert worker.alive
    over.set()
    worker.join()


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    over = threading.Event()
    worker = Worker(over.wait, "wait")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        child = os.fork()
    if not child:
        worker.join()
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 3 << 8
    over.set()
    worker.join()


@pytest.mark.parametrize(
    ("start", "error"), [(start_none, StoreIOError), (start_dead, InternalError)]
)
def test_a_commit_without_a_thread_raises_and_loses_nothing(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch, start: Any, error: Any
) -> None:
    store["t"].write([3], np.full((1, DIM), 7, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(_threads._thread, "start_new_thread", start)
        outcome = in_time(lambda: store.commit_async(payload={"model": b"m" * 99}))
    assert isinstance(outcome, error)
    if start is start_none:
        assert not list(Path(store.path).glob("payload-*"))
    assert store.commit(step=5) == 2
    while list(Path(store.path).glob("payload-*")):  # its thread takes it back
        time.sleep(0.01)
    store.close()
    with tierstore.open(store.path) as reader:
        assert reader["t"].read([3]).tolist() == [[7] * DIM]


def test_a_commit_whose_thread_dies_later_is_told_of(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it cannot even say what went wrong."""

    def fail(*_: object) -> None:
        raise MemoryError

    store["t"].write([3], np.full((1, DIM), 7, np.float32))
    monkeypatch.setattr(commit.PendingCommit, "set_result", fail)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    pending = store.commit_async()
    monkeypatch.setattr(commit.PendingCommit, "set_exception", commit.Future.set_exception)
    assert isinstance(in_time(pending.result), InternalError)


def test_an_interrupt_while_a_commit_waits_for_the_store_gives_it_up(
    store: tierstore.Store,
) -> None:
    taken, over = threading.Event(), threading.Event()
    store["t"].write([3], np.full((1, DIM), 7, np.float32))

    def take() -> None:
        with inside.door(store).use():
            taken.set()
            over.wait(60)

    def late(*given: object) -> Worker:
        """The store is taken between the payload and the thread."""
        other.start()
        taken.wait(60)
        timer.start()
        return Worker(*given)  # type: ignore[arg-type]

    other = threading.Thread(target=take)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(commit, "Worker", late)
        store.commit_async(payload={"model": b"m" * 99})
    over.set()
    other.join()
    assert not inside.door(store).closed
    assert store.commit() == 2
    while list(Path(store.path).glob("payload-*")):  # its thread takes it back
        time.sleep(0.01)


@pytest.mark.parametrize("start", [start_none, start_dead])
def test_a_prefetch_without_a_thread_is_dropped(
    store: tierstore.Store, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    prefetcher = inside.state(store).prefetcher
    with monkeypatch.context() as patch:
        patch.setattr(_threads._thread, "start_new_thread", start)
        for _ in range(3):
            store["t"].prefetch([1, 2])
        in_time(prefetcher.wait)
        in_time(store.rollback)
    store["t"].prefetch([1, 2])
    prefetcher.wait()
    before = store["t"].stats()["host"].hits
    store["t"].read([1, 2])
    assert store["t"].stats()["host"].hits == before + 2


@pytest.mark.filterwarnings("default:.*the fold thread died")  # a later commit may warn
def test_a_fold_whose_thread_dies_is_told_of_and_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore._store.compaction._MOST_DELTAS", 0)
    with tierstore.create(tmp_path / "s", {"t": SPEC}, keep=1) as store:
        with (
            monkeypatch.context() as patch,
            pytest.warns(RuntimeWarning, match="the fold thread died"),
        ):
            patch.setattr(_threads._thread, "start_new_thread", start_dead)
            for step in range(3):
                store["t"].write([step], np.full((1, DIM), step, np.float32))
                assert in_time(store.commit) == step + 2
        with pytest.warns(UpkeepWarning, match="the fold thread died"):
            store.commit()  # tells of the last of the threads that died
        in_time(store.fold)
        assert store.info().folded
        assert store.verify().ok


@pytest.mark.parametrize("start", [start_none, start_dead])
def test_parts_come_without_a_thread_that_runs_ahead(
    monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    monkeypatch.setattr(_threads._thread, "start_new_thread", start)
    assert in_time(lambda: list(paced(20, lambda _: None))) == list(range(20))


def test_first_requests_of_many_threads_start_one(store: tierstore.Store) -> None:
    """Two threads at one queue: `close` would wait for the other one forever."""
    before, started = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "tierstore._table.prefetch.Worker",
                lambda *given: (started.append(given), Worker(*given))[1],
            )
            others = [
                threading.Thread(target=lambda: store["t"].prefetch(np.arange(40)))
                for _ in range(16)
            ]
            for other in others:
                other.start()
            for other in others:
                other.join()
    finally:
        sys.setswitchinterval(before)
    assert len(started) == 1
    in_time(store.close)


def test_a_prefetch_keeps_the_ids_it_was_given(store: tierstore.Store) -> None:
    ids = np.arange(10, 20)
    with inside.door(store).use():  # so that the request waits
        store["t"].prefetch(ids)
        ids[:] = np.arange(100, 110)
    inside.state(store).prefetcher.wait()
    before = store["t"].stats()["host"].hits
    store["t"].read(np.arange(10, 20))
    assert store["t"].stats()["host"].hits == before + 10


@pytest.mark.parametrize("act", ["rollback", "close", "refresh"])
def test_from_a_callback_beside_a_prefetch_nothing_deadlocks(
    store: tierstore.Store, act: str
) -> None:
    store["t"].write([7], np.full((1, DIM), 5, np.float32))

    def progress(done: int, total: int) -> None:
        store["t"].prefetch([1, 2, 3])  # which waits for the call that this is part of
        getattr(store, act)()

    outcome = in_time(lambda: store.verify(progress=progress))
    if act == "close":
        assert isinstance(outcome, ClosedError) or outcome is not None
        assert store.closed
        with tierstore.open(store.path, "r+") as again:  # its lock went with the call
            assert again.verify().ok
    else:
        assert store["t"].read([7])[0, 0] == (5 if act == "refresh" else SPEC_ROWS[7, 0])


def test_closing_from_a_callback_of_what_would_commit(store: tierstore.Store) -> None:
    def progress(done: int, total: int) -> None:
        store.close()

    outcome = in_time(lambda: store.create_table("new", SPEC, progress=progress))
    assert isinstance(outcome, ClosedError)
    with tierstore.open(store.path, "r+") as again:
        assert (again.version, list(again)) == (1, ["t"])
        assert again.verify().ok


def _rows() -> np.ndarray:
    from tierstore._memory_table import MemoryTable

    with MemoryTable(SPEC.bound("t")) as scratch:
        return scratch.table.read(np.arange(ROWS))  # type: ignore[no-any-return]


SPEC_ROWS = _rows()


def test_a_wait_that_cannot_take_its_lock_again_ends_with_its_own_error() -> None:
    """Memory may run out just then; what is raised must not be about the lock."""
    condition = Condition()

    def fail(state: object) -> None:
        raise MemoryError

    condition._acquire_restore = fail
    with pytest.raises(MemoryError), condition:
        condition.wait(0.001)
    with pytest.raises(RuntimeError, match="un-acquired"), condition:
        condition.release()


@pytest.mark.parametrize("host_rows", [ROWS * 8, ROWS * 4], ids=["every row has a slot", "cached"])
def test_a_read_of_few_resident_rows_keeps_the_interpreters_lock(
    tmp_path: Path, host_rows: int
) -> None:
    """Else threads that compute would each take up to 5 ms of it, several times a read."""
    spec = tierstore.TableSpec(ROWS * 8, 32, init=tierstore.normal(seed=1))
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=host_rows)) as store:
        table, few = store["t"], np.arange(8)
        with table.lease(few):
            lost = lost_to_others(lambda: table.read(few))
    assert lost < 80  # `take` would lose it some 200 times; the log of uses is shortened at times


def lost_to_others(call: Callable[[], object], calls: int = 10_000) -> int:
    """Return during how many calls another thread got the interpreter's lock, unforced."""
    begun, ended = 0, False
    got: set[int] = set()

    def wait_for_it() -> None:
        while not ended:
            got.add(begun)
            time.sleep(0)

    other, interval = threading.Thread(target=wait_for_it), sys.getswitchinterval()
    sys.setswitchinterval(1_000)  # nobody has to give it up
    try:
        other.start()
        for begun in range(1, calls + 1):  # noqa: B007
            call()
        return len(got)
    finally:
        ended = True
        sys.setswitchinterval(interval)
        other.join()
