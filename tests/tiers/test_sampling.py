"""The hit rate of reads over distinct ids, against what a set counts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore import Budget
from tierstore._tiers.sampling import Sampling


@pytest.mark.parametrize("period", [1, 2, 64, 512])
def test_each_batch_is_stood_for_once(period: int) -> None:
    """Spans follow each other without gaps, and the batch that stands for one is within it."""
    sampling, begin, weights = Sampling(period), 0, []
    for number in range(40 * period):
        if number >= sampling.at:
            weights.append(sampling.take())
            assert begin <= number < begin + weights[-1]
            begin += weights[-1]
    assert weights[:2] == [1, 1]
    assert max(weights) == period
    assert len(weights) <= 40 + 2 + math.log2(period)


def test_no_place_in_a_span_is_preferred() -> None:
    """Or batches that come at regular times, such as a validation, would count too much."""
    sampling, places = Sampling(64), np.zeros(8)
    for number in range(64 * 2000):
        if number >= sampling.at:
            places[number % 64 // 8] += 1
            sampling.take()
    assert (abs(places / places.sum() - 1 / 8) < 0.01).all()


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize(
    ("rows", "slots", "size"), [(1_000, 1_000, 64), (5_000, 600, 64), (20_000, 30_000, 128)]
)
def test_the_rate_of_reads_is_that_of_a_set(
    tmp_path: Path, rows: int, slots: int, size: int
) -> None:
    """From the second batch on: a cold cache is told as it is, and soon a warm one, too."""
    spec = tierstore.TableSpec(rows, 4, init=tierstore.normal(seed=1))
    tierstore.create(tmp_path / "s", {"t": spec}).close()
    seen = {2: 1e-9, 10: 0.10, 50: 0.08, 100: 0.06, 500: 0.04}
    errors: dict[int, list[float]] = {after: [] for after in seen}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        with tierstore.open(tmp_path / "s", budget=Budget(host_rows=slots)) as store:
            table, unique = store["t"], 0
            assert table.stats()["host"].unique_hit_rate == 0
            for batch in range(1, 501):
                ids = rng.zipf(1.3, size) % rows
                table.read(ids)
                unique += np.unique(ids).size
                if batch in seen:
                    found = table.stats()["host"]
                    missed = found.bytes_promoted // 16
                    errors[batch].append(found.unique_hit_rate - (1 - missed / unique))
                    assert found.unique_sampled is (batch > 2)
    for after, most in seen.items():
        assert abs(np.mean(errors[after])) <= most, (after, errors)


def test_rates_of_reads_and_steps_add_up(tmp_path: Path) -> None:
    """Leases count every batch, of reads some stand for many: both are of the same size."""
    spec = tierstore.TableSpec(100, 4)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=100)) as store:
        table, ids = store["t"], np.arange(10)
        for _ in range(256):
            table.read(ids)
        reads = table.stats()["host"].unique
        assert reads == 2560
        for _ in range(256):
            table.lease(ids).release()
        assert table.stats()["host"].unique == 2 * reads
