"""A GPU tier by frequency or by given counts gives up the rows of least worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.gpu.conftest import Place
from tests.gpu.model import Twin
from tests.policy.naive import NaiveLFU, NaiveStatic
from tierstore import Budget, TableSpec
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore.errors import InvalidInputError
from tierstore.policy import lfu, lookahead, lru, static

ROWS, SLOTS = 300, 90
COUNTS = np.random.default_rng(5).permutation(ROWS).astype(np.float32)
HALF_LIFE = 6.0


def naive(name: str) -> Any:
    if name == "static":
        return NaiveStatic(ROWS, COUNTS)
    return NaiveLFU(ROWS, HALF_LIFE)


POLICIES = {
    "lfu": lfu(HALF_LIFE),
    "static": static(COUNTS),
    "lookahead": lookahead(lfu(HALF_LIFE)),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("way", ["read", "write", "lease"])
def test_rows_of_least_worth_go_first(place: Place, name: str, way: str) -> None:
    expected = naive(name)
    host_slots = ROWS if way != "lease" else 200
    with Twin(place, rows=ROWS, slots=SLOTS, host_slots=host_slots, policy=POLICIES[name]) as twin:
        before: set[int] = set()
        given_up = 0
        for _ in range(40):
            ids = twin.ids(40)
            if way == "lease":
                twin.lease(ids)
                twin.release()
            else:
                getattr(twin, way)(ids)
            expected.use(ids)
            row_of = place.get(twin.tier.memory._arrays["row_of"])
            after = set(row_of[row_of >= 0].tolist())
            assert set(ids.tolist()) <= after
            gone, kept = before - after, before & after - set(ids.tolist())
            if gone and kept:
                most = max(expected.worth[row] for row in gone)
                assert most <= min(expected.worth[row] for row in kept) * (1 + 1e-5)
                given_up += len(gone)
            before = after
        assert given_up > 100
        twin.check()


def test_worth_is_rescaled_before_it_overflows(place: Place) -> None:
    """With a half-life of a batch worth doubles with each; a float ends after 127 of them."""
    with Twin(place, rows=50, slots=10, policy=lfu(1)) as twin:
        often = np.arange(5)
        for step in range(300):
            twin.read(often if step % 2 else np.arange(10 + step % 30, 14 + step % 30))
        worth = place.get(twin.tier.memory._arrays["key"])
        assert np.isfinite(worth).all()
        row_of = place.get(twin.tier.memory._arrays["row_of"])
        assert set(often.tolist()) <= set(row_of.tolist())


def test_counts_keep_their_rows_where_recency_would_not(place: Place) -> None:
    misses = []
    for policy in (lru(), static(np.arange(ROWS)[::-1])):
        with Twin(place, rows=ROWS, slots=50, policy=policy) as twin:
            for start in range(0, 200, 20):
                twin.read(np.arange(20))
                twin.read(np.arange(100 + start % 180, 120 + start % 180))
                twin.read(np.arange(60, 80))
            misses.append(twin.tier.stats.misses)
    assert misses[1] < misses[0] * 0.9


def test_memory_of_worth_is_in_the_budget() -> None:
    for nbytes in (10_000_000, 123_456_789):
        slots = GpuMemory.slots_for(1_000_000, 512, nbytes, worth=True)
        assert GpuMemory.bytes_for(1_000_000, 512, slots, worth=True) <= nbytes
        assert GpuMemory.bytes_for(1_000_000, 512, slots + 1, worth=True) > nbytes
        assert slots < GpuMemory.slots_for(1_000_000, 512, nbytes)


@pytest.mark.parametrize("policy", ["lfu", "lookahead", static(COUNTS)], ids=str)
def test_a_store_with_a_policy_on_both_tiers(tmp_path: Path, place: Place, policy: Any) -> None:
    spec = {"t": TableSpec(ROWS, 8, init=tierstore.normal(seed=2))}
    path = tmp_path / "s.tier"
    tierstore.create(path, spec).close()
    rng = np.random.default_rng(1)
    budget = Budget(host_rows=120, gpu_rows=40)
    with tierstore.open(path, "r+", budget=budget, policy=policy, device=place.device) as store:
        table = store["t"]
        expected = table.read(np.arange(ROWS)).copy()
        for _ in range(20):
            ids = (rng.zipf(1.3, 50) % ROWS).astype(np.int64)
            table.prefetch(ids)
            np.testing.assert_array_equal(table.read(ids), expected[ids])
            rows = rng.standard_normal((50, 8)).astype(np.float32)
            table.write(ids, rows)
            expected[ids] = rows
        store.commit()
    with tierstore.open(path) as store:
        np.testing.assert_array_equal(store["t"].read(np.arange(ROWS)), expected)


def test_counts_must_be_one_a_row(tmp_path: Path, place: Place) -> None:
    tierstore.create(tmp_path / "s.tier", {"t": TableSpec(ROWS, 8)}).close()
    with pytest.raises(InvalidInputError, match="one number a row"):
        tierstore.open(tmp_path / "s.tier", "r+", policy=static([1, 2, 3]), device=place.device)
