"""Matrices of int8 and uint8, as quantised vectors have, are read as float32, to the number."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, read_file
from tierstore._formats import open_source

EVERY = np.arange(256, dtype=np.uint8).reshape(32, 8)[::-1]


def by_numpy(path, **matrices):
    np.savez_compressed(path, **matrices)


def by_safetensors(path, **matrices):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({name: np.ascontiguousarray(each) for name, each in matrices.items()}, path)


def by_torch(path, **matrices):
    torch = pytest.importorskip("torch")
    torch.save({n: torch.from_numpy(each.copy()) for n, each in matrices.items()}, path)


def by_zarr(path, **matrices):
    group = pytest.importorskip("zarr").create_group(path)
    for name, each in matrices.items():
        group.create_array(name, data=each, config={"write_empty_chunks": True})


WRITERS = {".npz": by_numpy, ".safetensors": by_safetensors, ".pt": by_torch, ".zarr": by_zarr}


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("dtype", ["i1", "u1"])
def test_bytes_are_numbers(tmp_path, suffix, dtype):
    matrix, path = EVERY.view(dtype), tmp_path / f"f{suffix}"
    WRITERS[suffix](path, codes=matrix)
    assert read_file(path, block_rows=5).tobytes() == matrix.astype("f4").tobytes()


@pytest.mark.parametrize("suffix", WRITERS)
def test_floats_are_taken_before_bytes(tmp_path, suffix):
    matrix, path = random_matrix(32, 3), tmp_path / f"f{suffix}"
    WRITERS[suffix](path, codes=EVERY, vectors=matrix)
    assert read_file(path).tobytes() == matrix.tobytes()
    assert read_file(f"{path}:codes").tobytes() == EVERY.astype("f4").tobytes()
    with open_source(path, field="codes") as source:
        assert source.dim == 8


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["i1", "u1"])
def test_arrays_of_numpy(tmp_path, order, dtype):
    np.save(tmp_path / "f.npy", np.asarray(EVERY.view(dtype), order=order))
    assert read_file(tmp_path / "f.npy").tobytes() == EVERY.view(dtype).astype("f4").tobytes()
