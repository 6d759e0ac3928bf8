import _thread
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import records
from tierstore import _rowcopy

spans = st.tuples(st.integers(1, 12), st.integers(0, 2**32)).flatmap(
    lambda given: st.tuples(
        st.just(16 * given[0]),
        st.integers(0, 8 * given[0] - 1).map(lambda half: 2 * half),
        st.just(given[1]),
    )
)


@settings(deadline=None, max_examples=120)
@given(spans, st.integers(0, 40), st.sampled_from([np.int32, np.int64]), st.booleans(), st.data())
def test_byte_ranges_are_copied_as_numpy_would(span, count, kind, small, data):
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            patch.setattr(_rowcopy, "_SMALL", -1)
        assert_copied_as_numpy_would(span, count, kind, data)


def assert_copied_as_numpy_would(span, count, kind, data):
    width, lo, seed = span
    hi = data.draw(st.integers(lo + 1, width)) if lo < width else width
    rng = np.random.default_rng(seed)
    source = records(rng, 20, width)
    slots = rng.integers(0, 20, count).astype(kind)
    out = records(rng, count, hi - lo)
    _rowcopy.gather(source, slots, out, lo)
    assert np.array_equal(out, source[slots, lo:hi])

    targets = rng.permutation(20)[:count].astype(kind)
    values = records(rng, targets.size, hi - lo)
    expected = source.copy()
    expected[targets, lo:hi] = values
    _rowcopy.scatter(source, targets, values, lo)
    assert np.array_equal(source, expected)


@pytest.mark.parametrize(("lo", "hi"), [(0, 512), (0, 4), (256, 512), (508, 512), (2, 510)])
def test_large_batches_are_split_among_threads_without_a_trace(lo, hi):
    rng = np.random.default_rng(lo + hi)
    source = records(rng, 3000, 512)
    slots = rng.integers(0, 3000, 9001)
    out = np.empty((9001, hi - lo), np.uint8)
    _rowcopy.gather(source, slots, out, lo)
    assert np.array_equal(out, source[slots, lo:hi])

    expected, targets = source.copy(), rng.permutation(3000)
    values = records(rng, 3000, hi - lo)
    expected[targets, lo:hi] = values
    _rowcopy.scatter(source, targets, values, lo)
    assert np.array_equal(source, expected)


@pytest.fixture
def four_threads(monkeypatch):
    """A pool of four threads, whatever the machine has."""
    _rowcopy._threads.cache_clear()
    monkeypatch.setattr(_rowcopy, "most_threads", lambda: 4)
    yield
    _rowcopy._threads.cache_clear()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 1001])
def test_parts_cover_the_rows_once_in_threads_of_the_pool(four_threads, rows):
    seen, threads = np.zeros(rows, np.int64), set()
    met = threading.Barrier(4, timeout=30)

    def work(part):
        met.wait()  # which needs all four at a time
        seen[part] += 1
        threads.add(threading.get_ident())

    _rowcopy.in_parts(work, rows, 400, least=100)
    assert (seen == 1).all()
    assert len(threads) == 4 and threading.get_ident() not in threads


def test_an_error_of_a_part_is_raised_when_all_have_ended(four_threads):
    ended, first = [], threading.Event()

    def work(part):
        if part.start == 0:
            first.set()
            raise KeyError(part.stop)
        assert first.wait(30)
        ended.append(part)

    with pytest.raises(KeyError, match="25"):
        _rowcopy.in_parts(work, 100, 400, least=100)
    assert len(ended) == 3


def test_parts_within_parts_and_of_a_busy_pool_wait_for_no_thread(four_threads):
    done, release = [], threading.Event()

    def inner(part):
        done.append(part)

    def outer(part):
        _rowcopy.in_parts(inner, 8, 800, least=100)

    _rowcopy.in_parts(outer, 4, 400, least=100)
    assert done == [slice(0, 8)] * 4

    def block():
        _rowcopy.in_parts(lambda part: release.wait(30), 4, 400, least=100)

    blocked = threading.Thread(target=block)
    blocked.start()
    done.clear()
    _rowcopy.in_parts(inner, 8, 400, least=100)  # the caller does what nobody begins
    assert sorted((part.start, part.stop) for part in done) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert blocked.is_alive()  # nor does the caller wait for the pool then
    release.set()
    blocked.join()


def test_no_part_goes_on_when_an_interrupt_has_ended_the_call(four_threads, monkeypatch):
    late, over = [], threading.Event()
    met = threading.Barrier(4, timeout=30)

    def work(part):
        if over.wait(0.1):
            late.append(part)

    def interrupted(function, *calls):
        numbers = itertools.count()

        def call(*arguments):
            if next(numbers) in calls:
                raise KeyboardInterrupt
            return function(*arguments)

        return call

    pool = _rowcopy._threads(os.getpid())
    for owner, name, calls in (pool, "submit", (2,)), (_rowcopy, "wait", (0, 1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted(getattr(owner, name), *calls))
            with pytest.raises(KeyboardInterrupt):
                _rowcopy.in_parts(work, 100, 400, least=100)
        over.set()
        _rowcopy.in_parts(lambda part: met.wait(), 100, 400, least=100)  # nothing else is left
        assert not late, f"interrupted in {name}"
        over.clear()


def test_threads_that_outlive_the_main_thread_copy_alone():
    program = """
import threading
import numpy as np
from tierstore import _rowcopy

_rowcopy.most_threads = lambda: 4
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


@pytest.mark.parametrize("largest", [0, 7, 2**16 - 1, 2**16, 2**31, 2**33, 2**62])
@pytest.mark.parametrize("count", [0, 1, 512, 513, 6000])
def test_the_order_of_values_is_that_of_a_stable_sort(count, largest):
    values = np.random.default_rng([count, largest]).integers(0, largest, count, endpoint=True)
    assert np.array_equal(_rowcopy.order(values), np.argsort(values, kind="stable"))
    found = _rowcopy.unique(values)
    assert np.array_equal(found, np.unique(values))
    again = _rowcopy.unique(found)
    assert np.array_equal(again, found) and not np.shares_memory(again, found)
    negative = values - largest // 2
    assert np.array_equal(_rowcopy.unique(negative), np.unique(negative))


def test_read_only_records_and_no_rows():
    source = records(np.random.default_rng(1), 5, 16)
    source.flags.writeable = False
    out = np.empty((2, 16), np.uint8)
    _rowcopy.gather(source, np.array([4, 4]), out)
    assert np.array_equal(out, source[[4, 4]])
    _rowcopy.gather(source, np.empty(0, np.int64), np.empty((0, 16), np.uint8))


@pytest.mark.parametrize(("lo", "hi"), [(0, 512), (0, 4), (2, 510)])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_negative_slot_is_no_record(lo, hi, kind):
    source = records(np.random.default_rng(lo), 5, 512)
    before, slots = source.copy(), np.array([3, -1], kind)
    with pytest.raises(IndexError, match="slot -1"):
        _rowcopy.gather(source, slots, np.empty((2, hi - lo), np.uint8), lo)
    with pytest.raises(IndexError, match="slot -1"):
        _rowcopy.scatter(source, slots, np.zeros((2, hi - lo), np.uint8), lo)
    assert np.array_equal(source, before)


@pytest.mark.parametrize("some", [0, 1])
def test_without_threads_it_copies_by_itself(some, monkeypatch):
    start, started = _thread.start_new_thread, []

    def few(*given):
        if len(started) >= some:
            raise RuntimeError("can't start new thread")
        started.append(given)
        return start(*given)

    _rowcopy._threads.cache_clear()
    monkeypatch.setattr(_rowcopy, "most_threads", lambda: 4)
    monkeypatch.setattr(_rowcopy, "_BYTES_PER_THREAD", 64)
    monkeypatch.setattr(_rowcopy, "_SMALL", 0)
    monkeypatch.setattr(threading, "_start_new_thread", few)
    records = np.random.default_rng(1).integers(0, 256, (100, 64), np.uint8)
    slots = np.random.default_rng(2).permutation(100)
    out = np.empty_like(records)
    _rowcopy.gather(records, slots, out)
    assert np.array_equal(out, records[slots])
    assert len(started) == some
    _rowcopy._threads.cache_clear()
