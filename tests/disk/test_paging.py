import mmap

import numpy as np
import pytest

from tierstore import _io
from tierstore._disk import readahead


@pytest.fixture
def mapped(tmp_path):
    """Random records of 520 bytes in a file that is mapped behind a header."""
    data = np.random.default_rng(1).integers(0, 256, 64 + 520 * 5000, np.uint8)
    data.tofile(tmp_path / "rows")
    with _io.Directory.open(tmp_path) as directory, directory.open_file("rows") as file:
        array = _io.map_files([file], data.nbytes, advice=mmap.MADV_RANDOM)
        return array[64:].reshape(5000, 520), data[64:].reshape(5000, 520)


@pytest.mark.parametrize("count", [0, 1, 3, 4000, 20_000])
@pytest.mark.parametrize("fast", [True, False], ids=["process_madvise", "madvise"])
def test_announcing_never_changes_what_is_read(mapped, monkeypatch, count, fast):
    records, expected = mapped
    if not fast:
        monkeypatch.setattr(readahead, "_pidfd", lambda pid: -1)
    monkeypatch.setattr(readahead, "looks_resident", lambda records, rows: False)
    rows = np.random.default_rng(2).integers(0, 5000, count)
    readahead.prefetch(records, rows)
    assert np.array_equal(records[rows], expected[rows])


@pytest.mark.parametrize("gap", [0, readahead.USUAL_GAP, 100_000])
def test_the_ranges_cover_every_row_and_little_more(mapped, gap):
    records, _ = mapped
    rows = np.random.default_rng(3).integers(0, 5000, 300)
    ranges = readahead._page_ranges(records, rows, gap)
    base = records.ctypes.data
    begin, nbytes = ranges[:, 0].astype(np.int64), ranges[:, 1].astype(np.int64)
    assert (begin % mmap.PAGESIZE == 0).all()
    assert (nbytes % mmap.PAGESIZE == 0).all()
    assert (begin[1:] > begin[:-1] + nbytes[:-1] + gap).all()
    for row in rows.tolist():
        first = base + 520 * row
        assert ((begin <= first) & (first + 520 <= begin + nbytes)).any()
    assert nbytes.sum() <= 300 * (2 * mmap.PAGESIZE + gap)


def test_rows_in_memory_are_seen_to_be(mapped):
    records, _ = mapped
    rows = np.arange(5000)
    records.sum()
    assert readahead.looks_resident(records, rows)


@pytest.mark.parametrize("width", [520, 64, 9000])
@pytest.mark.parametrize("count", [1, 5, 300, 5000])
def test_rows_that_a_disk_would_be_asked_for_are_seen_not_to_be(tmp_path, width, count):
    """Of any number, in any order: pages of a sample alone decide."""
    path, rng = tmp_path / "records", np.random.default_rng([width, count])
    with path.open("wb") as file:
        file.truncate(5000 * width)  # holes: of no page that was never touched is there any memory
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    records = np.frombuffer(memory, np.uint8).reshape(5000, width)
    rows = rng.permutation(5000)[:count]
    assert not readahead.looks_resident(records, rows)
    assert records[rows].sum() == 0
    assert readahead.looks_resident(records, rows)
    assert readahead.looks_resident(records, rows[:0])
    with pytest.raises(IndexError):
        readahead.looks_resident(records, np.array([3, 5000]))


def test_the_way_pages_are_announced_has_a_name():
    assert readahead.method() in ("process_madvise", "madvise")
