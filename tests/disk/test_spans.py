"""Which deltas are compacted into one: few spans of versions, and few writes of a record."""

import numpy as np
import pytest

from tests.every import every
from tierstore._disk.manifest import DeltaInfo
from tierstore._disk.merging import spans


class Stub:
    """A delta of a version, for what looks at no more."""

    def __init__(self, version: int, rows: int = 1) -> None:
        self.info = DeltaInfo(f"delta {version}", rows, rows, version, 0)


@every(newest=[17, 256, 257, 4095, 70_000, 1_048_575, 1_048_576, 3_000_000], most=[6, 15, 30, 48])
def test_spans_are_few_consecutive_and_stay_together(newest, most):
    rng = np.random.default_rng(newest)
    versions = np.unique(rng.integers(1, newest + 1, 3000)).tolist()
    groups = spans(list(map(Stub, versions)), newest, most)
    assert [each.info.version for group in groups for each in group] == versions
    assert len(groups) <= most
    power = newest & (newest - 1) == 0  # all versions before it are one complete span
    assert len(groups) > 1 or power or most < 2 * newest.bit_length()


@pytest.mark.parametrize(("most", "times"), [(64, 5), (20, 12)])
@pytest.mark.parametrize("commits", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_record_is_written_a_few_times(most, times, commits):
    """Thousands of commits of one record, compacted at a threshold of deltas."""
    deltas, written = [], 0
    for version in range(1, commits + 1):
        deltas.append(Stub(version))
        if len(deltas) > most:
            groups = spans(deltas, version, most * 3 // 4)
            rows = [sum(each.info.rows for each in part) for part in groups]
            written += sum(n for n, part in zip(rows, groups, strict=True) if len(part) > 1)
            deltas = [Stub(part[-1].info.version, n) for n, part in zip(rows, groups, strict=True)]
    assert written < times * commits
