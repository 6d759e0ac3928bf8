import mmap
import resource
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore._core import find_slots, set_numbers
from tierstore._disk.index import DeltaIndex
from tierstore._rowmap import RowMap, bytes_for, entries_for, is_hashed, zeros
from tierstore._tiers.slots import CachedSlots, DirectSlots
from tierstore.policy import lru

MANY = 1_000_000_000
ENTRY = np.dtype([("row", "<i8"), ("number", "<i4")])


def rows_at(places: int, homes: list[int], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """A row for each of the homes given, among so many places, as the core chooses them."""
    found: dict[int, list[int]] = {}
    while any(home not in found for home in homes):
        for row in rng.integers(0, 2**63 - 1, 64 * places).tolist():
            mixed = (row ^ row >> 32) * 0x9E3779B97F4A7C15 % 2**64
            found.setdefault((mixed >> 32) * places >> 32, []).append(row)
    return np.array([found[home][number] for number, home in enumerate(homes)], np.int64)


@given(st.data())
def test_entries_that_share_places_are_as_a_dict(data: st.DataObject) -> None:
    """Rows whose homes are the same, or behind each other's, around the end; one stays empty."""
    places = data.draw(st.integers(1, 9))
    homes = data.draw(st.lists(st.integers(0, places - 1), min_size=1, max_size=12))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    while True:  # each its own row
        rows = rows_at(places, homes, rng) if max(map(homes.count, homes)) < 13 else None
        assert rows is not None
        if np.unique(rows).size == rows.size:
            break
    entries, oracle, held = np.zeros(places, ENTRY), dict[int, int](), 0
    for _ in range(data.draw(st.integers(1, 30))):
        row = int(rows[data.draw(st.integers(0, rows.size - 1))])
        number, raises = data.draw(st.integers(0, 5)), data.draw(st.booleans())
        given = np.array([row]), np.array([number], np.int32), raises
        if raises and oracle.get(row, 0) >= number:
            pass
        elif number == 0:
            oracle.pop(row, None)
        elif row not in oracle and len(oracle) + 1 >= places:
            with pytest.raises(IndexError):
                set_numbers(entries, *given, held)
            continue
        else:
            oracle[row] = number
        held = set_numbers(entries, *given, held)
        assert held == len(oracle) == np.count_nonzero(entries["number"])
        found = np.empty(rows.size, np.int64)
        assert find_slots(entries, 9, rows, found) == sum(r not in oracle for r in rows.tolist())
        assert (found + 1).tolist() == [oracle.get(each, 0) for each in rows.tolist()]


@pytest.mark.parametrize("most", [None, 0.02, 1.0])
@pytest.mark.parametrize("rows", [1, 63, 1000, 20_000])
def test_a_map_is_as_an_array(rows: int, most: float | None) -> None:
    """Of any number of rows, and of at most so many, which are hashed if they are few."""
    rng = np.random.default_rng(rows)
    held = None if most is None else max(1, int(most * rows))
    taken: list[npt.NDArray[Any]] = []

    def take(name: str, size: int, dtype: Any) -> npt.NDArray[Any]:
        taken.append(zeros(name, size, dtype))
        return taken[-1]

    found, oracle = RowMap(rows, held, take), np.zeros(rows, np.int32)
    for _ in range(50):
        some = rng.permutation(rows)[: rng.integers(0, (held or rows) + 1)]
        numbers = rng.integers(1, 2**31, some.size).astype(np.int32)
        if held is not None:  # the others lose theirs, as slots go from row to row
            others = np.setdiff1d(np.flatnonzero(oracle), some)
            found.set(others, None)
            oracle[others] = 0
        raises = bool(rng.integers(2))
        found.set(some, numbers, raises=raises)
        oracle[some] = np.maximum(oracle[some], numbers) if raises else numbers
        wanted = rng.integers(0, rows, 300)
        assert np.array_equal(found.find(wanted) + 1, oracle[wanted])
        assert np.array_equal(
            np.sort(found.numbers[found.numbers > 0]), np.sort(oracle[oracle > 0])
        )
    if held is not None:
        assert sum(array.nbytes for array in taken) == found.nbytes == bytes_for(rows, held)
        assert (found.array is None) == is_hashed(rows, held) == (2 * (24 * held + 24) < 4 * rows)


@pytest.mark.parametrize("most", [None, 30])
def test_a_map_of_more_rows_keeps_its_numbers(most: int | None) -> None:
    rng, rows = np.random.default_rng(4), 20
    found, oracle = RowMap(rows, most), dict[int, int]()
    for more in (rows, 21, 700, 701, 5000, 2**40, 2**63 - 1):
        found.grow(more)
        some = rng.integers(0, more, 4)
        numbers = rng.integers(1, 2**31, some.size).astype(np.int32)
        found.set(some, numbers)
        oracle.update(zip(some.tolist(), numbers.tolist(), strict=True))
        asked = np.array([*oracle, 19, more - 1])
        assert (found.find(asked) + 1).tolist() == [oracle.get(row, 0) for row in asked.tolist()]
    assert found.array is None


def test_a_map_takes_memory_for_rows_with_a_number() -> None:
    """24 bytes each and half as much to grow into, until an array by row is not twice that."""
    rng, rows = np.random.default_rng(3), 300_000
    found = RowMap(rows)
    found.find(np.arange(rows))
    assert found.nbytes <= mmap.PAGESIZE, "looking up takes memory"
    seen = np.empty(0, np.int64)
    for count in (10, 100, 1000, 10_000):
        some = rng.integers(0, rows, count)
        found.set(some, np.ones(count, np.int32))
        seen = np.union1d(seen, some)
        least = max(seen.size * 3 // 2 + 10, 169)
        assert found.array is None and found.nbytes <= 12 * entries_for(least)
    for _ in range(20):
        found.set(rng.integers(0, rows, 10_000), np.ones(10_000, np.int32))
    assert found.nbytes == 4 * rows and found.array is not None


def test_entries_that_are_all_taken_have_no_room_whatever_is_said_of_them() -> None:
    entries = np.zeros(5, ENTRY)
    entries["row"], entries["number"] = np.arange(5), 1
    before = entries.copy()
    with pytest.raises(IndexError, match="position 0"):
        set_numbers(entries, np.array([7]), np.array([2], np.int32), False, 0)
    assert np.array_equal(entries, before)


def test_all_rows_find_their_numbers_however_they_are_spread() -> None:
    """Neighbours, multiples of powers of two, tables one after another: few share a home."""
    for step in (1, 2, 64, 4096, 1 << 20, 1 << 32, (1 << 40) + 1):
        rows = np.arange(10_000, dtype=np.int64) * step
        found = RowMap(2**62, rows.size)
        found.set(rows, np.arange(1, rows.size + 1, dtype=np.int32))
        places = np.flatnonzero(found.numbers)
        mixed = (rows.astype(np.uint64) ^ rows.astype(np.uint64) >> np.uint64(32)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        homes = (mixed >> np.uint64(32)) * np.uint64(found.places.size) >> np.uint64(32)
        where = np.empty(rows.size, np.int64)
        where[found.numbers[places] - 1] = places
        assert ((where - homes.astype(np.int64)) % found.places.size).mean() < 6, step
        assert np.array_equal(found.find(rows), np.arange(rows.size))


def taken_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize(
    "make",
    [lambda: DeltaIndex(MANY), lambda: CachedSlots(MANY, 1 << 24, lru(), zeros)],
)
def test_maps_of_many_rows_take_no_memory_before_use(make: Any) -> None:
    make()  # what it takes once
    before = taken_pages()
    made = make()
    assert taken_pages() - before < 2000, f"{mmap.PAGESIZE} B each"
    del made


def test_a_slot_for_each_of_more_rows_than_an_int32_counts() -> None:
    rows = 2**31 + 5
    slots = DirectSlots(rows, zeros)
    some = np.array([rows - 1, 3, 2**31, 7])
    slots.bind(some, some)
    found, missing = slots.find(np.array([3, 4, rows - 1, 2**31, 2**31 - 1]))
    assert (found.tolist(), missing) == ([3, -1, rows - 1, 2**31, -1], 2)


@pytest.mark.parametrize("rows", [3000, 1 << 40])
def test_an_index_of_runs_and_of_scattered_rows(rows: int) -> None:
    """Runs of neighbours are set as a whole, among rows that others have set before or not."""
    rng, near, start = np.random.default_rng(5), 3000, rows - 3000
    index, oracle, place = DeltaIndex(rows), np.zeros(near, np.int32), 1
    for number in range(60):
        first, count = rng.integers(0, near), int(rng.integers(0, 300))
        ids = np.arange(first, min(near, first + count))
        if number % 3 == 0:
            ids = rng.integers(0, near, count)
        places = np.arange(place, place + ids.size, dtype=np.int32)
        place += ids.size
        index.entries.point(ids + start, places)
        np.maximum.at(oracle, ids, places)
        assert np.array_equal(index.entries.take(np.arange(near) + start), oracle)
