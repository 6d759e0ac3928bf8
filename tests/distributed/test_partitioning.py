"""The arithmetic of partitions, by brute force."""

import numpy as np
import pytest
import torch

from tests.every import every
from tierstore._disk.partitioning import Shard

RANDOM = np.random.default_rng(4)


@every(rows=[1, 2, 7, 64, 65, 1000], partitions=[1, 2, 3, 8, 64])
def test_every_row_is_in_one_partition_of_one_rank(rows: int, partitions: int) -> None:
    ids = np.arange(rows)
    for ranks in {1, 2, partitions} & set(range(1, partitions + 1)):
        seen: list[int] = []
        for rank in range(ranks):
            shard = Shard.of_rank(rows, partitions, rank, ranks)
            numbers = shard.partition_of(ids)
            mine = ids[(numbers >= shard.first) & (numbers < shard.first + shard.count)]
            assert (numbers[mine] * ranks // partitions == rank).all()
            there = shard.rows_of(mine)
            assert there.tolist() == list(range(mine.size))
            assert len(shard) == max(1, mine.size)
            assert np.array_equal(shard.ids_of(there), mine)
            part, local = shard.locate(there)
            assert np.array_equal(part, numbers[mine] - shard.first)
            assert np.array_equal(local, mine // partitions)
            assert (local < shard.blocks).all()
            for each in range(shard.count):
                which = part == each
                assert np.array_equal(shard.rows_in(each, local[which]), there[which])
            seen += mine.tolist()
        assert sorted(seen) == ids.tolist()


def test_the_whole_table_is_numbered_by_id() -> None:
    shard = Shard(10_000, 64, 0, 64)
    ids = RANDOM.integers(0, 10_000, 1000)
    assert np.array_equal(shard.rows_of(ids), ids)
    assert np.array_equal(shard.ids_of(ids), ids)
    assert len(shard) == 10_000


def test_tensors_are_placed_as_arrays_are() -> None:
    shard = Shard.of_rank(2**40, 48, 2, 5)
    ids = RANDOM.integers(0, 2**40, 10_000)
    given = torch.from_numpy(ids)
    assert np.array_equal(shard.partition_of(given).numpy(), shard.partition_of(ids))
    assert np.array_equal(shard.rows_of(given).numpy(), shard.rows_of(ids))


@pytest.mark.parametrize("step", [1, 2, 63, 64, 65, 128, 4096, 6765])
def test_no_stride_of_ids_favours_a_partition(step: int) -> None:
    shard = Shard(2**40, 64, 0, 64)
    counts = np.bincount(shard.partition_of(np.arange(64_000) * step), minlength=64)
    assert counts.min() > 800
    assert counts.max() < 1200
