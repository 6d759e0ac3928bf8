"""Scans keep resident memory flat, that of mapped files too, whatever the size of the table."""

import mmap
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore import _io

ROWS, DIM = 1 << 18, 64  # 64 MiB
LIMIT = 24 << 20


def resident_file_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("RssFile")]
    return 1024 * int(found.split()[1])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("scan") / "s.tier"
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.initializers.normal(mean=0, std=1))
    with tierstore.create(path, {"item": spec}) as store:  # every row, in a delta too
        values = np.random.default_rng(1).standard_normal((ROWS // 2, DIM), np.float32)
        store["item"].write(np.arange(0, ROWS, 2), values)
        store.commit()
    return path


def grown_by(path, work):
    """Return how many bytes of mapped files became resident at most while a table was scanned."""
    with tierstore.open(path, budget=tierstore.Budget(host=0, gpu=0)) as store:
        before = most = resident_file_bytes()
        for _ in work(store):
            most = max(most, resident_file_bytes())
    return most - before


def scanned(store):
    yield from store["item"].scan()


def verified(store):
    seen = []
    assert store.verify(progress=lambda *_: seen.append(resident_file_bytes())).ok
    yield
    assert max(seen) - seen[0] < LIMIT


@pytest.mark.parametrize("work", [scanned, verified])
def test_pages_behind_a_scan_are_let_go(path, work):
    assert grown_by(path, work) < LIMIT


def test_without_that_they_stay(path, monkeypatch):
    monkeypatch.setattr(_io, "let_go", lambda array: None)
    assert grown_by(path, scanned) > ROWS * DIM * 4 / 2


def test_rows_read_the_same_afterwards(path):
    with tierstore.open(path, budget=tierstore.Budget(host=0, gpu=0)) as store:
        first, second = (np.concatenate(list(store["item"].scan())) for _ in range(2))
        assert first.tobytes() == second.tobytes()
        ids = np.random.default_rng(2).integers(0, ROWS, 5000)
        assert store["item"].read(ids).tobytes() == first[ids].tobytes()


def test_only_mapped_files_are_let_go():
    """Elsewhere the contents would be lost, as the last lines show."""
    size = 8 * mmap.PAGESIZE
    region = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    anonymous = np.frombuffer(region, np.uint8)
    for array in (np.empty(size, np.uint8), anonymous):
        array[:] = np.random.default_rng(3).integers(1, 256, size)
        expected = array.copy()
        _io.let_go(array)
        _io.let_go(array[mmap.PAGESIZE :].reshape(-1, 64))
        np.testing.assert_array_equal(array, expected)
    region.madvise(mmap.MADV_DONTNEED)
    assert not anonymous.any()
