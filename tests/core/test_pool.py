"""Threads of the core: they share long calls, take no signals, and are a forked child's own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import inside
from tierstore import _core

ROWS, WIDTH = 4096, 64
PROCESSORS = len(os.sched_getaffinity(0))
TASKS = Path("/proc/self/task")
several = pytest.mark.skipif(PROCESSORS < 2, reason="one processor: no thread is started")


@pytest.fixture(autouse=True)
def shared() -> Iterator[None]:
    """Let the smallest calls be shared."""
    with inside.core_threads(8):
        yield


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (ROWS, WIDTH), np.uint8), rng.integers(0, ROWS, ROWS)


def gathers(seed: int) -> bool:
    """Whether a shared call has the right result."""
    records, slots = drawn(seed)
    out = np.zeros_like(records)
    _core.gather(records, slots, 0, out)
    return np.array_equal(out, records[slots])


def helpers() -> list[Path]:
    """The threads of the core, by their name."""
    found = []
    for each in TASKS.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has ended
            if (each / "comm").read_text() == "tierstore\n":
                found.append(each)
    return found


@several
def test_helpers_are_no_more_than_processors_and_take_no_signal() -> None:
    for seed in range(20):
        assert gathers(seed)
    assert 1 <= len(helpers()) < PROCESSORS
    for each in helpers():
        status = (each / "status").read_text()
        blocked = int(next(line for line in status.splitlines() if "SigBlk" in line).split()[1], 16)
        assert all(blocked >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))


def test_callers_at_the_same_time_have_their_own_results() -> None:
    """Of more threads than processors, in calls of any length, while others end and begin."""
    failed = list[int]()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        records, slots = drawn(seed)
        for _ in range(100):
            count = int(rng.integers(1, ROWS))
            out = np.zeros((count, WIDTH), np.uint8)
            _core.gather(records, slots[:count], 0, out)
            if not np.array_equal(out, records[slots[:count]]):
                failed.append(seed)

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(2 * PROCESSORS + 2)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not failed
    assert len(helpers()) < PROCESSORS


def test_a_child_that_is_forked_during_calls_has_threads_of_its_own() -> None:
    over, failed = threading.Event(), list[int]()
    np.random.default_rng()  # imported now: the lock of an import stays locked in a child

    def work(seed: int) -> None:
        while not over.is_set():
            if not gathers(seed):
                failed.append(seed)

    caller = threading.Thread(target=work, args=(1,))
    caller.start()
    try:
        for seed in range(12):
            child = os.fork()
            if not child:
                os._exit(0 if all(map(gathers, range(seed, seed + 3))) else 1)
            for _ in range(600):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    break
                over.wait(0.05)
            else:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                pytest.fail("a child waits for threads that it does not have")
            assert status == 0
    finally:
        over.set()
        caller.join()
    assert not failed


def test_the_first_of_all_items_that_parts_refuse_is_told() -> None:
    records, _ = drawn(1)
    ids, out = np.arange(ROWS), np.empty_like(records)
    for wrong in ([17], [ROWS - 1], [0], [4000, 170, 2000]):
        marks = np.ones(ROWS, np.uint8)
        marks[wrong] = 0
        found = _core.read_slots(records, marks, ids, 0, ROWS, 0, out, None, None, 1, None)
        assert found == min(wrong)


@several
def test_a_thread_that_may_use_one_processor_shares_nothing() -> None:
    """As one that is pinned, or a process with TIERSTORE_THREADS=1."""
    program = (
        "from tests.core.test_pool import gathers, helpers; from tierstore import _core, _parts; "
        "_core.set_threads(_parts.threads_of_core(), 1); print(gathers(1), len(helpers()))"
    )
    told = []
    for threads in ("", "1"):
        env = os.environ | {"TIERSTORE_THREADS": threads}
        command = [sys.executable, "-c", program]
        found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        told.append(found.stdout.split())
    assert [right for right, _ in told] == ["True", "True"]
    assert int(told[0][1]) > 0 == int(told[1][1])


@pytest.mark.parametrize("wrong", ["none", "0", "-1", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused(wrong: str) -> None:
    command = [sys.executable, "-c", "import tierstore; tierstore.open('x')"]
    env = os.environ | {"TIERSTORE_THREADS": wrong}
    found = subprocess.run(command, env=env, capture_output=True, text=True)
    assert found.returncode == 1
    assert f"TIERSTORE_THREADS is '{wrong}', but should be" in found.stderr
