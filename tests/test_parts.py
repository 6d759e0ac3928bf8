"""Work in parts on several threads."""

import _thread
import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests import inside
from tierstore import _cgroups, _parts


@pytest.mark.parametrize(
    ("quota", "cores", "threads"),
    [
        ("max 100000", 3, 3),
        ("200000 100000", 8, 2),
        ("150000 100000", 8, 2),
        ("20000 100000", 8, 1),
        ("900000 100000", 4, 4),
        ("", 64, 64),
    ],
)
@pytest.mark.parametrize("group", ["", "jobs", "jobs/mine/deep"])
@pytest.mark.parametrize("limited", ["", "jobs"])
def test_threads_are_as_many_as_the_process_may_use(
    tmp_path, monkeypatch, quota, cores, threads, group, limited
):
    limits = tmp_path / "groups"
    (limits / "jobs/mine/deep").mkdir(parents=True)
    (limits / "other").mkdir()
    (limits / "other/cpu.max").write_text("100000 100000\n")
    (limits / "jobs/mine/cpu.max").write_text("max 100000\n")
    if quota:
        (limits / limited / "cpu.max").write_text(quota + "\n")
    own = tmp_path / "own"
    own.write_text(f"4:memory:/other\n0::/{group}\n")
    monkeypatch.setattr(_cgroups, "_GROUPS", limits)
    monkeypatch.setattr(_cgroups, "_OWN_GROUP", own)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    is_limited = group.startswith(limited)
    assert _parts.threads_of_core.__wrapped__() == (threads if is_limited else cores)


@pytest.mark.parametrize("own", [None, "", "nonsense\n", "0::/../../elsewhere\n"])
def test_a_cgroup_that_cannot_be_told_is_the_root(tmp_path, monkeypatch, own):
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    file = tmp_path / "own"
    if own is not None:
        file.write_text(own)
    monkeypatch.setattr(_cgroups, "_GROUPS", tmp_path)
    monkeypatch.setattr(_cgroups, "_OWN_GROUP", file)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert _parts.threads_of_core.__wrapped__() == 2


@pytest.fixture
def four_threads(monkeypatch):
    """A pool of four threads, whatever the machine has."""
    inside.forget_threads()
    monkeypatch.setattr(_parts, "most_threads", lambda: 4)
    yield
    inside.forget_threads()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 1001])
def test_parts_cover_the_rows_once_in_four_threads(four_threads, rows):
    seen, threads = np.zeros(rows, np.int64), set()
    met = threading.Barrier(4, timeout=30)

    def work(part):
        met.wait()  # which needs all four at a time
        seen[part] += 1
        threads.add(threading.get_ident())

    _parts.in_parts(work, rows, 400, least=100)
    assert (seen == 1).all()
    assert len(threads) == 4 and threading.get_ident() in threads


def test_an_error_of_a_part_is_raised_when_all_have_ended(four_threads):
    ended, first = [], threading.Event()

    def work(part):
        if part.start == 0:
            first.set()
            raise KeyError(part.stop)
        assert first.wait(30)
        ended.append(part)

    with pytest.raises(KeyError, match="25"):
        _parts.in_parts(work, 100, 400, least=100)
    assert len(ended) == 3


@pytest.mark.parametrize("threads", [1, 4])
def test_of_many_errors_that_of_the_first_part_is_raised(four_threads, monkeypatch, threads):
    monkeypatch.setattr(_parts, "most_threads", lambda: threads)
    seen, failed = np.zeros(100, np.int64), threading.Event()

    def work(part):
        for row in range(part.start, part.stop):
            seen[row] += 1
            if row >= 60:
                failed.set()
                raise KeyError(row)
            if row == 25 and threads > 1:
                assert failed.wait(30)
            if row >= 25:
                raise KeyError(row)

    with pytest.raises(KeyError, match="25"):
        _parts.in_parts(work, 100, 1000, least=100)
    assert threads == 1 or (seen[::25] == 1).all()  # all parts began


def test_a_part_that_nobody_ended_is_an_error(four_threads, monkeypatch):
    """As where there is no memory to note why it failed."""
    lost = threading.Event()

    def dies(job):
        with contextlib.suppress(IndexError):
            job.rest.popleft()
            lost.set()

    monkeypatch.setattr(_parts._Job, "help", dies)
    with pytest.raises(MemoryError, match="in a part"):
        _parts.in_parts(lambda part: lost.wait(30), 100, 400, least=100)
    monkeypatch.undo()


def test_memory_that_lacks_for_a_call_lacks_for_no_other(four_threads, monkeypatch):
    def fails(crew, job, threads):
        raise MemoryError("of a test")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="of a test"):
        patch.setattr(_parts._Crew, "_call_for", fails)
        _parts.in_parts(print, 100, 400, least=100)
    met = threading.Barrier(4, timeout=30)
    _parts.in_parts(lambda part: met.wait(), 100, 400, least=100)


def test_parts_within_parts_and_of_a_busy_pool_wait_for_no_thread(four_threads):
    done, release = [], threading.Event()

    def inner(part):
        done.append(part)

    def outer(part):
        _parts.in_parts(inner, 8, 800, least=100)

    _parts.in_parts(outer, 4, 400, least=100)
    assert done == [slice(0, 8)] * 4

    def block():
        _parts.in_parts(lambda part: release.wait(30), 4, 400, least=100)

    blocked = threading.Thread(target=block)
    blocked.start()
    done.clear()
    _parts.in_parts(inner, 8, 400, least=100)  # the caller does what nobody begins
    assert sorted((part.start, part.stop) for part in done) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert blocked.is_alive()  # nor does the caller wait for the pool then
    release.set()
    blocked.join()


def test_two_calls_go_on_beside_each_other(four_threads):
    met = threading.Barrier(2, timeout=30)
    threads = []

    def call():
        met.wait()
        threads.append(threading.get_ident())

    _parts.beside(call, call)
    assert len(set(threads)) == 2


def test_where_no_thread_is_free_the_second_call_follows_the_first(four_threads, monkeypatch):
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(_parts._Crew, "_call_for", lambda crew, job, threads: crew._jobs.append(job))
        _parts.beside(lambda: calls.append(1), lambda: calls.append(2))
    assert not _parts._crew(os.getpid())._jobs
    monkeypatch.setattr(_parts, "most_threads", lambda: 1)
    _parts.beside(lambda: calls.append(3), lambda: calls.append(4))
    assert calls == [1, 2, 3, 4]


def test_an_error_beside_another_call_is_raised_when_both_have_ended(four_threads):
    ended, begun = [], threading.Event()

    def fails():
        raise KeyError("here")

    def slow():
        begun.set()
        time.sleep(0.01)
        ended.append(True)

    def waits_and_fails():
        assert begun.wait(30)
        fails()

    with pytest.raises(KeyError, match="here"):
        _parts.beside(waits_and_fails, slow)
    assert ended
    with pytest.raises(KeyError, match="here"):
        _parts.beside(lambda: ended.append(False), fails)
    assert ended == [True, False]


@pytest.mark.parametrize("places", [("_call_for",), ("end",), ("_call_for", "end")])
def test_no_part_goes_on_when_an_interrupt_has_ended_the_call(four_threads, monkeypatch, places):
    """Nor is one begun: before the caller's own first part, while it waits, and both."""
    late, over = [], threading.Event()
    begun, raised = threading.Event(), threading.Event()
    met = threading.Barrier(4, timeout=30)
    caller = threading.get_ident()

    def work(part):
        if threading.get_ident() == caller:
            assert begun.wait(30)  # so there is a part to wait for
            return
        begun.set()
        assert raised.wait(30)
        if over.wait(0.1):
            late.append(part)

    def interrupted(function):
        numbers = itertools.count()

        def call(*given):
            function(*given)
            if next(numbers) == 0:
                raised.set()
                raise KeyboardInterrupt

        return call

    class Impatient:
        """Raises where the caller waits for the others, some times."""

        def __init__(self):
            self.lock, self.left = _thread.allocate_lock(), 3

        def acquire(self, timeout=-1):
            found = self.lock.acquire(timeout=timeout)
            if timeout > 0 and self.left:
                self.left -= 1
                raised.set()
                raise KeyboardInterrupt
            return found

        def release(self):
            self.lock.release()

    begin = _parts._Job.__init__

    def impatient(job, *given):
        begin(job, *given)
        job.over = Impatient()
        job.over.acquire()

    with monkeypatch.context() as patch:
        if "_call_for" in places:
            patch.setattr(_parts._Crew, "_call_for", interrupted(_parts._Crew._call_for))
        if "end" in places:
            patch.setattr(_parts._Job, "__init__", impatient)
        with pytest.raises(KeyboardInterrupt):
            _parts.in_parts(work, 100, 400, least=100)
    over.set()
    _parts.in_parts(lambda part: met.wait(), 100, 400, least=100)  # nothing else is left
    assert not late


def test_a_part_of_the_caller_that_is_interrupted_ends_the_call(four_threads):
    caller, begun, done = threading.get_ident(), threading.Event(), []

    def work(part):
        if threading.get_ident() == caller:
            assert begun.wait(30)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.05)
        done.append(part)

    with pytest.raises(KeyboardInterrupt):
        _parts.in_parts(work, 100, 400, least=100)
    count = len(done)
    assert 1 <= count <= 3
    time.sleep(0.1)
    assert len(done) == count


def test_threads_that_outlive_the_main_thread_copy_alone():
    program = """
import threading
import numpy as np
from tierstore import _cgroups, _parts, _rowcopy

_parts.most_threads = lambda: 4
source = np.random.default_rng(1).integers(0, 256, (60_000, 512), np.uint8)
slots = np.random.default_rng(2).permutation(60_000)
out = np.empty_like(source)
_rowcopy.gather(source, slots, out)

def late():
    threading.main_thread().join()
    out[:] = 0
    _rowcopy.gather(source, slots, out)
    print(np.array_equal(out, source[slots]))

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("some", [0, 1])
def test_without_threads_it_works_by_itself(some, monkeypatch):
    start, started = _thread.start_new_thread, []

    def few(*given):
        if len(started) >= some:
            raise RuntimeError("can't start new thread")
        started.append(given)
        return start(*given)

    inside.forget_threads()
    monkeypatch.setattr(_parts, "most_threads", lambda: 4)
    monkeypatch.setattr(_thread, "start_new_thread", few)
    done = np.zeros(100, np.int64)

    def work(part):
        done[part] += 1

    _parts.in_parts(work, 100, 100 * 64, least=64)
    assert (done == 1).all()
    assert len(started) == some
    inside.forget_threads()
