"""When batches are copied in the order of host memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.tiers.stack import ArrayTier
from tierstore._tiers.gpu.abi import TIER, Mode
from tierstore._tiers.gpu.link import Ordering, region_bits
from tierstore._tiers.host import HostTier

REGIONS = TIER.constants["REGIONS"]


@pytest.mark.parametrize("rows", [1, 2, 4095, 4096, 4097, 8192, 8193, 16_000_000, 2**33 + 1])
def test_regions_cover_every_row(rows: int) -> None:
    size = region_bits(rows)
    assert (rows - 1) >> size < REGIONS
    assert size == 0 or (rows - 1) >> (size - 1) >= REGIONS


CLAIMS, WAITS = Ordering.CLAIMS, Ordering.WAITS


def ordering(*, host_slots: int = 50, kind: str = "managed", gib: float = 2) -> Ordering:
    host = HostTier(ArrayTier(np.zeros((50, 16), np.uint8)), slots=host_slots)
    host.arena.kind = kind
    host.arena.array = mock.Mock(nbytes=int(gib * 2**30))
    return Ordering(host, slots=1 << 20)


READ: dict[str, Any] = {"ids": 100_000, "mode": Mode.READ, "admit": True}
WRITE_THERE: dict[str, Any] = {"ids": 100_000, "mode": Mode.WRITE, "admit": False}


def test_pinned_memory_is_worth_it_where_it_is_large() -> None:
    pinned = ordering(kind="pinned")
    assert pinned.of(**READ) == CLAIMS
    assert pinned.of(**{**READ, "mode": Mode.LEASE}) == CLAIMS
    assert pinned.of(**{**READ, "admit": False}) == WAITS
    assert pinned.of(**{**READ, "ids": 2 << 20}) == CLAIMS | WAITS  # more than slots
    assert pinned.of(**{**READ, "ids": 2 << 20, "mode": Mode.PREFETCH}) == CLAIMS
    assert ordering(kind="pinned", gib=0.5).of(**READ) == 0
    assert ordering(kind="managed").of(**READ) == 0


def test_writes_to_host_memory_are_worth_it() -> None:
    assert ordering().of(**WRITE_THERE) == WAITS
    assert ordering().of(**{**WRITE_THERE, "admit": True, "ids": 2 << 20}) == WAITS
    assert ordering().of(**{**WRITE_THERE, "admit": True}) == 0


def test_few_ids_are_not_worth_it() -> None:
    assert ordering(kind="pinned").of(**{**READ, "ids": 5000}) == 0
    assert ordering().of(**{**WRITE_THERE, "ids": 5000}) == 0


def test_a_cache_has_no_order() -> None:
    assert ordering(host_slots=20, kind="pinned").of(**READ) == 0
