import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import records
from tests.tiers.stack import ArrayTier, check, random_span, read
from tierstore import _rowcopy
from tierstore._rowcopy import Groups
from tierstore._tiers import host
from tierstore._tiers.host import HostTier
from tierstore._tiers.memory import ALIGNMENT
from tierstore._tiers.slots import STAGING_BYTES, bytes_for, queue_bytes, slots_for
from tierstore.errors import CapacityError
from tierstore.policy import PolicySpec, lfu, lru

ROWS, WIDTH = 40, 48


def stacked(
    seed: int, *slots: int, policy: PolicySpec | None = None
) -> tuple[list[HostTier], ArrayTier, np.ndarray]:
    """Host tiers of these many slots, nearest first, over an array; and what it holds."""
    below = ArrayTier(records(np.random.default_rng(seed), ROWS, WIDTH))
    tiers: list[HostTier] = []
    for count in reversed(slots):
        tiers.insert(0, HostTier(tiers[0] if tiers else below, slots=count, policy=policy))
    return tiers, below, below.records.copy()


@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([1, 2, 7, 39, 40, 99]), min_size=1, max_size=2),
    st.sampled_from([0, 2 << 20]),
    st.sampled_from([lru(), lfu()]),
)
def test_any_sequence_of_calls_is_as_if_there_were_no_tier(seed, slots, many, policy):
    """Batches of all sizes, duplicates, byte ranges, leases, prefetches, one tier or two.

    Batches of `many` bytes that repeat their rows are copied from these rows, side by side.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_MANY_BYTES", many)
        run_any_calls(seed, slots, policy)


def run_any_calls(seed: int, slots: list[int], policy: PolicySpec) -> None:
    rng = np.random.default_rng(seed)
    tiers, below, oracle = stacked(seed, *slots, policy=policy)
    top = tiers[0]
    leases: list[np.ndarray] = []
    for _ in range(int(rng.integers(1, 40))):
        action = rng.choice(["read", "write", "lease", "give back", "fetch", "flush", "stage"])
        if action == "read":
            rows, (lo, hi) = rng.integers(0, ROWS, rng.integers(0, 90)), random_span(rng, WIDTH)
            found = read(top, rows, lo, hi, admit=bool(rng.random() < 0.8))
            assert np.array_equal(found, oracle[rows, lo:hi])
        elif action == "write":
            rows, (lo, hi) = rng.permutation(ROWS)[: rng.integers(0, ROWS)], random_span(rng, WIDTH)
            oracle[rows, lo:hi] = records(rng, rows.size, hi - lo)
            top.write(rows, oracle[rows, lo:hi], lo, hi)
        elif action == "lease":
            ids, (lo, hi) = rng.integers(0, ROWS, rng.integers(0, 30)), random_span(rng, WIDTH)
            batch, found = Groups(ids), np.empty((ids.size, hi - lo), np.uint8)
            leases.append(top.lease(batch, ids, found, lo))
            assert np.array_equal(found, oracle[ids, lo:hi])
            for each, wanted in ((True, oracle[ids]), (False, oracle[batch.rows])):
                found = np.empty((len(wanted), hi - lo), np.uint8)
                top.read_held(batch, found, lo, each=each)
                assert np.array_equal(found, wanted[:, lo:hi])
        elif action == "give back" and leases:
            top.give_back(leases.pop())
        elif action == "fetch":
            top.fetch(rng.integers(0, ROWS, rng.integers(0, 30)), window=3)
        elif action == "stage":
            top.stage(rng.integers(0, ROWS, 5))
        elif action == "flush":
            top.flush()
            assert np.array_equal(below.records, oracle)
            assert top.dirty().size == 0
        for tier in tiers:
            check(tier)
    assert np.array_equal(read(top, np.arange(ROWS)), oracle)
    top.flush()
    assert np.array_equal(below.records, oracle)


@pytest.mark.parametrize("changed", [0, 1, 6, 7, 8, 29, ROWS])
def test_a_flush_writes_part_by_part(monkeypatch, changed):
    monkeypatch.setattr(host, "staging_rows", lambda record_bytes: 7)
    rng = np.random.default_rng(changed)
    for slots in (ROWS, ROWS - 1):
        (tier,), below, oracle = stacked(3, slots)
        rows = rng.permutation(ROWS)[:changed]
        oracle[rows] = records(rng, changed, WIDTH)
        tier.write(rows, oracle[rows])
        tier.flush()
        assert np.array_equal(below.records, oracle)
        assert below.stats.written == changed and not tier.dirty().size
        check(tier)


def test_a_flush_that_fails_keeps_what_it_did_not_hand_down(monkeypatch):
    monkeypatch.setattr(host, "staging_rows", lambda record_bytes: 7)
    (tier,), below, oracle = stacked(4, ROWS)
    write, parts = below.write, []

    def fails(rows, *given, **options):
        parts.append(rows)
        below.full = len(parts) == 3
        write(rows, *given, **options)

    below.write = fails
    oracle[:] = records(np.random.default_rng(5), ROWS, WIDTH)
    tier.write(np.arange(ROWS), oracle)
    with pytest.raises(OSError, match="no space"):
        tier.flush()
    assert tier.dirty().tolist() == list(range(14, ROWS))
    tier.flush()
    assert np.array_equal(below.records, oracle)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_who_presses_ctrl_c_often_leaves_the_lock_to_others(times):
    (tier,), _, oracle = stacked(6, 10)
    lock, presses = tier._lock, list(range(times))

    class Impatient:
        release = lock.release

        def acquire(self) -> None:
            if presses:
                presses.pop()
                raise KeyboardInterrupt
            lock.acquire()

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    tier._lock = Impatient()
    with pytest.raises(KeyboardInterrupt):
        read(tier, np.arange(5))
    found = []
    other = threading.Thread(target=lambda: found.append(read(tier, np.arange(20))))
    other.start()
    other.join(60)
    assert np.array_equal(found[0], oracle[:20])


def test_leased_rows_stay_whatever_else_is_read():
    (tier,), _, oracle = stacked(1, 10)
    held = tier.lease(Groups(np.arange(6)))
    slots = held.slots
    assert np.array_equal(tier.records[slots], oracle[:6])
    for start in range(6, 40, 5):
        read(tier, np.arange(start, min(start + 5, ROWS)))
    assert np.array_equal(tier.map.lookup(np.arange(6)), slots)
    assert np.array_equal(tier.records[slots], oracle[:6])
    tier.give_back(held)
    read(tier, np.arange(30, 40))
    assert (tier.map.lookup(np.arange(6)) < 0).all()


def test_leases_of_more_rows_than_there_are_slots():
    (tier,), _, oracle = stacked(2, 4)
    first, second = tier.lease(Groups(np.arange(10))), tier.lease(Groups(np.arange(5, 15)))
    assert first.slots.size == 4 and not first.whole
    assert second.slots.size <= 4
    tier.write(np.arange(15), oracle[15:30])
    assert np.array_equal(read(tier, np.arange(15)), oracle[15:30])
    tier.give_back(first)
    tier.give_back(second)
    assert np.array_equal(read(tier, np.arange(15)), oracle[15:30])


@pytest.mark.parametrize("held", [0, 4])
def test_frequent_rows_survive_a_lease_that_finds_no_room_for_all(held):
    """The batch or, with `held` rows of another lease, both together outnumber the slots."""
    (top,), _, oracle = stacked(5, 12, policy=lfu())
    often = np.arange(8)
    for _ in range(3):
        top.give_back(top.lease(Groups(often)))
    other = top.lease(Groups(np.arange(36, 36 + held)))
    batch = Groups(np.arange(10, 23 - held))
    placed = top.lease(batch)
    assert placed.slots.size == 4 - held
    out = np.empty((batch.rows.size, WIDTH), np.uint8)
    top.read_held(batch, out, 0)
    assert np.array_equal(out, oracle[batch.rows])
    top.give_back(placed)
    top.give_back(other)
    assert top.stats.evictions == 0
    hits = top.stats.hits
    assert np.array_equal(read(top, often, 0, WIDTH), oracle[often])
    assert top.stats.hits == hits + often.size


def test_a_lease_that_finds_room_takes_it_from_frequent_rows():
    (top,), _, _ = stacked(6, 12, policy=lfu())
    for _ in range(3):
        top.give_back(top.lease(Groups(np.arange(8))))
    assert top.lease(Groups(np.arange(10, 22))).slots.size == 12


def test_fetched_rows_stay_until_they_are_used():
    (tier,), _, oracle = stacked(3, 10)
    tier.fetch(np.array([3, 1, 3]), window=2)
    for start in (10, 20, 30):
        read(tier, np.arange(start, start + 9))
    assert (tier.map.lookup(np.array([1, 3])) >= 0).all()
    hits = tier.stats.hits
    assert np.array_equal(read(tier, [1, 3]), oracle[[1, 3]])
    assert tier.stats.hits == hits + 2
    read(tier, np.arange(10, 20))
    assert (tier.map.lookup(np.array([1, 3])) < 0).all()


def test_fetched_rows_that_are_never_used_go_after_a_while():
    (tier,), _, _ = stacked(4, 10)
    for start in range(0, 40, 2):
        tier.fetch(np.array([start, start + 1]), window=3)
        read(tier, np.arange(10))
    assert np.count_nonzero(tier.map.lookup(np.arange(ROWS)) >= 0) == 10


def test_the_least_recently_used_go_first():
    (tier,), _, _ = stacked(5, 6)
    for row in (0, 1, 2, 3, 4, 5, 0, 2):
        read(tier, [row])
    read(tier, [10, 11, 12])
    assert np.flatnonzero(tier.map.lookup(np.arange(ROWS)) >= 0).tolist() == [0, 2, 5, 10, 11, 12]


def test_only_changed_records_are_written_back():
    (tier,), below, _ = stacked(6, 5)
    read(tier, np.arange(5))
    tier.write(np.array([1]), np.zeros((1, WIDTH), np.uint8))
    read(tier, np.arange(10, 15))
    assert below.stats.written == 1
    assert tier.stats.write_backs == 1
    assert tier.stats.evictions == 5
    assert tier.stats.bytes_written_back == WIDTH


def test_rows_that_are_not_admitted_leave_no_trace():
    (tier,), _, oracle = stacked(7, 5)
    read(tier, np.arange(5))
    assert np.array_equal(read(tier, np.arange(ROWS), admit=False), oracle)
    assert tier.map.lookup(np.arange(5)).min() >= 0
    assert tier.stats.evictions == 0


def test_a_write_back_that_fails_loses_nothing():
    (tier,), below, oracle = stacked(8, 5)
    oracle[:5] = records(np.random.default_rng(8), 5, WIDTH)
    tier.write(np.arange(5), oracle[:5])
    below.full = True
    with pytest.raises(OSError, match="no space"):
        read(tier, np.arange(10, 15))
    with pytest.raises(OSError, match="no space"):
        tier.flush()
    check(tier)
    assert np.array_equal(read(tier, np.arange(5)), oracle[:5])
    below.full = False
    assert np.array_equal(read(tier, np.arange(ROWS)), oracle)
    tier.flush()
    assert np.array_equal(below.records, oracle)


def test_a_copy_into_slots_that_fails_loses_nothing_of_evicted_rows(monkeypatch):
    """The slots hold other records by then: what was evicted is read from below."""
    (tier,), below, oracle = stacked(8, 5)
    oracle[:5] = records(np.random.default_rng(8), 5, WIDTH)
    tier.write(np.arange(5), oracle[:5])
    scatter, done = _rowcopy.scatter, []

    def breaks(target, slots, source, *given):
        scatter(target, slots, source, *given)
        if slots.size == 5:
            done.append(slots)
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_rowcopy, "scatter", breaks)
        with pytest.raises(MemoryError):
            tier.write(np.arange(10, 15), records(np.random.default_rng(9), 5, WIDTH))
    assert done
    check(tier)
    assert np.array_equal(read(tier, np.arange(5)), oracle[:5])
    assert np.array_equal(below.records[:5], oracle[:5])


@pytest.mark.parametrize("slots", [10, ROWS])
def test_rows_fetched_ahead_are_not_counted_as_requests(slots):
    (tier,), _, _ = stacked(3, slots)
    tier.fetch(np.arange(4), 16)
    assert tier.stats.requested == 0
    read(tier, np.arange(4))
    assert (tier.stats.requested, tier.stats.hits) == (4, 4)


def test_what_was_not_handed_down_can_be_dropped():
    for slots in (7, ROWS):
        (tier,), _, oracle = stacked(9, slots)
        tier.write(np.arange(5), np.zeros((5, WIDTH), np.uint8))
        assert tier.dirty().tolist() == [0, 1, 2, 3, 4]
        tier.discard(np.array([20]))
        assert tier.dirty().size == 0
        check(tier)
        assert np.array_equal(read(tier, np.arange(ROWS)), oracle)


@pytest.mark.parametrize("slots", [7, ROWS])
def test_rows_that_are_dropped_are_read_below_again(slots):
    (tier,), below, _ = stacked(3, slots)
    read(tier, np.arange(5), 0, WIDTH)
    below.records[2:4] ^= 255
    tier.discard(np.array([2, 3, 20]))
    assert np.array_equal(read(tier, np.arange(5), 0, WIDTH), below.records[:5])


def test_a_tier_with_a_slot_for_every_row_never_evicts():
    (tier,), below, oracle = stacked(10, ROWS + 5)
    assert tier.direct
    assert tier.slots == ROWS
    read(tier, np.arange(ROWS))
    asked = below.stats.requested
    assert np.array_equal(read(tier, np.arange(ROWS)[::-1]), oracle[::-1])
    assert below.stats.requested == asked
    assert tier.stats.hit_rate == 0.5


def test_counters():
    (tier,), _, _ = stacked(11, 8)
    read(tier, [1, 1, 2, 3])
    read(tier, [1, 2, 9], 0, 16)
    stats = tier.stats
    assert (stats.requested, stats.hits, stats.misses) == (7, 2, 5)
    assert stats.hit_rate == pytest.approx(2 / 7)
    assert stats.bytes_out == 4 * WIDTH + 3 * 16
    assert stats.bytes_promoted == 4 * WIDTH
    assert (stats.unique, stats.unique_hits, stats.unique_of) == (6, 2, 7)
    assert not stats.unique_sampled  # yet
    assert stats.to_dict()["hit_rate"] == stats.hit_rate
    assert (stats - stats).unique_hit_rate == 0  # nothing was requested
    read(tier, [1])
    stats = tier.stats
    read(tier, [1])
    assert tier.stats.unique_sampled
    assert math.isnan((tier.stats - stats).unique_hit_rate)  # it was, but not counted


@pytest.mark.parametrize("slots", [ROWS, ROWS - 1])
def test_rows_that_repeat_are_fetched_from_their_slots_once(monkeypatch, slots):
    """In a large batch; those of one that hardly repeats are copied to each id at once."""
    fetched = []
    gather = _rowcopy.gather

    def noted(source, wanted, *rest):
        fetched.append((source is tier.records, wanted.size))
        gather(source, wanted, *rest)

    (tier,), _, oracle = stacked(5, slots)
    ids = np.random.default_rng(6).integers(0, 9, 5000)
    batch, few = Groups(ids), Groups(np.arange(30))
    assert batch.rows.size == 9
    tier.lease(batch)
    monkeypatch.setattr(host, "_MANY_BYTES", 30 * 16)
    monkeypatch.setattr(_rowcopy, "gather", noted)
    out = np.empty((5000, 16), np.uint8)
    tier.lease(batch, ids, out, 8)
    assert np.array_equal(out, oracle[ids, 8:24])
    assert fetched == [(True, 9), (False, 5000)]
    fetched.clear()
    out = np.empty((30, 16), np.uint8)
    tier.lease(few, np.arange(30), out, 8)
    assert np.array_equal(out, oracle[:30, 8:24])
    assert not fetched, "the core reads each id where it is"


def test_batches_across_ranges_are_counted_apart():
    below = ArrayTier(records(np.random.default_rng(3), ROWS, WIDTH))
    starts = [0, 5, 6, 20]
    tier = HostTier(below, slots=12, starts=starts)
    rng, expected = np.random.default_rng(4), np.zeros((4, 4), np.int64)
    for _ in range(30):
        ids = rng.integers(0, ROWS, rng.integers(1, 30))
        here = tier.map.lookup(np.arange(ROWS)) >= 0
        tier.give_back(tier.lease(Groups(ids)))
        of = np.searchsorted(starts, np.arange(ROWS), "right") - 1
        distinct = np.unique(ids)
        for column, rows in enumerate((ids, ids[here[ids]], distinct, distinct[here[distinct]])):
            expected[:, column] += np.bincount(of[rows], minlength=4)
    for start, (requested, hits, unique, unique_hits) in zip(starts, expected, strict=True):
        found = tier.stats_from(start)
        assert (found.requested, found.hits) == (requested, hits)
        assert (found.unique, found.unique_hits) == (unique, unique_hits)
        assert found.unique_of == requested


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 10**6))
def test_a_budget_gives_the_most_slots_that_fit(rows, sixteenths, nbytes):
    width = 16 * sixteenths
    if 0 < nbytes < min(bytes_for(rows, width, slots) for slots in (1, rows)):
        with pytest.raises(
            CapacityError, match=f"{nbytes} bytes cannot hold one record of a table of {rows} rows"
        ):
            slots_for(rows, width, nbytes)
        return
    slots = slots_for(rows, width, nbytes)
    assert slots == 0 or bytes_for(rows, width, slots) <= nbytes
    assert slots == rows or bytes_for(rows, width, slots + 1) > nbytes


def test_a_tier_takes_the_memory_it_says():
    below = ArrayTier(np.zeros((100_000, 64), np.uint8))
    for slots in (1, 5000, 100_000):
        tier = HostTier(below, slots=slots)
        arrays = [tier.records, tier.map.dirty]
        if not tier.direct:
            arrays += [tier.map.slot_of.places, tier.map.row_of]
        assert sum(array.nbytes for array in arrays) <= tier.arena.array.nbytes
        beside = min(STAGING_BYTES, 64 * slots) + queue_bytes(64, slots)
        assert tier.arena.array.nbytes + beside <= tier.nbytes + 16 * ALIGNMENT
        tier.close()
    with pytest.raises(CapacityError, match="at least one slot"):
        HostTier(below, slots=0)


def test_the_tier_above_is_awaited_before_rows_move():
    """By every call that gives slots to other rows, or hands down or drops what changed."""
    for slots in (10, ROWS):
        for move in (
            lambda tier: read(tier, np.arange(20, 30)),
            lambda tier: tier.write(np.arange(20, 30), np.zeros((10, WIDTH), np.uint8)),
            lambda tier: tier.write(np.arange(20, 30), np.zeros((10, 16), np.uint8), 0, 16),
            lambda tier: tier.fetch(np.arange(20, 30), window=2),
            lambda tier: tier.lease(Groups(np.arange(20, 30))),
            lambda tier: tier.warm(np.arange(20, 30)),
            lambda tier: tier.flush(),
            lambda tier: tier.discard(np.arange(5)),
        ):
            (tier,), _, _ = stacked(12, slots)
            tier.write(np.arange(10), np.ones((10, WIDTH), np.uint8))
            seen = []

            def wait(tier=tier, seen=seen):
                seen.append((tier.map.lookup(np.arange(ROWS)).tolist(), tier.dirty().tolist()))

            before = tier.map.lookup(np.arange(ROWS)).tolist(), tier.dirty().tolist()
            tier.before_change = wait
            move(tier)
            assert seen[0] == before
