import numpy as np
import pytest

import tierstore
from tests import inside
from tests.pairs import pairs
from tierstore import policy
from tierstore.errors import InvalidInputError
from tierstore.sizing import load_stream, simulate, stream_of
from tierstore.sizing.simulation import NEVER, Replay, next_uses, optimum, replay


def zipf(batches: int = 60, size: int = 200, rows: int = 2000, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    scattered = rng.permutation(rows)
    return [scattered[(rng.random(size) ** 3 * rows).astype(np.int64)] for _ in range(batches)]


def test_the_optimum_is_what_trying_everything_finds():
    """Three rows, two slots or one: all choices of what to keep, batch by batch."""
    rng = np.random.default_rng(5)
    for slots in (1, 2):
        for _ in range(30):
            batches = [rng.permutation(4)[: rng.integers(1, 3)] for _ in range(7)]
            stream = stream_of(batches, rows=4)
            assert optimum(stream, slots, measured=1).unique_hits == best(batches, slots)


def test_rows_that_the_optimum_drops_are_evicted():
    stream = stream_of([[0], [1], [1], [0]])
    rates = optimum(stream, 1, measured=1)
    assert (rates.unique_hits, rates.evictions) == (
        1,
        2,
    )  # 0 for 1, and 1 after its last use


def best(batches: list[np.ndarray], slots: int) -> int:
    from itertools import combinations

    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for rows in batches:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            now = hits + len(held & set(rows.tolist()))
            pool = held | set(rows.tolist())
            for count in range(min(slots, len(pool)) + 1):
                for choice in combinations(sorted(pool), count):
                    kept = frozenset(choice)
                    after[kept] = max(after.get(kept, 0), now)
        reached = after
    return max(reached.values())


def test_next_uses():
    stream = stream_of([[1, 2], [2, 3], [1, 1]])
    found = [dict(zip(b.rows.tolist(), use.tolist(), strict=True))
             for b, use in zip(stream.batches, next_uses(stream), strict=True)]  # fmt: skip
    assert found == [{1: 2, 2: 1}, {2: NEVER, 3: NEVER}, {1: NEVER}]


def test_no_policy_beats_the_optimum_and_more_slots_never_hurt_it():
    found = simulate(
        stream_of(zipf()), policies=["lru", "lfu", "lookahead"], sizes=(0.02, 0.1, 0.3)
    )
    assert found.policies == ["lru", "lfu", "lookahead", "optimum"]
    best_rates = [point.unique_hit_rate for point in found.curve("optimum")]
    assert best_rates == sorted(best_rates)
    for name in found.policies:
        for point, most in zip(found.curve(name), best_rates, strict=True):
            assert 0 <= point.unique_hit_rate <= most + 1e-12
            assert point.slots == int(point.share * 2000 + 0.5)
            missed = (1 - point.unique_hit_rate) * point.misses_per_batch
            assert missed >= 0
    lfu, lru = found.curve("lfu")[1], found.curve("lru")[1]
    assert lfu.unique_hit_rate > lru.unique_hit_rate, "independent draws: frequency wins"


def test_a_tier_for_every_row_misses_each_row_once():
    batches = zipf(10)
    stream = stream_of(batches, rows=2000)
    (point,) = simulate(
        stream, policies=["lru"], sizes=[2000], with_optimum=False, measured=1
    ).points
    assert point.misses_per_batch * 10 == np.unique(np.concatenate(batches)).size
    assert point.evictions_per_batch == 0


@pytest.mark.variants(5, 9)
@pairs(chosen=["lru", "lfu", "lookahead"], leases=[False, True], slots=[40, 200, 900])
def test_what_is_predicted_is_what_a_store_does(tmp_path, chosen, leases, slots):
    """The hit rates of a run, over requested and distinct ids, within 2 points of the replay's."""
    batches = zipf(80)
    budget = tierstore.Budget(host_rows=slots)
    specs = {"t": tierstore.TableSpec(rows=2000, dim=4)}
    with tierstore.create(tmp_path / "s", specs, budget=budget, policy=chosen) as store:
        table = store["t"]
        with table.record(tmp_path / "trace"):
            for number, ids in enumerate(batches):
                if chosen == "lookahead":
                    for coming in batches[number and number + 4 : number + 5]:
                        table.prefetch(coming)
                    inside.owner(table).prefetcher.wait()
                if leases:
                    with table.lease(ids) as lease:
                        lease.write("weight", lease.read("weight"))
                else:
                    table.read(ids)
        stats = table.stats()["host"]
        store.rollback()
    stream = load_stream(tmp_path / "trace")
    rates = replay(stream, policy.choose(chosen), slots, leases=leases, measured=1)
    assert rates.requested == stats.requested
    if chosen != "lookahead":  # what is fetched ahead counts as a hit when it is used
        assert rates.hit_rate == pytest.approx(stats.hit_rate, abs=0.02)
    else:
        assert stats.hit_rate >= rates.hit_rate - 0.02
    if leases:
        assert not stats.unique_sampled
        assert stats.unique == rates.unique


def test_a_batch_larger_than_the_tier_leaves_a_tier_full_of_its_rows():
    stream = stream_of([np.arange(50), np.arange(50), np.arange(50)], rows=100)
    for name in ("lru", "lfu"):
        for options in ({}, {"chance": True}, {"leases": True}):
            rates = replay(stream, policy.choose(name), 10, measured=0.5, **options)
            assert rates.unique_hits == 10 * rates.batches


def test_sizes_are_parts_or_slots():
    stream = stream_of(zipf(5))
    found = simulate(stream, policies={"mine": policy.lfu(3)}, sizes=[0.5, 7, 10**9])
    assert [(p.policy, p.slots) for p in found.points[:3]] == [
        ("mine", stream.rows // 2), ("mine", 7), ("mine", stream.rows),
    ]  # fmt: skip
    for wrong in ([], [0.0], [1.5], [0]):
        with pytest.raises(InvalidInputError):
            simulate(stream, sizes=wrong)
    with pytest.raises(InvalidInputError, match="measured"):
        simulate(stream, measured=0)


def test_at_least_a_row_and_a_batch_are_counted():
    stream = stream_of(zipf(5))
    found = simulate(stream, sizes=[1e-9], measured=1e-18)
    assert [point.slots for point in found.points] == [1, 1, 1]
    assert found.measured_batches == 1


def test_the_share_of_rows_that_are_asked_for_first():
    batches = [np.arange(n * 10, n * 10 + 20) for n in range(10)]  # half of each batch is new
    for measured in (0.2, 0.5):
        assert simulate(stream_of(batches), sizes=[0.5], measured=measured).first_touch_rate == 0.5


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_as_many_batches_are_announced_ahead_as_are_asked_for(monkeypatch, depth):
    announced, seen = [], []
    announce, use = Replay.announce, Replay.use
    monkeypatch.setattr(
        Replay, "announce", lambda tier, batch: announced.append(batch) or announce(tier, batch)
    )
    monkeypatch.setattr(
        Replay, "use", lambda tier, batch: seen.append(len(announced)) or use(tier, batch)
    )
    stream = stream_of(zipf(6))
    replay(stream, policy.lookahead(), 9, depth=depth)
    assert seen == [min(number + depth + 1, 6) for number in range(6)]
    assert announced == stream.batches


def test_the_answer_is_plain_data():
    import json

    seen: list[tuple[int, int]] = []
    found = simulate(stream_of(zipf(6)), sizes=(0.1,), progress=lambda *at: seen.append(at))
    assert seen == [(batch + 1, 18) for batch in range(18)]  # three replays
    data = json.loads(json.dumps(found.to_dict()))
    assert data["rows"] == found.rows
    assert [point["policy"] for point in data["points"]] == ["lru", "lfu", "optimum"]
