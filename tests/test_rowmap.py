import mmap
import resource
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tierstore import _rowmap
from tierstore._disk.index import DeltaIndex
from tierstore._rowmap import SparseMap, bytes_for, resize, row_map, slots_of, zeros
from tierstore._tiers.slots import CachedSlots
from tierstore.policy import lru

MANY = 1_000_000_000


@pytest.fixture(params=["an array", "blocks"])
def dense_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rowmap, "_DENSE_ROWS", 1 << 30 if request.param == "an array" else 0)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000, 20_000])
def test_a_map_is_as_an_array(dense_rows: None, rows: int) -> None:
    rng = np.random.default_rng(rows)
    taken: list[npt.NDArray[Any]] = []

    def take(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
        taken.append(zeros(name, size, dtype))
        return taken[-1]

    found, oracle = row_map(rows, take), np.zeros(rows, np.int32)
    for _ in range(50):
        some = rng.permutation(rows)[: rng.integers(0, rows + 1)]
        numbers = rng.integers(0, 2**31, some.size).astype(np.int32)
        found[some], oracle[some] = numbers, numbers
        wanted = rng.integers(0, rows, 300)
        assert np.array_equal(slots_of(wanted, found) + 1, oracle[wanted])
    assert sum(array.nbytes for array in taken) == found.nbytes == bytes_for(rows)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
def test_a_map_of_more_rows_keeps_its_numbers(dense_rows: None, rows: int) -> None:
    rng = np.random.default_rng(rows)
    found, oracle = row_map(rows), np.zeros(5000, np.int32)
    for more in (rows, rows + 1, rows + 64, 5000):
        resize(found, more)
        some = rng.permutation(more)[: more // 2]
        oracle[some] = rng.integers(0, 2**31, some.size)
        found[some] = oracle[some]
        assert np.array_equal(slots_of(np.arange(more), found) + 1, oracle[:more])
        assert found.nbytes == bytes_for(more)


def test_a_map_grows_by_blocks_that_are_used() -> None:
    found = SparseMap(MANY, zeros)
    assert found.size == 64
    slots_of(np.arange(0, MANY, 1 << 20), found)
    assert found.size == 64, "looking up takes memory"
    rows = np.array([5, 6, 63, 64, MANY - 1])
    found[rows] = np.arange(1, 6)
    assert found.size == 4 * 64
    assert slots_of(rows, found).tolist() == [0, 1, 2, 3, 4]


def used_pages(found: SparseMap, taken: list[npt.NDArray[Any]]) -> int:
    """The pages of a map in which a number was set."""
    pages = 0
    for array in taken:
        used = array[: found.size] if array is found.numbers else array
        pages += np.unique(np.flatnonzero(used) * 4 // mmap.PAGESIZE).size
    return pages


def test_the_first_rows_of_a_map_take_no_more_memory_than_later_ones() -> None:
    """Rows all over a large table take memory for their own number, not for the table's."""
    taken: list[npt.NDArray[Any]] = []

    def take(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
        taken.append(zeros(name, size, dtype))
        return taken[-1]

    found = SparseMap(MANY, take)
    rng, pages = np.random.default_rng(6), [0]
    for _ in range(2):
        found[np.unique(rng.integers(0, MANY, 10_000))] = 1
        pages.append(used_pages(found, taken))
    first, second = np.diff(pages)
    assert first < 1.5 * second, pages


def taken_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeltaIndex(MANY),
        lambda: CachedSlots(MANY, 1 << 24, lru(), zeros),
    ],
)
def test_maps_of_many_rows_take_no_memory_before_use(make: Any) -> None:
    make()  # what it takes once
    before = taken_pages()
    made = make()
    assert taken_pages() - before < 2000, f"{mmap.PAGESIZE} B each"
    del made


def test_an_index_of_runs_and_of_scattered_rows(dense_rows: None) -> None:
    """Runs of neighbours are set as a whole, within blocks that others have used before or not."""
    rng, rows = np.random.default_rng(5), 3000
    index, oracle, place = DeltaIndex(rows), np.zeros(rows, np.int32), 1
    for number in range(60):
        start, count = rng.integers(0, rows), int(rng.integers(0, 300))
        ids = np.arange(start, min(rows, start + count))
        if number % 3 == 0:
            ids = rng.integers(0, rows, count)
        places = np.arange(place, place + ids.size, dtype=np.int32)
        place += ids.size
        index.entries.point(ids, places)
        np.maximum.at(oracle, ids, places)
        assert np.array_equal(index.entries.take(np.arange(rows)), oracle)
