"""Random work over three tiers of any size equals the same work on one array."""

import numpy as np
import pytest

from tests.gpu.conftest import Place
from tests.gpu.every_kernel import all_kernels, reach_every_kernel
from tests.gpu.model import Twin
from tests.policy.naive import examples
from tierstore.policy import PolicySpec


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("policy", PolicySpec.registry)
@pytest.mark.nightly("3")
def test_random_work(place: Place, policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 5, 100, 700]))
    with Twin(
        place,
        rows=rows,
        record_bytes=int(rng.choice([16, 48, 512, 1040])),
        slots=int(rng.choice([1, 2, 10, 60, rows])),
        host_slots=int(rng.choice([1, 7, 50, rows])) if seed % 2 else rows,
        chunk=int(rng.integers(1, 9)) if seed % 3 == 0 else None,
        policy=examples(rows)[policy],
        seed=seed,
    ) as twin:
        twin.work(50, discards=True)
        twin.check()


@pytest.mark.variants(2, 4)
@pytest.mark.parametrize("record_bytes", [16, 32, 80, 528, 4096])
@pytest.mark.parametrize("direct", [True, False])
def test_every_size_of_record(place: Place, record_bytes: int, direct: bool) -> None:
    host_slots = 60 if direct else 13
    with Twin(
        place, rows=60, record_bytes=record_bytes, slots=9, host_slots=host_slots, seed=record_bytes
    ) as twin:
        twin.work(20, sizes=(1, 40))
        twin.check()


def test_a_little_work_reaches_every_kernel(place: Place) -> None:
    """So that compute-sanitizer, which is slow, can look at all of them."""
    assert reach_every_kernel(place) == all_kernels()
