"""Scans keep resident memory flat, that of mapped files too, whatever the size of the table."""

import mmap
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore import _io
from tierstore.reporting import write_report

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


def sampled(store):
    """Rows all over the table, in any order and in one piece, as a report and `get` read them."""
    ids = np.random.default_rng(4).permutation(ROWS)[: ROWS // 8]
    table = store["item"]
    for field in (None, ["weight"]):
        for order in (ids, np.sort(ids)):
            table.read(order, field, cache=False)
            yield


def exported(store):
    ids = np.random.default_rng(5).permutation(ROWS)[: ROWS // 8]
    place = Path(store.path).parent / "some.npy"
    tierstore.export_table(store["item"], place, rows=ids, force=True)
    yield


def verified_in_part(store):
    seen = []
    tierstore.verify(
        store.path, sample=ROWS // 8, progress=lambda *_: seen.append(resident_file_bytes())
    )
    yield
    assert max(seen) - seen[0] < LIMIT


def reported(store):
    write_report(store, Path(store.path).parent / "r.html", force=True)
    yield


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("work", [scanned, verified, verified_in_part, sampled, exported, reported])
def test_pages_behind_a_reader_are_let_go(path, work):
    assert grown_by(path, work) < LIMIT


@pytest.mark.slow
def test_pages_of_many_tables_are_let_go(tmp_path):
    spec = tierstore.TableSpec(ROWS // 4, DIM, init=tierstore.initializers.normal(mean=0, std=1))
    with tierstore.create(tmp_path / "s.tier", dict.fromkeys("abcd", spec)):
        pass

    def work(store):
        for name in store:
            yield store[name].read(np.arange(0, ROWS // 4, 7), cache=False)

    assert grown_by(tmp_path / "s.tier", work) < LIMIT


def test_without_that_they_stay(path, monkeypatch):
    monkeypatch.setattr(_io, "let_go", lambda array: None)
    assert grown_by(path, scanned) > ROWS * DIM * 4 / 2
    assert grown_by(path, sampled) > ROWS * DIM * 4 / 2


def test_rows_that_are_read_once_are_those_of_any_read(path):
    rng = np.random.default_rng(6)
    with tierstore.open(path, budget=tierstore.Budget(host=0, gpu=0)) as store:
        table = store["item"]
        whole = np.concatenate(list(table.scan()))
        for ids in (
            rng.integers(0, ROWS, 5000),
            np.sort(rng.integers(0, ROWS, 5000)),
            np.sort(rng.permutation(ROWS)[:5000]),
            np.repeat(np.arange(0, ROWS, 997), 3),
            np.arange(500),
        ):
            assert table.read(ids, cache=False).tobytes() == whole[ids].tobytes()


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
