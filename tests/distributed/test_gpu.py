"""A partitioned store under a GPU tier, by the emulated device."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import CONTROL, HEAD, run, values, watch
from tests.distributed.test_collections import specs, train
from tests.distributed.test_ranks import assert_same, contents
from tests.gpu.emulator import EmulatedDevice
from tierstore import distributed
from tierstore.distributed import request, wire
from tierstore.errors import InvalidInputError, RanksError, RowIndexError, StoreIOError
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
    remote,
)
from tierstore.optim import TieredOptimizer


@pytest.mark.slow
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


@pytest.mark.variants(0, 1)
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


SMALL = {"wide": 50, "seen": 40, "bought": 30, "user": 40, "word": 2}


def train_in_order(rank: int, path: Path, seed: int) -> None:
    """Train rows of which many ids ask, with sums that depend on their order."""
    torch.use_deterministic_algorithms(True)
    budget = tierstore.Budget(host_rows=120, gpu_rows=60)
    device = EmulatedDevice(seed=2 * seed + rank)
    with distributed.open(path, device=device, budget=budget) as store:
        layers = [
            TieredEmbedding(store["wide"], padding_idx=3),
            TieredEmbeddingCollection(store, {"seen": "item", "bought": "item"}),
            TieredEmbeddingBagCollection(store, ["user", "word"], "mean"),
        ]
        optimizer = TieredOptimizer(torch.optim.Adam, layers, lr=0.05)
        for step in range(3):
            draw = torch.Generator().manual_seed(2 * step + rank)
            ids = {
                name: (torch.rand(64, 3, generator=draw) ** 3 * count).long()
                for name, count in SMALL.items()
            }
            found = [
                layers[0](ids["wide"]),
                *layers[1]({name: ids[name] for name in ("seen", "bought")}).values(),
                *layers[2]({name: ids[name] for name in ("user", "word")}).values(),
            ]
            sum((each * torch.randn(each.shape, generator=draw)).sum() for each in found).backward()
            optimizer.step()
        store.commit(3)


@pytest.mark.slow
def test_a_run_on_devices_repeats_to_the_bit_where_that_is_asked_for(tmp_path: Path) -> None:
    """Threads of the emulated device run in another order each time."""
    for seed in (1, 2):
        path = tmp_path / str(seed)
        distributed.create(path, specs(), partitions=4).close()
        values(run(2, train_in_order, path, seed))
    assert_same(contents(tmp_path / "1"), contents(tmp_path / "2"), exact=True)


def as_over_nccl() -> mock.Mock:
    """Have tensors on the host go the way of those on devices, through the group of the data.

    Return what stands for the stream that the host could wait for.
    """
    stream = mock.Mock()
    for module in (wire, request):
        mock.patch.object(module, "on_host", lambda _: False).start()
    mock.patch.object(wire, "fetched", torch.clone).start()
    mock.patch("torch.cuda.current_stream", lambda _: stream).start()
    return stream


def train_over_a_data_group(rank: int, path: Path, kind: str) -> int:
    stream, sent = as_over_nccl(), 0

    def counted(kind: str, nbytes: int) -> None:
        nonlocal sent
        sent += kind != CONTROL and nbytes > HEAD  # a word on the outcome is in a head

    watch(counted)
    train_on_a_device(rank, path, kind)
    stream.synchronize.assert_not_called()  # the host waits for counts alone
    return sent


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_rows_go_through_the_group_of_the_data(tmp_path: Path, kind: str) -> None:
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        train(plain, 0, 1, kind)
        plain.commit(4)
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=8).close()
    assert values(run(2, train_over_a_data_group, path, kind)) == [0, 0]
    assert_same(contents(path), contents(tmp_path / "plain"), exact=False)


def refused_over_a_data_group(rank: int, path: Path) -> None:
    as_over_nccl()
    with distributed.open(path) as store:
        emb = TieredEmbedding(store["item"])
        with pytest.raises(RowIndexError if rank else RanksError, match=r"rank 1 of 2|300"):
            emb(torch.tensor([1, 300 if rank else 2]))
        layer = emb if rank else TieredEmbedding(store["user"])
        with pytest.raises(InvalidInputError, match=f"rank {1 - rank} of 2 does something else"):
            layer(torch.tensor([1, 2]))
        failing = {"side_effect": StoreIOError("broken")} if rank else {"wraps": remote._answered}
        with (
            mock.patch.object(remote, "_answered", **failing),
            pytest.raises(StoreIOError if rank else RanksError, match="broken"),
        ):
            emb(torch.tensor([1, 2]))
        assert emb(torch.tensor([1, 2])).shape == (2, store["item"].dim)


@pytest.mark.slow
def test_errors_go_to_all_ranks_through_the_group_of_the_data(tmp_path: Path) -> None:
    distributed.create(tmp_path / "parts", specs(), partitions=8).close()
    values(run(2, refused_over_a_data_group, tmp_path / "parts"))
