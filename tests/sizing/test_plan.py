import dataclasses

import numpy as np
import pytest

from tierstore import policy
from tierstore._tiers.slots import bytes_for, slots_for
from tierstore.errors import CapacityError, InvalidInputError
from tierstore.machine.speeds import BatchTimes, Speeds
from tierstore.sizing import host_for_hits, plan, planning, stream_of
from tierstore.sizing.simulation import Replay, replay

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
    assert host.slots == slots_for(2000, 64, 40_000, policy.lfu(), indexed=True)
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
    pages = both.seconds["disk_reads"] * 1e5  # which hold several of the rows
    assert 0 < pages < host.misses_per_batch
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
    assert none.seconds["disk_reads"] == pytest.approx(missing_pages(stream, 0) / 1e5)
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


def line(fixed, row):
    """Return the times of batches that take `fixed` seconds and `row` for each row."""
    return BatchTimes((1, 1001), (fixed, fixed + 1000 * row))


MEASURED = dataclasses.replace(
    SPEEDS,
    warm=line(1e-4, 2e-7),
    cached=line(3e-4, 5e-7),
    missed=line(9e-4, 8e-7),
    cold=line(2e-3, 5e-6),
)
NARROW = 0.4 + 0.6 / 8  # of the time of a row of 512 bytes, for one of 64


def far(times, count, wide=1.0):
    """Return the seconds of a batch, from the two times of a line."""
    fixed = times.seconds[0]
    return fixed + (count - 1) * (times.seconds[1] - fixed) / 1000 * wide


def missing_pages(stream, slots):
    """Return the pages per batch, in the second half, of the rows that a tier lacks."""
    tier, pages = Replay(2000, slots, policy.lru()) if slots else None, 0
    for number, batch in enumerate(stream.batches):
        rows = batch.rows if tier is None else batch.rows[~tier.use(batch)[0]]
        pages += len({int(row) // 64 for row in rows}) if number >= 30 else 0
    return pages / 30


def test_batches_take_what_is_interpolated_between_those_measured():
    times = BatchTimes((64, 1024, 8192), (1e-4, 4e-4, 2e-3))
    for count, expected in ((1, 1e-4), (64, 1e-4), (544, 2.5e-4), (1024, 4e-4), (8192, 2e-3)):
        assert times.of(count) == pytest.approx(expected)
    assert times.of(15_360) == pytest.approx(3.6e-3)
    assert times.of(8192, 0.5) == pytest.approx(1e-4 + 0.5 * 1.9e-3)
    assert times.of(0.25) == pytest.approx(0.25e-4)
    assert times.of(0) == 0
    assert BatchTimes((100,), (1e-3,)).of(300) == pytest.approx(3e-3)
    assert BatchTimes((10, 20), (2e-3, 1e-3)).of(100) == pytest.approx(1e-3)  # no less


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0,), (1.0,))]
    + [((1,), (seconds,)) for seconds in (0.0, float("nan"), float("inf"))],
)
def test_times_that_cannot_be_are_refused(counts, seconds):
    with pytest.raises(InvalidInputError, match="times"):
        BatchTimes(counts, seconds)


def test_times_are_those_measured_of_tierstore(stream):
    def seconds(host=40_000, **options):
        return plan(2000, 64, host=host, stream=stream, training=False, **options).seconds

    (host,) = plan(2000, 64, host=40_000, stream=stream, training=False).tiers
    cold = seconds(speeds=MEASURED, page_cache=0)
    pages = missing_pages(stream, host.slots)
    assert 0 < pages < host.misses_per_batch
    whole = dataclasses.replace(MEASURED, sequential_bytes=1e6)  # the table in order is slower
    read = seconds(speeds=whole, page_cache=0)["disk_reads"]
    assert read == pytest.approx(far(MEASURED.cold, pages))
    assert cold["disk_reads"] == pytest.approx(2000 * 64 / 1e8)
    copied = stream.unique + 0.5 * (100 - stream.unique)
    assert cold["host_gather"] == pytest.approx(far(MEASURED.warm, copied, NARROW))
    cached = seconds(speeds=MEASURED, page_cache=2**30)["disk_reads"]
    more = far(MEASURED.missed, host.misses_per_batch, NARROW)
    assert cached == pytest.approx(more - far(MEASURED.warm, host.misses_per_batch, NARROW))
    some = seconds(speeds=whole, page_cache=2000 * 68 // 2)["disk_reads"]
    half = host.misses_per_batch / 2
    more = far(MEASURED.missed, half, NARROW) - far(MEASURED.warm, half, NARROW)
    assert some == pytest.approx(more + far(MEASURED.cold, pages / 2))
    without = seconds(host=0, speeds=MEASURED, page_cache=2**30)["disk_reads"]
    assert without == pytest.approx(far(MEASURED.cached, stream.unique, NARROW))
    assert missing_pages(stream, 0) > pages


def test_files_are_kept_in_the_memory_that_the_host_tier_leaves(stream, monkeypatch):
    def seconds(**options):
        found = plan(2000, 64, host=40_000, stream=stream, speeds=MEASURED, **options)
        return found.seconds["disk_reads"]

    monkeypatch.setattr(planning, "available_bytes", lambda: 2000 * 68)
    left = seconds()
    assert left == seconds(page_cache=2000 * 68 - 40_000)
    assert left != seconds(page_cache=2000 * 68)


def test_long_records_have_pages_of_their_own():
    rows = np.array([3, 0, 9])
    assert planning._pages(rows, 4096) == 3 and planning._pages(rows, 10_000) == 9
    assert planning._pages(rows, 512) == 2 and planning._pages(rows[:0], 512) == 0


def test_rows_in_the_caches_of_the_cpu_are_read_faster(stream, monkeypatch):
    full = dataclasses.replace(
        MEASURED, hot=line(1e-5, 5e-8), leased=line(4e-4, 1e-6), hot_leased=line(3e-4, 2e-7)
    )

    def gather(speeds=full, host=40_000, training=False):
        found = plan(2000, 64, host=host, stream=stream, speeds=speeds, training=training)
        return found.seconds["host_gather"]

    def mixed(count, one, other, rows=100, again=0.5):
        part, copied = count / rows, stream.unique + again * (100 - stream.unique)
        return part * far(one, copied, NARROW) + (1 - part) * far(other, copied, NARROW)

    first = planning._far_rows(stream, 64, 0.5)  # each row once, as the caches hold all
    assert gather() == pytest.approx(mixed(first, full.warm, full.hot))
    leased = mixed(first, full.leased, full.hot_leased, stream.unique, 0.15)
    assert gather(training=True) == pytest.approx(leased)
    assert stream.unique < 100  # of as many ids
    assert gather(host=0) == pytest.approx(far(full.hot, 100, NARROW))
    monkeypatch.setattr(planning, "HOT_BYTES", 1)
    most = planning._far_rows(stream, 64, 0.5)
    assert gather() == pytest.approx(mixed(most, full.warm, full.hot))
    assert most > first


def test_a_tier_for_every_row_reads_nothing_once_they_are_there(stream):
    def disk(host):
        return plan(2000, 64, host=host, stream=stream, speeds=MEASURED).seconds["disk_reads"]

    assert disk(10**6) == 0 < disk(40_000)


def test_a_gpu_tier_for_every_row_moves_nothing_once_they_are_there():
    batches = [np.arange(n * 10, n * 10 + 20) for n in range(10)]  # half of each batch is new
    speeds = dataclasses.replace(MEASURED, link_bytes=20e9)

    def times(gpu, host=0):
        found = plan(2000, 64, host=host, gpu=gpu, stream=stream_of(batches, 2000), speeds=speeds)
        return found.seconds

    for host in (0, 50_000, 10**6):
        whole, part = times(10**6, host), times(100_000, host)
        assert whole["disk_reads"] == whole["link"] == 0
        assert part["link"] > 0
    assert times(100_000)["disk_reads"] > 0


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


ON_GPU = dataclasses.replace(
    MEASURED,
    gpu_warm=line(2e-5, 1e-9),
    gpu_leased=line(6e-5, 2e-9),
    gpu_missed=line(5e-5, 1e-8),
    gpu_lease_missed=line(9e-5, 2e-8),
)


@pytest.mark.parametrize("training", [False, True])
def test_a_gpu_takes_time_for_rows_that_it_has_and_the_link_for_others(stream, training):
    def planned(host=10**6, gpu=125_000, speeds=ON_GPU):
        found = plan(2000, 64, host=host, gpu=gpu, stream=stream, speeds=speeds, training=training)
        return found, found.seconds

    hits, through = (
        (ON_GPU.gpu_leased, ON_GPU.gpu_lease_missed)
        if training
        else (ON_GPU.gpu_warm, ON_GPU.gpu_missed)
    )
    found, seconds = planned()
    moved = found.tiers[0].misses_per_batch
    count = stream.unique if training else 100
    assert seconds["gpu"] == pytest.approx(far(hits, count, 64 / 512)) and seconds["gpu"] > 0
    more = far(through, moved, 64 / 512) - far(hits, moved, 64 / 512)
    assert seconds["link"] == pytest.approx(more) and more > 0
    assert seconds["host_gather"] == 0  # kernels fetch from a tier that holds every row
    found, seconds = planned(host=68_000)
    gathered = found.tiers[0].misses_per_batch * 64 / (ON_GPU.gather_rows * 512)
    assert seconds["host_gather"] == pytest.approx(max(0, gathered - seconds["link"]))
    _, seconds = planned(gpu=10**6)  # every row
    assert seconds["gpu"] > 0 and seconds["link"] < more


def test_a_link_that_is_given_works_both_ways_at_once(stream):
    speeds = dataclasses.replace(SPEEDS, link_bytes=1e9, gather_rows=1e3)
    found = plan(2000, 64, host=68_000, gpu=125_000, stream=stream, speeds=speeds)
    gpu = found.tiers[0]
    assert gpu.write_backs_per_batch > 0
    most = max(gpu.misses_per_batch, gpu.write_backs_per_batch) * 64
    assert found.seconds["link"] == pytest.approx(most / 1e9)
    gathered = gpu.misses_per_batch * 64 / (1e3 * 512)
    assert gathered > found.seconds["link"]  # of both, beside each other, the longer one counts
    assert found.seconds["host_gather"] == pytest.approx(gathered - found.seconds["link"])
    assert "what a GPU takes for rows that it has is left out" in " ".join(found.notes)
    every = plan(2000, 64, host=10**6, gpu=125_000, stream=stream, speeds=speeds)
    assert every.seconds["host_gather"] == 0  # kernels fetch from a tier that holds every row
