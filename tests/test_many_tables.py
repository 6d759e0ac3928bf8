"""Stores of many tables: what a call costs is what changed, or what is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore._disk.manifest import Manifest
from tierstore.errors import ClosedError, CorruptStoreError

ROWS, DIM = 50, 4
NAMES = [f"t{number}" for number in range(12)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=3))
    tierstore.create(tmp_path / "s", dict.fromkeys(NAMES, spec)).close()
    return tmp_path / "s"


@pytest.fixture
def store(path: Path) -> Iterator[tierstore.Store]:
    with tierstore.open(path, "r+") as opened:
        yield opened


def write(
    store: tierstore.Store, name: str, seed: int, ids: Sequence[int] = (4, 2, 9)
) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((len(ids), DIM)).astype(np.float32)
    store[name].write(ids, values)
    return values


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, a call of `work` calls in this thread."""
    count = 0

    def note(frame: object, event: str, what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def many(count: int) -> tierstore.Store:
    """Return a store of so many tables, each of which has a row that was committed."""
    made = tierstore.create(None, {f"t{n}": tierstore.TableSpec(7, DIM) for n in range(count)})
    for name in made:
        write(made, name, 0, [0])
    made.commit()
    return made


def test_a_commit_of_one_row_calls_the_same_functions_however_many_tables() -> None:
    counts = []
    for count in (3, 30, 300):
        with many(count) as store:
            found = []
            for version in range(6):
                write(store, "t2", version, [version % 7])
                if version == 3:
                    store["t1"].scalars["step"] = 1
                found.append(calls_of(lambda store=store, version=version: store.commit(version)))
            counts.append(found[1:])  # the first one drops what all tables were written to
    assert np.ptp(np.array(counts), axis=0).max() <= 25, counts  # of some thousands


@pytest.mark.parametrize(
    "what", ["open", "write", "info", "refresh", "commit", "rollback", "close"]
)
def test_what_is_done_to_every_table_costs_each_the_same(what: str) -> None:
    """Nothing looks at all tables for each table."""
    counts = {}
    for count in (30, 300):
        with many(count) as store, tierstore.open(store.path) as reader:
            path = store.path
            if what == "close":
                opened = tierstore.open(path)
                opened["t0"].read([0])
                counts[count] = calls_of(opened.close)
                continue
            for name in store:
                write(store, name, 1, [3])
            if what == "refresh":
                store.commit()
            acts: dict[str, Callable[[], object]] = {
                "open": lambda path=path: tierstore.open(path).close(),
                "write": lambda store=store: [write(store, name, 2, [5]) for name in store],
                "info": lambda store=store: [str(store.info()), store.info().to_dict()],
                "refresh": reader.refresh,
                "commit": store.commit,
                "rollback": store.rollback,
            }
            counts[count] = calls_of(acts[what])
            store.rollback()
    assert counts[300] <= 20 * counts[30], counts  # 100 where each looks at all


def test_a_commit_encodes_the_tables_that_changed(store: tierstore.Store) -> None:
    write(store, "t3", 1)
    store.commit()
    before = store._state.manifest.tables
    write(store, "t7", 2)
    store["t1"].scalars["step"] = 1
    store.commit()
    after = store._state.manifest.tables
    assert [name for name in NAMES if after[name] is not before[name]] == ["t1", "t7"]


def test_scalars_of_another_type_are_a_change(store: tierstore.Store) -> None:
    for value in (1, 1.0, True):
        store["t2"].scalars["step"] = value
        store.commit()
        with tierstore.open(store.path) as reader:
            assert type(reader["t2"].scalars["step"]) is type(value)


def test_what_a_manifest_shares_with_another_is_what_is_the_same(store: tierstore.Store) -> None:
    first = store._state.manifest
    write(store, "t5", 1)
    store.commit()
    second = store._state.manifest
    plain = Manifest.decode(second.encode(), "manifest")
    shared = Manifest.decode(second.encode(), "manifest", first)
    assert plain == shared and plain.tables == second.tables
    assert [name for name in NAMES if shared.tables[name] is not first.tables[name]] == ["t5"]
    new, gone = second.changed_paths(first)
    assert (new, gone) == (second.paths() - first.paths(), first.paths() - second.paths())


def test_a_table_is_mapped_when_it_is_needed(path: Path) -> None:
    with tierstore.open(path) as reader:

        def mapped() -> list[str]:
            return [name for name in NAMES if reader[name]._disk._base._opened is not None]

        assert mapped() == []
        reader["t4"].read([1, 2])
        assert mapped() == ["t4"]


@pytest.mark.parametrize("name", ["rows.npy", "rows.crc"])
def test_a_file_that_is_cut_is_found_though_it_is_not_mapped(path: Path, name: str) -> None:
    (file,) = (path / "t6").rglob(name)
    os.truncate(file, file.stat().st_size - 1)
    with tierstore.open(path) as reader:
        assert list(reader.damaged) == ["t6"]
        reader["t5"].read([0])


@pytest.mark.parametrize("name", ["rows.npy", "rows.crc"])
def test_a_file_that_is_replaced_before_it_is_mapped_is_noticed(path: Path, name: str) -> None:
    (file,) = (path / "t6").rglob(name)
    with tierstore.open(path, budget=tierstore.Budget(host=0)) as reader:
        (path.parent / "other").write_bytes(file.read_bytes())
        os.replace(path.parent / "other", file)
        with pytest.raises(CorruptStoreError, match="replaced"):
            reader["t6"].read([1])
        reader["t5"].read([1])


def test_a_refresh_follows_what_changed_and_ends_leases_of_all(store: tierstore.Store) -> None:
    with tierstore.open(store.path) as reader:
        lease = reader["t1"].lease([1, 2])
        values = write(store, "t8", 5)
        store.commit()
        kept = {name: reader[name].read([4, 2, 9]) for name in NAMES}
        assert reader.refresh()
        assert np.array_equal(reader["t8"].read([4, 2, 9]), values)
        for name in set(NAMES) - {"t8"}:
            assert np.array_equal(reader[name].read([4, 2, 9]), kept[name])
        with pytest.raises(ClosedError):
            lease.read("weight")
        lease.release()
