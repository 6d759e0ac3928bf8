import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairs import pairs
from tierstore.policy.recency import LRU

module = sys.modules[LRU.__module__]
SLOTS = 12
slots_lists = st.lists(st.integers(0, SLOTS - 1), max_size=20)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), slots_lists),
        st.tuples(st.just("next_batch"), st.none()),
        st.tuples(st.just("victims"), st.tuples(st.integers(0, SLOTS + 3), slots_lists)),
        st.tuples(st.just("forget"), slots_lists),
    ),
    max_size=60,
)


class Oracle:
    """Which batch used each slot last."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.now = 0

    def check_victims(self, victims: list[int], count: int, barred: set[int]) -> None:
        """Victims are distinct, allowed, as many as can be, and none is younger than what stays."""
        allowed = {s for s, batch in self.used.items() if batch < self.now and s not in barred}
        assert len(set(victims)) == len(victims) == min(count, len(allowed))
        assert set(victims) <= allowed
        left = [self.used[slot] for slot in allowed - set(victims)]
        ages = [self.used[slot] for slot in victims]
        assert max(ages, default=0) <= min(left, default=self.now)
        assert ages == sorted(ages)
        for slot in victims:
            del self.used[slot]


@pytest.fixture(scope="module", autouse=True)
def short_entries():
    """Give touches of five or more slots separate entries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PACKED", 5, raising=False)
        yield


@given(actions, st.sampled_from([0, 600, 100_000]))
def test_lru_gives_up_what_was_used_longest_ago(steps, log_bytes):
    """Whether the log is compacted all the time, now and then or never."""
    lru, oracle = LRU(SLOTS), Oracle()
    lru._most_bytes = log_bytes
    for action, given_ in steps:
        if action == "touch":
            lru.touch(np.array(given_, np.int32))
            oracle.used.update(dict.fromkeys(given_, oracle.now))
        elif action == "next_batch":
            lru.next_batch()
            oracle.now += 1
        elif action == "forget":
            lru.forget(np.array(given_, np.int32))
            for slot in given_:
                oracle.used.pop(slot, None)
        else:
            count, barred = given_
            held = np.isin(np.arange(SLOTS), barred)
            victims = lru.victims(np.arange(count), lambda slots, held=held: held[slots])
            assert victims.dtype == np.int32
            oracle.check_victims(victims.tolist(), count, set(barred))


def test_slots_of_the_running_batch_stay():
    lru = LRU(4)
    lru.touch(np.arange(4, dtype=np.int32))
    assert lru.victims(np.arange(4)).size == 0
    lru.next_batch()
    lru.touch(np.array([1, 2, 1], np.int32))
    assert sorted(lru.victims(np.arange(4)).tolist()) == [0, 3]


def test_the_batch_number_may_run_out():
    lru = LRU(6)
    lru._now = 2**32 - 4
    for slot in range(6):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    assert lru._now < 100
    lru.touch(np.array([0], np.int32))
    lru.next_batch()
    assert lru.victims(np.arange(6)).tolist() == [1, 2, 3, 4, 5, 0]


def test_the_order_stays_where_the_batch_number_runs_out():
    rng = np.random.default_rng(5)
    lru, oracle = LRU(60), Oracle()
    lru._now = 2**32 - 40
    for size in rng.integers(1, 12, 80):
        slots = rng.integers(0, 60, size).astype(np.int32)
        lru.touch(slots)
        oracle.used.update(dict.fromkeys(slots.tolist(), oracle.now))
        lru.next_batch()
        oracle.now += 1
    assert lru._now < 200
    for count in rng.integers(1, 20, 5):
        oracle.check_victims(lru.victims(np.arange(count)).tolist(), count, set())


@pytest.mark.variants(2, 4)
@pairs(
    together=1,
    sizes=[(1,), (3,), (200,), (1, 256), (129,), (255, 2), (1000, 4)],
    slots=[1, 50, 5000],
)
def test_the_log_takes_what_it_may(monkeypatch, slots, sizes):
    monkeypatch.setattr(module, "_PACKED", 256, raising=False)
    rng = np.random.default_rng(slots)
    lru = LRU(slots)
    for number in range(20_000 // max(sizes) + 300):
        lru.touch(rng.integers(0, slots, sizes[number % len(sizes)]).astype(np.int32))
        lru.next_batch()
        assert lru.nbytes <= LRU.bytes_for(slots)
    entries = sum(module._bytes_of(*entry) for entry in lru._log)
    assert lru.nbytes == lru._stamp.nbytes + entries + 8 * module._packed(slots)
    used = np.count_nonzero(lru._stamp)
    assert lru.victims(np.arange(slots)).size == used


def test_batches_of_one_row_take_no_more_memory_than_their_budget(monkeypatch):
    monkeypatch.setattr(module, "_PACKED", 256, raising=False)
    slots, one = 5000, np.array([7], np.int32)
    tracemalloc.start()
    try:
        lru = LRU(slots)
        for _ in range(2 * slots):
            lru.touch(one)
            lru.next_batch()
        assert tracemalloc.get_traced_memory()[1] <= LRU.bytes_for(slots) + 10_000
    finally:
        tracemalloc.stop()


def test_pinned_slots_in_front_are_put_back_in_one_entry():
    lru = LRU(100)
    for slot in range(100):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    for count in (1, 9):
        victims = lru.victims(np.arange(count), lambda slots: slots < 80)
        assert victims.tolist() == list(range(80, 80 + count) if count == 1 else range(81, 90))
        assert lru._log[0][0].tolist() == list(range(80))
    assert lru.victims(np.arange(100)).tolist() == [*range(80), *range(90, 100)]
