"""What is left after the tiers below fail in the middle of a batch: everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu.conftest import Place
from tests.gpu.model import Twin
from tests.tiers.stack import ArrayTier
from tierstore.errors import StoreFullError


class Faulty(ArrayTier):
    """Fails every so often, before it does anything."""

    odds = 0.0
    rng = np.random.default_rng(1)

    def read(self, *given: Any, **named: Any) -> None:
        self._toss()
        super().read(*given, **named)

    def write(self, *given: Any, **named: Any) -> None:
        self._toss()
        super().write(*given, **named)

    def _toss(self) -> None:
        if self.rng.random() < self.odds:
            raise StoreFullError("the disk is full")


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("slots", [1, 12, 80])
def test_nothing_is_lost_when_the_tiers_below_fail(place: Place, slots: int, chunk: int) -> None:
    failures = 0
    with Twin(place, rows=150, slots=slots, host_slots=20, chunk=chunk, seed=slots) as twin:
        faulty = twin.below = twin.host.below = Faulty(twin.below.records)
        for _ in range(60):
            twin.write(twin.rng.permutation(150)[:10], 0, 32)
            faulty.odds = 0.3
            ids = twin.ids(40)
            try:
                if twin.rng.random() < 0.5:
                    twin.read(ids)
                else:
                    with twin.tier.lease(place.put(ids)) as lease:
                        twin.check_lease(lease, ids)
                twin.tier.flush()
            except StoreFullError:
                failures += 1
            faulty.odds = 0.0
        twin.check()
    assert failures > 10
