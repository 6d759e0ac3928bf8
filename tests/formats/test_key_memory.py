"""Keys take 40 bytes each at most while a file is loaded, however many there are."""

import contextlib
import gzip
import importlib
import json
import tracemalloc

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import write_file

h5py = torch = None
with contextlib.suppress(ImportError):
    h5py = importlib.import_module("h5py")
with contextlib.suppress(ImportError):
    torch = importlib.import_module("torch")

COUNT = 100_000  # blocks take some MiB, whatever the count
MATRIX = np.random.default_rng(0).standard_normal((COUNT, 2), np.float32)
KEYS = {"words": [f"user-{n:07}" for n in range(COUNT)], "ids": np.arange(COUNT) * 3}


AT_NIGHT = (".arrow", ".feather", ".vec", ".bin", ".tsv", ".csv", ".csv.gz", ".csv.xz")
AT_NIGHT += ("pgvector.csv", ".jsonl", ".jsonl.gz", ".txt")
"""Texts take ten seconds and more where every allocation is traced."""


def peak_while(work):
    """Return the most that Python and NumPy had allocated at once during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _write(path, keys, count):
    """Write a file with the library, or as the tools do whose files it only reads."""
    suffix = path.suffix
    matrix, keys = MATRIX[:count], None if keys is None else keys[:count]
    if ".jsonl" in path.suffixes:
        with gzip.open(path, "wt") if suffix == ".gz" else path.open("w") as file:
            for row, values in enumerate(matrix.tolist()):
                key = {} if keys is None else {"id": _plain(keys[row])}
                file.write(json.dumps({**key, "embedding": values}) + "\n")
    elif suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["weight"] = matrix
            if keys is not None:
                file["keys"] = keys
    elif suffix == ".pt":
        tensors = {"weight": matrix} | ({} if keys is None else {"keys": keys})
        torch.save({name: torch.from_numpy(each) for name, each in tensors.items()}, path)
    elif path.name.endswith("pgvector.csv"):
        front = "" if keys is None else "{},"
        with path.open("w") as file:
            file.write(f"{'' if keys is None else 'id,'}embedding\n")
            for row, values in enumerate(matrix.tolist()):
                key = front.format(None if keys is None else keys[row])
                file.write(f'{key}"{json.dumps(values, separators=(",", ":"))}"\n')
    else:
        write_file(path, matrix, "float32", block_rows=10_000, keys=keys)


def _plain(key):
    return key if isinstance(key, str) else int(key)


def peak_of(tmp_path, name, keys=None, count=COUNT):
    """Return the most that Python and NumPy had allocated at once while a file was imported."""
    place = tmp_path / f"{name.replace(':', '-')}.tier"
    _write(tmp_path / name, keys, count)
    found = peak_while(lambda: tierstore.import_table(place, tmp_path / name))
    if keys is not None and count == COUNT:
        with tierstore.open(place) as store:
            assert list(store["embeddings"].keys[-3:]) == list(keys[-3:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix",
    [
        *(".npz", ".safetensors", ".parquet", ".arrow", ".feather", ".zarr", ".vec", ".bin"),
        *(".tsv", ".csv", ".csv.gz", ".csv.xz", "-pgvector.csv", ".jsonl", ".jsonl.gz", ".h5"),
        ".pt",
    ],
)
@pytest.mark.nightly(*AT_NIGHT)
def test_keys_are_packed_while_they_are_loaded(tmp_path, suffix):
    if suffix in (".parquet", ".arrow", ".feather"):
        pytest.importorskip("pyarrow")
    if (suffix == ".h5" and h5py is None) or (suffix == ".pt" and torch is None):
        pytest.skip("the package that writes such files is not installed")
    kinds = ["ids"] if suffix == ".pt" else list(KEYS)  # tensors hold numbers
    # Which imports modules, that count as well.
    peak_of(tmp_path, f"first{suffix}", KEYS[kinds[0]], 1000)
    without = peak_of(tmp_path, f"without{suffix}")
    for kind in kinds:
        assert peak_of(tmp_path, f"{kind}{suffix}", KEYS[kind]) - without <= 40 * COUNT, kind


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".txt", ".npy"])
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.nightly(".txt")
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
