import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.every import every
from tests.oracle import records
from tierstore import _rowcopy

spans = st.tuples(st.integers(1, 12), st.integers(0, 2**32)).flatmap(
    lambda given: st.tuples(
        st.just(16 * given[0]),
        st.integers(0, 8 * given[0] - 1).map(lambda half: 2 * half),
        st.just(given[1]),
    )
)


@given(spans, st.integers(0, 40), st.sampled_from([np.int32, np.int64]), st.data())
def test_byte_ranges_are_copied_as_numpy_would(span, count, kind, data):
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


@every(largest=[0, 7, 2**16 - 1, 2**16, 2**31, 2**33, 2**62], count=[0, 1, 512, 513, 6000])
def test_distinct_values_ascend(count, largest):
    values = np.random.default_rng([count, largest]).integers(0, largest, count, endpoint=True)
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
def test_a_slot_that_is_none_is_no_record(lo, hi, kind):
    source = records(np.random.default_rng(lo), 5, 512)
    before, values = source.copy(), np.zeros((2, hi - lo), np.uint8)
    for none in (-1, 5):
        slots = np.array([3, none], kind)
        with pytest.raises(IndexError, match="position 1"):
            _rowcopy.gather(source, slots, values.copy(), lo)
        with pytest.raises(IndexError, match="position 1"):
            _rowcopy.scatter(source, slots, values, lo)
    assert np.array_equal(source, before)
