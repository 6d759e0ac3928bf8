"""A GPU tier beside the plain array it must agree with, bit for bit, and random work for both."""

from __future__ import annotations

import contextlib
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests import inside
from tests.gpu.conftest import Place
from tests.tiers.stack import ArrayTier, check
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.abi import Mode
from tierstore._tiers.gpu.lease import GpuLease
from tierstore._tiers.gpu.link import FeatureIds
from tierstore._tiers.host import HostTier
from tierstore.errors import ClosedError
from tierstore.policy import PolicySpec


def sparse_maps() -> Any:
    """Have GPU tiers made with a map of places, however few rows there are, unless these score."""
    return mock.patch.multiple(
        "tierstore._tiers.gpu.memory", _DIRECT_BYTES=0, _DIRECT_SHARE=sys.maxsize
    )


class Twin:
    """Three tiers, and `truth`, an array that gets the same writes."""

    def __init__(
        self,
        place: Place,
        *,
        rows: int = 100,
        record_bytes: int = 64,
        slots: int = 10,
        host_slots: int | None = None,
        chunk: int | None = None,
        policy: PolicySpec | None = None,
        sparse: bool = False,
        seed: int = 0,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.place = place
        self.truth = self.rng.integers(0, 256, (rows, record_bytes), np.uint8)
        self.below = ArrayTier(self.truth.copy())
        host_slots = rows if host_slots is None else min(host_slots, rows)
        self.host = HostTier(self.below, slots=host_slots, kind=place.kind, mapped=True)
        with sparse_maps() if sparse else contextlib.nullcontext():
            self.tier = GpuTier(self.host, slots=slots, device=place.device, policy=policy)
        if chunk is not None and inside.staging(self.tier) is not None:
            inside.staging(self.tier).limit = min(chunk, inside.staging(self.tier).limit)
        toss = np.random.default_rng(seed + 1)
        self.tier.ordering = mock.Mock(
            of=lambda ids, mode, **_: int(toss.integers(2 if mode == Mode.PREFETCH else 4))
        )
        self.from_host = 0.3
        self.leases: list[tuple[GpuLease, np.ndarray]] = []
        self.dead: list[GpuLease] = []
        self.announced: list[np.ndarray] = []

    def put(self, ids: np.ndarray) -> Any:
        """The ids, on the device or the host: those of a prefetch where they are the same."""
        rows = self.tier.prefetched_for(ids)
        if rows is not None:
            return rows
        return ids.copy() if self.rng.random() < self.from_host else self.place.put(ids)

    def close(self) -> None:
        self.tier.close()
        self.host.close()

    def __enter__(self) -> Twin:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(
        self, ids: np.ndarray, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        out = self.place.noise(ids.size, self.truth[:1, lo:hi].shape[1])
        for part, first in self.tier.parts(self.put(ids)):
            self.tier.read(part, out, lo, hi, first=first, admit=admit)
        np.testing.assert_array_equal(self.place.get(out), self.truth[ids, lo:hi])

    def write(
        self, ids: np.ndarray, lo: int = 0, hi: int | None = None, *, admit: bool = True
    ) -> None:
        shape = (ids.size, self.truth[:1, lo:hi].shape[1])
        data = self.rng.integers(0, 256, shape, np.uint8)
        given = self.place.put(data)
        for part, first in self.tier.parts(self.put(ids)):
            self.tier.write(part, given, lo, hi, first=first, admit=admit)
        for row, record in zip(ids, data, strict=True):
            self.truth[row, lo:hi] = record

    def lease(self, ids: np.ndarray) -> GpuLease:
        if not ids.size or self.rng.random() < 0.4:
            lease = self.tier.lease(self.put(ids))
        else:
            lo, hi = self.span()
            out = self.place.noise(ids.size, self.truth[:1, lo:hi].shape[1])
            lease = self.tier.lease(self.put(ids), out, lo, hi)
            np.testing.assert_array_equal(self.place.get(out), self.truth[ids, lo:hi])
        self.leases.append((lease, ids))
        return lease

    def features(self, starts: np.ndarray, lengths: np.ndarray) -> FeatureIds:
        """Features of so many ids, of tables that begin at these rows, end to end."""
        device = self.place.device
        rows = np.diff([*starts, len(self.truth)])
        bounds = device.upload(np.stack([starts, rows, np.arange(len(starts))]).astype(np.int64))
        return FeatureIds(device, lengths.tolist(), bounds, device.current_stream())

    def check_features(self) -> None:
        """Ids of features, each of its own table, become rows: beforehand, and when leased."""
        starts = np.array([0, *sorted(self.rng.choice(np.arange(1, len(self.truth)), 3, False))])
        sizes = np.diff([*starts, len(self.truth)])
        lengths = self.rng.integers(0, 12, len(starts))
        lengths[1], lengths[2] = 0, 7
        features = self.features(starts, lengths)
        of = np.arange(len(starts)).repeat(lengths)
        ids = self.rng.integers(0, sizes[of])
        given, rows = self.place.put(ids), self.place.noise(ids.size, 8).view(np.int64).reshape(-1)
        self.tier.in_space(given, rows, features, self.place.device.current_stream())
        np.testing.assert_array_equal(self.place.get(rows), starts[of] + ids)
        lo, hi = self.span()
        out = self.place.noise(ids.size, hi - lo)
        lease = self.tier.lease(given, out, lo, hi, features=features)
        np.testing.assert_array_equal(self.place.get(out), self.truth[starts[of] + ids, lo:hi])
        self.check_lease(lease, starts[of] + ids)
        lease.release()

    def check_lease(self, lease: GpuLease, ids: np.ndarray) -> None:
        get = self.place.get
        count, distinct = int(get(lease.count)[0]), np.unique(ids)
        assert count == distinct.size <= lease.bound
        positions = get(lease.positions)
        assert np.array_equal(np.unique(positions), np.arange(count))
        out = self.place.noise(lease.bound, self.truth.shape[1])
        lease.gather(out)
        np.testing.assert_array_equal(get(out)[positions], self.truth[ids])
        each = self.place.noise(ids.size, self.truth.shape[1])
        lease.read(each)
        np.testing.assert_array_equal(get(each), self.truth[ids])

    def scatter(self, lease: GpuLease, ids: np.ndarray, lo: int = 0, hi: int | None = None) -> None:
        shape = (lease.bound, self.truth[:1, lo:hi].shape[1])
        data = self.rng.integers(0, 256, shape, np.uint8)
        lease.scatter(self.place.put(data), lo, hi)
        self.truth[ids, lo:hi] = data[self.place.get(lease.positions)]

    def release(self, index: int = -1) -> None:
        self.leases.pop(index)[0].release()

    def check(self) -> None:
        """Compare everything, and look at what must hold between batches."""
        while self.leases:
            self.release()
        fetches = self.tier._fetches
        fetches.end(fetches.newest, self.place.device.current_stream())
        self.read(np.arange(len(self.truth)))
        arrays = {
            name: self.place.get(array) for name, array in inside.arrays(self.tier.memory).items()
        }
        slot_of, row_of = self.slot_of(), arrays["row_of"]
        assert (slot_of >= -1).all()
        held = np.flatnonzero(slot_of >= 0)
        assert np.array_equal(row_of[slot_of[held]], held)
        assert held.size == np.count_nonzero(row_of >= 0) <= self.tier.slots
        assert not arrays["pins"].any()
        assert not arrays["mark"].any()
        assert not (arrays["stamp"] >> 31).any()
        self.tier.flush()
        assert not self.place.get(inside.arrays(self.tier.memory)["dirty"]).any()
        self.host.flush()
        np.testing.assert_array_equal(self.below.records, self.truth)

    def slot_of(self) -> np.ndarray:
        """The slot of each row, -1 where it has none, whatever kind of map says so."""
        places = self.tier.memory.places
        if places is None:
            return self.place.get(inside.arrays(self.tier.memory)["slot_of"])
        rows, entries = map(self.place.get, places.arrays)
        taken = np.flatnonzero(rows >= 0)
        counted = int(self.place.get(places.header).view(np.uint64)[3])
        assert np.unique(rows[taken]).size == taken.size <= counted <= places.count
        assert (entries[rows < 0] == -1).all()
        found = np.full(self.tier.rows, -1, np.int32)
        found[rows[taken]] = entries[taken]
        return found

    def discard(self) -> None:
        """Go back to what was handed down last."""
        self.tier.discard()
        self.host.discard(np.empty(0, np.int64))
        self.truth[:] = self.below.records
        self.dead += [lease for lease, _ in self.leases]
        self.leases.clear()
        self.use_dead()

    def use_dead(self) -> None:
        """Use leases that a discard has ended: nothing may be read or written."""
        for lease in self.dead:
            data = self.place.noise(lease.bound, self.truth.shape[1])
            for use in (lease.gather, lease.scatter, lease.read):
                with pytest.raises(ClosedError, match="was rolled back"):
                    use(data)
            with pytest.raises(ClosedError):
                lease.trim(wait=False)
            lease.release()

    # -- random work

    def ids(self, n: int) -> np.ndarray:
        rows = len(self.truth)
        if self.rng.random() < 0.5:
            return self.rng.integers(0, rows, n)
        return (self.rng.zipf(1.3, n) % rows).astype(np.int64)

    def span(self) -> tuple[int, int]:
        record = self.truth.shape[1]
        if self.rng.random() < 0.3:
            return 0, record
        width = int(self.rng.choice([1, 2, 4, 8, 16]))
        low = int(self.rng.integers(0, record // width))
        high = int(self.rng.integers(low + 1, record // width + 1))
        return low * width, high * width

    def work(
        self, steps: int, sizes: tuple[int, ...] = (0, 1, 3, 33, 200), *, discards: bool = False
    ) -> None:
        names = ["read", "write", "lease", "use", "release", "fetch", "flush", "discard"]
        shares = [0.3, 0.25, 0.15, 0.1, 0.08, 0.2, 0.02, 0.05 * discards]
        for name in self.rng.choice(names, steps, p=np.divide(shares, sum(shares))):
            check(self.host)
            ids = self.ids(int(self.rng.choice(sizes)))
            if name != "fetch" and self.announced and self.rng.random() < 0.7:
                ids = self.announced.pop(0)
            if name == "read":
                self.read(ids, *self.span(), admit=bool(self.rng.random() < 0.8))
            elif name == "write":
                self.write(ids, *self.span(), admit=bool(self.rng.random() < 0.8))
            elif name == "fetch":
                window = int(self.rng.integers(1, 6))
                if self.rng.random() < 0.5:
                    self.tier.prefetch_for(ids, window)
                    self.announced.append(ids)
                else:
                    self.tier.fetch(self.put(ids), window)
            elif name == "flush":
                self.tier.flush()
            elif name == "discard":
                self.discard()
            elif name == "release" and self.leases:
                self.release(int(self.rng.integers(len(self.leases))))
            elif name == "lease":
                self.use(self.lease(ids), ids)
                if self.rng.random() < 0.5:
                    self.release()
            elif name == "use" and self.leases:
                self.use(*self.leases[int(self.rng.integers(len(self.leases)))])
        self.use_dead()

    def use(self, lease: GpuLease, ids: np.ndarray) -> None:
        self.check_lease(lease, ids)
        if self.rng.random() < 0.6:
            self.scatter(lease, ids, *self.span())
