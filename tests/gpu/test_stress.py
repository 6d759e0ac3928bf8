"""Prefetches beside writes, over many steps, and tables whose offsets need more than 32 bits."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from tests.gpu.conftest import Place
from tests.tiers.stack import ArrayTier
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.host import HostTier
from tierstore.stats import TierStats


def library(place: Place) -> Any:
    """The array library of the device: the oracle lives there, so that nothing waits for it."""
    if place.kind == "pageable":
        return np
    import cupy

    return cupy


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("streams", [1, 3])
def test_prefetches_beside_writes(place: Place, direct: bool, streams: int) -> None:
    emulated = place.kind == "pageable"
    if emulated and streams > 1:
        pytest.skip("streams of the emulator are numbers")
    steps, n, rows, depth = (40, 50, 300, 3) if emulated else (3000, 2000, 20_000, 4)
    steps = steps if direct or emulated else steps // 10
    xp = library(place)
    rng = np.random.default_rng(streams)
    below = ArrayTier(rng.integers(0, 256, (rows, 80), np.uint8))
    truth = place.put(below.records.copy())
    host = HostTier(below, slots=rows if direct else rows // 2, kind=place.kind, mapped=True)
    tier = GpuTier(host, slots=rows // 6, device=place.device)
    turns = [] if emulated else [xp.cuda.Stream(non_blocking=True) for _ in range(streams)]

    def batch() -> Any:
        hot = rng.zipf(1.2, n) % rows
        return place.put(np.where(rng.random(n) < 0.5, hot, rng.integers(0, rows, n)))

    coming = deque(batch() for _ in range(depth))
    wrong = xp.zeros(1, np.int64)
    for step in range(steps):
        turn = turns[step % streams] if turns else contextlib.nullcontext()
        if turns:
            # The oracle is the caller's: ordering it between streams is the caller's work.
            turn.wait_event(turns[step % streams - 1].record())
        with turn:
            coming.append(batch())
            tier.fetch(coming[-1], 2 * depth)
            ids = coming.popleft()
            with tier.lease(ids) as lease:
                data = xp.random.randint(0, 256, (lease.bound, 16)).astype(np.uint8)
                lease.scatter(data, 32, 48)
                truth[ids, 32:48] = data[lease.positions]
            distinct = place.put(rng.permutation(rows)[: n // 2])
            data = xp.random.randint(0, 256, (n // 2, 80)).astype(np.uint8)
            tier.write(distinct, data)
            truth[distinct] = data
            out = xp.empty((n, 80), np.uint8)
            tier.read(ids, out)
            wrong += xp.count_nonzero(out != truth[ids])
    if turns:
        turns[(steps - 1) % streams].synchronize()
    assert int(wrong[0]) == 0
    tier.flush()
    host.flush()
    np.testing.assert_array_equal(below.records, place.get(truth))
    tier.close()
    host.close()


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("streams", [1, 3])
def test_foreseen_batches_beside_writes(place: Place, streams: int) -> None:
    """Over a host tier that is a cache; most batches then finish without the host."""
    emulated = place.kind == "pageable"
    steps, n, rows, depth = (60, 12, 600, 3) if emulated else (2000, 300, 20_000, 4)
    xp = library(place)
    rng = np.random.default_rng(streams)
    below = ArrayTier(rng.integers(0, 256, (rows, 80), np.uint8))
    truth = place.put(below.records.copy())
    host = HostTier(below, slots=rows * 9 // 10, kind=place.kind, mapped=True)
    tier = GpuTier(host, slots=rows // 2, device=place.device)
    turns = [] if emulated else [xp.cuda.Stream(non_blocking=True) for _ in range(streams)]
    coming: deque[np.ndarray] = deque()
    wrong = xp.zeros(1, np.int64)
    settled = 0
    for step in range(steps + depth):
        hot = rng.zipf(1.2, n) % rows
        ids = np.where(rng.random(n) < 0.5, hot, rng.integers(0, rows, n)).astype(np.int64)
        turn = turns[step % streams] if turns else contextlib.nullcontext()
        if turns:
            turn.wait_event(turns[step % streams - 1].record())
        with turn:
            tier.await_fetches()
            host.fetch(ids, 2 * depth)
            tier.prefetch_for(ids, 2 * depth)
            coming.append(ids)
            if len(coming) <= depth:
                continue
            ids = coming.popleft()
            given = tier.prefetched_for(ids)
            given = place.put(ids) if given is None else given
            with tier.lease(given) as lease:
                data = xp.random.randint(0, 256, (lease.bound, 16)).astype(np.uint8)
                lease.scatter(data, 32, 48)
                truth[given, 32:48] = data[lease.positions]
            settled += not tier._batch.alone
            out = xp.empty((n, 80), np.uint8)
            tier.read(given, out)
            wrong += xp.count_nonzero(out != truth[given])
    if turns:
        turns[(steps + depth - 1) % streams].synchronize()
    assert int(wrong[0]) == 0
    assert settled < steps / 2
    tier.flush()
    host.flush()
    np.testing.assert_array_equal(below.records, place.get(truth))
    tier.close()
    host.close()


class NumberedRows:
    """A lower tier whose record i is the number i, over and over; it takes no memory."""

    def __init__(self, rows: int, record_bytes: int) -> None:
        self.rows, self.record_bytes, self.stats = rows, record_bytes, TierStats()

    def read(self, rows: Any, out: Any) -> None:
        out.view(np.int64)[:] = rows[:, None]

    def stream(self, rows: Any) -> Generator[tuple[slice, Any]]:
        records = np.empty((rows.size, self.record_bytes), np.uint8)
        self.read(rows, records)
        yield slice(0, rows.size), records

    def write(self, rows: Any, records: Any, *, resident: bool = False) -> None:
        raise NotImplementedError

    def stage(self, rows: Any) -> None:
        pass

    def flush(self) -> None:
        raise NotImplementedError


@pytest.mark.gpu
@pytest.mark.slow
def test_a_table_of_more_than_two_to_the_31_elements() -> None:
    import cupy

    from tierstore._tiers.gpu.device import CudaDevice

    rows, dim = 2_200_000, 1024
    assert rows * dim > 2**31
    device = CudaDevice()
    host = HostTier(NumberedRows(rows, 4 * dim), slots=rows, kind=device.arena_kind(rows * dim * 4))
    tier = GpuTier(host, slots=rows, device=device)
    last = cupy.arange(rows - 1000, rows)
    for _ in range(2):
        for start in range(0, rows, 200_000):
            ids = cupy.arange(start, min(start + 200_000, rows))[::-1].copy()
            out = cupy.empty((ids.size, 4 * dim), np.uint8)
            tier.read(ids, out)
            assert bool((out.view(np.int64) == ids[:, None]).all())
    assert tier.stats.misses == rows
    data = cupy.random.randint(0, 256, (1000, 4 * dim)).astype(np.uint8)
    tier.write(last, data)
    out = cupy.empty_like(data)
    tier.read(last, out)
    assert bool((out == data).all())
    tier.flush()
    np.testing.assert_array_equal(host.records[-1000:], data.get())
    tier.close()
    host.close()
