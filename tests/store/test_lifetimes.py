"""What is closed and dropped keeps no file mapped or open, without the garbage collector."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore import Budget, TableSpec
from tierstore._disk.generation import Generation

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
ROWS = 100


def in_use(path: Path) -> list[str]:
    """The files below a directory that this process has mapped or open, removed ones included."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [each for each in (*maps, *files) if f"{path}/" in each]


@pytest.mark.parametrize("budget", [{"host": 0}, {"host_rows": 10}, {"host_rows": ROWS}], ids=str)
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
@pytest.mark.parametrize("anew", [False, True], ids=["", "files opened anew"])
def test_no_file_of_a_closed_store_stays_in_use(
    tmp_path, monkeypatch, budget, by_key, backend, anew
):
    """A file system could not be unmounted, nor the space of a removed file be used.

    A reader opens files anew where a fold has others in the place of these, as on overlayfs.
    """
    if anew:
        monkeypatch.setattr(Generation, "is_of", lambda *_: False)
    path, rng = tmp_path / "s", np.random.default_rng(1)
    spec = TableSpec(ROWS, 4, keys="int64" if by_key else None, backend=backend)
    with tierstore.create(path, {"t": spec}) as store:
        store["t"].write(np.arange(ROWS), np.ones((ROWS, 4), np.float32))
        store.commit()
    options = {"budget": Budget(**budget), "device": "cpu"}
    gc.collect()
    gc.disable()
    try:
        reader, writer = (tierstore.open(path, mode, **options) for mode in ("r", "r+"))
        with reader, writer:
            for _ in range(2):
                ids = rng.choice(ROWS, 40, replace=False)
                writer["t"].write(ids, np.zeros((40, 4), np.float32))
                writer.commit()
                reader.refresh()
                writer.fold()
                reader.refresh()
                for store in (reader, writer):
                    assert not store["t"].read(ids).any()
                    assert store.verify().ok
            assert in_use(path)
        assert not in_use(path)
    finally:
        gc.enable()
