"""Rows trained by several ranks against one process: gloo, each rank a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import HEAD, no_warnings, run, values, watch
from tierstore import distributed
from tierstore.errors import InvalidInputError, RanksError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

pytestmark = pytest.mark.slow

ROWS, DIM, BATCH = 500, 4, 48
OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adagrad": (RowWiseAdagrad, {"lr": 0.1}),
}


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    return {
        "item": tierstore.TableSpec(ROWS, DIM, init=init),
        "user": tierstore.TableSpec(7, DIM, init=init),
    }


def share(rank: int, ranks: int) -> slice:
    """Return the part of the batch that is a rank's; of three ranks the last has none."""
    edges = {1: [0, 48], 2: [0, 20, 48], 3: [0, 8, 48, 48], 4: [0, 1, 20, 33, 48]}[ranks]
    return slice(edges[rank], edges[rank + 1])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, weights of whole numbers, so that no order of a sum matters, and users."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, 3, generator=generator) ** 3 * ROWS).long()
    weights = torch.randint(-8, 9, (BATCH, 3, DIM), generator=generator).float()
    return ids, weights, torch.randint(0, 7, (BATCH,), generator=generator)


def train(store: Any, rank: int, ranks: int, name: str, steps: range) -> None:
    kind, options = OPTIMIZERS[name]
    item, user = TieredEmbedding(store["item"], padding_idx=3), TieredEmbedding(store["user"])
    optimizer = TieredOptimizer(kind, [item, user], **options)
    mine = share(rank, ranks)
    for step in steps:
        ids, weights, users = batch(step)
        loss = (item(ids[mine]) * weights[mine]).sum() + user(users[mine]).sum()
        if step % 3 == 1:  # a second lookup of the same table before the step
            loss = loss + item(ids[mine][:, :1]).sum()
        (loss / BATCH * 64 / 64).backward()
        optimizer.step()


def train_and_commit(rank: int, path: Path, name: str, steps: range) -> int:
    no_warnings()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path, average=False, budget=tierstore.Budget(host_rows=60)) as store:
        train(store, rank, ranks, name, steps)
        store["item"].scalars["note"] = "same"
        return store.commit(steps.stop)


def contents(path: Path) -> dict[str, Any]:
    with tierstore.open(path) as store:
        fields = {
            f"{name}.{field}": store[name].read(np.arange(store[name].rows), field)
            for name in store
            for field in store[name].fields
        }
        return fields | {"scalars": {name: store[name].scalars for name in store}}


def assert_same(one: dict[str, Any], other: dict[str, Any], *, exact: bool) -> None:
    assert one.keys() == other.keys()
    for name in one:
        if name == "scalars":
            assert one[name] == other[name]
        elif exact:
            assert np.array_equal(one[name], other[name]), name
        else:
            np.testing.assert_allclose(one[name], other[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_train_what_one_process_trains(tmp_path: Path, name: str) -> None:
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        train(plain, 0, 1, name, range(5))
        plain["item"].scalars["note"] = "same"
        plain.commit(5)
    expected = contents(tmp_path / "plain")
    for ranks in (1, 2, 3, 4) if name == "adam" else (1, 3):
        path = tmp_path / f"parts{ranks}"
        distributed.create(path, specs(), partitions=8).close()
        values(run(ranks, train_and_commit, path, name, range(5)))
        assert_same(contents(path), expected, exact=ranks == 1)
        assert tierstore.verify(path).ok


def test_other_numbers_of_ranks_go_on_between_commits(tmp_path: Path) -> None:
    path, again = tmp_path / "parts", tmp_path / "again"
    for place in (path, again):
        distributed.create(place, specs(), partitions=8).close()
        for at, ranks in enumerate((2, 1, 4)):
            values(run(ranks, train_and_commit, place, "adam", range(2 * at, 2 * at + 2)))
    assert_same(contents(path), contents(again), exact=True)  # to the bit, run by run
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        train(plain, 0, 1, "adam", range(6))
        plain["item"].scalars["note"] = "same"
        plain.commit(6)
    assert_same(contents(path), contents(tmp_path / "plain"), exact=False)


def read_and_write(rank: int, path: Path, other: Path) -> None:
    with distributed.open(path) as store, tierstore.open(other) as plain:
        table = store["item"]
        ids = np.random.default_rng(rank).integers(0, ROWS, (rank * 5, 2))
        assert np.array_equal(table.read(ids), plain["item"].read(ids))
        assert torch.equal(table.read(torch.from_numpy(ids)), torch.as_tensor(table.read(ids)))
        mine = np.arange(rank, ROWS, dist.get_world_size())
        rows = np.repeat(mine[:, None], DIM, 1).astype(np.float32)
        table.write(mine, rows)
        table.write(
            [3, 3] if rank == 1 else [],
            np.array([[1.0], [2.0]] if rank == 1 else np.empty((0, 1)), np.float32).repeat(DIM, 1),
        )
        table.prefetch(np.arange(50))
        everything = table.read(np.arange(ROWS))
        expected = np.repeat(np.arange(ROWS)[:, None], DIM, 1).astype(np.float32)
        expected[3] = 2
        assert np.array_equal(everything, expected)
        store.rollback()
        assert np.array_equal(table.read(ids), plain["item"].read(ids))
        table.write([5], np.full((1, DIM), 9, np.float32))
        store.commit(1, keep="best", payload={"rank": {"of": rank}})
        assert store.payload["rank"].tree() == {"of": 0}


def test_reads_and_writes_reach_every_rank(tmp_path: Path) -> None:
    distributed.create(tmp_path / "parts", specs(), partitions=5).close()
    tierstore.create(tmp_path / "plain", specs()).close()
    values(run(3, read_and_write, tmp_path / "parts", tmp_path / "plain"))
    with tierstore.open(tmp_path / "parts", version="best") as store:
        assert (store["item"][5] == 9).all()


def create_on_all(rank: int, path: Path) -> list[str]:
    with distributed.create(
        path, {"item": tierstore.TableSpec(90, 3, init=tierstore.normal())}, partitions=4
    ) as store:
        shard = store["item"].shard
        return [store.uuid, shard.rows, store["item"].read(np.arange(90)).tobytes()]


def test_all_ranks_make_one_store(tmp_path: Path) -> None:
    one, other = values(run(2, create_on_all, tmp_path / "parts"))
    assert one[0] == other[0]
    assert one[1] + other[1] == 90
    assert one[2] == other[2]
    found = run(2, create_on_all, tmp_path / "parts")
    assert all(isinstance(each, FileExistsError) for each in found), found


def bags(rank: int, path: Path) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path, average=False) as store:
        bag = TieredEmbeddingBag(store["item"], mode="mean")
        optimizer = TieredOptimizer(torch.optim.SGD, [bag], lr=0.5)
        for step in range(3):
            ids, weights, _ = batch(step)
            mine = share(rank, ranks)
            (bag(ids[mine]) * weights[mine][:, 0]).sum().backward()
            optimizer.step()
        store.commit(3)


def test_bags(tmp_path: Path) -> None:
    for ranks in (1, 2):
        distributed.create(tmp_path / str(ranks), specs(), partitions=4).close()
        values(run(ranks, bags, tmp_path / str(ranks)))
    assert_same(contents(tmp_path / "1"), contents(tmp_path / "2"), exact=False)


def refused(rank: int, path: Path) -> None:
    """Give what no table takes on rank 1 alone, and go on."""
    with distributed.open(path) as store:
        good = np.ones((1, DIM), np.float32)
        for name in ("item", "key"):
            table = store[name]
            calls: list[tuple[Any, type[Exception]]] = [
                (lambda t=table: t.write([1], np.ones((1, DIM + rank), np.float32)), ValueError),
                (lambda t=table: t.write([1], good.astype("f8") if rank else good), TypeError),
                (lambda t=table: t.write([1], [[1.0], [2.0, 3.0]] if rank else good), TypeError),
                (lambda t=table: t.write([1], good, "no" if rank else None), KeyError),
                (lambda t=table: t.read([1], "no" if rank else None), KeyError),
            ]
            for call, kind in calls:
                with pytest.raises(kind if rank else RanksError, match="" if rank else "rank 1"):
                    call()
            with pytest.raises(InvalidInputError, match="something else"):
                table.write([1], good) if rank else table.read([1])
            table.write([1], good * 7)
            assert np.array_equal(table.read([1]), good * 7)
        store["item"].prefetch([1])
        with pytest.raises(InvalidInputError, match="something else"):
            store["item"].read([2], "weight" if rank else "bias")
        store.rollback()


def test_what_one_rank_may_not_do_raises_on_all(tmp_path: Path) -> None:
    fields = {"weight": tierstore.Field(DIM), "bias": tierstore.Field(DIM)}
    tables = {"item": tierstore.TableSpec(90, fields=fields)}
    tables["key"] = tierstore.TableSpec(dim=DIM, keys="int64")
    distributed.create(tmp_path / "parts", tables, partitions=4).close()
    values(run(2, refused, tmp_path / "parts"))


def counted(rank: int, path: Path) -> list[tuple[int, int]]:
    """Return for each step the bytes this rank sent, and those of the distinct remote rows."""
    ranks, found = dist.get_world_size(), []
    with distributed.open(path) as store:
        emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
        sent = [0]

        def counted(_: str, nbytes: int) -> None:
            sent[0] += nbytes

        watch(counted)
        for step in range(3):
            ids, _, _ = batch(step * ranks + rank)
            wanted: list[Any] = [None] * ranks
            dist.all_gather_object(wanted, ids.unique().numpy())
            place = store["item"].place
            asked = [
                place.partition_of(each) * ranks // place.partitions != of
                for of, each in enumerate(wanted)
            ]
            of_mine = int(asked[rank].sum())
            of_others = sum(
                int((place.partition_of(each) * ranks // place.partitions == rank).sum())
                for of, each in enumerate(wanted)
                if of != rank
            )
            sent[0] = 0
            emb(ids).sum().backward()
            optimizer.step()
            found.append((sent[0], (of_mine + of_others) * DIM * 4 + of_mine * 4))
    return found


def test_no_more_is_sent_than_distinct_remote_rows(tmp_path: Path) -> None:
    distributed.create(tmp_path / "store", specs(), partitions=8).close()
    for found in values(run(3, counted, tmp_path / "store")):
        for sent, least in found:
            # And how many are asked for, and the heads of four messages to each other rank.
            assert least <= sent <= least + 2 * (5 * 8 + 4 * HEAD)
