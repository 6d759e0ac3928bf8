"""Tables by key that ranks share: each key on the rank that its hash names, against one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests import inside
from tests.distributed.ranks import Killed, in_turn, no_warnings, run, values
from tests.distributed.test_commit import hooked
from tests.distributed.test_ranks import share
from tests.gpu.emulator import EmulatedDevice
from tierstore import distributed
from tierstore._disk import partitioned_keys
from tierstore._table import expiry
from tierstore.errors import (
    CorruptStoreError,
    InvalidInputError,
    InvalidTypeError,
    RanksError,
    StoreFullError,
    UnknownNameError,
)
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer
from tierstore.spec import USES

DIM, BATCH = 4, 48
KINDS = ["int64", "text"]


def spec(kind: Any, **options: Any) -> tierstore.TableSpec:
    return tierstore.TableSpec(
        dim=DIM, keys=kind, init=tierstore.normal(std=0.5, seed=3), **options
    )


def all_keys(kind: str) -> Any:
    numbers = np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 300)
    return numbers if kind == "int64" else [f"clé {number:x}" for number in numbers.tolist()]


def some_keys(kind: str, step: int, mine: slice) -> Any:
    at = (np.random.default_rng(step).random((BATCH,)) ** 2 * 300).astype(np.int64)[mine]
    every = all_keys(kind)
    return torch.from_numpy(every[at]) if kind == "int64" else [every[each] for each in at]


def weights(step: int, mine: slice) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-8, 9, (BATCH, DIM), generator=generator).float()[mine]


def train(store: Any, rank: int, ranks: int, kind: str, steps: range) -> None:
    user = TieredEmbedding(store["user"])
    optimizer = TieredOptimizer(torch.optim.Adam, [user], lr=0.05)
    mine = share(rank, ranks)
    for step in steps:
        (user(some_keys(kind, step, mine)) * weights(step, mine)).sum().backward()
        optimizer.step()


def by_key(path: Path, table: str = "user") -> dict[Any, list[float]]:
    """Return all fields of every key."""
    with tierstore.open(path) as store:
        found = store[table]
        rows = np.arange(found.rows)
        parts = found.by_row.read(rows, list(found.fields))
        flat = np.concatenate([parts[name].astype(np.float64) for name in sorted(parts)], 1)
        return dict(zip(found.keys[:].tolist(), flat.tolist(), strict=True))


def same(one: dict[Any, list[float]], other: dict[Any, list[float]], *, exact: bool) -> None:
    assert one.keys() == other.keys()
    for key in one:
        if exact:
            assert one[key] == other[key], key
        else:
            np.testing.assert_allclose(one[key], other[key], rtol=2e-4, atol=2e-5)


def train_and_commit(rank: int, path: Path, kind: str, steps: range) -> int:
    no_warnings()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path, average=False, budget=tierstore.Budget(host_rows=60)) as store:
        train(store, rank, ranks, kind, steps)
        store.commit(steps.stop)
        return int(store["user"].rows)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"track_uses": True, "admit_after": 2}])
def test_one_process_trains_what_a_plain_store_does(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    with tierstore.create(tmp_path / "plain", {"user": spec(kind, **options)}) as plain:
        train(plain, 0, 1, kind, range(6))
        plain.commit(6)
    path = tmp_path / "parts"
    distributed.create(path, {"user": spec(kind, **options)}, partitions=7).close()
    train_and_commit(0, path, kind, range(6))
    same(by_key(path), by_key(tmp_path / "plain"), exact=True)
    assert tierstore.verify(path).ok


@pytest.mark.variants(0, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"track_uses": True, "admit_after": 2}])
def test_ranks_train_what_one_process_trains(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    with tierstore.create(tmp_path / "plain", {"user": spec(kind, **options)}) as plain:
        train(plain, 0, 1, kind, range(6))
        plain.commit(6)
        count = plain["user"].rows
    path = tmp_path / "parts"
    distributed.create(path, {"user": spec(kind, **options)}, partitions=8).close()
    if options:  # uses of keys without a row are counted in memory alone
        assert values(run(3, train_and_commit, path, kind, range(6))) == [count] * 3
    else:
        for at, ranks in enumerate((2, 1, 4)):  # each restarts on another number
            found = run(ranks, train_and_commit, path, kind, range(2 * at, 2 * at + 2))
        assert values(found) == [count] * 4
    same(by_key(path), by_key(tmp_path / "plain"), exact=False)
    assert tierstore.verify(path).ok


def read_and_write(rank: int, path: Path, kind: str) -> None:
    keys = all_keys(kind)
    with distributed.open(path) as store:
        user, ranks = store["user"], store.ranks
        first = user.read(keys)
        assert not user.contains(keys).any() and user.rows == 0
        assert user.is_here(keys).sum() in range(50, 200)
        mine = list(range(rank * 20, rank * 20 + 30))  # some are of two ranks
        own = [keys[at] for at in mine]
        user.write(own, np.full((30, DIM), rank + 1, np.float32))
        expected = first.copy()
        for each in range(ranks):
            expected[each * 20 : each * 20 + 30] = each + 1
        assert np.array_equal(user.read(keys), expected)
        assert user.contains(keys).sum() == 20 * ranks + 10
        store.rollback()
        assert np.array_equal(user.read(keys), first) and user.rows == 0
        user.write(own if rank == 1 else own[:0], np.full((30 * (rank == 1), DIM), 5, np.float32))
        store.commit(1)
        assert user.rows == 30
        expected = first.copy()
        expected[20:50] = 5
        assert np.array_equal(user.read(keys), expected)
        assert user.read(own[:0]).shape == (0, DIM)
        numbers = user.lookup(keys[20:50])
        assert np.array_equal(user.by_row.read(numbers), expected[20:50])
        at = 5 if rank == 0 else 25  # key 5 has no row: rank 0 alone hears of it
        with pytest.raises(KeyError) if rank == 0 else contextlib.nullcontext():
            found = user.read(keys[at : at + 1], missing="raise")
            assert np.array_equal(found, expected[at : at + 1])
        found = user.read(keys[4 * rank : 30], missing=float(rank))
        assert (found[: 20 - 4 * rank] == rank).all() and (found[20 - 4 * rank :] == 5).all()
        user.prefetch(keys[: 10 * rank])
        if kind == "int64":
            found = user.read(torch.from_numpy(keys[:6].reshape(2, 3)))
            assert torch.equal(found, torch.from_numpy(expected[:6].reshape(2, 3, DIM)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_read_and_write_by_key(tmp_path: Path, kind: str) -> None:
    distributed.create(tmp_path / "parts", {"user": spec(kind)}, partitions=4).close()
    values(run(3, read_and_write, tmp_path / "parts", kind))
    assert len(by_key(tmp_path / "parts")) == 30


def fill(store: Any, kind: str, *, rank: int = 0, ranks: int = 1) -> None:
    """Write rows of the first 200 keys to one table, and of the last 200 to another."""
    keys, rng = all_keys(kind), np.random.default_rng(7)
    for name, begin in (("user", 0), ("more", 100)):
        rows = rng.random((200, DIM), np.float32)
        mine = np.arange(rank, 200, ranks)
        store[name].write([keys[begin + at] for at in mine], rows[mine])


def merge_and_add(rank: int, path: Path, other: Path | None, kind: str, how: Any) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    budget = tierstore.Budget(host_rows=60)
    with distributed.open(path, budget=budget) as store, contextlib.ExitStack() as stack:
        user, keys = store["user"], all_keys(kind)
        fill(store, kind, rank=rank, ranks=ranks)
        store.commit(1)
        reader = store if other is None else stack.enter_context(tierstore.open(other))
        assert user.merge(reader["more"], on_conflict=how) == 100
        assert user.merge(reader["more"], on_conflict="keep") == 0
        store.rollback()
        assert user.rows == 200
        user.merge(reader["more"], on_conflict=how)
        with pytest.raises(InvalidInputError, match="itself"):
            user.merge(user)
        with pytest.raises(InvalidTypeError, match="by key"):
            user.merge(keys)
        with pytest.raises(InvalidInputError, match="newest"):
            user.merge(reader["more"], on_conflict="last")
        new = [number if kind == "int64" else f"new {number}" for number in range(30)]
        mine = new[rank * 5 : rank * 5 + 10]  # some are of two ranks
        first = user.read(mine)
        numbers = user.get_or_add(mine[:0] if rank == 1 else mine)
        assert numbers.shape == ((0,) if rank == 1 else (10,))
        again = user.get_or_add(mine)
        assert rank == 1 or np.array_equal(again, numbers)
        assert np.array_equal(user.by_row.read(again), first)
        user.get_or_add(new)
        assert user.contains(new).all()
        store.commit(2)
        assert user.rows == 330


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(
    ("kind", "how", "ranks"),
    [
        ("int64", "newest", 1),
        *(
            pytest.param(kind, how, ranks, marks=pytest.mark.slow)
            for kind, how, ranks in [
                ("text", "mean", 1),
                ("int64", "mean", 2),
                ("text", "keep", 2),
                ("text", "newest", 3),
                ("int64", "mean", 3),
            ]
        ),
    ],
)
@pytest.mark.parametrize("where", ["here", "plain", "parts"])
def test_merging_and_adding_as_one_process_does(
    tmp_path: Path, kind: str, how: Any, ranks: int, where: str
) -> None:
    specs, path = {"user": spec(kind), "more": spec(kind)}, tmp_path / "many"
    distributed.create(path, specs, partitions=5).close()
    with tierstore.create(tmp_path / "plain", specs) as plain:
        fill(plain, kind)
        plain.commit()
        other = None if where == "here" else tmp_path / "plain"
        if where == "parts":
            other = tmp_path / "others"
            distributed.save(tmp_path / "plain", other, partitions=3)
        values(run(ranks, merge_and_add, path, other, kind, how))
        plain["user"].merge(plain["more"], on_conflict=how)
        new = [number if kind == "int64" else f"new {number}" for number in range(30)]
        plain["user"].get_or_add(new)
        plain.commit()
    same(by_key(path), by_key(tmp_path / "plain"), exact=True)
    assert tierstore.verify(path).ok


def merge_into_little_room(rank: int, path: Path, other: Path) -> tuple[str, int]:
    with distributed.open(path) as store, tierstore.open(other) as reader:
        user = store["user"]
        if rank == 1:
            user.shard.write = lambda *given: failing()
        with pytest.raises(StoreFullError) as raised:
            user.merge(reader["more"])
        with pytest.raises(RanksError, match="merge table"):
            user.read(all_keys("int64"))
        user.shard.__dict__.pop("write", None)
        store.rollback()
        assert user.merge(reader["more"]) == 200
        return str(raised.value), user.shard.rows


@pytest.mark.slow
def test_a_rank_that_fails_to_merge_is_known_to_all(tmp_path: Path) -> None:
    specs = {"user": spec("int64"), "more": spec("int64")}
    distributed.create(tmp_path / "many", specs, partitions=4).close()
    with tierstore.create(tmp_path / "plain", specs) as plain:
        fill(plain, "int64")
        plain.commit()
    found = values(run(2, merge_into_little_room, tmp_path / "many", tmp_path / "plain"))
    (first, one), (own, two) = found
    assert "rank 1 of 2" in first and "rank 1 of 2" not in own and one + two == 200


def first_rows(rank: int, path: Path, kind: str) -> list[bytes]:
    """Return the rows of keys before and after they were added, an uneven share by each rank."""
    with distributed.open(path, average=False) as store:
        table, keys = store["user"], all_keys(kind)[:40]
        before = table.read(keys)
        added = keys[rank::3] if rank else keys[:9]
        table.write(added, table.read(added))
        store.commit(1)
        return [before.tobytes(), table.read(keys).tobytes()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_has_one_first_row_everywhere(tmp_path: Path, kind: str) -> None:
    """In one process and on three ranks, before it is added and after, and after restarts."""
    plain, parts = tmp_path / "plain", tmp_path / "parts"
    with tierstore.create(plain, {"user": spec(kind)}) as store:
        first = store["user"].read(all_keys(kind)[:40])
        assert len(np.unique(first, axis=0)) == 40
        store["user"].lease(all_keys(kind)[20:30]).release()
        store.commit()
    with tierstore.open(plain, missing="init") as store:
        assert np.array_equal(store["user"].read(all_keys(kind)[:40]), first)
    distributed.create(parts, {"user": spec(kind)}, partitions=4).close()
    for ranks in (3, 1):
        for found in values(run(ranks, first_rows, parts, kind)):
            assert found == [first.tobytes()] * 2
    assert set(by_key(parts)) >= set(np.asarray(all_keys(kind)[:9]).tolist())


def in_collections(store: Any, rank: int, ranks: int) -> None:
    sources = {"user": "user", "friend": "user", "item": "item"}
    rows = TieredEmbeddingCollection(store, sources)
    bags = TieredEmbeddingBagCollection(store, {"word": "word"})
    optimizer = TieredOptimizer(torch.optim.SGD, [rows, bags], lr=0.5)
    mine = share(rank, ranks)
    for step in range(3):
        keys = some_keys("int64", step, mine)
        found = rows({"user": keys, "friend": keys // 2, "item": keys.abs() % 7})
        pooled = bags({"word": keys.view(-1, 1)})
        loss = sum((each * weights(step, mine)).sum() for each in found.values())
        (loss + (pooled["word"] * weights(step + 9, mine)).sum()).backward()
        optimizer.step()
    rows.eval()
    with torch.no_grad():
        new = torch.arange(5)
        first = rows({"user": new, "friend": new, "item": new % 7})["user"]
        assert torch.equal(first, store["user"].read(new))
    store.commit(3)


def with_collections(rank: int, path: Path) -> None:
    with distributed.open(path, average=False) as store:
        in_collections(store, rank, store.ranks)


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_collections_take_tables_by_key(tmp_path: Path, ranks: int) -> None:
    tables = {
        "user": spec("int64"),
        "word": spec("int64"),
        "item": tierstore.TableSpec(7, DIM, init=tierstore.normal(std=0.5, seed=3)),
    }
    with tierstore.create(tmp_path / "plain", tables) as plain:
        in_collections(plain, 0, 1)
    path = tmp_path / "parts"
    distributed.create(path, tables, partitions=8).close()
    values(run(ranks, with_collections, path))
    for name in ("user", "word"):
        same(by_key(path, name), by_key(tmp_path / "plain", name), exact=True)
    with tierstore.open(path) as store, tierstore.open(tmp_path / "plain") as plain:
        assert np.array_equal(store["item"][:], plain["item"][:])


def admitted(store: Any, rank: int, ranks: int) -> None:
    """Train keys that are admitted with their second use; the last of three ranks has none."""
    rows = TieredEmbeddingCollection(store, {"user": "user", "friend": "user"})
    bags = TieredEmbeddingBagCollection(store, {"word": "word"})
    optimizer = TieredOptimizer(torch.optim.SGD, [rows, bags], lr=0.5)
    mine = share(rank, ranks)
    for step in range(5):
        keys = some_keys("int64", step % 3, mine)
        found = rows({"user": keys, "friend": keys // 2})
        pooled = bags({"word": keys.view(-1, 1)})
        factors = weights(step, mine)
        loss = sum((each * factors).sum() for each in found.values())
        (loss + (pooled["word"] * factors).sum()).backward()
        optimizer.step()
    store.commit(3)


def with_admission(rank: int, path: Path) -> None:
    with distributed.open(path, average=False) as store:
        admitted(store, rank, store.ranks)


@pytest.mark.slow
def test_collections_admit_keys_on_all_ranks(tmp_path: Path) -> None:
    tables = {name: spec("int64", admit_after=2) for name in ("user", "word")}
    with tierstore.create(tmp_path / "plain", tables) as plain:
        admitted(plain, 0, 1)
    distributed.create(tmp_path / "parts", tables, partitions=8).close()
    values(run(3, with_admission, tmp_path / "parts"))
    for name in tables:
        same(by_key(tmp_path / "parts", name), by_key(tmp_path / "plain", name), exact=True)


def refused(rank: int, path: Path) -> list[str]:
    told = []
    with distributed.open(path) as store:
        user = store["user"]
        with pytest.raises(InvalidTypeError if rank else RanksError) as caught:
            user.read(["text"] if rank else [3])
        told.append(str(caught.value))
        with pytest.raises(InvalidInputError, match="something else") as other:
            user.lookup([1]) if rank else user.read([1])
        told.append(str(other.value))
        with pytest.raises(UnknownNameError):
            user.lookup([1])
        if rank:  # the disk of one rank is full where keys are added
            inside.owner(user.shard).grow_rows = lambda *_: failing()
            user.shard._write_first = lambda *_: failing()
        with pytest.raises(StoreFullError if rank else RanksError) as full:
            user.write(np.arange(40), np.ones((40, DIM), np.float32))
        told.append(str(full.value))
        if rank:
            del inside.owner(user.shard).grow_rows, user.shard._write_first
        user.write(np.arange(40), np.ones((40, DIM), np.float32))
        by_row_is_refused(store)
        store.commit(1)
        store.create_table("more", spec("text"))
        store["more"].write(["a", "b"], np.ones((2, DIM), np.float32))
        store.commit(2)
    return told


def by_row_is_refused(store: distributed.DistributedStore) -> None:
    """A table by key gets rows by their keys alone."""
    one = np.ones((1, DIM), np.float32)
    for change, words in (
        (lambda: store.grow("user", 1 << 20), "by key"),
        (lambda: store.append("user", one), "by key"),
        (lambda: store.append("user", one, keys=[40]), "by key"),
        (lambda: store.set_keys("user", None), "by key"),
        (lambda: store.create_table("more", tierstore.TableSpec(100, DIM, keys="int64")), "rows"),
        (lambda: TieredEmbedding(store["user"], padding_idx=0), "key"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            change()


def failing() -> None:
    raise StoreFullError("the disk is full")


def test_one_process_gives_rows_by_their_keys(tmp_path: Path) -> None:
    distributed.create(tmp_path / "s", {"user": spec("int64")}, partitions=4).close()
    with distributed.open(tmp_path / "s") as store:
        store["user"].write(np.arange(40), np.ones((40, DIM), np.float32))
        store.commit(1)
        by_row_is_refused(store)
        assert store["user"].rows == 40


@pytest.mark.slow
def test_what_cannot_be_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, {"user": spec("int64")}, partitions=4).close()
    one, other = values(run(2, refused, path))
    assert "rank 1 of 2 could not read keys of table 'user'" in one[0] and "int64" in other[0]
    assert "rank 1 of 2 could not write keys" in one[2]
    assert len(by_key(path)) == 40 and by_key(path, "more").keys() == {"a", "b"}
    with pytest.raises(InvalidInputError, match="leave rows= out"):
        distributed.create(tmp_path / "no", {"user": tierstore.TableSpec(9, DIM, keys="int64")})
    assert not (tmp_path / "no").exists()


# -- expiry


def use(store: Any, steps: int) -> None:
    for step in range(steps):
        keys = np.arange(step * 10, 200)
        is_shared = isinstance(store, distributed.DistributedStore)
        here = store["user"].is_here(keys) if is_shared else slice(None)
        store["user"].write(
            keys[here], np.random.default_rng(step).random((200, DIM), np.float32)[keys[here]]
        )
        store.commit(step)


def use_and_expire(rank: int, path: Path) -> dict[int, list[float]]:
    with distributed.open(path) as store:
        use(store, 4)
        user = store["user"]
        before = user.read(np.arange(220))
        dist.barrier()
        gone: dict[int, list[float]] = {}
        for keys, rows in user.expire(unused_for=2):
            gone |= dict(zip(keys.tolist(), rows["weight"].tolist(), strict=True))
        here = user.contains(np.arange(220))
        assert here[:20].sum() == 0 and here[20:200].all() and not here[200:].any()
        assert np.array_equal(user.read(np.arange(20, 220)), before[20:])
        store.rollback()
        assert user.rows == 200 and np.array_equal(user.read(np.arange(220)), before)
        for _ in user.expire(unused_for=2):
            pass
        user.write([1000, 1001], np.full((2, DIM), 7, np.float32))
        assert np.array_equal(user.read(np.arange(20, 220)), before[20:])
        store.commit(9)
        assert user.rows == 182
        return gone


def use_and_remove(rank: int, path: Path) -> int:
    with distributed.open(path) as store:
        use(store, 1)
        user = store["user"]
        before = user.read(np.arange(200))
        dealt = np.arange(150 + rank, 210, 2)  # whichever rank has them, and one on both
        count = user.remove([*dealt.tolist(), 199])
        assert user.contains(np.arange(210)).tolist() == [True] * 150 + [False] * 60
        store.commit(9)
        assert user.rows == 150
        assert np.array_equal(user.read(np.arange(150)), before[:150])
        return count


@pytest.mark.slow
def test_keys_are_removed_by_the_ranks_that_have_them(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, {"user": spec("int64")}, partitions=5).close()
    one, other = values(run(2, use_and_remove, path))
    assert one == other == 50
    assert len(by_key(path)) == 150
    assert tierstore.verify(path).ok


@pytest.mark.slow
def test_each_rank_expires_keys_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    tables = {"user": spec("int64", track_uses=True)}
    distributed.create(path, tables, partitions=5).close()
    with tierstore.create(tmp_path / "plain", tables) as plain:
        use(plain, 4)
        expected = {
            key: row
            for keys, rows in plain["user"].expire(unused_for=2)
            for key, row in zip(keys.tolist(), rows["weight"].tolist(), strict=True)
        }
        plain["user"].write([1000, 1001], np.full((2, DIM), 7, np.float32))
        plain.commit(9)
    one, other = values(run(2, use_and_expire, path))
    assert one.keys().isdisjoint(other) and one | other == expected and len(one) > 3
    found, wanted = by_key(path), by_key(tmp_path / "plain")
    assert found.keys() == wanted.keys()
    for key, row in wanted.items():
        assert found[key][2:] == row[2:], key  # beside the uses: versions differ
    assert tierstore.verify(path).ok


def keep_the_most_used(rank: int, path: Path, most: int) -> list[float]:
    with distributed.open(path) as store:
        use(store, 4)
        gone: list[float] = []
        for _, rows in store["user"].expire(keep_at_most=most, fewer_than=2):
            gone += rows[USES][:, 0].tolist()
        store.commit(9)
        assert store["user"].rows == min(most, 190)
        return gone


@pytest.mark.slow
def test_all_ranks_together_keep_the_most_used_keys(tmp_path: Path) -> None:
    for most in (0, 37, 175, 1000):
        tables = {"user": spec("int64", track_uses=True)}
        path = tmp_path / str(most)
        distributed.create(path, tables, partitions=5).close()
        with tierstore.create(tmp_path / f"plain {most}", tables) as plain:
            use(plain, 4)
            expected = [
                uses
                for _, rows in plain["user"].expire(keep_at_most=most, fewer_than=2)
                for uses in rows[USES][:, 0].tolist()
            ]
            plain.rollback()
        found = values(run(3, keep_the_most_used, path, most))
        assert sorted(itertools.chain(*found)) == sorted(expected), most
        assert len(by_key(path)) == min(most, 190)


def test_what_ranks_keep_is_what_one_keeps() -> None:
    random = np.random.default_rng(1)
    for ranks in (1, 2, 5):
        parts = [random.integers(0, 4, (int(random.integers(0, 60)), 2)) for _ in range(ranks)]
        every = np.concatenate(parts).astype(np.float64)
        for most in (0, 1, len(every) // 2, len(every) - 1, len(every), len(every) + 9):
            kept = expiry.shares([expiry.tally(each.astype(np.float64)) for each in parts], most)
            assert sum(kept) == min(most, len(every))
            left = []
            for part, own in zip(parts, kept, strict=True):
                gone = expiry.expired(
                    part.astype(np.float64), 9, unused_for=None, fewer_than=None, keep_at_most=own
                )
                left += np.delete(part, gone, 0).tolist()
            alone = expiry.expired(
                every, 9, unused_for=None, fewer_than=None, keep_at_most=max(most, 0)
            )
            assert sorted(left) == sorted(np.delete(every, alone, 0).tolist())


# -- what is on the disk


@pytest.mark.slow
def test_random_programs_equal_a_plain_store(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    tables = {"user": spec("int64", track_uses=True)}
    path = tmp_path / "parts"
    with tierstore.create(tmp_path / "plain", tables) as plain:
        store = distributed.create(path, tables, partitions=5, budget="600KiB")
        for step in range(60):
            keys = random.integers(0, 150, random.integers(0, 30)) * 10**15
            rows = random.standard_normal((keys.size, DIM)).astype(np.float32)
            kind = random.integers(8)
            for each in (plain, store):
                each["user"].write(keys, rows)
                if kind == 0:
                    each.rollback()
                elif kind <= 2:
                    each.commit(step)
                elif kind == 3:
                    for _ in each["user"].expire(fewer_than=2):
                        pass
                elif kind == 4:
                    each.commit(step)
                    each.fold()
            if kind == 5:
                plain.commit(step)
                store.commit(step)
                store.close()
                store = distributed.open(path, budget="600KiB")
            everything = np.arange(150) * 10**15
            assert plain["user"].rows == store["user"].rows, step
            assert np.array_equal(plain["user"].read(everything), store["user"].read(everything))
        plain.commit(99)
        store.commit(99)
        assert plain.version == store.version
        store.close()
    same(by_key(path), by_key(tmp_path / "plain"), exact=True)
    assert tierstore.verify(path).ok


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_checks(tmp_path: Path, kind: str) -> None:
    keys = all_keys(kind)
    path = tmp_path / "parts"
    rows = np.random.default_rng(2).standard_normal((300, DIM)).astype(np.float32)
    with distributed.create(path, {"user": spec(kind)}, partitions=4) as store:
        store["user"].write(keys, rows)
        store.commit(1)
    expected = by_key(path)
    distributed.save(path, tmp_path / "wide", partitions=9)
    with tierstore.open(path) as reader:
        reader.save(tmp_path / "plain")
        assert np.array_equal(reader["user"].read(keys), rows)
    distributed.save(tmp_path / "plain", tmp_path / "few", partitions=2)
    tierstore.repair(path, tmp_path / "repaired")
    for each in ("wide", "plain", "few", "repaired"):
        same(by_key(tmp_path / each), expected, exact=True)
        assert tierstore.verify(tmp_path / each).ok
    delta = next((path / "partitions" / "00002" / "user").glob("g*/delta-*.bin"))
    data = bytearray(delta.read_bytes())
    data[3] ^= 1
    delta.write_bytes(data)
    (bad,) = tierstore.verify(path).bad_rows["user"]
    with tierstore.open(path) as reader:
        with pytest.raises(CorruptStoreError):
            reader["user"].by_row.read([bad])
        key = reader["user"].keys[bad]
    report = tierstore.repair(path, tmp_path / "filled", fill="nan")
    assert (report.tables["user"].filled, report.tables["user"].older) == (1, 0)
    found = by_key(tmp_path / "filled")
    assert np.isnan(found.pop(key)).all() and expected.pop(key)
    assert found == expected
    assert f"user,{key},{key},1,filled," in (tmp_path / "filled.rows.csv").read_text()
    damaged = next((path / "partitions" / "00002" / "user").glob("g*/keys.*"))
    data = bytearray(damaged.read_bytes())
    data[5] ^= 1
    damaged.write_bytes(data)
    assert not tierstore.verify(path).ok
    with tierstore.open(path) as reader, pytest.raises(CorruptStoreError):
        reader["user"].read(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_of_a_reader_load_its_keys_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The first of them does, also where all ask for a key at once."""
    keys = all_keys(kind)
    rows = np.random.default_rng(2).standard_normal((300, DIM)).astype(np.float32)
    with distributed.create(tmp_path / "s", {"user": spec(kind)}, partitions=3) as store:
        store["user"].write(keys, rows)
        store.commit()
    shard = partitioned_keys.KeyedPartitionedGeneration
    take, found, done = shard._take, [], threading.Event()
    with tierstore.open(tmp_path / "s") as reader:
        table = reader["user"]
        other = threading.Thread(target=lambda: found.append(table.read(keys)))

        def slow(whole: Any, keys: Any, number: int, part: Any) -> None:
            take(whole, keys, number, part)
            if threading.current_thread() is other:
                done.wait(60)
            elif number == 1:
                other.start()
                other.join(0.1)  # it waits for this one, or takes the first partition

        monkeypatch.setattr(shard, "_take", slow)
        found.append(table.read(keys))
        done.set()
        other.join(60)
        assert len(found) == 2 and all(np.array_equal(each, rows) for each in found)
        assert table.rows == 300


def test_versions_are_compared_place_by_place(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    rows = np.random.default_rng(2).standard_normal((100, DIM)).astype(np.float32)
    with distributed.create(path, {"user": spec("int64")}, partitions=4, keep=4) as store:
        for step, keys in ((0, np.arange(50)), (0, np.arange(40, 60)), (1, np.arange(3))):
            store["user"].write(keys, rows[keys] + step)
            store.commit()
    with tierstore.open(path) as reader:
        user = reader["user"]
        found = [np.sort(user.keys[reader.changed(version)["user"]]) for version in (1, 2, 3)]
        with pytest.raises(InvalidInputError, match="which is by key"):
            reader.write_patch(tmp_path / "patch", 3, 4)
    assert found[0].tolist() == list(range(60))
    assert found[1].tolist() == [0, 1, 2, *range(50, 60)]
    assert found[2].tolist() == [0, 1, 2]


def test_keys_of_another_partition_are_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "parts"
    with distributed.create(path, {"user": spec("int64")}, partitions=2) as store:
        store["user"].write(np.arange(50), np.ones((50, DIM), np.float32))
        store.commit(1)
    partition_of = partitioned_keys.partition_of_key
    monkeypatch.setattr(
        partitioned_keys, "partition_of_key", lambda codes, count: 1 - partition_of(codes, count)
    )
    with pytest.raises(CorruptStoreError, match="keys of other partitions"):
        distributed.open(path)


# -- a rank is killed


def add_and_commit(rank: int, path: Path, victim: int | None, moment: tuple[str, str]) -> int:
    with distributed.open(path) as store:

        def hook(what: str, when: str) -> None:
            if rank == victim and (what, when) == moment:
                time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)

        hooked(hook)
        step = store.step + 1
        store["user"].write(keys_of(step)[rank :: store.ranks], rows_of(step)[rank :: store.ranks])
        store.commit(step)
        return store.version


def keys_of(step: int) -> np.ndarray:
    return np.arange(20 * step, 20 * step + 40) * 7919


def rows_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((40, DIM)).astype(np.float32)


@pytest.mark.slow
def test_keys_and_rows_are_of_one_version_whoever_is_killed(tmp_path: Path) -> None:
    path, number = tmp_path / "parts", 0
    with distributed.create(path, {"user": spec("int64")}, partitions=4) as store:
        store["user"].write(keys_of(0), rows_of(0))
        store.commit(0)
    whats = "commit its partitions", "publish the version", "confirm the version"
    moments = [(what, when) for what in whats for when in ("before", "done")]
    for victim, moment in in_turn(moments):
        found = run(2, add_and_commit, path, victim, moment)
        assert isinstance(found[victim], Killed)
        number += 1
        with tierstore.open(path) as store:
            step = store.step
        expected: dict[Any, list[float]] = {}
        for each in range(step + 1):
            expected |= zip(keys_of(each).tolist(), rows_of(each).tolist(), strict=True)
        same(by_key(path), expected, exact=True)
        assert tierstore.verify(path).ok
    values(run(2, add_and_commit, path, None, ("", "")))
    assert 3 <= step + 1 <= number


@pytest.mark.slow
def test_partitions_and_tiers_grow_with_their_keys(tmp_path: Path) -> None:
    tables = {"user": tierstore.TableSpec(dim=1, keys="int64", init=tierstore.normal(seed=1))}
    path = tmp_path / "parts"
    random = np.random.default_rng(1)
    keys = random.permutation(1_000_000)[:200_000] * 31
    rows = random.standard_normal((keys.size, 1)).astype(np.float32)
    some = np.concatenate([keys[::997], np.arange(50) * 31 + 1])
    with (
        tierstore.create(tmp_path / "plain", tables) as plain,
        distributed.create(path, tables, partitions=2, budget="2MiB") as store,
    ):
        for each in (plain, store):
            user = each["user"]
            user.write(keys[:60_000], rows[:60_000])
            each.commit()
            user.write(keys[60_000:], rows[60_000:])
            each.rollback()
            assert user.rows == 60_000
            user.write(keys[60_000:], rows[60_000:])
            assert user.rows == keys.size
        assert store["user"].capacity >= keys.size
        assert np.array_equal(plain["user"].read(some), store["user"].read(some))
        for each in (plain, store):
            each.commit()
    with distributed.open(path) as store, tierstore.open(path) as reader:
        for each in (store, reader):
            assert each["user"].rows == keys.size
            assert np.array_equal(each["user"].read(keys), rows)
        store.fold()
        assert np.array_equal(store["user"].read(keys), rows)
    tierstore.repair(path, tmp_path / "copy")
    with tierstore.open(tmp_path / "copy") as store:
        assert np.array_equal(store["user"].read(keys), rows)
    assert tierstore.verify(path).ok


def test_a_tier_on_a_device_holds_rows_by_key(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    budget = tierstore.Budget(host_rows=200, gpu_rows=100)
    random = np.random.default_rng(3)
    with tierstore.create(tmp_path / "plain", {"user": spec("int64")}) as plain:
        store: Any = distributed.create(
            path,
            {"user": spec("int64")},
            partitions=3,
            budget=budget,
            device=EmulatedDevice(seed=1),
        )
        for step in range(12):
            keys = random.integers(0, 90, 20) * 7919
            rows = random.standard_normal((20, DIM)).astype(np.float32)
            for each in (plain, store):
                each["user"].write(keys, rows)
                if step % 5 == 3:
                    each.rollback()
                elif step % 2:
                    each.commit(step)
            everything = np.arange(95) * 7919
            assert np.array_equal(plain["user"].read(everything), store["user"].read(everything))
        plain.commit(99)
        store.commit(99)
        store.close()
    same(by_key(path), by_key(tmp_path / "plain"), exact=True)
