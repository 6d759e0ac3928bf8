"""Tables by key with a GPU tier: growth makes the tiers anew, and keeps what is not committed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.gpu.conftest import Place
from tierstore import Budget, TableSpec
from tierstore.errors import ClosedError

pytest.importorskip("torch")

DIM = 4


@pytest.mark.parametrize("slots", [(9, 3), (300, 40)])
def test_growth_and_expiry(tmp_path: Path, place: Place, slots: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    spec = TableSpec(dim=DIM, keys="int64", init=tierstore.normal(seed=1), track_uses=True)
    budget = Budget(host_rows=slots[0], gpu_rows=slots[1])
    path = tmp_path / "s"
    with tierstore.create(path, {"t": spec}, budget=budget, device=place.device) as store:
        table = store["t"]
        keys = rng.integers(-(2**63), 2**63 - 1, 100)
        rows = rng.standard_normal((100, DIM)).astype(np.float32)
        first = table.read(keys[50:])
        table.write(keys[:50], rows[:50])
        lease = table.lease(keys[:3])
        with table._owner.door.use(write=True):
            table._grow(table.capacity + 1)
        assert table.capacity == 131_072
        with pytest.raises(ClosedError):
            lease.read("weight")
        assert np.array_equal(table.read(keys[:50]), rows[:50])
        assert np.array_equal(table.read(keys[50:]), first)
        store.commit()
        table.write(keys, rows)
        assert table.read(keys[:1], "uses").tolist() == [[3, store.version + 1]]
        store.rollback()
        assert table.rows == 50
        table.write(keys[20:], rows[20:])
        gone = [key for found, _ in table.expire(fewer_than=2) for key in found.tolist()]
        assert sorted(gone) == sorted([*keys[3:20].tolist(), *keys[50:].tolist()])
        assert np.array_equal(table.read(keys[20:50]), rows[20:50])
        store.commit()
    with tierstore.open(path) as reader:
        assert reader["t"].rows == 33
        assert np.array_equal(reader["t"].read(keys[20:50]), rows[20:50])
        assert reader["t"].capacity == 131_072
