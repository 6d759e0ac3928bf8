import mmap
import os

import numpy as np
import pytest

from tierstore.disk import uring

pytestmark = pytest.mark.skipif(not uring.available(), reason="io_uring is not to be had here")


@pytest.fixture
def file(tmp_path):
    """Random bytes in a file: its descriptor and what it holds."""
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    data.tofile(tmp_path / "f")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd, data
    os.close(fd)


@pytest.fixture
def ring():
    made = uring.Ring()
    yield made
    made.close()
    made.close()


def buffer(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 5000])
def test_everything_asked_for_is_read(file, ring, count):
    fd, data = file
    rng = np.random.default_rng(count)
    offsets, lengths = rng.integers(0, data.size - 600, count), rng.integers(1, 600, count)
    out = buffer(600 * max(count, 1))
    for _ in range(2):
        out[:] = 0
        addresses = out.ctypes.data + 600 * np.arange(count)
        results = ring.read(fd, offsets, lengths, addresses)
        assert np.array_equal(results, lengths)
        for number in range(count):
            at, n = int(offsets[number]), int(lengths[number])
            assert np.array_equal(out[600 * number : 600 * number + n], data[at : at + n])


def test_several_files_short_reads_and_errors(file, ring, tmp_path):
    fd, data = file
    (tmp_path / "g").write_bytes(b"0123456789")
    with open(tmp_path / "g", "rb") as other, open(tmp_path / "w", "wb") as unreadable:
        fds = np.array([fd, other.fileno(), other.fileno(), unreadable.fileno()], np.int32)
        out = buffer(64)
        results = ring.read(
            fds, np.array([5, 2, 7, 0]), np.array([8, 8, 8, 8]), out.ctypes.data + 16 * np.arange(4)
        )
    assert results[:3].tolist() == [8, 8, 3]
    assert results[3] < 0
    assert np.array_equal(out[:8], data[5:13])
    assert out[16:24].tobytes() == b"23456789"
    assert out[32:35].tobytes() == b"789"


def test_no_more_is_started_than_is_allowed(file, ring):
    fd, data = file
    count, window = 3000, 40
    out = buffer(16 * window)
    offsets = np.random.default_rng(1).integers(0, data.size - 16, count)
    seen = np.zeros(count, bool)
    found = np.zeros((count, 16), np.uint8)
    taken = 0

    def completed(numbers: np.ndarray, results: np.ndarray) -> int:
        nonlocal taken
        seen[numbers] = True
        while taken < count and seen[taken]:
            found[taken] = out.reshape(window, 16)[taken % window]
            taken += 1
        return min(count, taken + window)

    addresses = out.ctypes.data + 16 * (np.arange(count) % window)
    ring.read(fd, offsets, np.full(count, 16), addresses, completed=completed)
    assert np.array_equal(found, data[offsets[:, None] + np.arange(16)])


def test_an_error_leaves_no_read_under_way(file, ring):
    fd, _ = file
    out = buffer(1 << 16)
    calls = 0

    def completed(numbers: np.ndarray, results: np.ndarray) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return 1000

    wanted = np.arange(1000), np.full(1000, 16), out.ctypes.data + 16 * np.arange(1000)
    with pytest.raises(KeyboardInterrupt):
        ring.read(fd, *wanted, completed=completed)
    results = ring.read(fd, *wanted)
    assert (results == 16).all()
