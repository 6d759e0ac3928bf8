import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore._tiers.slots import CachedSlots, DirectSlots, Pins
from tierstore.policy import lru

ROWS, SLOTS = 30, 8


def take(name: str, size: int, dtype: type) -> np.ndarray:
    return np.zeros(size, dtype)


def make() -> CachedSlots:
    return CachedSlots(ROWS, SLOTS, lru(), take)


rows_lists = st.lists(st.integers(0, ROWS - 1), max_size=20)


@given(st.lists(st.tuples(st.sampled_from(["use", "release", "dirty"]), rows_lists), max_size=30))
def test_the_map_is_as_a_dict_of_rows(steps):
    """Rows get slots, evicting others, as a tier does it; a dict says who lies where."""
    slots, where = make(), {}
    for action, given_ in steps:
        rows = np.array(given_, np.int64)
        found = slots.lookup(rows)
        assert {r: s for r, s in zip(given_, found.tolist(), strict=True) if s >= 0} == {
            row: where[row] for row in given_ if row in where
        }
        if action == "release":
            slots.release(np.unique(found[found >= 0]))
            for row in given_:
                where.pop(row, None)
        elif action == "dirty":
            slots.dirty[found[found >= 0]] = 1
        else:
            slots.touch(found[found >= 0])
            new = slots.distinct(rows[found < 0])
            assert sorted(new) == sorted({row for row in given_ if row not in where})
            assert (slots.lookup(new) < 0).all()
            taken = slots.free(new)
            if taken.size < new.size:
                victims = slots.victims(new[taken.size :])
                for row in slots.rows(victims).tolist():
                    del where[row]
                slots.dirty[victims] = 0
                slots.evict(victims)
                taken = np.concatenate([taken, victims])
            slots.bind(new[: taken.size], taken)
            where.update(zip(new.tolist(), taken.tolist(), strict=False))
            slots.next_batch()
        assert len(set(where.values())) == len(where) <= SLOTS
        assert not slots.dirty[np.setdiff1d(np.arange(SLOTS), list(where.values()))].any()
        assert slots.rows(np.array([*where.values()], np.int64)).tolist() == [*where]
        everywhere = [where.get(row, -1) for row in range(ROWS)]
        assert slots.lookup(np.arange(ROWS)).tolist() == everywhere
        assert slots.used == len(where)


def test_every_slot_that_is_released_is_taken_again():
    slots, rows = make(), np.arange(SLOTS)
    slots.bind(rows, slots.free(rows))
    slots.release(slots.lookup(rows))
    assert (slots.lookup(rows) < 0).all()
    assert slots.used == 0
    some = slots.free(rows[:3])
    slots.bind(rows[:3], some)
    others = slots.free(rows[3:])
    assert sorted([*some, *others]) == [*rows]
    assert slots.used == SLOTS


def test_rows_that_repeat_most_come_first_where_not_all_have_room():
    rows = np.array([5, 1, 2, 3, 4, 6, 7, 8, 9, 9, 2, 9])
    assert make().distinct(rows).tolist()[:2] == [9, 2]


def test_a_tier_for_every_row_needs_no_map():
    slots = DirectSlots(ROWS, take)
    rows = np.array([3, 7, 3])
    assert slots.lookup(rows).tolist() == [-1, -1, -1]
    assert slots.distinct(rows).tolist() == [3, 7]
    slots.bind(np.array([3]), slots.free(np.array([3])))
    assert slots.lookup(rows).tolist() == [3, -1, 3]
    assert slots.missing
    slots.bind(np.arange(ROWS), np.arange(ROWS))
    assert not slots.missing
    assert slots.lookup(rows) is rows
    slots.release(np.array([7]))
    assert slots.lookup(rows).tolist() == [3, -1, 3]
    assert slots.victims(rows).size == 0


def barred(pins: Pins) -> list[int]:
    return np.flatnonzero(pins.barred(np.arange(SLOTS))).tolist()


def test_leases_pin_as_long_as_any_is_open():
    pins = Pins(SLOTS, take)
    pins.lease(np.array([1, 2]))
    pins.lease(np.array([2, 3]))
    assert barred(pins) == [1, 2, 3]
    pins.give_back(np.array([1, 2]))
    assert barred(pins) == [2, 3]
    pins.give_back(np.array([2, 3]))
    assert barred(pins) == []


def test_a_tier_is_full_once_leases_hold_every_slot():
    pins, every = Pins(SLOTS, take), np.arange(SLOTS)
    pins.lease(every[1:])
    assert not pins.full
    pins.lease(every[1:])
    assert not pins.full, "slots that are held twice do not stand for others"
    pins.lease(every[:1])
    assert pins.full
    pins.give_back(every[1:])
    assert pins.full
    pins.give_back(every[1:])
    assert not pins.full


def test_slots_fetched_ahead_are_pinned_until_used_or_overtaken():
    pins = Pins(SLOTS, take)
    pins.fetched(np.array([1, 2]), window=2)
    pins.fetched(np.array([3]), window=2)
    assert pins.ahead == 3
    assert barred(pins) == [1, 2, 3]
    pins.used(np.array([2]))
    assert barred(pins) == [1, 3]
    pins.fetched(np.array([4]), window=2)
    assert barred(pins) == [3, 4]
    assert pins.ahead == 2
    pins.clear()
    assert barred(pins) == []
    assert pins.ahead == 0


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("slots", [1, 5, 1000])
def test_the_map_takes_the_memory_it_says(slots, by_row):
    taken: list[np.ndarray] = []

    def counted(name: str, size: int, dtype: type) -> np.ndarray:
        taken.append(np.zeros(size, dtype))
        return taken[-1]

    made = CachedSlots(2000, slots, lru(), counted, by_row=by_row)
    nbytes = sum(array.nbytes for array in taken) + made.policy.nbytes
    assert nbytes <= CachedSlots.bytes_for(2000, slots, lru(), by_row=by_row)
