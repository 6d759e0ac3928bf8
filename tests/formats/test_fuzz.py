"""Damaged files give rows or a FormatError, soon, and never anything else.

Each case cuts a good file, flips some of its bits, or both; the seeds are fixed.
"""

import csv
import json
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, write_file
from tests.reference.formats import write_without_us
from tierstore._formats import SOURCE_SUFFIXES, open_source
from tierstore._formats.base import FORMATS
from tierstore.errors import FormatError

CASES = 300
DECODED = (".parquet", ".arrow", ".h5")
DECODED_CASES = 60  # each starts a process
SECONDS = 300  # for one case, where most take a millisecond: what takes longer has no end


def good_file(directory: Path, suffix: str) -> Path:
    path, matrix = directory / f"good{suffix}", random_matrix(23, 5)
    if suffix in (".pt", ".pth", ".ckpt"):
        torch = pytest.importorskip("torch")  # for writing
        tensors = {"weight": torch.from_numpy(matrix), "keys": torch.arange(23) * 2, "n": {"x": 1}}
        torch.save(tensors, path)
    elif suffix in (".json", ".h5"):
        write_without_us(path, matrix)
    elif suffix == ".jsonl":
        pairs = zip(random_words(23), matrix.tolist(), strict=True)
        path.write_text("\n".join(json.dumps({"id": key, "v": row}) for key, row in pairs))
    elif suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["key", *"abcde"])
            for word, row in zip(random_words(23), matrix.tolist(), strict=True):
                writer.writerow([word, *row])
    else:
        keys = {} if FORMATS[suffix].keys == "never" else {"keys": random_words(23)}
        write_file(path, matrix, "float32", **keys)
    return path


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Half of the damage goes to the first or the last bytes, where headers and indices are."""
    data = bytearray(content)
    kind = rng.integers(4)
    if kind == 0 and data:
        del data[rng.integers(len(data)) :]
    if kind == 1:
        at = rng.integers(len(data) + 1)
        data[at:at] = rng.bytes(int(rng.integers(1, 40)))
    for _ in range(int(rng.integers(1, 5)) if kind else 0):
        span = min(len(data), 200)
        near = int(rng.integers(span)) if rng.random() < 0.5 else -1 - int(rng.integers(span))
        at = near if rng.random() < 0.5 else int(rng.integers(len(data)))
        data[at] = rng.integers(256) if rng.random() < 0.3 else data[at] ^ (1 << rng.integers(8))
    return bytes(data)


def read_all(path: Path) -> None:
    with open_source(path, field="weight") as source:
        assert source.rows >= 0
        rows = sum(len(block) for block in source.blocks(7))
        assert rows == source.rows
        keys = source.keys
        assert keys is None or len(keys) == source.rows


DIRECTORIES = (".zarr", ".projector")
SAME = (
    ".txt",
    ".feather",
    ".hdf5",
    ".h5ad",
    ".ndjson",
    ".pth",
    ".ckpt",
    ".bvecs",
    ".i8bin",
    ".u8bin",
    ".raw",
    ".dat",
)
"""Suffixes of formats that have another one."""


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("suffix", [s for s in SOURCE_SUFFIXES if s not in (*DIRECTORIES, *SAME)])
@pytest.mark.fault(55)
def test_damaged_files(tmp_path, suffix):
    content = good_file(tmp_path, suffix).read_bytes()
    path = tmp_path / f"bad{suffix}"
    cases = DECODED_CASES if suffix in DECODED else CASES
    refused = 0
    for case in range(cases):
        path.write_bytes(damaged(content, np.random.default_rng([case, len(suffix)])))
        refused += gives_rows_or_format_error(path, case)
    assert refused > cases // 10


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("suffix", DIRECTORIES)
def test_damaged_directories(tmp_path, suffix):
    good = good_file(tmp_path, suffix)
    path = tmp_path / f"bad{suffix}"
    refused = 0
    for case in range(CASES):
        rng = np.random.default_rng(case)
        shutil.copytree(good, path)
        file = rng.choice(sorted(f for f in path.rglob("*") if f.is_file()))
        if rng.random() < 0.1:
            file.unlink()
        else:
            file.write_bytes(damaged(file.read_bytes(), rng))
        refused += gives_rows_or_format_error(path, case)
        shutil.rmtree(path)
    assert refused > CASES // 10


def gives_rows_or_format_error(path: Path, case: int) -> bool:
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_all(path)
    except FormatError as error:
        assert str(path) in str(error), case
        return True
    finally:
        assert time.monotonic() - started < SECONDS, case
    return False


@pytest.mark.variants(3, 10)
@pytest.mark.parametrize("suffix", SOURCE_SUFFIXES)
def test_noise(tmp_path, suffix):
    path = tmp_path / f"noise{suffix}"
    for case in range(100):
        rng = np.random.default_rng(case)
        noise = rng.bytes(int(rng.integers(1, 5000)))
        if suffix in DIRECTORIES:
            path.mkdir(exist_ok=True)
            (path / {".zarr": "zarr.json", ".projector": "vectors.tsv"}[suffix]).write_bytes(noise)
        else:
            path.write_bytes(noise)
        with pytest.raises(FormatError):
            read_all(path)
