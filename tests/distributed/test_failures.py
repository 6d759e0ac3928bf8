"""A rank that cannot do its part of a call that others wait in: all are told, and go on."""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import run, values
from tests.distributed.test_ranks import assert_same, contents
from tests.durability.crash import small_deltas
from tests.durability.test_write_back import Disk
from tests.gpu.emulator import EmulatedDevice
from tierstore import _io, distributed
from tierstore.errors import (
    CorruptRowError,
    InvalidInputError,
    RanksError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
)
from tierstore.nn.remote import RemoteBatch
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

ROWS, DIM = 400, 4
FEATURES = {"item": "item", "bought": "item", "other": "other"}
BUDGET = tierstore.Budget(host_rows=60)


def start(path: Path) -> torch.Tensor:
    """Make a store of four partitions, damage a row of the last, and return what it should be."""
    init = tierstore.normal(std=0.5, seed=1)
    tables = {name: tierstore.TableSpec(ROWS, DIM, init=init) for name in ("item", "other")}
    tables["key"] = tierstore.TableSpec(dim=DIM, keys="int64")
    with distributed.create(path, tables, partitions=4) as store:
        whole = store["item"].read(np.arange(ROWS))
        store["key"].write(np.arange(ROWS), whole)
        store.commit(1)
        store.fold()
    for name in ("item", "key"):
        (base,) = (path / "partitions" / "00003" / name).glob("g*/rows.npy")
        data = bytearray(base.read_bytes())
        data[4096 + 40] ^= 0xFF
        base.write_bytes(data)
    return torch.from_numpy(whole)


def all_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"item": ids, "bought": ids.flip(0), "other": ids}


def layer_call(store: Any, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what looks ids up and returns the row of each."""
    emb: Any
    if kind == "read":
        return lambda ids: store["item"].read(ids)
    if kind == "read by key":
        return lambda ids: store["key"].read(ids)
    if kind in ("layer", "by key"):
        emb = TieredEmbedding(store["key" if kind == "by key" else "item"])
        return lambda ids: emb(ids)
    if kind == "frozen":
        emb = TieredEmbedding(store["item"]).requires_grad_(False)
        return lambda ids: emb(ids)
    if kind in ("bag", "frozen bag"):
        emb = TieredEmbeddingBag(store["item"]).requires_grad_(kind == "bag")
        return lambda ids: emb(ids[:, None])
    if kind in ("collection", "frozen collection"):
        emb = TieredEmbeddingCollection(store, FEATURES)
        emb.requires_grad_(kind == "collection")
        return lambda ids: emb(all_of(ids))["item"]
    emb = TieredEmbeddingBagCollection(store, FEATURES, "sum")
    return lambda ids: emb({name: each[:, None] for name, each in all_of(ids).items()})["item"]


KINDS = (
    "read",
    "layer",
    "frozen",
    "bag",
    "frozen bag",
    "collection",
    "frozen collection",
    "bags",
    "read by key",
    "by key",
)


def meets_damage(rank: int, path: Path, whole: torch.Tensor, on: str) -> list[Any]:
    """Look damaged rows up in every way, on both ranks or on that of others, and go on."""
    device = EmulatedDevice(seed=rank) if on == "device" else "cpu"
    budget = tierstore.Budget(host_rows=90, gpu_rows=60) if on == "device" else BUDGET
    errors: list[Any] = []
    with distributed.open(path, device=device, budget=budget) as store:
        ids = torch.arange(ROWS)
        is_whole = store["item"].place.partition_of(ids) != 3
        by_key = torch.from_numpy(store["key"].is_here(ids.numpy()))
        others: list[Any] = [None] * 2
        dist.all_gather_object(others, by_key)
        of_first = others[0]
        for kind in KINDS:
            call = layer_call(store, kind)
            good = ids[of_first if "key" in kind else is_whole]
            for mine in (ids, ids if rank == 0 else ids[:0], ids if rank else ids[:0]):
                try:
                    call(mine)
                    errors.append((kind, "nothing"))
                except TierStoreError as error:
                    errors.append((kind, error))
                found = call(good).detach().float()
                assert torch.equal(found.reshape(-1, DIM), whole[good]), kind
        store["item"].write(good[:3], whole[good[:3]].numpy() + rank)
        store.commit(2)
    return errors


@pytest.mark.parametrize("on", ["host", "device"])
def test_rows_that_cannot_be_read_raise_on_all_ranks(tmp_path: Path, on: str) -> None:
    whole = start(tmp_path / "parts")
    one, other = values(run(2, meets_damage, tmp_path / "parts", whole, on))
    assert len(one) == len(other) == 3 * len(KINDS)
    for (kind, at_first), (_, at_owner) in zip(one, other, strict=True):
        assert isinstance(at_owner, CorruptRowError), (kind, at_owner)
        assert isinstance(at_first, RanksError), (kind, at_first)
        assert "rank 1 of 2 could not" in str(at_first), (kind, at_first)
        assert "CorruptRowError" in str(at_first), (kind, at_first)


def announces_damage(rank: int, path: Path, whole: torch.Tensor) -> None:
    with distributed.open(path, budget=BUDGET) as store:
        emb = TieredEmbedding(store["item"])
        ids = torch.arange(ROWS)
        good = ids[store["item"].place.partition_of(ids) != 3]
        for coming in (good[:50], ids, good[50:]):
            emb.prefetch(coming)
        assert torch.equal(emb(good[:50]), whole[good[:50]])
        with pytest.raises(CorruptRowError if rank else RanksError, match="not match the checksum"):
            emb(ids)
        assert torch.equal(emb(good[50:]), whole[good[50:]])


def test_announced_rows_that_cannot_be_read_raise_on_all_ranks(tmp_path: Path) -> None:
    whole = start(tmp_path / "parts")
    values(run(2, announces_damage, tmp_path / "parts", whole))


def one_ends(rank: int, path: Path, stays: int) -> Any:
    """Meet damage; one rank catches what is raised and goes on, the other ends."""
    with distributed.open(path) as store:
        emb = TieredEmbedding(store["item"])
        with contextlib.suppress(TierStoreError) if rank == stays else contextlib.nullcontext():
            emb(torch.arange(ROWS))
        emb(torch.arange(ROWS))
    return None


@pytest.mark.parametrize("stays", [0, 1])
def test_a_rank_that_goes_on_alone_is_told(tmp_path: Path, stays: int) -> None:
    start(tmp_path / "parts")
    found = run(2, one_ends, tmp_path / "parts", stays)
    assert isinstance(found[stays], RanksError)
    assert "has ended, or did not come" in str(found[stays])
    assert isinstance(found[1 - stays], RanksError if stays else CorruptRowError)


@contextlib.contextmanager
def full_disk(disk: Disk, *, when: bool) -> Iterator[None]:
    disk.error = errno.ENOSPC if when else None
    try:
        yield
    finally:
        disk.error = None


def trains_on_a_full_disk(rank: int, path: Path, full: bool) -> int:
    """Train; now and then one rank cannot write back what it evicts. All try that step again."""
    told, disk, random = 0, Disk(), np.random.default_rng(3)
    with (
        small_deltas(threads=False),
        distributed.open(path, average=False, budget=tierstore.Budget(host_rows=120)) as store,
        mock.patch.object(_io.system, "calls", disk),
    ):
        emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.05)
        for step in range(40):
            ids = torch.from_numpy(random.integers(0, ROWS, (2, 40)))[rank]
            for is_full in (full and step % 3 == 2, False):
                try:
                    with full_disk(disk, when=is_full and rank == step % 2):
                        emb(ids).square().sum().backward()
                        optimizer.step()
                    break
                except StoreFullError:
                    assert rank == step % 2
                    told += 1
                except RanksError as error:
                    assert rank != step % 2 and f"rank {step % 2} of 2" in str(error)
                    assert "StoreFullError" in str(error)
                    told += 1
        store.commit(40)
    return told


def test_a_full_disk_is_told_to_all_ranks_and_training_goes_on(tmp_path: Path) -> None:
    init = tierstore.normal(std=0.5, seed=1)
    for name in ("whole", "full"):
        spec = tierstore.TableSpec(ROWS, DIM, init=init)
        distributed.create(tmp_path / name, {"item": spec}, partitions=4).close()
        one, other = values(run(2, trains_on_a_full_disk, tmp_path / name, name == "full"))
        assert one == other and (one > 3) == (name == "full"), one
    assert_same(contents(tmp_path / "full"), contents(tmp_path / "whole"), exact=True)


def fails_in(rank: int, path: Path, where: str) -> None:
    """Have rank 1 fail in a backward pass or a step, and go on."""
    with distributed.open(path) as store:
        emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.5)
        before = store["item"].read(np.arange(ROWS))

        def step() -> None:
            emb(torch.arange(20)).sum().backward()
            optimizer.step()

        def fails(*_: Any) -> Any:
            raise MemoryError("no more")

        target = {"gradient": (RemoteBatch, "_summed"), "step": (TieredOptimizer, "_update")}
        with mock.patch.object(*target[where], fails) if rank else contextlib.nullcontext():
            if where == "gradient" or rank:
                with pytest.raises(MemoryError if rank else RanksError, match="no more"):
                    step()
            else:
                step()
        optimizer.zero_grad()
        if where == "gradient":  # nothing was written on any rank
            assert np.array_equal(store["item"].read(np.arange(ROWS)), before)
            step()
            store.commit(2)
            return
        calls: list[Callable[[], object]] = [
            step,
            lambda: store["item"].read([1]),
            lambda: store.commit(2),
            lambda: emb.prefetch(torch.arange(3)),
        ]
        for call in calls:
            with pytest.raises(RanksError, match=r"rank 1 of 2.*MemoryError: no more"):
                call()
        store.rollback()
        assert np.array_equal(store["item"].read(np.arange(ROWS)), before)
        step()
        store.commit(2)


@pytest.mark.parametrize("where", ["gradient", "step"])
def test_what_fails_in_a_pass_or_a_step_is_told_to_all(tmp_path: Path, where: str) -> None:
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.5, seed=1))
    distributed.create(tmp_path / "parts", {"item": spec}, partitions=4).close()
    values(run(2, fails_in, tmp_path / "parts", where))
    with tierstore.open(tmp_path / "parts") as store:
        assert store.step == 2


def out_of_step(rank: int, path: Path, what: str) -> None:
    """Have one rank leave out what the other does: both are told, and go on."""
    with distributed.open(path) as store:
        emb = TieredEmbedding(store["other"])
        optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.5)
        if what == "an announced pass":
            for coming in (torch.arange(9), torch.arange(20)):
                emb.prefetch(coming)
        found = emb(torch.arange(9))
        with pytest.raises(InvalidInputError, match=f"rank {1 - rank} of 2 does something else"):
            if what == "a batch" and rank == 0:
                store.commit(2)
            elif rank == 0:
                found.sum().backward()
                optimizer.step()
            else:
                emb(torch.arange(20))
        expected = store["other"].read(torch.arange(20))
        emb.prefetch(torch.arange(20))
        assert torch.equal(emb(torch.arange(20)), expected)
        store.commit(2)


@pytest.mark.parametrize("what", ["a pass", "an announced pass", "a batch"])
def test_ranks_that_are_out_of_step_take_nothing_for_what_it_is_not(
    tmp_path: Path, what: str
) -> None:
    """The model of one fails between its passes, or it has a batch more than the other."""
    start(tmp_path / "parts")
    values(run(2, out_of_step, tmp_path / "parts", what))


def interrupted(rank: int, path: Path) -> None:
    """Interrupt one rank while it reads rows for others: it takes part first."""
    with distributed.open(path) as store:
        table = store["other"]
        read = type(table.shard).read

        def reads(self: Any, ids: Any, *arguments: Any, **options: Any) -> Any:
            if len(ids):
                signal.raise_signal(signal.SIGINT)
            return read(self, ids, *arguments, **options)

        expected = table.read(np.arange(50))
        if rank:
            with (
                mock.patch.object(type(table.shard), "read", reads),
                pytest.raises(KeyboardInterrupt),
            ):
                table.read(np.arange(50))
        else:
            assert np.array_equal(table.read(np.arange(50)), expected)
        assert np.array_equal(table.read(np.arange(50)), expected)


def test_an_interrupt_waits_for_the_end_of_a_call(tmp_path: Path) -> None:
    start(tmp_path / "parts")
    values(run(2, interrupted, tmp_path / "parts"))


def breaks_off(rank: int, path: Path) -> None:
    """Fail on one rank where it cannot take part any more."""
    with distributed.open(path, timeout=60) as store:
        began = time.monotonic()
        table = store["other"]
        if rank:
            with (
                mock.patch("tierstore.distributed.wire.Wire.swap", side_effect=MemoryError),
                pytest.raises(MemoryError),
            ):
                table.read(np.arange(50))
        else:
            with pytest.raises(RanksError, match="has ended"):
                table.read(np.arange(50))
            assert time.monotonic() - began < 30  # it is told, and does not wait in vain
        with pytest.raises(TierStoreError, match="start them again"):
            table.read(np.arange(50))


def test_a_rank_that_cannot_go_on_breaks_off(tmp_path: Path) -> None:
    start(tmp_path / "parts")
    values(run(2, breaks_off, tmp_path / "parts"))


def write_fails(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        table, good = store["other"], np.ones((ROWS, DIM), np.float32)
        before = table.read(np.arange(ROWS))
        shard = type(table.shard)
        with (
            mock.patch.object(shard, "write", side_effect=StoreIOError("broken"))
            if rank
            else contextlib.nullcontext(),
            pytest.raises(StoreIOError, match="broken"),
        ):
            table.write(np.arange(ROWS), good)
        with pytest.raises(RanksError, match=r"rank 1 of 2 .* in part .*roll back"):
            table.read([1])
        store.rollback()
        assert np.array_equal(table.read(np.arange(ROWS)), before)
        table.write(np.arange(ROWS), good)
        assert np.array_equal(table.read(np.arange(ROWS)), good)


def test_a_write_that_fails_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    start(tmp_path / "parts")
    values(run(2, write_fails, tmp_path / "parts"))
