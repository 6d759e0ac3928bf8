"""Ids grouped by row, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.every import every
from tierstore._rowcopy import Groups


def check(ids: np.ndarray) -> None:
    rows, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    found = Groups(ids)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_array_equal(found.order, np.argsort(ids, kind="stable"))
    np.testing.assert_array_equal(found.starts, np.concatenate([[0], counts.cumsum()]))
    np.testing.assert_array_equal(found.positions, inverse)
    np.testing.assert_array_equal(found.repeats, counts)


@every(
    count=[0, 1, 2, 95, 96, 97, 4095, 4096, 5000, 9999], rows=[1, 7, 300, 1 << 31, 1 << 40, 1 << 62]
)
def test_ids_are_grouped_by_row(count: int, rows: int) -> None:
    check(np.random.default_rng(count + rows).integers(0, rows, count))


@pytest.mark.parametrize("features", [2, 5, 16, 26])
@pytest.mark.parametrize("each", [256, 300, 512, 700])
def test_ids_of_features_whose_tables_follow_one_another(features: int, each: int) -> None:
    rng = np.random.default_rng(features * each)
    ids = rng.integers(0, 50, (features, each)) + 50 * np.arange(features)[:, None]
    check(ids.reshape(-1))
    check(np.append(ids.reshape(-1), 3))  # behind the last block, of the first table
    for _ in range(5):
        one, other = rng.integers(0, ids.size, 2)
        swapped = ids.reshape(-1).copy()
        swapped[[one, other]] = swapped[[other, one]]
        check(swapped)
    check(np.roll(ids, 1, axis=0).reshape(-1))
    check(ids.repeat(2, axis=0).reshape(-1))
