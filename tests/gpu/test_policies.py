"""A GPU tier evicts the rows with the lowest scores, for every policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.gpu.conftest import Place
from tests.gpu.model import Twin
from tests.pairs import pairs
from tests.policy.naive import device_twin, examples
from tierstore import Budget, TableSpec
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore.errors import InvalidInputError
from tierstore.policy import DeviceScores, ScoreStep, lfu, lru, static
from tierstore.policy.recency import LRUSpec

ROWS, SLOTS = 300, 90
COUNTS = np.random.default_rng(5).permutation(ROWS).astype(np.float32)
SPECS = examples(ROWS)


@pytest.mark.variants(1, 1)
@pairs(together=1, name=list(SPECS), way=["read", "write", "lease"])
def test_rows_of_least_score_go_first(place: Place, name: str, way: str) -> None:
    expected = device_twin(SPECS[name], ROWS)
    host_slots = ROWS if way != "lease" else 200
    with Twin(place, rows=ROWS, slots=SLOTS, host_slots=host_slots, policy=SPECS[name]) as twin:
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
            row_of = place.get(inside.arrays(twin.tier.memory)["row_of"])
            after = set(row_of[row_of >= 0].tolist())
            assert set(ids.tolist()) <= after
            gone, kept = before - after, before & after - set(ids.tolist())
            if gone and kept:
                most = max(expected.score[row] for row in gone)
                assert most <= min(expected.score[row] for row in kept) * (1 + 1e-5)
                given_up += len(gone)
            before = after
        assert given_up > 100
        twin.check()


@pytest.mark.slow
def test_scores_are_rescaled_before_it_overflows(place: Place) -> None:
    """With a half-life of a batch the scores double with each; a float ends after 127 of them."""
    with Twin(place, rows=50, slots=10, policy=lfu(1)) as twin:
        often = np.arange(5)
        for step in range(300):
            twin.read(often if step % 2 else np.arange(10 + step % 30, 14 + step % 30))
        scores = place.get(inside.arrays(twin.tier.memory)["key"])
        assert np.isfinite(scores).all()
        row_of = place.get(inside.arrays(twin.tier.memory)["row_of"])
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


def test_memory_of_scores_is_in_the_budget() -> None:
    for nbytes in (10_000_000, 123_456_789):
        slots = GpuMemory.slots_for(1_000_000, 512, nbytes, scored=True)
        assert GpuMemory.bytes_for(1_000_000, 512, slots, scored=True) <= nbytes
        assert GpuMemory.bytes_for(1_000_000, 512, slots + 1, scored=True) > nbytes
        assert slots < GpuMemory.slots_for(1_000_000, 512, nbytes)


class _ByArrival(DeviceScores):
    """The batch that brought a row, whatever uses it afterwards."""

    def __init__(self) -> None:
        self.batch = 0

    def step(self, ids: int, slots: int) -> ScoreStep:
        self.batch += 1
        return ScoreStep(on_arrival=float(self.batch))


class _FirstIn(LRUSpec):
    """A policy whose rows keep the score they arrived with; no name, so that it is not found."""

    def on_device(self) -> DeviceScores:
        return _ByArrival()


@pytest.mark.variants(1)
@pytest.mark.parametrize("way", ["read", "write", "lease"])
def test_a_score_on_arrival_makes_first_in_first_out(place: Place, way: str) -> None:
    for policy, expected in ((_FirstIn(), {3, 10, 11, 12}), (lru(), {0, 10, 11, 12})):
        with Twin(place, rows=20, slots=4, policy=policy) as twin:
            for row in (0, 1, 2, 3, 0, 0, 10, 11, 12):
                getattr(twin, way)(np.array([row]))
                if way == "lease":
                    twin.release()
            row_of = place.get(inside.arrays(twin.tier.memory)["row_of"])
            assert set(row_of.tolist()) == expected
            twin.check()


def test_a_prefetched_row_gets_a_score_on_arrival(place: Place) -> None:
    with Twin(place, rows=20, slots=6, policy=_FirstIn()) as twin:
        for row in (0, 1, 2, 3):
            twin.read(np.array([row]))
        twin.tier.fetch(place.put(np.array([10])), 2)
        for row in (10, 11, 12):
            twin.read(np.array([row]))
        row_of = place.get(inside.arrays(twin.tier.memory)["row_of"])
        assert set(row_of.tolist()) == {1, 2, 3, 10, 11, 12}
        twin.check()


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("policy", SPECS.values(), ids=SPECS)
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
    with pytest.raises(InvalidInputError, match="one number per row"):
        tierstore.open(tmp_path / "s.tier", "r+", policy=static([1, 2, 3]), device=place.device)
