"""Reads and writes past the page cache, against a file in memory."""

import errno
import mmap
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _io
from tierstore._io import direct, system
from tierstore._io.system import Calls as System
from tierstore.errors import StoreFullError, StoreIOError

SIZE = 5 * mmap.PAGESIZE + 1000
random_ranges = given(
    seed=st.integers(0, 2**32),
    ranges=st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8),
    aligned=st.booleans(),
)


class Calls:
    """The system, with some calls replaced, and what was read and written past the cache."""

    def __init__(self, **replaced):
        self.past = []
        self._direct = set()
        self._replaced = replaced

    def __getattr__(self, name):
        return self._replaced.get(name) or getattr(System, name)

    def open(self, path, flags, *more, **options):
        replaced = self._replaced.get("open", os.open)
        fd = (replaced if flags & os.O_DIRECT else os.open)(path, flags, *more, **options)
        (self._direct.add if flags & os.O_DIRECT else self._direct.discard)(fd)
        return fd

    def pwrite(self, fd, data, offset):
        if fd not in self._direct:
            return os.pwrite(fd, data, offset)
        count = self._replaced.get("pwrite", os.pwrite)(fd, data, offset)
        self.past.append((offset, count))
        return count

    def preadv(self, fd, buffers, offset):
        assert fd in self._direct
        count = self._replaced.get("preadv", os.preadv)(fd, buffers, offset)
        self.past.append((offset, count))
        return count


def refused(*given, **options):
    raise OSError(errno.EINVAL, "Invalid argument")


def full(*given, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def a_block_at_a_time(fd, data, offset):
    return os.pwrite(fd, memoryview(data)[: mmap.PAGESIZE], offset)


def less_than_a_block(fd, data, offset):
    """Write as little as a disk does that gets full."""
    count = min(data.nbytes, mmap.PAGESIZE) - 512
    other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    try:
        return os.pwrite(other, memoryview(data)[:count], offset)
    finally:
        os.close(other)


@pytest.fixture
def directory(tmp_path):
    with _io.Directory.open(tmp_path) as directory:
        yield directory


def make(directory: _io.Directory, rng: np.random.Generator) -> tuple[_io.File, np.ndarray]:
    content = rng.integers(0, 256, SIZE, np.uint8)
    directory.unlink("x")
    file = directory.create("x")
    file.write(content, 0)
    return file, content


def memory(nbytes: int, offset: int, *, aligned: bool) -> np.ndarray:
    return direct.memory_for(nbytes, offset) if aligned else np.empty(nbytes + 1, np.uint8)[1:]


WAYS = {
    "usual": {},
    "no such open": {"open": refused},
    "no such calls": {"pwrite": refused, "preadv": refused},
    "short writes": {"pwrite": a_block_at_a_time},
    "ragged writes": {"pwrite": less_than_a_block},
}


@pytest.mark.variants(1, 3)
@pytest.mark.parametrize("way", WAYS)
@random_ranges
def test_any_ranges(monkeypatch, directory, way, seed, ranges, aligned):
    """Direct reads and writes equal buffered ones on every file system."""
    monkeypatch.setattr(system, "calls", Calls(**WAYS[way]))
    rng = np.random.default_rng(seed)
    file, content = make(directory, rng)
    with file:
        mapped = _io.map_files([file], SIZE, advice=mmap.MADV_RANDOM)
        for offset, nbytes in ranges:
            nbytes = min(nbytes, SIZE - offset)
            data = memory(nbytes, offset, aligned=aligned)
            if rng.random() < 0.5:
                data[:] = rng.integers(0, 256, nbytes, np.uint8)
                direct.write(file, data, offset)
                content[offset : offset + nbytes] = data
            else:
                direct.read(file, data, offset)
                assert np.array_equal(data, content[offset : offset + nbytes])
            assert np.array_equal(mapped, content)
        assert file.size == SIZE


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("way", [*WAYS, "no such threads"])
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 60),
    nbytes=st.sampled_from([1, 4, 60, 512, 4096, 5000]),
    gathered=st.sampled_from([1, 3 * mmap.PAGESIZE, 1 << 20]),
    gap=st.sampled_from([0, mmap.PAGESIZE]),
)
def test_bytes_are_gathered_from_the_disk(
    monkeypatch, directory, way, seed, count, nbytes, gathered, gap
):
    monkeypatch.setattr(system, "calls", Calls(**WAYS.get(way, {})))
    monkeypatch.setattr(direct, "_GATHERED_BYTES", gathered)
    monkeypatch.setattr(direct, "_GAP", gap)
    if way == "no such threads":
        monkeypatch.setattr(direct, "ThreadPoolExecutor", no_threads)
    rng = np.random.default_rng(seed)
    file, content = make(directory, rng)
    offsets = np.sort(rng.integers(0, SIZE - nbytes + 1, count))
    out = np.empty((count, nbytes), np.uint8)
    with file:
        direct.gather(file, offsets, out)
        assert np.array_equal(out, content[offsets[:, None] + np.arange(nbytes)])
        with pytest.raises(StoreIOError, match="ends within bytes"):
            direct.gather(file, offsets[-1:] + SIZE, out[:1])


def no_threads(count):
    raise RuntimeError("can't start new thread")


def test_what_is_gathered_is_not_what_the_page_cache_holds(monkeypatch, directory):
    file, _ = make(directory, np.random.default_rng(4))
    calls = Calls()
    monkeypatch.setattr(system, "calls", calls)
    with file:
        direct.gather(file, np.array([700, 2 * mmap.PAGESIZE]), np.empty((2, 5000), np.uint8))
        if not calls.past:
            pytest.skip("this file system has no way past the page cache")
        assert calls.past == [(0, 4 * mmap.PAGESIZE)]


def test_whole_blocks_go_past_the_cache(monkeypatch, directory):
    file, _ = make(directory, np.random.default_rng(1))
    calls = Calls()
    monkeypatch.setattr(system, "calls", calls)
    offset, nbytes = 700, 3 * mmap.PAGESIZE
    with file:
        data = direct.memory_for(nbytes, offset)
        direct.read(file, data, offset)
        direct.write(file, data, offset)
        if not calls.past:
            pytest.skip("this file system has no way past the page cache")
        assert calls.past == [(mmap.PAGESIZE, 2 * mmap.PAGESIZE)] * 2
        direct.write(file, data[1:], offset)  # lies otherwise in memory than in the file
        assert len(calls.past) == 2


def test_memory_lies_in_its_block_as_the_bytes_in_theirs():
    for offset in (0, 1, 512, mmap.PAGESIZE, mmap.PAGESIZE + 64):
        memory = direct.memory_for(10, offset)
        assert memory.shape == (10,) and (memory.ctypes.data - offset) % mmap.PAGESIZE == 0


def test_a_full_disk_is_told(monkeypatch, directory):
    file, _ = make(directory, np.random.default_rng(2))
    monkeypatch.setattr(system, "calls", Calls(pwrite=full))
    with file, pytest.raises(StoreFullError, match="no space to write"):
        direct.write(file, direct.memory_for(mmap.PAGESIZE, 0), 0)


def test_a_file_that_ends_too_early_is_told(directory):
    file, _ = make(directory, np.random.default_rng(3))
    with file, pytest.raises(StoreIOError, match="ends within bytes"):
        direct.read(file, direct.memory_for(2 * SIZE, 0), 0)
