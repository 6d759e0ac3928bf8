import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore._rowcopy import ascends, unique


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_each_value_comes_once_ascending(values):
    given_ = np.array(values, np.int64)
    found = unique(given_)
    assert found.tolist() == sorted(set(values))
    assert given_.tolist() == values, "what was given is as it was"


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_the_dtype_stays(dtype):
    rng = np.random.default_rng(1)
    assert unique(rng.integers(0, 50, 300).astype(dtype)).dtype == dtype


EXTREMES = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 0, 2**63 - 1]))


@given(st.lists(EXTREMES, max_size=4), st.booleans())
def test_the_order_of_numbers_whose_differences_wrap(values, is_sorted):
    values = sorted(values) if is_sorted else values
    found = np.array(values, np.int64)
    pairs = list(itertools.pairwise(values))
    assert ascends(found) == all(a <= b for a, b in pairs)
    assert ascends(found, strictly=True) == all(a < b for a, b in pairs)
