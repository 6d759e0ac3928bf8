"""Ids grouped by row, and sums over the groups."""

import numpy as np
import torch

from tests.every import every
from tierstore._rowcopy import Groups
from tierstore.nn.autograd import sum_by_row


@every(largest=[0, 40, 2**31 - 1, 2**40], count=[0, 1, 2, 96, 97, 1024, 5000])
def test_ids_are_grouped_by_row(count: int, largest: int) -> None:
    ids = np.random.default_rng([count, largest]).integers(0, largest + 1, count)
    groups = Groups(ids)
    rows, positions = np.unique(ids, return_inverse=True)
    assert np.array_equal(groups.rows, rows)
    assert np.array_equal(groups.positions, positions)
    assert np.array_equal(groups.order, np.argsort(ids, kind="stable"))
    assert np.array_equal(np.diff(groups.starts), np.bincount(positions, minlength=rows.size))


@every(dim=[1, 3, 8, 15, 16, 17, 64, 100, 300], count=[1, 5, 64, 3000])
def test_bags_of_groups_are_sums_by_row_to_the_bit(dim: int, count: int) -> None:
    rng = np.random.default_rng([dim, count])
    groups = Groups(rng.integers(0, count // 3 + 1, count))
    values = rng.standard_normal((count, dim)) * 10.0 ** rng.integers(-8, 8, (count, dim))
    values[rng.random((count, dim)) < 0.2] = -0.0
    values[-1, 0] = np.inf
    given = torch.from_numpy(values.astype(np.float32))
    order, starts, positions = map(
        torch.from_numpy, (groups.order, groups.starts, groups.positions)
    )
    bags = torch.embedding_bag(given, order, starts, False, 0, False, None, True)[0]
    sums = sum_by_row(given, positions, groups.rows.size)
    assert bags.numpy().tobytes() == sums.numpy().tobytes()
