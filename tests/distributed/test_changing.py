"""Folds and new tables of a store that ranks share: each a version of all ranks, or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests import inside
from tests.distributed.ranks import Killed, in_turn, run, values
from tests.distributed.test_commit import kill_at
from tests.durability.crafting import newest_manifest, resealed
from tierstore import distributed
from tierstore.errors import (
    CorruptStoreError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    StoreFullError,
)
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM = 53, 3
FIELDS = {
    "weight": tierstore.Field(DIM, init=tierstore.normal(std=0.5, seed=3)),
    "age": tierstore.Field(1, "bfloat16", tierstore.constant(2.0)),
}
KEYS = [f"clé {number * 7919 % 1000}" for number in range(ROWS)]
NEW = tierstore.TableSpec(41, fields=FIELDS)


def start(path: Path) -> None:
    """Make a store of three versions, the last at step 2."""
    spec = {"item": tierstore.TableSpec(ROWS, fields=FIELDS)}
    with distributed.create(path, spec, partitions=4, keep=3) as store:
        for step in (1, 2):
            store["item"].write(np.arange(step, ROWS, 3), written(step))
            store.commit(step)


def written(step: int) -> np.ndarray:
    count = len(range(step, ROWS, 3))
    return np.random.default_rng(step).standard_normal((count, DIM)).astype(np.float32)


def contents(path: Path) -> dict[str, np.ndarray]:
    with tierstore.open(path) as store:
        return {
            f"{name}.{field}": store[name].read(np.arange(store[name].rows), field)
            for name in store
            for field in store[name].fields
        }


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def fold(store: Any) -> None:
    store.fold()


def create_table(store: Any) -> None:
    store.create_table("user", NEW)


def set_keys(store: Any) -> None:
    store.set_keys("item", KEYS)


def keys_in(path: Path) -> list[Any] | None:
    with tierstore.open(path) as store:
        keys = store["item"].keys
        return None if keys is None else keys[:].tolist()


def plain_contents(path: Path, *, table: bool) -> dict[str, np.ndarray]:
    with tierstore.create(path, {"item": tierstore.TableSpec(ROWS, fields=FIELDS)}) as store:
        for step in (1, 2):
            store["item"].write(np.arange(step, ROWS, 3), written(step))
        if table:
            store.commit()
            store.create_table("user", NEW)
        store.commit()
    return contents(path)


# -- fold


def bases(path: Path) -> np.ndarray:
    """Return the rows of all bases as NumPy reads them, in no particular order."""
    found = [
        np.load(each)["weight"] if np.load(each).dtype.names else np.load(each)
        for each in sorted(path.glob("partitions/*/item/g*/rows.npy"))
    ]
    return np.concatenate(found)


def fold_and_go_on(rank: int, path: Path) -> list[int]:
    with distributed.open(path) as store:
        dropped = store.fold()
        assert [each.version for each in store.versions()] == [store.version]
        assert store.info().folded
        everything = store["item"].read(np.arange(ROWS))
        store["item"].write([5], np.full((1, DIM), 7, np.float32))
        assert store.commit(3) == 4
        everything[5] = 7
        assert np.array_equal(store["item"].read(np.arange(ROWS)), everything)
        return dropped


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_fold_leaves_the_newest_version_in_the_bases(tmp_path: Path, ranks: int) -> None:
    start(tmp_path / "store")
    before = contents(tmp_path / "store")
    with distributed.open(tmp_path / "store") as store:
        info = store.info()
        assert not info.folded  # else nothing is shown
        assert info.allocated_bytes is not None
        assert info.allocated_bytes > info.data_bytes + sum(
            each.delta_bytes for each in info.tables
        )
    shutil.copytree(tmp_path / "store", tmp_path / "folded")
    with distributed.open(tmp_path / "folded") as store:
        assert store.fold() == [1, 2]
        assert store.fold() == []
    assert same(contents(tmp_path / "folded"), before)
    kept = {row.tobytes() for row in bases(tmp_path / "folded")}
    assert {row.tobytes() for row in before["item.weight"]} <= kept
    path = tmp_path / "store"
    found = [fold_and_go_on(0, path)] if ranks == 1 else values(run(ranks, fold_and_go_on, path))
    assert found == [[1, 2]] * ranks
    assert tierstore.verify(path).ok


def folds_refused(rank: int, path: Path) -> list[str]:
    told = []
    with distributed.open(path) as store:
        store["item"].write([1] if rank else [], np.ones((rank, DIM), np.float32))
        with pytest.raises(InvalidInputError) as caught:
            store.fold()
        told.append(str(caught.value))
        store.rollback()
        store.keep(2, "best")
        with pytest.raises(InvalidInputError) as caught:
            store.fold()
        told.append(str(caught.value))
        store.release("best")
        with pytest.raises(LockedError) as locked:  # the test has version 2 open
            store.fold()
        told.append(str(locked.value))
        assert [each.version for each in store.versions()] == [1, 2, 3]
    return told


@pytest.mark.slow
def test_what_cannot_fold_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "store"
    start(path)
    with tierstore.open(path, version=2) as reader:
        before = reader["item"][:]
        for told in values(run(2, folds_refused, path)):
            assert "not committed" in told[0]
            assert "kept as 'best'" in told[1]
            assert "open for reading" in told[2]
        assert np.array_equal(reader["item"][:], before)


# -- tables


def add_table_and_train(rank: int, path: Path) -> None:
    with distributed.open(path, average=False) as store:
        table = store.create_table("user", NEW)
        assert table is store["user"] and table.rows == NEW.rows
        train(store, rank, store.ranks)


def train(store: Any, rank: int, ranks: int) -> None:
    one, other = TieredEmbedding(store["item"]), TieredEmbedding(store["user"])
    optimizer = TieredOptimizer(torch.optim.SGD, [one, other], lr=0.5)
    ids = torch.arange(rank, 40, ranks)
    (one(ids) * other(ids).detach()).sum().backward()
    (other(ids) * torch.arange(1, DIM + 1)).sum().backward()
    optimizer.step()
    store.commit(9)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_new_table_has_the_rows_of_a_plain_store(tmp_path: Path, ranks: int) -> None:
    spec = {"item": tierstore.TableSpec(ROWS, fields=FIELDS)}
    with tierstore.create(tmp_path / "plain", spec) as plain:
        plain.create_table("user", NEW)
        assert plain["user"][:].any()
        train(plain, 0, 1)
    path = tmp_path / "store"
    distributed.create(path, spec, partitions=5).close()
    if ranks == 1:
        add_table_and_train(0, path)
    else:
        values(run(ranks, add_table_and_train, path))
    assert same(contents(path), contents(tmp_path / "plain"))
    assert tierstore.verify(path).ok


def test_a_new_table_may_be_of_zeros_or_of_other_values(tmp_path: Path) -> None:
    start(tmp_path / "store")
    given = np.random.default_rng(4).standard_normal((9, 2)).astype(np.float32)
    with distributed.open(tmp_path / "store", budget="1MiB") as store:
        store.create_table("zeros", tierstore.TableSpec(7, 2, sparse=True))
        store.create_table("few", tierstore.TableSpec(1, 2, init=tierstore.constant(3.0)))
        store.create_table("given", tierstore.TableSpec(9, 2, init=tierstore.from_array(given)))
        store.create_table("zarr", tierstore.TableSpec(99, 2, backend="zarr", compression="zstd"))
        with pytest.raises(ExistsError):
            store.create_table("few", tierstore.TableSpec(1, 2))
        assert store["few"][:].tolist() == [[3, 3]]
    with tierstore.open(tmp_path / "store") as store:
        assert not store["zeros"][:].any()
        assert np.array_equal(store["given"][:], given)
        assert store["zarr"].spec.backend == "zarr"
    assert tierstore.verify(tmp_path / "store").ok


def tables_refused(rank: int, path: Path) -> list[str]:
    told = []
    calls: list[tuple[type[Exception], Callable[[Any], Any]]] = [
        (
            InvalidInputError,
            lambda store: store.create_table("user", tierstore.TableSpec(7, 2 + rank)),
        ),
        (ExistsError, lambda store: store.create_table("item", NEW)),
        (InvalidTypeError, lambda store: store.create_table("user", 7)),
        (InvalidInputError, lambda store: store.create_table("../user", NEW)),
    ]
    with distributed.open(path) as store:
        before = store.version
        for kind, call in calls:
            with pytest.raises(kind) as caught:
                call(store)
            told.append(str(caught.value))
        if rank:  # the disk of one rank fails in the middle
            inside.parts(store).own[1].rewrite = lambda *_, **__: failing()
        with pytest.raises(StoreFullError, match="full") as info:
            store.create_table("user", NEW)
        told.append(str(info.value))
        assert list(store) == ["item"] and store.version == before
        if rank:
            del inside.parts(store).own[1].rewrite
        store.create_table("user", NEW)
    return told


def failing() -> None:
    raise StoreFullError("the disk is full")


@pytest.mark.slow
def test_a_table_that_cannot_be_made_is_made_on_no_rank(tmp_path: Path) -> None:
    start(tmp_path / "store")
    for told in values(run(2, tables_refused, tmp_path / "store")):
        assert "disagree on spec" in told[0]
        assert "already has a table" in told[1]
    assert same(contents(tmp_path / "store"), plain_contents(tmp_path / "plain", table=True))


# -- external keys


def set_and_use_keys(rank: int, path: Path) -> list[str]:
    told = []
    with distributed.open(path) as store:
        table = store["item"]
        assert table.keys is None
        with pytest.raises(InvalidInputError, match="has no keys"):
            table.lookup(["x"])
        calls: list[tuple[int, int]] = []
        store.set_keys("item", KEYS, progress=lambda *call: calls.append(call))
        assert calls == [(len(KEYS), len(KEYS))]
        ids = np.array([7, 3, 50])
        assert np.array_equal(table.lookup([KEYS[each] for each in ids.tolist()]), ids)
        assert table.keys[:].tolist() == KEYS
        before = table.read(ids)
        table.write(ids, np.full((3, DIM), 5, np.float32))
        store.rollback()
        assert np.array_equal(table.read(table.lookup([KEYS[7], KEYS[3], KEYS[50]])), before)
        store["item"].scalars["seen"] = 1
        store.commit(5)
        others = range(rank, ROWS + rank)
        calls: list[Callable[[], None]] = [
            lambda: store.grow("item", 60),
            lambda: store.set_keys("item", KEYS[:-1]),
            lambda: store.set_keys("item", [*KEYS[:-1], KEYS[0]]),
            *([lambda: store.set_keys("item", others)] if store.ranks > 1 else []),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError) as caught:
                call()
            told.append(str(caught.value))
        assert table.keys[:].tolist() == KEYS
        store.add_fields("item", {"more": tierstore.Field(1, init=tierstore.constant(3.0))})
        assert store["item"].keys[:].tolist() == KEYS
        store.fold()
    return told


def grow_with_keys(rank: int, path: Path) -> None:
    more = [f"more {each}" for each in range(9)]
    with distributed.open(path) as store:
        store.set_keys("item", KEYS)
        version = store.version
        for keys in (None, more[:2], [f"{rank} {each}" for each in range(7)], KEYS[:7]):
            with pytest.raises(InvalidInputError):
                store.grow("item", ROWS + 7, keys=keys)
        assert store.version == version and store["item"].rows == ROWS
        store.grow("item", ROWS + 7, keys=more[:7])
        rows = np.arange(2 * DIM, dtype=np.float32).reshape(2, DIM)
        assert store.append("item", rows, keys=more[7:]) == range(ROWS + 7, ROWS + 9)
        ids = store["item"].lookup([KEYS[5], "more 0", "more 8"])
        assert ids.tolist() == [5, ROWS, ROWS + 8]
        assert np.array_equal(store["item"].read(ids[2:]), rows[1:])


@pytest.mark.slow
def test_rows_with_keys_grow_on_all_ranks(tmp_path: Path) -> None:
    start(tmp_path / "store")
    values(run(2, grow_with_keys, tmp_path / "store"))
    assert keys_in(tmp_path / "store") == [*KEYS, *(f"more {each}" for each in range(9))]
    assert tierstore.verify(tmp_path / "store").ok


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_have_external_keys(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "store"
    start(path)
    found = [set_and_use_keys(0, path)] if ranks == 1 else values(run(2, set_and_use_keys, path))
    for told in found:
        assert "have keys" in told[0] and "needs 53 keys" in told[1] and "more than once" in told[2]
        assert ranks == 1 or "ranks disagree on the keys" in told[3]
    assert tierstore.verify(path).ok and keys_in(path) == KEYS
    with tierstore.open(path) as reader:
        assert reader["item"].lookup(KEYS[9]) == 9
        reader.save(tmp_path / "plain")
    distributed.save(tmp_path / "plain", tmp_path / "few", partitions=2)
    distributed.save(path, tmp_path / "wide", partitions=7)
    assert tierstore.repair(path, tmp_path / "fixed").complete
    for each in ("plain", "few", "wide", "fixed"):
        assert keys_in(tmp_path / each) == KEYS and tierstore.verify(tmp_path / each).ok
        assert same(contents(tmp_path / each), contents(path))
    with distributed.open(tmp_path / "wide") as store:
        store.set_keys("item", list(range(ROWS)))
        assert store["item"].lookup(9) == 9
        with tierstore.open(tmp_path / "wide") as reader:
            store.set_keys("item", None)
            store.commit(9)
            store.commit(10)
            assert reader["item"].lookup(9) == 9
        assert store["item"].keys is None
        store.grow("item", 60)
    assert [each.name for each in (tmp_path / "wide").glob("item/*")] == []
    file = next(path.glob("item/g*/keys.*.utf8"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    report = tierstore.verify(path)
    assert not report.ok and "item" in report.bad_files[0]
    report = tierstore.repair(path, tmp_path / "without")
    assert not report.complete and keys_in(tmp_path / "without") is None


def test_keys_of_partitions_of_another_shape_are_not_left_out_in_silence(tmp_path: Path) -> None:
    path, spec = tmp_path / "s", tierstore.TableSpec(dim=4, keys="int64")
    with distributed.create(path, {"k": spec}, partitions=2) as store:
        store["k"].write([3, 4, 5], np.ones((3, 4), np.float32))
        store.commit()
    manifest = newest_manifest(path)
    sound = manifest.read_bytes()
    for dim in (3, 5):  # three elements take as many bytes as four
        manifest.write_bytes(
            resealed(sound, lambda body, dim=dim: body["tables"]["k"]["fields"][0].update(dim=dim))
        )
        with pytest.raises(CorruptStoreError, match="other fields or keys"):
            tierstore.open(path)
    report = tierstore.repair(path, tmp_path / "mended")
    assert [each.split(": ")[1].split(" has")[0] for each in report.left_out] == ["table 'k'"] * 2
    assert not report.complete


# -- a rank is killed


def killed_in(rank: int, path: Path, change: Any, victim: int, moment: tuple[str, str]) -> None:
    with distributed.open(path) as store:
        if rank == victim:
            kill_at(moment)
        change(store)


def again(rank: int, path: Path, change: Any) -> None:
    with distributed.open(path) as store:
        if change is not create_table or "user" not in store:
            change(store)


MOMENTS = {
    fold: ["check that it can fold", "drop older versions", "fold its partitions"],
    create_table: [
        "check that it can change its tables",
        "write its tables",
        "change its partitions",
        "publish the version",
        "confirm the version",
        "place its tables",
    ],
    set_keys: [
        "check that it can set keys",
        "write the keys",
        "publish the version",
        "confirm the version",
    ],
}


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("change", MOMENTS)
def test_a_rank_is_killed_at_each_moment_of_a_change(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    """One rank or the other; when all know is as before what comes next.

    One process goes on with what is left, and now and then two.
    """
    start(tmp_path / "before")
    possible = [
        plain_contents(tmp_path / "plain", table=False),
        plain_contents(tmp_path / "plain with it", table=change is create_table),
    ]
    seen, named = set(), set()
    moments = [(what, when) for what in MOMENTS[change] for when in ("before", "done")]
    for at, (victim, (what, when)) in enumerate(in_turn(moments)):
        path = tmp_path / f"{what} {when}".replace(" ", "-")
        shutil.copytree(tmp_path / "before", path)
        found = run(2, killed_in, path, change, victim, (what, when))
        assert isinstance(found[victim], Killed), (what, when, found)
        now = contents(path)
        which = [number for number, each in enumerate(possible) if same(now, each)]
        assert which, (what, when)
        seen.add(which[0])
        assert tierstore.verify(path).ok, (what, when)
        named.add(keys_in(path) is not None)
        assert keys_in(path) in (None, KEYS)
        if at % 3:
            again(0, path, change)
        else:
            values(run(2, again, path, change))
        assert same(contents(path), possible[1]), (what, when)
        assert at % 3 or tierstore.verify(path).ok
        assert change is not set_keys or keys_in(path) == KEYS
        shutil.rmtree(path)
    assert seen == ({0, 1} if change is create_table else {0})
    assert named == ({False, True} if change is set_keys else {False})


IN_A_ROW: dict[str, Callable[[Any, str], object]] = {
    "drop": lambda store, name: store.drop(name),
    "rename": lambda store, name: store.rename(name, f"{name}2"),
    "add": lambda store, name: store.add_fields(name, {f"more{store.version}": tierstore.Field(1)}),
    "create": lambda store, name: store.create_table(f"new{store.version}", NEW),
    "fold": lambda store, name: store.fold(),
    "restore": lambda store, name: store.restore(store.version),
    "commit": lambda store, name: store.commit(),
}
"""Changes of a store and of one table by key in it."""


def changed_in_a_row(rank: int, path: Path, first: str, is_shared: bool) -> list[Any]:
    found = []
    for second in IN_A_ROW if is_shared else ["drop"]:
        specs = {"words": tierstore.TableSpec(dim=DIM, keys="text")}
        keys = KEYS[rank::2]
        with distributed.create(path / second, specs, partitions=2, keep=9) as store:
            store["words"].write(keys, np.ones((len(keys), DIM), np.float32))
            store.commit()
        with distributed.open(path / second, keep=9) as store:  # no key of the table is asked for
            for change in (first, second):
                IN_A_ROW[change](store, next(name for name in store if name.startswith("words")))
            found += [(second, [len(store[name]) for name in store if name.startswith("words")])]
    return found


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("first", [change for change in IN_A_ROW if change != "drop"])
def test_changes_follow_one_another_and_count_the_keys(tmp_path: Path, first: str) -> None:
    for ranks in (1, 2):
        (path := tmp_path / f"{ranks}").mkdir()
        for found in values(run(ranks, changed_in_a_row, path, first, ranks > 1)):
            for second, counts in found:
                there = len(KEYS) if ranks == 2 else len(KEYS[::2])
                assert counts == ([] if second == "drop" else [there]), (first, second, ranks)
