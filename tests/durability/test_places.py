"""Odd file systems, paths and moments (rows 47, 49, 50 and 51), and what was once wrong."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests.durability.faults import FAULTS, Faulty
from tierstore import _io
from tierstore.budget import Budget
from tierstore.errors import (
    ClosedError,
    NotAStoreError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)

NONE = Budget(host=0)
ONES = np.ones((1, 4), np.float32)


def make(path: Path, rows: int = 10) -> tierstore.Store:
    return tierstore.create(path, {"t": tierstore.TableSpec(rows, 4)}, budget=NONE)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
@pytest.mark.fault(47)
def test_a_file_system_without_links_takes_renames(tmp_path: Path, number: int) -> None:
    refused = mock.patch.object(_io.system.calls, "link", side_effect=OSError(number, "no links"))
    with refused, make(tmp_path / "s") as store:
        store["t"].write([1], ONES)
        assert store.commit() == 2
    with tierstore.open(tmp_path / "s") as store:
        assert store["t"].read([1]).tolist() == ONES.tolist()


@pytest.mark.fault(49)
def test_a_store_that_is_moved_stays_the_same(tmp_path: Path) -> None:
    with make(tmp_path / "s") as store:
        os.rename(tmp_path / "s", tmp_path / "moved")
        store["t"].write([1], ONES)
        store.commit()
    assert not (tmp_path / "s").exists()
    with tierstore.open(tmp_path / "moved") as store:
        assert store.version == 2


@pytest.mark.fault(49)
@pytest.mark.parametrize("change", ["grow", "add_fields"])
def test_a_store_that_is_removed_while_a_table_is_written_again(
    tmp_path: Path, change: str
) -> None:
    """The error is that of the file which is gone, not of what could not be cleaned up."""
    path = tmp_path / "s.tier"
    spec = tierstore.TableSpec(200_000, 4, init=tierstore.normal(seed=1))
    with tierstore.create(path, {"item": spec}) as store:

        def progress(done: int, total: int) -> None:
            shutil.rmtree(path, ignore_errors=True)

        what = 400_000 if change == "grow" else {"age": tierstore.Field(4)}
        with pytest.raises(TierStoreError) as caught:
            getattr(store, change)("item", what, progress=progress)
        assert str(path) in str(caught.value)


@pytest.mark.fault(49)
def test_a_store_that_is_removed_is_not_made_again(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(NotAStoreError, match="removed while the store was open"):
        store["t"].write([1], ONES)
    with pytest.raises(ClosedError, match="removed while"):
        store.commit()
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault(50)
def test_a_file_size_limit_is_like_a_full_disk(tmp_path: Path) -> None:
    with make(tmp_path / "s", 4000) as store:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(StoreFullError):
                store["t"].write(np.arange(4000), np.ones((4000, 4), np.float32))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store["t"].write([1], ONES)
        assert store.commit() == 2


@pytest.mark.parametrize(
    "name", ["with space", "ünïcode", "new\nline", "x" * 255, "trailing/", "-rf"]
)
@pytest.mark.fault(51)
def test_any_path_will_do(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tierstore.create(name, {"t": tierstore.TableSpec(3, 4)}) as store:
        monkeypatch.chdir("/")
        store["t"].write([1], ONES)
        store.commit()
    with tierstore.open(tmp_path / name) as store:
        assert store.version == 2


def test_confirming_spares_what_is_being_written(tmp_path: Path) -> None:
    with make(tmp_path / "s") as store:
        store.commit(confirm=False)
        store["t"].write([1], ONES)
        store.confirm(2)
        store["t"].write([2], ONES)
        assert store.commit() == 3
    with tierstore.open(tmp_path / "s") as store:
        assert store["t"].read([1, 2]).tolist() == np.ones((2, 4)).tolist()


def test_rows_torn_by_a_failed_write_are_not_committed(tmp_path: Path) -> None:
    with make(tmp_path / "s") as store:
        store["t"].write([1, 2], np.ones((2, 4), np.float32))
        store.commit()
        store["t"].write([1, 2], np.full((2, 4), 2, np.float32))
        faulty = mock.patch.object(_io.system, "calls", Faulty(FAULTS["EIO"], 1))
        with faulty, pytest.raises(StoreIOError):
            store["t"].write([1, 2], np.full((2, 4), 3, np.float32))
        with pytest.raises(StoreIOError, match="write them again, or roll back"):
            store.commit()
        store.rollback()
        assert store["t"].read([1]).tolist() == ONES.tolist()
        store["t"].write([1], np.full((1, 4), 4, np.float32))
        assert store.commit() == 3
        assert store.verify().ok
