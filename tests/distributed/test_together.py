"""What one function does for a plain store and for ranks, where only the state of ranks differs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.distributed.ranks import run, values
from tierstore import distributed
from tierstore._store import compaction
from tierstore.errors import CorruptStoreError, FormatError, RanksError, StoreFullError

ROWS, DIM, PARTITIONS = 23, 2, 4
IDS = np.arange(ROWS)
SPECS = {
    name: tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=seed))
    for seed, name in enumerate(("item", "user"))
}


def rows_of(value: float, count: int = ROWS) -> np.ndarray:
    return np.full((count, DIM), value, np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store in partitions, of which version 3 changed the first one alone."""
    with distributed.create(tmp_path / "s", SPECS, partitions=PARTITIONS, keep=5) as store:
        store["item"].write(IDS, rows_of(1))
        store.commit()
        first = [
            each for each in range(ROWS) if store.shard_of(SPECS["item"]).partition_of(each) == 0
        ]
        store["item"].write(first, rows_of(2, len(first)))
        store.commit()
    return tmp_path / "s"


def test_a_restore_drops_rows_of_partitions_that_stay(path: Path) -> None:
    """Also those that the tiers above could not hold, and wrote down."""
    with distributed.open(path, budget=tierstore.Budget(host_rows=2)) as store:
        store["item"].write(IDS, rows_of(3))
        store.restore(2)
        assert (store["item"].read(IDS) == 1).all()
        assert store.uncommitted_rows() == 0


def test_a_version_that_is_damaged_in_a_partition_is_not_restored(path: Path) -> None:
    """Nothing changes, not even rows that are not committed."""
    with distributed.open(path) as store:
        (older,) = path.glob("partitions/00002/item/g*")
        store.add_fields("item", {"age": tierstore.Field(1)})
        base = older / "rows.npy"
        base.write_bytes(base.read_bytes()[:-8])
        store["item"].write(IDS, rows_of(4))
        with pytest.raises(CorruptStoreError, match="nothing was changed"):
            store.restore(3)
        assert store.version == 4
        assert (store["item"].read(IDS) == 4).all()
        store.commit()


def test_a_partition_that_is_written_whole_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fold that is done is published before the next version, in a partition as in a store.

    It takes one commit more than a store, since the root lets go of a version only after it.
    """
    monkeypatch.setattr(compaction.BackgroundWork, "done", lambda self: self._worker.join() or True)
    rows, path = np.arange(8192), tmp_path / "small"
    values_of = np.random.default_rng(3).standard_normal((rows.size, 64), np.float32)
    specs = {"t": tierstore.TableSpec(rows.size, 64)}
    budget = tierstore.Budget(host_rows=500)
    with distributed.create(path, specs, partitions=2, budget=budget) as store:
        for version in range(1, 9):
            store["t"].write(rows, values_of * version)
            store.commit()
            if version > 4:
                used = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
                assert used <= 4.3 * specs["t"].nbytes
    with tierstore.open(path) as reader:
        assert np.array_equal(reader["t"].read(rows), values_of * 8)


def patched(place: Path) -> np.ndarray:
    """Make a store, a copy in partitions on each of two hosts, and two patches of these.

    The second is damaged where it changes the second table. Returns the rows of the first then.
    """
    with tierstore.create(place / "plain", SPECS, keep=5) as store:
        distributed.save(place / "plain", place / "0", partitions=PARTITIONS)
        shutil.copytree(place / "0", place / "1")
        for step in (1, 2):
            for name in SPECS:
                store[name].write(IDS[step::2], rows_of(step, len(IDS[step::2])))
            store.commit(step)
            store.write_patch(place / f"patch {step}", step, step + 1)
        found = store["item"].read(IDS)
    data = bytearray((place / "patch 2").read_bytes())
    data[-200] ^= 1
    (place / "patch 2").write_bytes(data)
    return found


class Leaves:
    """A value of a payload, while which is put together a rank leaves the others."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def state_dict(self) -> dict[str, int]:
        inside.state(self._store).ranks.close()
        raise InterruptedError("left")


def on_two_hosts(rank: int, place: Path) -> np.ndarray:
    """Apply a patch, fail to apply another, to write rows and to commit."""
    store = distributed.open(place / str(rank))
    store.apply_patch(place / "patch 1")
    found, item = store["item"].read(IDS), store["item"]
    with pytest.raises(FormatError, match="checksum"):
        store.apply_patch(place / "patch 2")
    assert store.uncommitted_rows() == 0
    assert np.array_equal(item.read(IDS), found)
    full = StoreFullError("no space")
    with (
        mock.patch.object(item.shard, "write", side_effect=full if rank else None),
        pytest.raises(StoreFullError, match="no space"),
    ):
        item.write(IDS, rows_of(7))
    with pytest.raises(RanksError, match="roll back on every rank"):
        item.read(IDS)
    store.rollback()
    assert np.array_equal(item.read(IDS), found)
    with pytest.raises((RanksError, InterruptedError)):
        store.commit(9, payload={"model": Leaves(store) if rank else b"whole"})
    assert inside.door(store).closed
    store.close()
    return found


def test_ranks_do_what_a_plain_store_does_with_patches_and_failures(tmp_path: Path) -> None:
    patched(tmp_path)
    one, other = values(run(2, on_two_hosts, tmp_path))
    with tierstore.open(tmp_path / "plain", version=2) as reader:
        expected = reader["item"].read(IDS)
    assert np.array_equal(one, expected)
    assert np.array_equal(other, expected)
