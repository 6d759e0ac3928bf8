"""Real processes: killed writers, locks, forks, pickles, threads and readers beside a writer.

Rows 19, 20, 22, 23, 24, 25, 26, 28, 29 and 34 of the list of faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability import small
from tests.durability.crash import scratch
from tests.durability.writer import DIM, ROWS, changes, content
from tierstore.budget import Budget
from tierstore.errors import (
    ClosedError,
    ForkedStoreError,
    InvalidTypeError,
    LockedError,
    TierStoreError,
)

NONE = Budget(host=0)


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch() as root:
        tierstore.create(root / "s", {"t": tierstore.TableSpec(ROWS, DIM)}).close()
        yield root / "s"


def killed(path: Path, seed: int) -> int:
    """Run a writer briefly, kill it, and return the last version it acknowledged."""
    command = [sys.executable, "-m", "tests.durability.writer", str(path), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.3)
        process.kill()
        lines = [first, *process.stdout.readlines()]
    return max(int(line) for line in lines if line.endswith("\n"))


def check(path: Path, acknowledged: int) -> None:
    """The store is at the last acknowledged version or the one that was in flight."""
    with tierstore.open(path, "r+", budget=NONE) as store:
        assert store.version in (acknowledged, acknowledged + 1)
        assert store.step == store.version
        assert np.array_equal(store["t"].read(np.arange(ROWS)), content(store.version))
        assert store.verify().ok
        if store.version % 3 == 0:
            assert store.payload["model"].read() == content(store.version).tobytes()


def torture(path: Path, seeds: range) -> None:
    for seed in seeds:
        acknowledged = killed(path, seed)
        try:
            check(path, acknowledged)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.slow
@pytest.mark.fault(29)
def test_a_killed_writer_leaves_a_committed_state(path: Path) -> None:
    torture(path, range(2))


@pytest.mark.torture
def test_writers_killed_many_times(path: Path) -> None:
    torture(path, range(200))


@pytest.mark.fault(19)
def test_a_second_writer_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "link"
    other.symlink_to(path)
    with tierstore.open(path, "r+") as store:
        for name in (path, other):
            with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
                tierstore.open(name, "r+")
        code = f"import tierstore; tierstore.open({str(path)!r}, 'r+')"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "LockedError" in found.stderr
        store["t"].write([1], np.ones((1, DIM), np.float32))
        assert store.commit() == 2


@pytest.mark.fault(20)
def test_what_a_dead_writer_left_in_the_lock_does_not_count(path: Path) -> None:
    (path / "LOCK").write_text(f"pid {os.getpid()} on elsewhere")
    with tierstore.open(path, "r+") as store:
        assert store.commit() == 2


@pytest.mark.fault(19, 24)
def test_a_forked_child_is_refused_and_harms_nothing(path: Path) -> None:
    store = tierstore.open(path, "r+", budget=NONE)
    store["t"].write(*changes(2))
    store["t"].prefetch(np.arange(ROWS))
    child = os.fork()
    if child == 0:
        code = 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused = 0
            for use in (
                lambda: store["t"].read([1]),
                lambda: store["t"].write([1], np.ones((1, DIM), np.float32)),
                lambda: store["t"].prefetch([1]),
                store.commit,
                store.rollback,
                store.verify,
            ):
                try:
                    use()
                except ForkedStoreError:
                    refused += 1
            store.close()
            code = 0 if refused == 6 else 1
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(LockedError):
        tierstore.open(path, "r+")
    store.commit(step=2)
    store.close()
    check(path, 2)


@pytest.mark.fault(24, 25)
def test_an_orphaned_child_does_not_keep_the_lock(path: Path) -> None:
    """The writer dies, a worker it forked lives on."""
    code = (
        "import os, sys, time, tierstore\n"
        f"store = tierstore.open({str(path)!r}, 'r+')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1); time.sleep(60)\n"
        "print(child, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(found.stdout)
    try:
        with tierstore.open(path, "r+") as store:
            assert store.commit() == 2
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_writer_is_not_pickled_and_a_reader_reopens_its_version(path: Path) -> None:
    with tierstore.open(path, "r+", keep=3) as writer:
        with pytest.raises(InvalidTypeError, match="open it for reading"):
            pickle.dumps(writer)
        with tierstore.open(path) as reader:
            data = pickle.dumps(reader)
            writer["t"].write(*changes(2))
            writer.commit()
            with pickle.loads(data) as copy:
                assert copy.version == 1
                assert not copy["t"].read(np.arange(ROWS)).any()


class Rows:
    """A data set that opens the store where it is used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store: tierstore.Store | None = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> np.ndarray:
        if self.store is None:
            self.store = tierstore.open(self.path, budget=NONE)
        return self.store["t"].read([row])[0]


class HeldRows:
    """A data set that holds a table of a reader."""

    def __init__(self, table: tierstore.Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> np.ndarray:
        return self.table.read([row])[0]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.fault(25)
@pytest.mark.nightly("spawn")
def test_workers_of_a_data_loader_read(path: Path, method: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    with tierstore.open(path, "r+") as writer:
        writer["t"].write(*changes(2))
        writer.commit()
        with tierstore.open(path, budget=NONE) as reader:
            for rows in (Rows(path), HeldRows(reader["t"])):
                loader = data.DataLoader(
                    rows, batch_size=8, num_workers=2, multiprocessing_context=method
                )
                found = np.concatenate([batch.numpy() for batch in loader])
                assert np.array_equal(found, content(2)[:40])
        assert writer.commit() == 3


@pytest.mark.slow
@pytest.mark.fault(22)
def test_readers_beside_a_writer_see_one_version(path: Path) -> None:
    """Row 22: whole versions, whatever is committed, folded and swept meanwhile."""
    done = threading.Event()
    problems: list[str] = []

    def read() -> None:
        while not done.is_set():
            try:
                with tierstore.open(path, budget=NONE) as reader:
                    for _ in range(3):
                        found = reader["t"].read(np.arange(ROWS))
                        if not np.array_equal(found, content(reader.version)):
                            problems.append(f"version {reader.version} is torn")
                        reader.refresh()
            except TierStoreError as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=read) for _ in range(2)]
    with tierstore.open(path, "r+", budget=Budget(host_rows=50)) as writer:
        for thread in threads:
            thread.start()
        for version in range(2, 60):
            writer["t"].write(*changes(version))
            writer.commit(step=version)
            if version % 7 == 0:
                with contextlib.suppress(LockedError):
                    writer.fold()
        done.set()
        for thread in threads:
            thread.join()
    assert not problems, problems[:3]


@pytest.mark.fault(23)
def test_a_reader_that_is_stopped_or_killed(path: Path) -> None:
    """A stopped reader puts a fold off; a killed one does not."""
    code = (
        "import sys, tierstore\n"
        f"reader = tierstore.open({str(path)!r})\n"
        "print('open', flush=True); sys.stdin.read()\n"
    )
    with (
        tierstore.open(path, "r+", budget=NONE) as store,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as reader,
    ):
        assert reader.stdout is not None and reader.stdout.readline() == b"open\n"
        reader.send_signal(signal.SIGSTOP)
        store["t"].write(*changes(2))
        store.commit(step=2)
        with pytest.raises(LockedError, match="version 1 is open for reading"):
            store.fold()
        reader.kill()
        reader.wait()
        store.fold()
        assert store.info().folded
    check(path, 2)


@pytest.mark.fault(26)
@pytest.mark.slow
def test_threads_share_a_store(path: Path) -> None:
    """Row 26: each thread owns some rows; commits and a close happen in between."""
    store = tierstore.open(path, "r+", budget=Budget(host_rows=37))
    problems: list[BaseException] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        own = np.arange(number, ROWS, 8)
        truth = np.zeros((own.size, DIM), np.float32)
        try:
            for turn in range(40):
                at = rng.integers(0, own.size, 20)
                new = rng.standard_normal((20, DIM)).astype(np.float32)
                store["t"].write(own[at], new)
                for row, value in zip(at, new, strict=True):
                    truth[row] = value
                if turn % 10 == number % 10:
                    store.commit()
                assert np.array_equal(store["t"].read(own), truth)
        except BaseException as error:
            problems.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not problems, problems[:2]
    store.commit()
    store.close()
    store.close()
    with pytest.raises(ClosedError):
        store["t"].read([1])


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.fault(28)
def test_an_interrupt_leaves_a_committed_state(path: Path, seed: int) -> None:
    """Row 28: Ctrl-C at a random moment of a writer."""
    command = [sys.executable, "-m", "tests.durability.writer", str(path), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(random.Random(seed).random() * 0.2)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=600)
    assert "KeyboardInterrupt" in errors
    check(path, max(map(int, (first + rest).split())))


@pytest.mark.fault(24)
def test_what_is_closed_is_free_whatever_a_fork_holds(path: Path) -> None:
    """The child has the parent's descriptors, and has not come to its hooks yet."""
    reading, writing = os.pipe()
    with tierstore.open(path) as reader:
        store = tierstore.open(path, "r+", budget=NONE)
        child = ctypes.CDLL(None).fork()  # which calls no hooks of Python
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        try:
            for version in range(2, 5):
                store.close()
                store = tierstore.open(path, "r+", budget=NONE)
                assert small.commit(store) == version
            reader.close()
            assert store.fold()
            store.close()
        finally:
            os.write(writing, b"1")
            os.waitpid(child, 0)
            os.close(reading)
            os.close(writing)
    small.check(path, 4)


@pytest.mark.slow
@pytest.mark.fault(34)
def test_no_descriptor_is_lost(path: Path) -> None:
    """Row 34: many deltas take no descriptors, and a thousand rounds lose none."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with tierstore.open(path, "r+", budget=NONE) as store:
        store.commit(confirm=False)
        opened = len(os.listdir("/proc/self/fd"))
        for version in range(3, 60):
            store["t"].write(*changes(version))
            store.commit(confirm=False)
        assert len(os.listdir("/proc/self/fd")) == opened
    for _ in range(50):
        tierstore.open(path).close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
