"""What only one policy does, and how policies are chosen."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import tierstore
from tests.policy.test_contract import batch, make, run
from tierstore import policy
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.policy import PolicySpec
from tierstore.policy.frequency import AgedFrequency
from tierstore.policy.hints import DueSoonest
from tierstore.policy.ranked import RankedSpec
from tierstore.policy.recency import Recency


def kept(slots) -> set[int]:
    return set(slots.resident.tolist())


def test_lfu_does_not_let_a_scan_in():
    slots = make(policy.lfu(half_life=50), slots=20)
    hot = np.arange(20)
    for _ in range(10):
        run(slots, hot)
    for start in range(100, 1100, 50):
        run(slots, np.arange(start, start + 50))
    assert kept(slots) == set(hot.tolist())


def test_lru_lets_everything_in():
    slots = make(policy.lru(), slots=20)
    run(slots, np.arange(20))
    run(slots, np.arange(100, 115))
    assert set(range(100, 115)) <= kept(slots)
    assert len(kept(slots)) == 20


def test_of_a_batch_larger_than_the_tier_the_rows_stay_that_repeat():
    slots = make(policy.lru(), slots=4)
    rows = np.array([1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 8])
    assert slots.distinct(rows)[:4].tolist() == [8, 5, 6, 7]


def test_lfu_keeps_its_order_when_scores_are_rescaled():
    """With a short half-life the weights double every batch, and are brought down again."""
    scores = AgedFrequency(10, 5, half_life=0.5)
    rng = np.random.default_rng(0)
    last = np.zeros(10)
    for step in range(1, 500):
        rows = rng.choice(10, 3, replace=False)
        scores.use(rows)
        last[rows] = step
    order = np.argsort(scores.keys(np.arange(10)))
    recent = last >= 480
    assert recent.sum() > 5
    assert np.array_equal(last[order][-5:], np.sort(last)[-5:])


def test_the_half_life_follows_the_batches():
    scores = AgedFrequency(10_000, slots=1000)
    rng = np.random.default_rng(0)
    for _ in range(300):
        scores.use(np.repeat(rng.choice(10_000, 100, replace=False), 2))
    assert scores.half_life == pytest.approx(4 * 1000 / 100, rel=0.01)


def test_counts_known_beforehand_decide_from_the_first_batch():
    scores = AgedFrequency(10, slots=5, half_life=3)
    counts = np.array([0, 9, 3, 7, 1, 0, 5, 2, 8, 4], np.float32)
    scores.prime(counts)
    assert np.array_equal(
        np.argsort(scores.keys(np.arange(10)), kind="stable"), np.argsort(counts, kind="stable")
    )
    slots = make(policy.lfu(half_life=3), rows=10, slots=5)
    slots.use(np.arange(10))
    slots.prime(counts)
    run(slots, np.arange(10))
    assert kept(slots) == {1, 3, 6, 8, 9}


def optimum(batches: list[np.ndarray], slots: int) -> int:
    """Hits if, after each batch, the rows used soonest stay."""
    held: set[int] = set()
    hits = 0
    for step, rows in enumerate(batches):
        hits += sum(row in held for row in rows.tolist())
        due = {}
        for later in range(len(batches) - 1, step, -1):
            due.update(dict.fromkeys(batches[later].tolist(), later))
        known = [row for row in held | set(rows.tolist()) if row in due]
        held = set(sorted(known, key=lambda row: due[row])[:slots])
    return hits


def test_lookahead_over_everything_is_the_optimum():
    rng = np.random.default_rng(4)
    batches = [np.unique((rng.random(30) ** 2 * 200).astype(np.int64)) for _ in range(60)]
    slots = make(policy.lookahead("lru"), rows=200, slots=40)
    for rows in batches:
        slots.announce(rows)
    hits = 0
    for rows in batches:
        hits += int((slots.lookup(rows) >= 0).sum())
        run(slots, rows)
    assert hits == optimum(batches, 40)


def test_lookahead_finds_its_way_when_batches_are_left_out_or_used_in_parts():
    rng = np.random.default_rng(6)
    ranking = DueSoonest(Recency(3000), 3000, window=8)
    batches = [np.unique(batch(rng)) for _ in range(12)]
    for rows in batches[:6]:
        ranking.announce(rows)
    for part in (batches[0][:20], batches[0][20:], batches[0]):  # read, read, write
        ranking.use(part)
    assert len(ranking._coming) == 5
    ranking.use(batches[2])  # the second was left out
    assert len(ranking._coming) == 3
    only = np.setdiff1d(batches[3], np.concatenate(batches[4:6]))
    later = np.setdiff1d(batches[5], np.concatenate(batches[3:5]))
    assert ranking.keys(only).min() > ranking.keys(later).max()
    for rows in batches[6:]:
        ranking.announce(rows)
    assert len(ranking._coming) == 8, "the oldest of more than a window are given up"


def test_a_row_that_scores_as_much_as_those_kept_is_not_admitted():
    counts = np.repeat([2, 2, 3], 10)
    slots = make(policy.static(counts), rows=30, slots=10)
    run(slots, np.arange(10, 20))
    assert run(slots, np.arange(5)).size == 0
    assert run(slots, np.arange(25, 28)).size == 3


def test_names_and_values_choose_a_policy():
    assert [policy.choose(name).name for name in policy.NAMES] == list(policy.NAMES)
    assert policy.choose(None).name == "lru"
    by_table = {"item": "lfu", "user": policy.lookahead("lru")}
    assert policy.choose(by_table, "item").name == "lfu"
    assert policy.choose(by_table, "user").on.name == "lru"
    assert policy.choose(by_table, "other").name == "lru"


def test_the_default_is_the_first_name():
    assert policy.NAMES[0] == policy.choose(None).name == "lru"
    assert "static" not in policy.NAMES


def test_a_declared_policy_is_available_by_name_and_needs_its_gpu_half(monkeypatch):
    monkeypatch.setattr(PolicySpec, "registry", dict(PolicySpec.registry))

    class Half(RankedSpec):
        name = "half"

        def ranking(self, rows, slots):
            return Recency(rows)

        def ranking_bytes(self, rows):
            return Recency.bytes_for(rows)

    with pytest.raises(TypeError, match="on_device"):
        policy.choose("half")

    class Whole(Half):
        name = "whole"

        def on_device(self):
            return None

    assert isinstance(policy.choose("whole"), Whole)
    assert isinstance(policy.lookahead("whole").on, Whole)
    with pytest.raises(InvalidInputError, match=r"there are .*whole"):
        policy.choose("no-such-policy")


def test_what_is_no_policy_is_refused():
    with pytest.raises(InvalidInputError, match="no policy 'no-such-thing'"):
        policy.choose("no-such-thing")
    with pytest.raises(InvalidTypeError):
        policy.choose(7)
    with pytest.raises(InvalidInputError, match="half_life"):
        policy.lfu(half_life=0)
    with pytest.raises(InvalidInputError, match="not 'lookahead'"):
        policy.lookahead("lookahead")
    with pytest.raises(InvalidInputError, match="window"):
        policy.lookahead(window=0)


@pytest.mark.parametrize(
    "counts", [np.ones(9), np.full(10, -1.0), np.full(10, np.nan), np.array(["a"] * 10), 3]
)
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(InvalidInputError, match="counts must be"):
        make(policy.static(counts), rows=10, slots=5)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize(
    "chosen", ["lfu", "lookahead", policy.static(np.arange(500)), {"t": policy.lookahead("lru")}]
)
def test_rows_are_the_same_whatever_the_policy(tmp_path, chosen):
    rng = np.random.default_rng(7)
    oracle = np.zeros((500, 4), np.float32)
    path = tmp_path / "s"
    specs = {"t": tierstore.TableSpec(rows=500, dim=4)}
    budget = tierstore.Budget(host_rows=30)
    with tierstore.create(path, specs, budget=budget, policy=chosen) as store:
        table = store["t"]
        for step in range(80):
            ids = (rng.random(40) ** 3 * 500).astype(np.int64)
            table.prefetch((rng.random(40) ** 3 * 500).astype(np.int64))
            assert np.array_equal(table.read(ids), oracle[ids])
            distinct = np.unique(ids)
            values = rng.standard_normal((distinct.size, 4)).astype(np.float32)
            oracle[distinct] = values
            table.write(distinct, values)
            with table.lease(ids) as lease:
                lease.write("weight", lease.read("weight") + 1)
            oracle[distinct] += 1
            if step % 20 == 19:
                store.commit()
    with tierstore.open(path, policy=chosen, budget=budget) as store:
        assert np.array_equal(store["t"].read(np.arange(500)), oracle)
        with pickle.loads(pickle.dumps(store)) as again:
            assert np.array_equal(again["t"].read([3, 5]), oracle[[3, 5]])
