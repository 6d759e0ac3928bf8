"""What the logger "tierstore" is told of a store."""

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.store.conftest import Logged
from tierstore._disk.write_queue import Piece, WriteQueue
from tierstore._door import Door
from tierstore._table import prefetch


@pytest.fixture
def store(tmp_path: Path) -> tierstore.Store:
    return tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(100, 4)})


def written(store: tierstore.Store, rows: int) -> None:
    store["t"].write(np.arange(rows), np.ones((rows, 4), np.float32))


def test_a_session_is_logged(store: tierstore.Store, logged: Logged) -> None:
    store.close()
    logged.setLevel(logging.INFO)
    with tierstore.open(store.path, "r+") as again:
        written(again, 7)
        size = again.commit() and again.versions()[-1].written_bytes
        again.commit()
        again.alter_table("t", dtype="float16")
    with tierstore.open(store.path):
        pass
    said = [message.removeprefix(f"{store.path}: ") for message in logged.messages]
    assert said[0] == "opened version 1 for writing"
    assert said[1].startswith(f"committed version 2: 7 rows, {size} B in ")
    assert said[2].startswith("committed version 3: 0 rows, 0 B in ")
    assert said[3] == "committed version 4: wrote tables ['t'], dropped []"
    assert said[4:] == ["closed", "opened version 4 for reading", "closed"]
    assert {record.levelname for record in logged.records} == {"INFO"}


def test_a_commit_in_a_thread_is_logged_once(store: tierstore.Store, logged: Logged) -> None:
    logged.setLevel(logging.INFO)
    written(store, 1)
    store.commit_async().result()
    assert [message for message in logged.messages if "committed version 2: 1 row," in message]
    assert len(logged.messages) == 1
    store.close()


def test_a_drop_and_a_fold_are_logged(store: tierstore.Store, logged: Logged) -> None:
    written(store, 3)
    store.commit()
    logged.setLevel(logging.INFO)
    store.fold()
    store.create_table("u", tierstore.TableSpec(3, 4))
    store.drop("t")
    store.close()
    fold = f"fold of {store.path} up to version 2"
    assert logged.messages[:2] == [f"{fold} starts", f"{fold} is published"]
    assert logged.messages[-2].endswith("wrote tables [], dropped ['t']")


def test_a_fold_that_an_error_ends_is_logged(store: tierstore.Store, logged: Logged) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("no longer wanted")

    written(store, 3)
    store.commit()
    logged.setLevel(logging.INFO)
    with pytest.raises(RuntimeError, match="no longer wanted"):
        store.fold(progress=fail)
    assert logged.messages[-1].endswith("ended without a result: 'no longer wanted'")
    store.close()


def test_a_dropped_prefetch_is_logged(logged: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_MOST_PENDING", 1)
    prefetcher = prefetch.Prefetcher(Door("s.tier", writable=False))
    begun, end = threading.Event(), threading.Event()

    def wait(rows: prefetch.Rows) -> None:
        begun.set()
        assert end.wait(60)

    logged.setLevel(logging.DEBUG)
    rows = np.arange(5)
    prefetcher.submit(rows, lambda _: None, wait)
    assert begun.wait(60)
    prefetcher.submit(rows, lambda _: None, wait)
    assert not logged.messages
    prefetcher.submit(rows, lambda _: None, wait)
    assert logged.messages == ["a prefetch of 5 rows is dropped: 1 others wait"]
    end.set()
    prefetcher.wait()
    prefetcher.close()
    prefetcher.submit(rows, lambda _: None, wait)
    assert len(logged.messages) == 1


def test_a_write_that_waits_for_the_queue_is_logged(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore._disk.write_queue._MIN_QUEUED_BYTES", 0)
    begun, end = threading.Event(), threading.Event()

    def write(piece: Piece) -> None:
        begun.set()
        assert end.wait(60)

    def fill(part: slice, out: np.ndarray) -> None:
        out[:] = part.stop

    queue = WriteQueue(write, 64, 4 * 64)
    at = np.arange(1)
    logged.setLevel(logging.DEBUG)
    for _ in range(4):
        queue.put(at, at, fill)
    assert begun.wait(60) and not logged.messages
    one_more = threading.Thread(target=queue.put, args=(at, at, fill))
    one_more.start()
    while not queue._changed._waiters:
        pass
    end.set()
    one_more.join(60)
    queue.drain()
    (message,) = logged.messages
    assert message.startswith("a write waited ") and "4 blocks of " in message
