"""What the GPU tier promises, one promise a test."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from tests import inside
from tests.gpu.conftest import Place
from tests.gpu.model import Twin
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore.errors import CapacityError, RowIndexError


def test_least_recently_used_batch_goes_first(place: Place) -> None:
    with Twin(place, rows=200, slots=60, seed=3) as twin:
        cached: OrderedDict[int, None] = OrderedDict()
        misses = 0
        for _ in range(30):
            # Batches of one row more than fits would leave the choice open; these do not.
            ids = twin.ids(40)
            distinct = np.unique(ids).tolist()
            misses += sum(row not in cached for row in distinct)
            for row in distinct:
                cached[row] = None
                cached.move_to_end(row)
            twin.read(ids)
            in_slots = twin.place.get(inside.arrays(twin.tier.memory)["row_of"])
            # Rows of one batch are of one age: what is cached differs at most within the oldest.
            while len(cached) > 60:
                oldest = next(iter(cached))
                if oldest in in_slots:
                    cached.move_to_end(oldest, last=False)
                    oldest = next(row for row in cached if row not in in_slots)
                del cached[oldest]
            assert set(cached) == set(in_slots[in_slots >= 0].tolist())
        assert twin.tier.stats.evictions == misses - 60


@pytest.mark.parametrize("host_slots", [100, 40])
def test_ids_of_features_are_rows_of_their_tables(place: Place, host_slots: int) -> None:
    with Twin(place, slots=12, host_slots=host_slots, chunk=9) as twin:
        for _ in range(5):
            twin.check_features()
            twin.work(3, sizes=(5, 40))
        twin.check()


def test_bad_ids_of_features_read_as_nan_and_are_told(place: Place) -> None:
    with Twin(place) as twin:
        starts, ids = np.array([0, 30]), np.array([29, 30, -1, 69, 70, 2**62, 0])
        features, out = twin.features(starts, np.array([3, 4])), place.noise(7, 64)
        lease = twin.tier.lease(place.put(ids), out, features=features)
        rows = np.array([29, -1, -1, 99, -1, -1, 30])
        expected = np.where((rows < 0)[:, None], 255, twin.truth[rows])
        np.testing.assert_array_equal(place.get(out), expected)
        np.testing.assert_array_equal(place.get(lease.positions) < 0, rows < 0)
        lease.release()
        twin.tier.features = {("first", "a", 30): 0, ("second", "b", 70): 1}
        with pytest.raises(RowIndexError, match="id 30 of feature 'first', at position 1 of the"):
            twin.tier.check()


def test_victims_are_the_oldest(place: Place) -> None:
    with Twin(place, rows=100, slots=10) as twin:
        for start in range(0, 10, 2):
            twin.read(np.arange(start, start + 2))
        twin.read(np.arange(4))
        twin.read(np.arange(50, 54))
        kept = twin.place.get(inside.arrays(twin.tier.memory)["row_of"])
        assert sorted(kept.tolist()) == [0, 1, 2, 3, 8, 9, 50, 51, 52, 53]


def test_clean_evictions_move_nothing(place: Place) -> None:
    with Twin(place, rows=100, slots=10) as twin:
        for start in range(0, 100, 5):
            twin.read(np.arange(start, start + 5))
        stats = twin.tier.stats
        assert (stats.evictions, stats.write_backs, stats.bytes_written_back) == (90, 0, 0)
        twin.write(np.arange(5))
        twin.read(np.arange(20, 40))
        assert twin.tier.stats.write_backs == 5


def test_a_table_that_fits_has_no_misses_after_one_pass(place: Place) -> None:
    with Twin(place, rows=100, slots=100) as twin:
        twin.read(np.arange(100))
        before = twin.tier.stats
        twin.work(20)
        twin.read(twin.ids(500))
        after = twin.tier.stats
        assert before.misses == after.misses == 100
        assert after.evictions == 0


def test_the_last_of_duplicates_wins(place: Place) -> None:
    with Twin(place, rows=50, slots=7, record_bytes=32) as twin:
        for n in (2, 64, 1000):
            twin.write(np.full(n, 3))
            twin.write(twin.rng.integers(0, 50, n), 4, 12)
        twin.check()


def test_empty_batches(place: Place) -> None:
    with Twin(place) as twin:
        none = np.empty(0, np.int64)
        twin.read(none)
        twin.write(none)
        twin.tier.fetch(twin.place.put(none), 4)
        with twin.tier.lease(twin.place.put(none)) as lease:
            assert int(twin.place.get(lease.count)[0]) == lease.bound == 0
            lease.gather(twin.place.noise(0, 64))
        assert twin.tier.stats.requested == 0


@pytest.mark.variants(1)
@pytest.mark.parametrize("direct", [True, False])
def test_batches_larger_than_the_tier(place: Place, direct: bool) -> None:
    with Twin(place, rows=300, slots=4, host_slots=300 if direct else 20, chunk=16) as twin:
        everything = twin.rng.permutation(300)
        twin.read(everything)
        twin.write(everything, 8, 24)
        twin.write(everything[::-1].copy())
        lease = twin.lease(everything)
        twin.check_lease(lease, everything)
        twin.scatter(lease, everything)
        twin.release()
        twin.check()


@pytest.mark.parametrize("direct", [True, False])
def test_ids_outside_the_table(place: Place, direct: bool) -> None:
    with Twin(place, rows=100, host_slots=100 if direct else 20) as twin:
        ids = np.array([5, 100, 7, -1, 2**40])
        out = place.noise(5, 64)
        twin.tier.read(place.put(ids), out)
        out = place.get(out)
        assert (out[[1, 3, 4]] == 0xFF).all()
        np.testing.assert_array_equal(out[[0, 2]], twin.truth[[5, 7]])

        data = place.noise(5, 64)
        twin.tier.write(place.put(ids), data)
        twin.truth[[5, 7]] = place.get(data)[[0, 2]]
        lease = twin.tier.lease(place.put(ids))
        assert (place.get(lease.positions) == -1).tolist() == [False, True, False, True, True]
        assert int(place.get(lease.count)[0]) == 2
        lease.read(out := place.noise(5, 64))
        assert (place.get(out)[[1, 3, 4]] == 0xFF).all()
        lease.release()

        for wait in (twin.tier.check, twin.tier.flush, twin.tier.check):
            with pytest.raises(RowIndexError, match="row 100 at position 1"):
                wait()
        np.testing.assert_array_equal(twin.host.map.lookup(np.array([5])) >= 0, [True])
        twin.tier.discard()
        twin.host.discard(np.empty(0, np.int64))
        twin.truth[:] = twin.below.records
        twin.check()


@pytest.mark.parametrize("host_slots", [30, 100])
def test_discard_drops_what_was_written(place: Place, host_slots: int) -> None:
    with Twin(place, rows=100, slots=10, host_slots=host_slots) as twin:
        twin.work(30)
        while twin.leases:
            twin.release()
        twin.tier.flush()
        twin.host.flush()
        committed = twin.truth.copy()
        twin.write(twin.ids(200))
        twin.lease(twin.ids(20))
        twin.tier.discard()
        handed_down = np.flatnonzero((twin.below.records != committed).any(axis=1))
        twin.host.discard(handed_down)
        twin.truth[:] = twin.below.records[:] = committed
        twin.read(np.arange(100))
        twin.check()


def test_leases_pin(place: Place) -> None:
    with Twin(place, rows=100, slots=10) as twin:
        first, second = np.arange(8), np.arange(6, 14)
        one, other = twin.lease(first), twin.lease(second)
        twin.read(np.arange(40, 90))
        twin.check_lease(one, first)
        twin.check_lease(other, second)
        twin.scatter(one, first)
        twin.check_lease(other, second)
        twin.scatter(other, second)
        twin.read(np.arange(20))
        twin.release(0)
        twin.read(np.arange(40, 90))
        twin.check_lease(other, second)
        twin.check()


def test_rows_leased_in_host_memory_are_not_promoted(place: Place) -> None:
    with Twin(place, rows=100, slots=4) as twin:
        ids = np.arange(20)
        one, other = twin.lease(ids), twin.lease(ids)
        twin.read(ids)
        twin.tier.fetch(place.put(ids), 3)
        twin.scatter(one, ids)
        twin.release(0)
        twin.read(ids)
        twin.write(ids, 0, 16)
        twin.check_lease(other, ids)
        twin.scatter(other, ids)
        twin.release()
        twin.read(ids)
        twin.check()


def test_a_direct_host_tier_needs_no_wait(place: Place) -> None:
    if place.kind != "pageable":
        pytest.skip("the emulator counts waits")
    with Twin(place, rows=500, slots=40) as twin:
        twin.from_host = 0.0
        twin.read(np.arange(10))
        before = place.device.waits
        for _ in range(10):
            twin.read(twin.ids(100))
            twin.write(twin.ids(100), 16, 32)
            ids = twin.ids(30)
            lease = twin.lease(ids)
            twin.scatter(lease, ids)
            twin.release()
            twin.tier.fetch(twin.put(twin.ids(30)), 2)
        grown = 4
        assert place.device.waits - before <= grown


@pytest.mark.parametrize("direct", [True, False])
def test_rows_that_are_not_admitted(place: Place, direct: bool) -> None:
    with Twin(place, rows=100, slots=10, host_slots=100 if direct else 20) as twin:
        twin.read(np.arange(10))
        before = place.get(inside.arrays(twin.tier.memory)["row_of"]).copy()
        twin.read(np.arange(5, 60), admit=False)
        twin.write(np.arange(5, 60), admit=False)
        twin.write(np.arange(3, 50), 4, 9, admit=False)
        after = place.get(inside.arrays(twin.tier.memory)["row_of"])
        assert np.array_equal(before, after)
        assert twin.tier.stats.evictions == 0
        twin.check()


def test_a_device_that_holds_every_row_needs_no_wait(place: Place) -> None:
    with Twin(place, rows=100, slots=100, host_slots=10) as twin:
        twin.read(np.arange(60))
        assert not inside.staging(twin.tier).complete
        twin.from_host = 0.0
        twin.tier.fetch(place.put(np.arange(60, 70)), 4)
        twin.read(np.arange(60, 100))
        assert inside.staging(twin.tier).complete
        before = getattr(place.device, "waits", 0)
        twin.read(twin.ids(200))
        twin.write(twin.ids(200), 3, 9)
        ids = twin.ids(30)
        lease = twin.lease(ids)
        twin.scatter(lease, ids)
        twin.release()
        assert getattr(place.device, "waits", 0) == before
        twin.check()


@pytest.mark.parametrize("wanted", ["read", "write", "lease"])
def test_a_batch_that_was_foreseen_needs_no_wait(place: Place, wanted: str) -> None:
    with Twin(place, rows=400, slots=130, host_slots=200) as twin:
        twin.host.read(np.arange(200), np.empty((200, 64), np.uint8))
        batches = [twin.rng.integers(0, 200, 20) for _ in range(3)]
        twin.read(np.arange(100, 180))
        for ids in batches:
            twin.tier.prefetch_for(ids, 8)
        twin.read(np.arange(250, 330))  # as many rows as would push the prefetched_for ones out
        missed = twin.tier.stats.misses
        forbidden = pytest.MonkeyPatch()
        forbidden.setattr(inside.staging(twin.tier), "settle", None)
        before = getattr(place.device, "waits", 0)
        for ids in batches:
            if wanted == "lease":
                lease = twin.lease(ids)
                twin.scatter(lease, ids)
                twin.release()
            else:
                getattr(twin, wanted)(ids)
            twin.read(ids)
        assert getattr(place.device, "waits", 0) == before
        forbidden.undo()
        assert twin.tier.stats.misses == missed
        twin.check()


def test_what_a_prefetch_lacks_is_waited_for(place: Place) -> None:
    with Twin(place, rows=400, slots=40, host_slots=60) as twin:
        twin.host.read(np.arange(60), np.empty((60, 64), np.uint8))
        twin.tier.prefetch_for(np.arange(50, 70), 4)  # the host tier has ten of them
        twin.tier.prefetch_for(np.arange(30), 4)  # more than half of the slots with those before
        twin.read(np.arange(50, 70))
        twin.write(np.arange(30))
        twin.check()


def test_slots_that_are_held_are_given_up_in_time(place: Place) -> None:
    with Twin(place, rows=400, slots=40, host_slots=200) as twin:
        twin.host.read(np.arange(200), np.empty((200, 64), np.uint8))
        for first in range(0, 120, 10):
            twin.tier.prefetch_for(np.arange(first, first + 10), 2)
            pinned = np.count_nonzero(place.get(inside.arrays(twin.tier.memory)["pins"]))
            assert pinned == (10 if first == 0 else 20)
        twin.tier.discard()
        assert not place.get(inside.arrays(twin.tier.memory)["pins"]).any()


def test_fetched_rows_stay_until_used(place: Place) -> None:
    with Twin(place, rows=400, slots=40) as twin:
        ahead = np.arange(10)
        twin.tier.fetch(place.put(ahead), 4)
        for start in range(50, 350, 40):
            twin.read(np.arange(start, start + 40))
        before = twin.tier.stats.misses
        twin.read(ahead)
        assert twin.tier.stats.misses == before
        twin.read(np.arange(100, 140))
        twin.read(np.arange(200, 240))
        twin.read(ahead)
        assert twin.tier.stats.misses == before + 90


def test_fetches_hold_at_most_half_the_slots(place: Place) -> None:
    with Twin(place, rows=400, slots=40) as twin:
        for start in range(0, 200, 25):
            twin.tier.fetch(place.put(np.arange(start, start + 25)), 8)
        twin.read(np.arange(300, 340))
        in_slots = place.get(inside.arrays(twin.tier.memory)["row_of"])
        assert np.count_nonzero(in_slots >= 300) == 20
        for start in range(10):
            twin.tier.fetch(place.put(np.arange(start, start + 1)), 2)
        twin.read(np.arange(300, 340))
        in_slots = place.get(inside.arrays(twin.tier.memory)["row_of"])
        assert np.count_nonzero(in_slots >= 300) >= 38
        twin.check()


def test_batch_numbers_start_again(place: Place) -> None:
    with Twin(place, rows=100, slots=10) as twin:
        twin.tier._now = 2**30 - 5
        for start in range(0, 10, 2):
            twin.read(np.arange(start, start + 2))
        assert twin.tier._now < 2**25
        twin.read(np.arange(4))
        twin.read(np.arange(50, 54))
        kept = place.get(inside.arrays(twin.tier.memory)["row_of"])
        assert sorted(kept.tolist()) == [0, 1, 2, 3, 8, 9, 50, 51, 52, 53]
        twin.work(30)
        twin.check()


def test_slots_of_a_budget() -> None:
    record = 512
    for nbytes in (10_000_000, 123_456_789):
        slots = GpuMemory.slots_for(1_000_000, record, nbytes)
        assert GpuMemory.bytes_for(1_000_000, record, slots) <= nbytes
        assert GpuMemory.bytes_for(1_000_000, record, slots + 1) > nbytes
    assert GpuMemory.slots_for(1000, record, 1 << 30) == 1000
    assert GpuMemory.slots_for(1000, record, 0) == 0
    with pytest.raises(CapacityError, match="1000 rows"):
        GpuMemory.slots_for(1000, record, 2000)


def test_ids_of_the_host_may_change_once_they_are_given(place: Place) -> None:
    """More batches than the inbox has places, of sizes that make it grow, each from one array."""
    with Twin(place, rows=3000, slots=50) as twin:
        ids = np.empty(2500, np.int64)
        outs, wanted = [], []
        for n in (1, 700, 2500, 30, 1100, 2400, 5, 2500):
            ids[:n] = twin.rng.integers(0, 3000, n)
            outs.append(place.noise(n, 64))
            wanted.append(twin.truth[ids[:n]])
            twin.tier.read(ids[:n], outs[-1])
            ids[:] = -1
        for out, rows in zip(outs, wanted, strict=True):
            np.testing.assert_array_equal(place.get(out), rows)
        twin.tier.check()
        twin.check()


def test_batches_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ids of the host, more than there are slots; where one repeats, its last record stays."""
    monkeypatch.setattr("tierstore._tiers.gpu.link._HEAD", 20)
    with Twin(place, rows=300, slots=30) as twin:
        twin.from_host = 1.0
        for n in (10, 30, 39, 40, 90, 250):
            batches = twin.tier._now
            ids = np.append(twin.rng.integers(0, 300, n - 2), [7, 7])
            ids[1] = 7
            twin.read(ids)
            twin.read(ids, 16, 24, admit=False)
            twin.write(ids)
            twin.write(ids, 3, 9)
            assert twin.tier._now - batches == (8 if n >= 40 else 4)
        twin.check()
    with Twin(place, rows=300, slots=30, host_slots=100) as twin:
        twin.from_host = 1.0
        twin.read(twin.rng.integers(0, 300, 200))
        assert twin.tier._now == 1
        twin.check()
