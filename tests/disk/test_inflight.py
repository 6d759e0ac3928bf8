import os

import numpy as np
import pytest

from tierstore.machine import speeds

pytestmark = pytest.mark.skipif(not speeds.available(), reason="the system forbids it here")


@pytest.fixture
def file(tmp_path):
    np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tofile(tmp_path / "f")
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("count", [1, 31, 256, 257, 3000])
def test_every_read_is_made_and_looked_at(file, count):
    rng = np.random.default_rng(count)
    offsets = rng.integers(0, 250, count) * 4096
    speeds.read(file, offsets, 4096)
    for number in {0, count - 1, int(rng.integers(count))}:
        short = offsets.copy()
        short[number] = (1 << 20) - 96
        with pytest.raises(OSError, match="gave 96"):
            speeds.read(file, short, 4096)


def test_a_file_that_cannot_be_read(file):
    speeds.read(file, np.empty(0, np.int64), 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        speeds.read(-1, np.array([0]), 4096)
