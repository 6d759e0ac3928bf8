"""What is closed and dropped leaves no file mapped, without the garbage collector."""

import gc
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore import Budget, TableSpec

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")


def mapped(path: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if f"{path}/" in line]


@pytest.mark.parametrize("budget", [{"host": 0}, {"host_rows": 10}, {"host_rows": 100}], ids=str)
@pytest.mark.parametrize("by_key", [False, True])
def test_no_file_of_a_closed_store_stays_mapped(tmp_path, budget, by_key):
    """A file system could not be unmounted, nor the space of a removed file be used."""
    path = tmp_path / "s"
    spec = TableSpec(100, 4, keys="int64" if by_key else None)
    with tierstore.create(path, {"t": spec}) as store:
        store["t"].write(np.arange(100), np.ones((100, 4), np.float32))
        store.commit()
    gc.collect()
    gc.disable()
    try:
        for mode in ("r", "r+"):
            with tierstore.open(path, mode, budget=Budget(**budget), device="cpu") as store:
                store["t"].read(np.arange(50))
                if mode == "r+":
                    store["t"].write(np.arange(5), np.zeros((5, 4), np.float32))
                    store["t"].read(np.arange(50))
                    store.commit()
                assert mapped(path)
            del store
            assert not mapped(path)
    finally:
        gc.enable()
