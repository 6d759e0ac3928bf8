"""The distinct ids of a batch by owner, as plain NumPy finds them: by operators and by kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests import inside
from tests.gpu.emulator import EmulatedDevice
from tierstore._disk.partitioning import Shard
from tierstore._memory_table import MemoryTable
from tierstore._table.gpu import DeviceAccess
from tierstore.distributed.key_exchange import Numbers
from tierstore.distributed.owners import DeviceOwners, Owners, Place, owners_over

NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class Asked:
    """What a rank looks up."""

    ids: Tensor
    tables: list[int]
    lengths: list[int]


@pytest.fixture(params=["operators", "kernels"])
def access(request: pytest.FixtureRequest) -> Any:
    on_device = request.param == "kernels"
    device = EmulatedDevice(seed=5) if on_device else "cpu"
    budget = tierstore.Budget(host_rows=8, gpu_rows=4 if on_device else 0)
    with MemoryTable(tierstore.TableSpec(8, 4), budget=budget, device=device) as made:
        yield inside.access(made.table)


def owned(access: Any, place: Place, ranks: int, rows: list[int], first: list[int]) -> Owners:
    found = owners_over(place, ranks, rows, first, access)
    assert isinstance(found, DeviceOwners) == isinstance(access, DeviceAccess)
    return found


def draw(
    random: np.random.Generator, rows: list[int], lengths: list[int], tables: list[int]
) -> Tensor:
    parts = [random.integers(0, rows[t], n) for t, n in zip(tables, lengths, strict=True)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))


def oracle(asked: Asked, place: Place, ranks: int, rows: list[int]) -> list[set[int]]:
    """Return the numbers of the distinct ids of each owner."""
    ends = np.cumsum(rows)
    found: list[set[int]] = [set() for _ in range(ranks)]
    for table, ids in zip(asked.tables, asked.ids.split(asked.lengths), strict=True):
        owners = place.partition_of(ids.numpy()) * ranks // place.partitions
        for owner, each in zip(owners.tolist(), ids.tolist(), strict=True):
            found[owner].add(each + int(ends[table] - rows[table]))
    return found


CASES = {
    "one rank": (1, 1, [50], [40], [0]),
    "one table": (3, 8, [700], [300], [0]),
    "odd partitions": (4, 7, [90, 5000, 1], [64, 200, 9], [1, 0, 2]),
    "equal lengths": (2, 16, [90, 500, 30], [32, 32, 32], [0, 1, 2]),
    "a table twice": (5, 64, [10**9, 6], [70, 0, 33], [0, 1, 0]),
    "wide numbers": (2, 4, [10**9, 2**33, 17], [100, 100, 50], [0, 1, 2]),
    "nothing": (3, 4, [90, 5], [0, 0], [0, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_distinct_ids_are_counted_and_placed_by_owner(access: Any, case: str) -> None:
    ranks, partitions, rows, lengths, tables = CASES[case]
    random = np.random.default_rng(sum(map(ord, case)))
    places = [Shard.of_rank(max(rows), partitions, rank, ranks) for rank in range(ranks)]
    first = random.integers(0, 1000, len(rows)).tolist()
    every = [owned(access, place, ranks, rows, first) for place in places]
    for _ in range(2):  # what the first batch left is not seen by the second
        asked = Asked(draw(random, rows, lengths, tables), tables, lengths)
        expected = oracle(asked, places[0], ranks, rows)
        found = every[0].find(asked, [77, -5], failed=False)
        message = found.told[0].numpy()
        assert message.shape == (ranks, 4)
        assert message[:, 0].tolist() == [len(each) for each in expected]
        assert (message[:, 1] == 0).all()
        assert (message[:, 2:] == [77, -5]).all()
        numbers, positions = found.placed()
        distinct = numbers[: sum(map(len, expected))]
        for part, own in zip(distinct.split([len(e) for e in expected]), expected, strict=True):
            assert sorted(part.tolist()) == sorted(own)
        starts = np.cumsum(rows) - rows
        offsets = torch.from_numpy(starts[np.repeat(tables, lengths)].astype(np.int64))
        arrived = distinct.split([len(each) for each in expected])
        assert torch.equal(distinct[positions.long()].long(), asked.ids + offsets)
        for rank, (owners, part) in enumerate(zip(every, arrived, strict=True)):
            mine = part.long().numpy()
            table = np.searchsorted(np.cumsum(rows), mine, side="right")
            own = places[rank].rows_of(mine - starts[table]) + np.array(first)[table]
            assert owners.rows_of(part.contiguous()).tolist() == own.tolist()


def test_the_last_features_are_remembered() -> None:
    device, budget = EmulatedDevice(seed=5), tierstore.Budget(host_rows=8, gpu_rows=4)
    spec, place = tierstore.TableSpec(8, 4), Shard(8, 4, 0, 1)
    with MemoryTable(spec, budget=budget, device=device) as made:
        owners: Any = owned(inside.access(made.table), place, 1, [8], [0])
        for count in range(1, 100):
            ids = torch.arange(count) % 8
            found = owners.find(Asked(ids, [0] * count, [1] * count), [1], failed=False)
            numbers, positions = found.placed()
            assert torch.equal(numbers[positions.long()].long(), ids)
        assert len(owners._features) <= 64


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(4, torch.float32), (64, torch.float32), (24, torch.bfloat16), (3, torch.float32)],
)
def test_each_id_gets_its_row(access: Any, dim: int, dtype: torch.dtype) -> None:
    owners = owned(access, Shard(8, 4, 0, 1), 1, [8], [0])
    kind = torch.int32 if isinstance(owners, DeviceOwners) else torch.int64
    for rows, ids in ((1, 1), (9, 70), (300, 1000), (5, 0), (0, 0)):
        came = torch.randn(rows, dim).to(dtype)
        positions = torch.randint(max(rows, 1), (ids,), dtype=kind)
        found = owners.expand(came, positions)
        assert torch.equal(found, came[positions.long()])
        if rows > 1:
            odd = came.view(-1)[1 : 1 + (rows - 1) * dim].view(-1, dim)  # not where units begin
            positions = positions % (rows - 1)
            assert torch.equal(owners.expand(odd, positions), odd[positions.long()])


def test_ids_of_no_row_are_told(access: Any) -> None:
    owners = owned(access, Shard(100, 4, 0, 2), 2, [100, 7], [0, 0])
    for bad, at in ((-1, 3), (100, 0), (7, 5), (2**62, 1), (-(2**63), 4)):
        ids = torch.tensor([1, 2, 3, 4, 5, 6])
        ids[at] = bad
        found = owners.find(Asked(ids, [0, 1], [4, 2]), [1], failed=False)
        assert (found.told[0][:, 1] == 1).all()
        found.placed()
    found = owners.find(Asked(torch.tensor([99, 0, 6, 6]), [0, 1], [2, 2]), [1], failed=False)
    assert (found.told[0][:, 1] == 0).all()
    found = owners.find(Asked(NONE, [0, 1], [0, 0]), [1], failed=True)
    assert (found.told[0][:, 1] == 1).all()


def test_rows_by_key_have_their_owner_in_their_number(access: Any) -> None:
    random, ranks = np.random.default_rng(3), 3
    place = Numbers(1, ranks)
    owners = owned(access, place, ranks, [place.rows], [0])
    rows = random.integers(0, 2**36, 200)
    ids = torch.from_numpy(rows + (random.integers(0, ranks, 200) << 36))[
        torch.randint(200, (300,))
    ]
    asked = Asked(ids, [0], [300])
    found = owners.find(asked, [], failed=False)
    expected = oracle(asked, place, ranks, [place.rows])
    assert found.told[0][:, 0].tolist() == [len(each) for each in expected]
    numbers, positions = found.placed()
    assert torch.equal(numbers[positions.long()], ids)
    first, own = (len(each) for each in expected[:2])
    own_numbers = numbers[first : first + own]
    assert owners.rows_of(own_numbers).tolist() == (own_numbers & (2**36 - 1)).tolist()
