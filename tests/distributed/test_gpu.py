"""A partitioned store under a GPU tier, by the emulated device."""

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import run, values
from tests.distributed.test_collections import specs, train
from tests.distributed.test_ranks import assert_same, contents
from tests.gpu.emulator import EmulatedDevice
from tierstore import distributed


def test_random_programs_equal_a_plain_store(tmp_path: Path) -> None:
    init = tierstore.normal(seed=1)
    specs = {
        "item": tierstore.TableSpec(700, 4, init=init),
        "user": tierstore.TableSpec(50, 4, init=init),
    }
    budget = tierstore.Budget(host_rows=120, gpu_rows=60)
    random = np.random.default_rng(0)
    with (
        tierstore.create(tmp_path / "plain", specs) as plain,
        distributed.create(
            tmp_path / "parts", specs, partitions=4, device=EmulatedDevice(seed=3), budget=budget
        ) as store,
    ):
        for step in range(30):
            table = ["item", "user"][step % 2]
            ids = random.integers(0, plain[table].rows, 40)
            values = random.standard_normal((40, 4)).astype(np.float32)
            for each in (plain, store):
                each[table].write(ids, values)
                if step % 5 == 2:
                    each.commit()
                if step % 7 == 6:
                    each.rollback()
            ids = random.integers(0, plain[table].rows, 55)
            assert np.array_equal(plain[table].read(ids), store[table].read(ids))
        plain.commit()
        store.commit()
    device = EmulatedDevice(seed=4)
    with (
        tierstore.open(tmp_path / "plain") as plain,
        tierstore.open(tmp_path / "parts", device=device, budget=budget) as reader,
    ):
        for table in specs:
            ids = np.arange(plain[table].rows)
            assert np.array_equal(plain[table].read(ids), reader[table].read(ids))


def train_on_a_device(rank: int, path: Path, kind: str) -> None:
    budget = tierstore.Budget(host_rows=120, gpu_rows=60)
    device = EmulatedDevice(seed=rank)
    with distributed.open(path, average=False, device=device, budget=budget) as store:
        train(store, rank, dist.get_world_size(), kind)
        store.commit(4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_ranks_train_on_devices_what_one_process_trains_on_the_host(
    tmp_path: Path, kind: str
) -> None:
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        train(plain, 0, 1, kind)
        plain.commit(4)
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=8).close()
    values(run(2, train_on_a_device, path, kind))
    assert_same(contents(path), contents(tmp_path / "plain"), exact=False)
