"""Copies by hard links, as `cp -al` and snapshots make them: neither changes the other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.small import NONE
from tierstore.errors import LockedError

KINDS = {
    "memmap": {},
    "sparse": {"sparse": True},
    "chunks": {"backend": "zarr", "chunk_rows": 1024},
    "zstd": {"backend": "zarr", "compression": "zstd"},
    "keys": {"keys": "int64"},
}
ROWS, DIM = 3000, 16


def write(store: tierstore.Store, seed: int) -> np.ndarray:
    """Write some rows, commit, and return all."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(ROWS, 200, replace=False)
    table = store["t"]
    table.write(ids, rng.standard_normal((ids.size, DIM), np.float32))
    store.commit()
    return rows_of(store)


def rows_of(store: tierstore.Store) -> np.ndarray:
    table = store["t"]
    keys = np.arange(ROWS)
    if table.spec.keys is None:
        return table.read(keys)
    known = keys[np.asarray(table.contains(keys))]
    return np.concatenate([known[:, None], table.read(known)], axis=1)


def linked(path: Path, target: Path) -> None:
    shutil.copytree(path, target, copy_function=os.link)


@pytest.mark.variants(3, 5)
@pytest.mark.fault(53)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writes", ["original", "copy", "both"])
def test_a_copy_by_hard_links_and_its_original_keep_their_rows(
    tmp_path: Path, kind: str, writes: str
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    spec = tierstore.TableSpec(None if kind == "keys" else ROWS, DIM, **KINDS[kind])
    with tierstore.create(one, {"t": spec}, budget=NONE) as store:
        write(store, 1)
        store.fold()
        rows = write(store, 2)
        linked(one, other)
    expected = {one: rows, other: rows}
    paths = {"original": [one], "copy": [other], "both": [one, other]}[writes]
    with tierstore.open(one) as still, tierstore.open(other) as too:
        for seed, path in enumerate(paths * 2, start=3):
            with tierstore.open(path, "r+", budget=NONE) as store:
                expected[path] = write(store, seed)
        assert np.array_equal(rows_of(still), rows)
        assert np.array_equal(rows_of(too), rows)
    for seed, path in enumerate(paths * 2, start=7):
        with (
            tierstore.open(path, budget=NONE) as follower,
            tierstore.open(path, "r+", budget=NONE) as store,
        ):
            rows_of(follower)
            expected[path] = write(store, seed)
            follower.refresh()
            assert store.fold()
            follower.refresh()
            assert np.array_equal(rows_of(follower), expected[path])
    for path, found in expected.items():
        with tierstore.open(path, "r+", budget=NONE) as store:
            assert np.array_equal(rows_of(store), found)
            assert store.verify().ok
        assert not list(path.rglob("*.partial"))


@pytest.mark.fault(19, 53)
def test_a_copy_by_hard_links_has_the_lock_of_its_original(tmp_path: Path) -> None:
    with tierstore.create(tmp_path / "one", {"t": tierstore.TableSpec(9, 2)}) as store:
        linked(tmp_path / "one", tmp_path / "other")
        with pytest.raises(LockedError, match="open for writing"):
            tierstore.open(tmp_path / "other", "r+")
        store.commit()
