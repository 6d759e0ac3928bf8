import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.policy.lru import LRU

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


@settings(max_examples=300, deadline=None)
@given(actions)
def test_lru_gives_up_what_was_used_longest_ago(steps):
    lru, oracle = LRU(SLOTS), Oracle()
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
        assert lru.nbytes <= LRU.bytes_for(SLOTS) + 4 * SLOTS


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


@pytest.mark.parametrize("slots", [1, 1000])
def test_the_log_stays_short_however_often_slots_are_used(slots):
    rng = np.random.default_rng(slots)
    lru = LRU(slots)
    for _ in range(300):
        lru.touch(rng.integers(0, slots, 200).astype(np.int32))
        lru.next_batch()
        assert lru.nbytes <= LRU.bytes_for(slots) + 4 * min(200, slots)


def test_the_log_stays_short_where_batches_are_small():
    lru = LRU(50)
    for slot in np.random.default_rng(1).integers(0, 3, 1000).astype(np.int32):
        lru.touch(np.array([slot]))
        lru.next_batch()
        assert len(lru._log) <= 101
    assert sorted(lru.victims(np.arange(50)).tolist()) == [0, 1, 2]
