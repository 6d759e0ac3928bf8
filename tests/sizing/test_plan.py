import dataclasses

import numpy as np
import pytest

from tierstore import policy
from tierstore._tiers.slots import bytes_for, slots_for
from tierstore.errors import CapacityError, InvalidInputError
from tierstore.machine.speeds import Speeds
from tierstore.sizing import host_for_hits, plan, planning, stream_of
from tierstore.sizing.simulation import replay

SPEEDS = Speeds(
    copy_bytes=1e10,
    gather_rows=1e6,
    sequential_bytes=1e8,
    random_reads=1e5,
    append_bytes=5e8,
    syncs=100,
    link_bytes=2e10,
)


@pytest.fixture
def stream():
    rng = np.random.default_rng(0)
    return stream_of([(rng.random(100) ** 3 * 2000).astype(np.int64) for _ in range(60)], 2000)


def test_the_host_tier_gets_the_slots_a_store_would_give_it(stream):
    found = plan(2000, 64, host=40_000, policy=policy.lfu())
    (host,) = found.tiers
    assert host.slots == slots_for(2000, 64, 40_000, policy.lfu(), index=8000)
    assert host.nbytes == bytes_for(2000, 64, host.slots, policy.lfu())
    assert host.nbytes + found.index_bytes <= 40_000
    assert (found.disk_bytes, found.seconds, found.step_seconds) == (2000 * 68, {}, 0)


@pytest.mark.parametrize("training", [True, False])
def test_rates_are_those_of_the_simulation(stream, training):
    found = plan(2000, 64, host=40_000, stream=stream, training=training)
    (host,) = found.tiers
    rates = replay(stream, policy.lru(), host.slots, leases=training)
    assert host.unique_hit_rate == rates.unique_hit_rate
    assert host.hit_rate == rates.hit_rate
    assert host.misses_per_batch == rates.misses_per_batch


def test_a_gpu_tier_leaves_the_host_tier_what_it_misses(stream):
    both = plan(2000, 64, host=68_000, gpu=125_000, stream=stream, speeds=SPEEDS)
    gpu, host = both.tiers
    assert (gpu.tier, host.tier) == ("gpu", "host")
    assert host.misses_per_batch < gpu.misses_per_batch
    assert set(both.seconds) == {"disk_reads", "disk_writes", "host_gather", "link"}
    assert both.seconds["disk_reads"] == pytest.approx(host.misses_per_batch / 1e5)
    alone = plan(2000, 64, host=68_000, stream=stream, speeds=SPEEDS)
    assert set(alone.seconds) == {"disk_reads", "disk_writes", "host_gather"}
    reading = plan(2000, 64, host=68_000, stream=stream, speeds=SPEEDS, training=False)
    assert reading.seconds["disk_writes"] == 0


def test_more_memory_never_costs_time(stream):
    seconds = [
        plan(2000, 64, host=host, stream=stream, speeds=SPEEDS, training=False).step_seconds
        for host in (20_000, 50_000, 100_000, 10**7)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_no_tier_at_all_and_one_for_everything(stream):
    none = plan(2000, 64, host=0, stream=stream, speeds=SPEEDS)
    assert none.tiers == ()
    assert none.seconds["disk_reads"] == pytest.approx(stream.unique / 1e5)
    every = plan(2000, 64, host=10**7, stream=stream, policy=policy.lfu())
    assert every.tiers[0].share == 1
    assert any("every row" in note for note in every.notes)


def test_what_cannot_be_is_refused(stream):
    with pytest.raises(CapacityError):
        plan(10**6, 64, host=100)
    with pytest.raises(CapacityError):
        plan(10**6, 64, host=0, gpu=100)
    with pytest.raises(InvalidInputError, match="has row 1999"):
        plan(1000, 64, host=10**6, stream=stream)
    with pytest.raises(InvalidInputError):
        plan(0, 64, host=0)


MEASURED = dataclasses.replace(SPEEDS, warm_rows=5e6, cached_rows=2e6, cold_rows=2e5)


def test_times_are_those_measured_of_tierstore(stream):
    def seconds(**options):
        return plan(2000, 64, host=40_000, stream=stream, training=False, **options).seconds

    (host,) = plan(2000, 64, host=40_000, stream=stream, training=False).tiers
    cold = seconds(speeds=MEASURED, page_cache=0)
    assert cold["disk_reads"] == pytest.approx(host.misses_per_batch / 2e5)
    assert cold["host_gather"] == pytest.approx(100 / 5e6 / 2)  # narrower than those measured
    cached = seconds(speeds=MEASURED, page_cache=2**30)
    narrow = 0.4 + 0.6 / 8  # of the time of a row of 512 bytes
    assert cached["disk_reads"] == pytest.approx(narrow * host.misses_per_batch / 2e6)
    half = seconds(speeds=MEASURED, page_cache=2000 * 68 // 2)
    assert half["disk_reads"] == pytest.approx((cold["disk_reads"] + cached["disk_reads"]) / 2)
    some = dataclasses.replace(MEASURED, miss_seconds=1e-3)
    late = seconds(speeds=some, page_cache=2**30)["disk_reads"] - cached["disk_reads"]
    assert late == pytest.approx(1e-3)
    whole = dataclasses.replace(MEASURED, sequential_bytes=1e10)  # the table in order is faster
    assert seconds(speeds=whole, page_cache=0)["disk_reads"] == pytest.approx(2000 * 64 / 1e10)


def test_rows_in_the_caches_of_the_cpu_are_read_faster(stream, monkeypatch):
    full = dataclasses.replace(MEASURED, hot_rows=2e7, leased_rows=1e6, hot_leased_rows=4e6)

    def gather(speeds=full, host=40_000, training=False):
        found = plan(2000, 64, host=host, stream=stream, speeds=speeds, training=training)
        return found.seconds["host_gather"]

    first = planning._far_rows(stream, 64, 0.5)  # each row once, as the caches hold all
    assert gather() == pytest.approx((first / 5e6 + (100 - first) / 2e7) / 2)
    assert gather(training=True) == pytest.approx((first / 1e6 + (100 - first) / 4e6) / 2)
    assert gather(host=0) == pytest.approx((0.4 + 0.6 / 8) * 100 / 2e7)
    monkeypatch.setattr(planning, "HOT_BYTES", 1)
    far = planning._far_rows(stream, 64, 0.5)
    assert gather() == pytest.approx((far / 5e6 + (100 - far) / 2e7) / 2)
    assert far > first


def test_a_tier_for_every_row_reads_nothing_once_they_are_there(stream):
    def disk(host):
        return plan(2000, 64, host=host, stream=stream, speeds=MEASURED).seconds["disk_reads"]

    assert disk(10**6) == 0 < disk(40_000)


def test_rows_asked_for_first_are_counted():
    batches = [np.arange(n * 10, n * 10 + 20) for n in range(10)]  # half of each batch is new
    (host,) = plan(2000, 64, host=100_000, stream=stream_of(batches, 2000)).tiers
    assert host.first_touches_per_batch == 10
    assert host.misses_per_batch >= host.first_touches_per_batch
    (host,) = plan(2000, 64, host=100_000).tiers
    assert host.first_touches_per_batch is None


def test_a_plan_says_what_was_not_measured(stream):
    def notes(speeds, gpu=0):
        found = plan(2000, 64, host=60_000, gpu=gpu, stream=stream, speeds=speeds)
        return " ".join(found.notes)

    assert "tierstore bench" in notes(SPEEDS)
    assert "tierstore bench" not in notes(MEASURED)
    without = dataclasses.replace(MEASURED, link_bytes=None)
    assert "link" in notes(without, gpu=125_000)
    assert "link" not in notes(without) and "link" not in notes(MEASURED, gpu=125_000)


def test_commits_take_what_was_measured_of_them():
    def seconds(rows, record_bytes, speeds, training=True):
        found = plan(rows, record_bytes, host=0, speeds=speeds, training=training)
        return found.commit_seconds

    speeds = dataclasses.replace(SPEEDS, committed_rows=200_000.0)
    assert seconds(4_000_000, 512, speeds) == pytest.approx(0.2)
    assert seconds(4_000_000, 2048, speeds) == pytest.approx(0.8)
    assert seconds(4_000_000, 64, speeds) == pytest.approx(0.2)
    assert seconds(4_000_000, 512, SPEEDS) is None
    assert seconds(4_000_000, 512, speeds, training=False) is None


def test_the_memory_for_a_hit_rate_is_enough_and_little_more(stream):
    for hits in (0.3, 0.6):
        host = host_for_hits(2000, 64, stream, hits)
        (tier,) = plan(2000, 64, host=host, stream=stream).tiers
        assert tier.hit_rate >= hits
        less = bytes_for(2000, 64, tier.slots - 40, policy.lru())
        (tier,) = plan(2000, 64, host=less, stream=stream).tiers
        assert tier.hit_rate < hits + 0.02
    with pytest.raises(InvalidInputError, match="first time"):
        host_for_hits(2000, 64, stream, 1.0)
    with pytest.raises(InvalidInputError, match="hits"):
        host_for_hits(2000, 64, stream, 0)
