"""Keys take 40 bytes each at most while a file is loaded, however many there are."""

import tracemalloc

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import write_file

COUNT = 100_000  # blocks take some MiB, whatever the count
MATRIX = np.random.default_rng(0).standard_normal((COUNT, 2), np.float32)
KEYS = {"words": [f"user-{n:07}" for n in range(COUNT)], "ids": np.arange(COUNT) * 3}


def peak_while(work):
    """Return the most that Python and NumPy had allocated at once during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def peak_of(tmp_path, name, keys=None):
    """Return the most that Python and NumPy had allocated at once while a file was imported."""
    place = tmp_path / f"{name}.tier"
    write_file(tmp_path / name, MATRIX, "float32", block_rows=10_000, keys=keys)
    found = peak_while(lambda: tierstore.import_table(place, tmp_path / name))
    if keys is not None:
        with tierstore.open(place) as store:
            assert list(store["embeddings"].keys[-3:]) == list(keys[-3:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix",
    [".npz", ".safetensors", ".parquet", ".arrow", ".zarr", ".vec", ".bin", ".tsv", ".csv"],
)
def test_keys_are_packed_while_they_are_loaded(tmp_path, suffix):
    if suffix in (".parquet", ".arrow"):
        pytest.importorskip("pyarrow")
    peak_of(tmp_path, f"first{suffix}", KEYS["words"])  # imports modules, which count as well
    without = peak_of(tmp_path, f"without{suffix}")
    for kind, keys in KEYS.items():
        assert peak_of(tmp_path, f"{kind}{suffix}", keys) - without <= 40 * COUNT, kind


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".txt", ".npy"])
@pytest.mark.parametrize("kind", KEYS)
def test_files_of_keys_are_packed(tmp_path, kind, suffix):
    write_file(tmp_path / "rows.npy", MATRIX, "float32", block_rows=10_000)
    keys = tmp_path / f"keys{suffix}"
    if suffix == ".txt":
        keys.write_text("\n".join(map(str, KEYS[kind])))
    else:
        np.save(keys, np.array(KEYS[kind]))

    def peak(name, keys=None):
        place = tmp_path / f"{name}.tier"
        return peak_while(lambda: tierstore.import_table(place, tmp_path / "rows.npy", keys=keys))

    peak("first", keys)  # imports modules, which count as well
    assert peak("with", keys) - peak("without") <= 40 * COUNT


def test_what_is_measured_sees_a_list():
    joined = "\n".join(KEYS["words"])
    tracemalloc.start()
    try:
        listed = joined.split("\n")
        assert tracemalloc.get_traced_memory()[0] > 40 * len(listed)
    finally:
        tracemalloc.stop()
