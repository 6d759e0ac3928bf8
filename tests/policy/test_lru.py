import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.policy.recency import LRU

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


def made(slots, row_of=None):
    """Return an LRU of slots that all have rows."""
    return LRU(slots, np.arange(slots) if row_of is None else row_of)


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


@given(actions, st.sampled_from([1, 3, SLOTS]))
def test_lru_gives_up_what_was_used_longest_ago(steps, candidates):
    """However many candidates it finds at a time."""
    lru, oracle = made(SLOTS), Oracle()
    lru._found = lru._found.repeat(SLOTS)[:candidates]
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
    lru = made(4)
    lru.touch(np.arange(4, dtype=np.int32))
    assert lru.victims(np.arange(4)).size == 0
    lru.next_batch()
    lru.touch(np.array([1, 2, 1], np.int32))
    assert sorted(lru.victims(np.arange(4)).tolist()) == [0, 3]


def test_the_batch_number_may_run_out():
    lru = made(6)
    lru.now = 2**32 - 4
    for slot in range(6):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    assert lru.now < 100
    lru.touch(np.array([0], np.int32))
    lru.next_batch()
    assert lru.victims(np.arange(6)).tolist() == [1, 2, 3, 4, 5, 0]


def test_the_order_stays_where_the_batch_number_runs_out():
    rng = np.random.default_rng(5)
    lru, oracle = made(60), Oracle()
    lru.now = 2**32 - 40
    for size in rng.integers(1, 12, 80):
        slots = rng.integers(0, 60, size).astype(np.int32)
        lru.touch(slots)
        oracle.used.update(dict.fromkeys(slots.tolist(), oracle.now))
        lru.next_batch()
        oracle.now += 1
    assert lru.now < 200
    for count in rng.integers(1, 20, 5):
        oracle.check_victims(lru.victims(np.arange(count)).tolist(), count, set())


@pytest.mark.parametrize("slots", [1, 7, 5000])
def test_it_takes_the_memory_it_says(slots):
    rng, lru = np.random.default_rng(slots), made(slots)
    for _ in range(300):
        lru.touch(rng.integers(0, slots, 40).astype(np.int32))
        lru.next_batch()
        lru.victims(np.arange(rng.integers(0, 9)))
        assert lru.nbytes <= LRU.bytes_for(slots)
    used = np.count_nonzero(lru.stamps)
    assert lru.victims(np.arange(slots)).size == used


def test_a_candidate_that_is_used_stays():
    lru = made(80)
    for slot in range(80):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    assert lru.victims(np.arange(1)).tolist() == [0]
    lru.touch(np.array([2], np.int32))
    lru.next_batch()
    assert lru.victims(np.arange(3)).tolist() == [1, 3, 4]


def test_a_slot_without_a_row_is_no_victim():
    """Whether it is stamped before the candidates are found or afterwards."""
    rows = np.arange(80)
    lru = made(80, rows)
    for slot in range(80):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    rows[:10] = -1
    assert lru.victims(np.arange(3)).tolist() == [10, 11, 12]
    rows[14] = -1
    lru.forget(np.array([14], np.int32))
    lru.touch(np.array([14, 15], np.int32))
    lru.next_batch()
    assert lru.victims(np.arange(80)).tolist() == [13, *range(16, 80), 15]


def test_a_slot_that_is_stamped_while_it_is_taken_is_taken_once():
    """By threads that read its row: here whenever the policy asks which slots must stay."""
    lru = made(40)
    for slot in range(40):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()

    def barred(slots):
        lru.touch(slots)
        lru.next_batch()
        return slots % 4 == 0

    victims = lru.victims(np.arange(40), barred)
    assert sorted(victims.tolist()) == [slot for slot in range(40) if slot % 4]
    assert sorted(lru.victims(np.arange(40), lambda slots: slots % 4 > 0).tolist()) == [
        *range(0, 40, 4)
    ]


def test_a_candidate_without_a_row_is_no_victim_whatever_its_stamp():
    """A thread may have stamped it by the number that the batch had when the thread began."""
    rows = np.arange(80)
    lru = made(80, rows)
    for slot in range(80):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    assert lru.victims(np.arange(1)).tolist() == [0]
    age = lru.stamps[2]
    lru.forget(np.array([2], np.int32))
    rows[2] = -1
    lru.stamps[2] = age
    assert lru.victims(np.arange(3)).tolist() == [1, 3, 4]


def test_barred_slots_stay_the_first_to_go():
    lru = made(100)
    for slot in range(100):
        lru.touch(np.array([slot], np.int32))
        lru.next_batch()
    for first, count in ((80, 1), (81, 9)):
        victims = lru.victims(np.arange(count), lambda slots: slots < 80)
        assert victims.tolist() == list(range(first, first + count))
    assert lru.victims(np.arange(100)).tolist() == [*range(80), *range(90, 100)]
