"""Integer keys of every width, in the formats of named arrays that other tools write."""

import numpy as np
import pytest

import tierstore
from tests.every import every
from tests.formats.matrices import random_matrix, read_keys_of

WIDTHS = [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)]
MATRIX = random_matrix(4, 3)


def npz(path, keys):
    np.savez(path, w=MATRIX, keys=keys)


def safetensors(path, keys):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"w": MATRIX, "keys": keys}, path)


def pt(path, keys):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.from_numpy(MATRIX), "keys": torch.from_numpy(keys)}, path)


def pth(path, keys):
    torch = pytest.importorskip("torch")
    state = {"w": torch.from_numpy(MATRIX), "keys": torch.from_numpy(keys)}
    torch.save(state, path, _use_new_zipfile_serialization=False)


def h5(path, keys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["w"], file["keys"] = MATRIX, keys


def zarr(path, keys):
    group = pytest.importorskip("zarr").open_group(path, mode="w")
    for name, array in (("w", MATRIX), ("keys", keys)):
        group.create_array(name, shape=array.shape, dtype=array.dtype)[:] = array


def parquet(path, keys):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"w": MATRIX.tolist(), "key": keys}), path
    )


FORMATS = [npz, safetensors, pt, pth, h5, zarr, parquet]


@pytest.mark.parametrize("save", FORMATS, ids=lambda save: save.__name__)
@every(width=WIDTHS)
def test_keys_of_any_width(tmp_path, save, width):
    ends = np.iinfo(width)
    keys = np.array([3, ends.max, ends.min, ends.max // 2], width)
    path = tmp_path / f"file.{save.__name__}"
    save(path, keys)
    found = read_keys_of(path)
    assert found.tolist() == keys.tolist()
    assert found.dtype == ("uint64" if width == "uint64" else "int64")


@pytest.mark.parametrize("save", FORMATS, ids=lambda save: save.__name__)
def test_they_become_the_keys_of_a_table(tmp_path, save):
    keys = np.array([2**64 - 1, 0, 2**63, 2**63 - 1], np.uint64)
    path = tmp_path / f"file.{save.__name__}"
    save(path, keys)
    tierstore.import_table(tmp_path / "s.tier", path, table="t")
    with tierstore.open(tmp_path / "s.tier", mode="r") as store:
        assert np.asarray(store["t"].keys[:]).tolist() == keys.tolist()
        assert (store["t"].read(store["t"].lookup(keys)) == MATRIX).all()
