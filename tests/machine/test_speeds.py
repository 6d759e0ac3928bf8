import dataclasses
import mmap
import os

import pytest

from tierstore._disk import readahead
from tierstore.errors import InvalidInputError, StoreIOError
from tierstore.machine import comparison, speeds


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_everything_is_measured_and_kept(tmp_path):
    where = tmp_path / "disk"
    where.mkdir()
    assert speeds.known_speeds(where) is None
    seen: list[tuple[int, int]] = []
    found = speeds.measure(
        where, file_bytes=1 << 20, seconds=0.01, progress=lambda *at: seen.append(at)
    )
    assert all(value is None or value > 0 for value in found.to_dict().values())
    assert list(where.iterdir()) == []
    assert seen[-1] == (7, 7)
    assert speeds.known_speeds(where / "not" / "yet") == found


class Clock:
    """A clock that advances by a millisecond each time it is read."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-3
        return self.now


def test_rates_are_what_was_done_by_the_time_it_took(tmp_path, monkeypatch):
    monkeypatch.setattr(speeds, "time", Clock())
    found = speeds.measure(tmp_path, file_bytes=1 << 20, seconds=0.0035)
    rate = 3 / 5e-3  # three calls until 3.5 ms have passed, which are seen at the fifth look
    amounts = {
        "copy_bytes": 1 << 19,
        "gather_rows": 2048,
        "sequential_bytes": 4 << 20,
        "random_reads": 64 * 64,
        "append_bytes": 8 << 20,
        "syncs": 1,
    }
    for name, amount in amounts.items():
        assert getattr(found, name) == pytest.approx(amount * rate), name


def test_tierstore_is_compared_in_rows_per_second(tmp_path, monkeypatch):
    limits = speeds.measure(tmp_path, file_bytes=1 << 20, seconds=0.01)
    monkeypatch.setattr(comparison, "time", Clock())  # each call takes a millisecond
    found = comparison.compare(tmp_path, limits, store_bytes=1 << 20, seconds=0.01)
    rows = 2048
    expected = [  # the rows, or pages, of the usual batch of a small store, and the limit
        ("rows from memory", rows // 8, limits.gather_rows),
        ("rows from the page cache", rows // 8, limits.gather_rows),
        ("cold rows from the disk", rows * 512 // mmap.PAGESIZE, limits.random_reads),
        ("changed rows committed", rows // 100, limits.append_bytes / 512),
    ]
    for each, (name, count, limit) in zip(found, expected, strict=True):
        assert (each.name, each.unit, each.limit) == (name, "rows", limit)
        assert each.slow == each.fast == pytest.approx(each.reached)
        assert each.reached == pytest.approx(count / 1e-3), name
        assert each.ratio == each.to_dict()["ratio"] == each.reached / limit
    assert speeds.known_speeds(tmp_path).committed_rows == found[-1].reached


def test_figures_of_other_disks_are_kept(tmp_path, monkeypatch):
    found = speeds.measure(tmp_path, file_bytes=1 << 20, seconds=0.01)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(readahead, "disk_of", lambda _: "another disk")
        assert speeds.known_speeds(tmp_path) is None
        speeds.save_speeds(tmp_path, dataclasses.replace(found, syncs=7.0))
    assert speeds.known_speeds(tmp_path) == found


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"8:0": 3}', "\xff", 100_000 * "[", "[]".rjust(2 << 20)]
)
def test_a_cache_that_cannot_be_read_is_as_good_as_none(tmp_path, content):
    path = readahead.cache_path("speeds.json")
    path.parent.mkdir(parents=True)
    path.write_text(content.replace("8:0", readahead.disk_of(tmp_path)), encoding="latin-1")
    assert speeds.known_speeds(tmp_path) is None


def test_what_is_measured_of_tierstore_is_kept(tmp_path):
    found = speeds.measure(tmp_path, file_bytes=1 << 20, seconds=0.01)
    comparison.compare(tmp_path, found, store_bytes=1 << 20, seconds=0.01)
    kept = speeds.known_speeds(tmp_path)
    assert kept.missed.counts[-1] == 2048 // 8  # no more than its tier has room for
    assert kept == speeds.Speeds.from_dict(kept.to_dict()) != found


def test_figures_of_an_earlier_release_are_kept_as_far_as_they_mean_the_same(tmp_path):
    """Rates of rows at one size of batches are not times of batches; `plan` asks for them."""
    limits = dict.fromkeys(
        ["copy_bytes", "gather_rows", "sequential_bytes", "random_reads", "append_bytes", "syncs"],
        2.5,
    )
    old = limits | {"link_bytes": None, "cached_rows": 1e6, "cold_rows": 1e4, "miss_seconds": 1e-3}
    readahead.write_cache(readahead.SPEEDS, {readahead.disk_of(tmp_path): old})
    found = speeds.known_speeds(tmp_path)
    assert (found.syncs, found.cached, found.cold) == (2.5, None, None)
    for wrong in ({"counts": [2, 1], "seconds": [1, 1]}, {"counts": [1]}, [1], 3, "many"):
        entry = {readahead.disk_of(tmp_path): limits | {"link_bytes": None, "cold": wrong}}
        readahead.write_cache(readahead.SPEEDS, entry)
        assert speeds.known_speeds(tmp_path) is None
    for wrong in (0, -1.0, float("nan")):
        entry = {readahead.disk_of(tmp_path): old | {"syncs": wrong}}
        readahead.write_cache(readahead.SPEEDS, entry)
        assert speeds.known_speeds(tmp_path) is None, wrong


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_a_cache_that_is_no_file_is_as_good_as_none(tmp_path, make):
    """Opening a FIFO would block forever."""
    path = readahead.cache_path("speeds.json")
    path.parent.mkdir(parents=True)
    make(path)
    assert speeds.known_speeds(tmp_path) is None
    assert readahead.merge_gap(tmp_path) == 12 << 10


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    readahead.write_cache("speeds.json", {"a": 1})
    assert readahead.read_cache("speeds.json") == {}


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(InvalidInputError):
        speeds.measure(tmp_path, file_bytes=100)
    with pytest.raises(StoreIOError):
        speeds.measure(tmp_path / "nowhere", file_bytes=1 << 20, seconds=0.01)


@pytest.mark.parametrize(
    ("kept", "gap"),
    [
        ({"sequential_bytes": 2e9, "random_reads": 1e5}, 20_000),
        ({"sequential_bytes": 2e9, "random_reads": 100}, 256 << 10),
        ({"sequential_bytes": 1e8, "random_reads": 1e6}, 4 << 10),
        ({"sequential_bytes": 2e9, "random_reads": 0}, 12 << 10),
        ({"sequential_bytes": "much", "random_reads": 1e5}, 12 << 10),
        ({"sequential_bytes": float("nan"), "random_reads": 1e5}, 12 << 10),
        ([], 12 << 10),
    ],
)
def test_pages_are_merged_across_what_was_measured(tmp_path, kept, gap):
    assert readahead.merge_gap(tmp_path) == 12 << 10
    readahead.write_cache(readahead.SPEEDS, {readahead.disk_of(tmp_path): kept})
    assert readahead.merge_gap(tmp_path) == gap
