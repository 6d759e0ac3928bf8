"""GPU tiers whose map has places for the rows that batches asked for, not an entry for each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.gpu.conftest import Place
from tests.gpu.model import Twin
from tests.tiers.stack import ArrayTier
from tierstore import Budget, TableSpec
from tierstore._tiers import host, memory, slots
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.gpu.places import Places


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("host_slots", [700, 30])
@pytest.mark.parametrize("slots", [1, 10, 60, 700])
def test_random_work(place: Place, slots: int, host_slots: int) -> None:
    with Twin(place, rows=700, slots=slots, host_slots=host_slots, sparse=True, seed=slots) as twin:
        assert twin.tier.memory.places is not None
        twin.work(60, discards=True)
        twin.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.nightly("3")
def test_more_random_work(place: Place, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = int(rng.choice([1, 5, 100, 3000]))
    with Twin(
        place,
        rows=rows,
        record_bytes=int(rng.choice([16, 48, 1040])),
        slots=int(rng.choice([1, 2, 10, 60, rows])),
        host_slots=int(rng.choice([1, 7, 50, rows])) if seed % 2 else rows,
        chunk=int(rng.integers(1, 9)) if seed % 3 == 0 else None,
        sparse=True,
        seed=seed,
    ) as twin:
        twin.work(120, discards=True)
        twin.check()


def test_a_sweep_keeps_what_leases_use_in_host_memory(place: Place) -> None:
    with Twin(place, rows=500, slots=8, sparse=True) as twin:
        places = twin.tier.memory.places
        assert places is not None
        held = np.arange(100, 140)
        lease = twin.lease(held)
        twin.scatter(lease, held)
        other = twin.lease(np.arange(130, 160))
        for start in range(0, 500, 20):  # far more rows than there are places
            twin.read(np.arange(start, min(start + 20, 500)))
            twin.write(twin.ids(9))
            twin.check_lease(lease, held)
        assert (twin.slot_of()[held] != -1).all()
        twin.check_lease(other, np.arange(130, 160))
        twin.check()


def test_rows_that_are_there_cause_no_sweep(place: Place) -> None:
    """The host's count of ids exceeds the places again and again; the device's does not."""

    def swept() -> bool:
        assert twin.tier.memory.places is not None
        return bool(place.get(twin.tier.memory.places.header).view(np.uint64)[4])

    with Twin(place, rows=500, slots=40, sparse=True) as twin:
        some = np.arange(30)
        for _ in range(4):  # until the map has grown for such batches
            twin.read(some)
        for _ in range(50):
            twin.read(some)
            assert not swept()
        causes = []
        for start in range(30, 480, 15):  # these do take places
            twin.read(np.arange(start, start + 15))
            causes.append(swept())
        assert any(causes)
        assert not all(causes)
        twin.check()


def test_the_map_grows_with_a_batch_and_is_counted(place: Place) -> None:
    with Twin(place, rows=2000, slots=10, host_slots=100, sparse=True) as twin:
        before = twin.tier.memory.nbytes
        assert before == GpuMemory.bytes_for(2000, 64, 10) - 4 * 2000 + 10 * Places.BYTES
        twin.lease(np.arange(1500))
        twin.check_lease(*twin.leases[0])
        assert twin.tier.memory.nbytes > before + 1500 * 12
        twin.release()
        twin.check()


def test_which_map_a_budget_gives() -> None:
    """An array over all rows up to 64 MiB, and up to a tenth of the tier; else places."""
    record, rows = 512, 400_000_000
    assert not GpuMemory._is_sparse(1 << 24, record, 1, scored=False)
    assert GpuMemory._is_sparse((1 << 24) + 1, record, 1, scored=False)
    assert not GpuMemory._is_sparse(rows, record, 1, scored=True)
    kinds = set()
    for nbytes in np.linspace(1e8, 4e10, 150).astype(np.int64).tolist():
        slots = GpuMemory.slots_for(rows, record, nbytes)
        taken = GpuMemory.bytes_for(rows, record, slots)
        sparse = GpuMemory._is_sparse(rows, record, slots, scored=False)
        kinds.add(sparse)
        assert slots * (record + Places.BYTES if sparse else record) < taken <= nbytes
        assert sparse == (4 * rows > slots * (record + 25) // 9)
        more = GpuMemory.bytes_for(rows, record, slots + 1)
        assert more > nbytes
    assert kinds == {True, False}


def test_a_host_map_of_few_slots_is_no_array_in_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocate, asked = memory.allocate, list[int]()

    def noted(nbytes: int, kind: str) -> memory.Arena:
        asked.append(nbytes)
        return allocate(nbytes, "pageable")

    monkeypatch.setattr(memory, "allocate", noted)
    monkeypatch.setattr(slots, "_MOST_MAPPED", 40_000)
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 256, (50_000, 16), np.uint8)
    tier = host.HostTier(ArrayTier(truth.copy()), slots=30, kind="pinned", mapped=True)
    assert tier.view().slot_of is None
    assert asked[0] < tier.nbytes + 16 * memory.ALIGNMENT < 50_000
    for _ in range(50):
        rows, out = rng.integers(0, 50_000, 50), np.empty((50, 16), np.uint8)
        tier.read(rows, out)
        assert np.array_equal(out, truth[rows])
        written = rng.permutation(50_000)[:20]
        truth[written] = rng.integers(0, 256, (20, 16), np.uint8)
        tier.write(written, truth[written])
    tier.close()


@pytest.mark.slow
def test_a_table_of_more_rows_than_an_int32_counts(tmp_path: Path, place: Place) -> None:
    """The file is of holes, and the host tier keeps few rows; the reader has a slot for each."""
    torch = pytest.importorskip("torch")
    rows = (1 << 31) + (1 << 20) + 5
    rng, where = np.random.default_rng(5), torch.device(place.device.torch_name)
    universe = np.unique(rng.integers(0, rows, 3000))
    universe[[0, -1]] = 0, rows - 1
    truth: dict[int, Any] = {}
    spec = TableSpec(rows, 4, sparse=True)
    budget = Budget(host_rows=700, gpu_rows=90)

    def expected(ids: np.ndarray) -> np.ndarray:
        return np.array([truth.get(row, np.zeros(4)) for row in ids.tolist()], np.float32)

    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device=place.device) as store:
        table = store["t"]
        assert inside.space(table).gpu.memory.places is not None
        for step in range(60):
            ids = rng.choice(universe, int(rng.choice([1, 20, 400])), replace=False)
            given = torch.from_numpy(ids).to(where)
            if step % 3 == 0:
                values = rng.standard_normal((ids.size, 4)).astype(np.float32)
                table.write(given, torch.from_numpy(values).to(where))
                truth.update(zip(ids.tolist(), values, strict=True))
            elif step % 7 == 0:
                table.prefetch(ids)
                assert np.array_equal(table.read(ids), expected(ids))
            elif step % 10 == 1:
                with table.lease(given) as lease:
                    assert np.array_equal(lease.expand("weight").cpu(), expected(ids))
            else:
                assert np.array_equal(table.read(given).cpu(), expected(ids))
            if step % 20 == 19:
                store.commit()
        store.commit()
    with tierstore.open(tmp_path / "s") as reader:
        assert np.array_equal(reader["t"].read(universe), expected(universe))
