"""What every policy promises, against the same policies written naively."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.policy.naive import examples, twin
from tierstore import policy
from tierstore._tiers.slots import CachedSlots
from tierstore.policy import PolicySpec

ROWS, SLOTS, BATCH = 3000, 1500, 60
SPECS = {
    **examples(ROWS),
    "lfu, forgetful": policy.lfu(half_life=0.25),
    "lookahead on lru": policy.lookahead("lru"),
}


class Pair:
    """A policy and its naive twin."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.twin: Any = twin(spec, ROWS)


def make(spec: PolicySpec, rows: int = ROWS, slots: int = SLOTS) -> CachedSlots:
    return CachedSlots(rows, slots, spec, lambda name, size, dtype: np.zeros(size, dtype))


def load(slots: CachedSlots, rows: np.ndarray, *, force: bool = False) -> np.ndarray:
    """Give slots to a leading part of `rows`, absent; return the rows that went."""
    order = slots.order(rows)
    rows = rows if order is None else rows[order]
    places = slots.free(rows)
    victims = slots.victims(rows[places.size :], force=force)
    gone = slots.rows(victims)
    slots.evict(victims)
    places = np.concatenate([places, victims])
    slots.bind(rows[: places.size], places)
    return gone


def run(slots: CachedSlots, rows: np.ndarray, *, force: bool = False) -> np.ndarray:
    """Do what a tier does with a batch; return the rows that went."""
    slots.use(rows)
    places = slots.lookup(rows)
    slots.touch(places[places >= 0], done=True)
    absent = np.unique(rows[places < 0])
    gone = load(slots, absent, force=force) if absent.size else absent
    slots.next_batch()
    return gone


@pytest.fixture(params=SPECS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(SPECS[request.param])


def batch(rng: np.random.Generator, count: int = BATCH) -> np.ndarray:
    """Ids of which some are common and most are rare, with repeats."""
    return (rng.random(count) ** 2 * ROWS).astype(np.int64)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("seed", range(2))
def test_the_rows_of_least_score_go_first(pair, seed):
    """No row that stays, and was not in the batch, scores less than one that went."""
    rng = np.random.default_rng(seed)
    slots = make(pair.spec)
    ahead = [batch(rng) for _ in range(5)]
    for each in ahead:
        slots.announce(each)
        pair.twin.announce(each)
    went = 0
    for _ in range(160):
        rows = ahead.pop(0)
        ahead.append(batch(rng))
        slots.announce(ahead[-1])
        pair.twin.announce(ahead[-1])
        pair.twin.use(rows)
        gone = run(slots, rows, force=bool(rng.random() < 0.3))
        went += gone.size
        score = np.maximum(pair.twin.score, 1e-35)  # less is as good as never used
        stayed = np.setdiff1d(slots.resident, rows)
        if gone.size:
            least = score[stayed].min()
            assert (score[gone] <= least * (1 + 1e-4)).all()
    assert went > SLOTS


def test_what_it_gives_up_is_distinct_in_use_not_of_the_batch_and_not_barred(pair):
    slots = make(pair.spec)
    for start in range(0, SLOTS, 100):
        run(slots, np.arange(start, start + 100))
    used = np.arange(0, 200)
    pinned = slots.lookup(np.arange(200, 400)).astype(np.int32)
    slots.use(used)
    slots.touch(slots.lookup(used))
    slots.pins.lease(pinned)
    wanted = np.arange(ROWS - 1400, ROWS)
    victims = slots.victims(wanted, force=True)
    rows = slots.rows(victims)
    assert victims.dtype == np.int32
    assert np.unique(victims).size == victims.size == SLOTS - 400
    assert not np.isin(rows, used).any()
    assert not np.isin(victims, pinned).any()
    slots.pins.give_back(pinned)
    again = slots.victims(wanted, force=True)
    assert np.array_equal(np.sort(again), np.sort(pinned)), "what it gave up once is forgotten"


def test_slots_that_are_free_are_no_victims(pair):
    slots = make(pair.spec)
    run(slots, np.arange(50))
    slots.release(slots.lookup(np.arange(10)))
    slots.use(np.arange(1000, 1100))
    victims = slots.victims(np.arange(1000, 1100), force=True)
    assert np.array_equal(np.sort(slots.rows(victims)), np.arange(10, 50))


def test_one_slot(pair):
    slots = make(pair.spec, slots=1)
    for row in (3, 3, 8, 3):
        run(slots, np.array([row]), force=True)
        assert slots.row_of.tolist() == [row]


@pytest.mark.variants(3)
def test_it_takes_the_memory_it_says(pair):
    slots = make(pair.spec)
    rng = np.random.default_rng(2)
    for _ in range(200):
        run(slots, batch(rng, 500))
    assert slots.policy.nbytes <= pair.spec.bytes_for(ROWS, SLOTS)


def test_repeats_in_a_batch_count_once(pair):
    """A batch is a set: how often it names a row is nothing to the policy."""
    rng = np.random.default_rng(3)
    once, many = make(pair.spec), make(pair.spec)
    for _ in range(60):
        rows = np.unique(batch(rng))
        run(once, rows, force=True)
        run(many, np.repeat(rows, 3), force=True)
    if pair.spec.name != "lru":  # among the rows of one batch LRU lets chance decide
        assert np.array_equal(np.sort(once.resident), np.sort(many.resident))
    assert once.resident.size == many.resident.size


def test_a_policy_without_a_twin_is_reported():
    class Unknown(policy.PolicySpec):
        bytes_for = make = on_device = None  # type: ignore[assignment]

    Unknown.name = "no-such-policy"  # set later, so that it does not register
    with pytest.raises(LookupError, match=r"no twin: add it to tests/policy/naive\.py"):
        twin(Unknown(), 5)
