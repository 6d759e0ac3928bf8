"""Tables renamed and dropped, versions restored, patches: on ranks as in a plain store, or none."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.distributed.ranks import Killed, in_turn, run, values
from tests.distributed.test_commit import hooked
from tierstore import distributed
from tierstore._store import partitions as opening
from tierstore.errors import (
    ClosedError,
    ExistsError,
    FormatError,
    InvalidInputError,
    StoreFullError,
    UnknownNameError,
    VersionError,
)

ROWS = 41
SPECS = {
    "item": tierstore.TableSpec(ROWS, 3, init=tierstore.normal(seed=3)),
    "user": tierstore.TableSpec(9, 2, init=tierstore.normal(seed=4)),
    "word": tierstore.TableSpec(dim=2, keys="text"),
}
KEYS = [f"key {each * 7 % ROWS}" for each in range(ROWS)]
Seen = tuple[int, int | None, dict[str, Any]]


def opened(path: Path) -> Any:
    parts = (path / "partitions").exists()
    return distributed.open(path) if parts else tierstore.open(path, "r+")


def start(path: Path, partitions: int | None = 4) -> None:
    """Make a store of four versions: rows, scalars, keys, and rows again at step 2."""
    make = tierstore.create if partitions is None else distributed.create
    with make(path, SPECS, keep=30, **({"partitions": partitions} if partitions else {})) as store:
        store["word"].write(["one", "two"], rows_of(1, 2, 2))
        write(store, 1)
        store["item"].scalars["lr"] = 0.5
        store.commit(1)
        store.set_keys("item", KEYS)
        write(store, 2)
        store.commit(2, payload={"of": {"step": 2}})


def rows_of(seed: int, count: int, dim: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def write(store: Any, seed: int) -> None:
    for name in sorted(store.keys() & {"item", "user", "other"}):
        ids = np.random.default_rng(seed).permutation(store[name].rows)[:7]
        store[name].write(ids, rows_of(seed, 7, store[name].dim))


def contents(path: Path) -> Seen:
    """Return the version, the step, and by table the keys, rows and scalars."""
    found = {}
    with tierstore.open(path) as store:
        for name, table in store.items():
            keys = None if table.keys is None else table.keys[:].tolist()
            if table.spec.keys:
                keys = sorted(keys)
                rows = table.read(keys)
            else:
                rows = table[:]
            found[name] = keys, rows.tolist(), dict(table.scalars)
        payload = {name: value.tree() for name, value in store.payload.items()}
        return store.version, store.step, {**found, "payload": payload}


def make_patch(place: Path) -> None:
    """Write a patch that follows version 4 of a copy of `place/before`, as `place/patch`."""
    shutil.copytree(place / "before", place / "ahead")
    with opened(place / "ahead") as store:
        store.keep(4, "base")
        write(store, 5)
        store["user"].scalars["seen"] = 3
        store.commit(7, payload={"of": {"step": 7}})
    with tierstore.open(place / "ahead") as store:
        store.write_patch(place / "patch", "base")


def rename(store: Any, place: Path) -> None:
    old = store["item"]
    assert store.rename("item", "other") is store["other"]
    with pytest.raises(ClosedError, match="renamed or dropped"):
        old.read([0])


def rename_keyed(store: Any, place: Path) -> None:
    store.rename("word", "text")


def drop(store: Any, place: Path) -> None:
    assert store["item"].scalars["lr"] == 0.5
    store.drop("item")


def restore(store: Any, place: Path) -> None:
    table = store["item"]
    table.write([5], np.full((1, 3), 9, np.float32))  # which a restore drops
    table.scalars["lr"] = 4.0
    store.restore(2)
    assert table.scalars == {"lr": 0.5}
    assert not (table.read([5]) == 9).any()


def patch(store: Any, place: Path) -> None:
    done = store.apply_patch(place / "patch")
    assert done.rows == {"item": 7, "user": 7}
    assert store["user"].scalars == {"seen": 3}


CHANGES = [rename, rename_keyed, drop, restore, patch]


def change_and_go_on(rank: int, path: Path, place: Path, change: Any) -> None:
    with opened(path) as store:
        change(store, place)
        write(store, 8)
        store.commit(8)
        with tierstore.open(path) as reader:
            assert reader.version == store.version


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_change_is_that_of_a_plain_store(tmp_path: Path, change: Any, ranks: int) -> None:
    start(tmp_path / "before")
    make_patch(tmp_path)
    start(tmp_path / "plain", None)
    if change is patch:
        shutil.rmtree(tmp_path / "plain")
        with tierstore.open(tmp_path / "before") as reader:
            reader.save(tmp_path / "plain")
    change_and_go_on(0, tmp_path / "plain", tmp_path, change)
    arguments = tmp_path / "before", tmp_path, change
    values(
        [change_and_go_on(0, *arguments)]
        if ranks == 1
        else run(ranks, change_and_go_on, *arguments)
    )
    assert contents(tmp_path / "before") == contents(tmp_path / "plain")
    assert tierstore.verify(tmp_path / "before").ok


def test_a_patch_goes_from_a_plain_store_to_a_copy_in_partitions(tmp_path: Path) -> None:
    start(tmp_path / "before", None)
    make_patch(tmp_path)
    distributed.save(tmp_path / "before", tmp_path / "copy", partitions=5)
    with opened(tmp_path / "copy") as store:
        store.apply_patch(tmp_path / "patch")
    assert contents(tmp_path / "copy")[1:] == contents(tmp_path / "ahead")[1:]
    with tierstore.open(tmp_path / "copy") as copy, tierstore.open(tmp_path / "ahead") as ahead:
        assert inside.manifest(copy).mark == inside.manifest(ahead).mark


@pytest.mark.slow
def test_every_version_is_restored_in_turn(tmp_path: Path) -> None:
    for name, partitions in (("plain", None), ("parts", 3)):
        start(tmp_path / name, partitions)
        with opened(tmp_path / name) as store:
            store.drop("user")
            store.rename("item", "user")
            store["word"].write(["three"], rows_of(9, 1, 2))
            store.commit()
    for version in (1, 5, 2, 2, 6, 4, 3, 7):
        for name in ("plain", "parts"):
            with opened(tmp_path / name) as store:
                store.restore(version)
                store["word"].write([f"at {version}"], rows_of(version, 1, 2))
                store.commit()
        assert contents(tmp_path / "parts") == contents(tmp_path / "plain")
    assert tierstore.verify(tmp_path / "parts").ok


def refused(rank: int, path: Path, place: Path) -> list[str]:
    told = []
    calls: list[tuple[type[Exception], Callable[[Any], Any]]] = [
        (UnknownNameError, lambda store: store.rename("nothing", "other")),
        (ExistsError, lambda store: store.rename("item", "user")),
        (InvalidInputError, lambda store: store.rename("item", "a/b")),
        (UnknownNameError, lambda store: store.drop("nothing")),
        (VersionError, lambda store: store.restore(77)),
        (VersionError, lambda store: store.restore("best")),
        (FormatError, lambda store: store.apply_patch(place / "damaged")),
        (InvalidInputError, lambda store: store.drop("user" if rank else "item")),
        (InvalidInputError, lambda store: store.restore(1 + rank)),
    ]
    with distributed.open(path) as store:
        before = store.version
        for kind, call in calls[: None if store.ranks > 1 else -2]:
            with pytest.raises(kind) as caught:
                call(store)
            told.append(str(caught.value))
        for method, change in (("rewrite", rename), ("rewrite", drop), ("restore", restore)):
            part = inside.parts(store).own[-1]
            if rank == store.ranks - 1:  # the disk of the last one fails in the middle
                setattr(part, method, lambda *_, **__: full())
            with pytest.raises(StoreFullError, match="full"):
                change(store, place)
            if rank == store.ranks - 1:
                delattr(part, method)
            store.rollback()
        assert store.version == before
    return told


def full() -> None:
    raise StoreFullError("the disk is full")


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_cannot_be_done_changes_nothing(tmp_path: Path, ranks: int) -> None:
    start(tmp_path / "before")
    make_patch(tmp_path)
    data = bytearray((tmp_path / "patch").read_bytes())
    data[-90] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    before = contents(tmp_path / "before")
    arguments = tmp_path / "before", tmp_path
    values([refused(0, *arguments)] if ranks == 1 else run(ranks, refused, *arguments))
    assert contents(tmp_path / "before") == before
    assert tierstore.verify(tmp_path / "before").ok


def look_and_commit(rank: int, path: Path) -> list[list[int]]:
    """Return the versions that remain while a store is open to keep one, and after its commit."""
    with distributed.open(path, keep=1) as store:
        looked = [each.version for each in store.versions()]
    with distributed.open(path, keep=1) as store:
        store["item"].write([rank], rows_of(rank, 1, 3))
        store.commit()
        return [looked, [each.version for each in store.versions()]]


def test_ranks_that_keep_fewer_remove_none_before_a_commit(tmp_path: Path) -> None:
    start(tmp_path / "s")
    before = list(range(1, contents(tmp_path / "s")[0] + 1))
    found = values(run(2, look_and_commit, tmp_path / "s"))
    assert found == [[before, [before[-1] + 1]]] * 2
    assert tierstore.verify(tmp_path / "s").ok


# -- a rank is killed


def recorded(rank: int, path: Path, place: Path, change: Any) -> list[tuple[str, str]]:
    moments: list[tuple[str, str]] = []
    with distributed.open(path) as store:
        hooked(lambda *moment: moments.append(moment))
        change(store, place)
    return moments


def killed_in(rank: int, path: Path, place: Path, change: Any, victim: int, number: int) -> None:
    with distributed.open(path) as store:
        left = [number]

        def hook(what: str, when: str) -> None:
            if rank == victim and not left[0]:
                time.sleep(0.05)  # the others come as far as they can
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        hooked(hook)
        change(store, place)


def again(rank: int, path: Path, place: Path, change: Any, done: int) -> None:
    with distributed.open(path) as store:
        if not done:
            change(store, place)


@pytest.mark.slow
@pytest.mark.parametrize("change", [rename, restore, patch])
@pytest.mark.nightly("restore", "rename")
def test_a_rank_is_killed_at_each_moment(tmp_path: Path, change: Any) -> None:
    """One rank and the other in turn; when all know is as before what comes next.

    One process goes on with it, and now and then two.
    """
    start(tmp_path / "before")
    make_patch(tmp_path)
    shutil.copytree(tmp_path / "before", tmp_path / "after")
    moments = values(run(2, recorded, tmp_path / "after", tmp_path, change))[0]
    possible = [contents(tmp_path / name)[1:] for name in ("before", "after")]
    seen = set()
    told = [number for number, moment in enumerate(moments) if moment[1] != "told"]
    for at, (victim, number) in enumerate(in_turn(told)):
        moment = moments[number]
        path = tmp_path / "store"
        shutil.copytree(tmp_path / "before", path)
        found = run(2, killed_in, path, tmp_path, change, victim, number)
        assert isinstance(found[victim], Killed), (moment, found)
        now = possible.index(contents(path)[1:])
        assert tierstore.verify(path).ok, moment
        if at % 3:
            again(0, path, tmp_path, change, now)
        else:
            values(run(2, again, path, tmp_path, change, now))
        assert contents(path)[1:] == possible[1], moment
        assert at % 3 or tierstore.verify(path).ok, moment
        seen.add(now)
        shutil.rmtree(path)
    assert seen == {0, 1}


def test_a_reader_of_partitions_looks_again_where_files_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold of what it opens leaves the root as it is at first."""
    path, generation, done = tmp_path / "s", opening._Reader.generation, []
    start(path, 3)
    with distributed.open(path) as store:

        def folded(reader: Any, name: str) -> Any:
            if not done and reader._number == 1:
                done.append(name)
                for part in inside.parts(store).own:
                    part.fold()
            return generation(reader, name)

        monkeypatch.setattr(opening._Reader, "generation", folded)
        ids = np.arange(ROWS)
        with tierstore.open(path) as reader:
            assert done and np.array_equal(reader["item"].read(ids), store["item"].read(ids))


def loaded(_: int, path: Path) -> list[float]:
    """Load a state over rows that are not committed, and over later versions."""
    found, states = [], []
    ids = np.arange(40)
    with distributed.open(path) as store:
        table = store["item"]

        def write(value: float) -> None:
            table.write(ids, np.full((40, 8), value, np.float32))

        def load() -> None:
            store.load_state_dict(states[0])
            found.append(float(table.read(ids)[3, 0]))

        write(1.0)
        store.commit(keep="one")
        states.append(store.state_dict())
        write(2.0)
        load()
        for value in (3.0, 4.0, 5.0):
            write(value)
            store.commit()
            states.append({**store.state_dict()})  # as in a file, so that no version is kept for it
        load()
        with pytest.raises(InvalidInputError, match="no longer kept"):
            store.load_state_dict(states[1])
        with pytest.raises(InvalidInputError, match="belongs to the store other"):
            store.load_state_dict({**states[1], "uuid": "other"})
        write(6.0)
        store.commit(payload={"model": b"m"}, keep="with a payload")
        states[0] = store.state_dict()
        write(7.0)
        store.commit()  # whose payload is that of the version before
        load()
    return found


def test_a_state_brings_the_rows_of_all_ranks_back(tmp_path: Path) -> None:
    specs = {"item": tierstore.TableSpec(40, 8)}
    for ranks in (1, 2):
        path = tmp_path / str(ranks)
        distributed.create(path, specs, partitions=4).close()
        assert values(run(ranks, loaded, path)) == [[1.0, 1.0, 6.0]] * ranks
