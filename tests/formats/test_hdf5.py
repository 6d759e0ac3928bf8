""".h5: what h5py writes, and places outside of the file that one may name."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of
from tests.pairs import pairs
from tierstore._formats import _columns, open_source
from tierstore.errors import FormatError, MissingExtraError

h5py = pytest.importorskip("h5py")

MATRIX, WORDS = random_matrix(31, 6), random_words(31)


@pairs(
    together=1,
    dtype=["<f2", ">f4", "<f8", "i1", "u1"],
    options=[{}, {"chunks": (7, 4), "compression": "gzip"}],
)
def test_reads_datasets(tmp_path, dtype, options):
    matrix = (np.random.default_rng(3).standard_normal((31, 6)) * 50).astype(dtype)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("model/weight", data=matrix, **options)
    found = read_file(tmp_path / "f.h5", block_rows=5)
    assert (found == matrix).all() and found.dtype == (
        "<" + dtype[1:] if dtype[0] in "<>" else "f4"
    )
    assert read_keys_of(tmp_path / "f.h5") is None


@pytest.mark.parametrize("keys", [WORDS, np.array([w.encode() for w in WORDS]), np.arange(31) * 3])
def test_reads_keys(tmp_path, keys):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["weight"], file["keys"] = MATRIX, keys
    found = read_keys_of(tmp_path / "f.h5")
    assert list(found) == (
        WORDS if len(keys[0:1]) and not isinstance(keys[0], np.int64) else list(keys)
    )


@pytest.mark.parametrize("last", [2**63 - 1, 2**63, 2**64 - 1])
def test_unsigned_keys(tmp_path, last):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["weight"], file["keys"] = MATRIX, np.array([*range(30), last], ">u8")
    found = read_keys_of(tmp_path / "f.h5")
    assert found.tolist() == [*range(30), last]
    assert found.dtype == (np.uint64 if last >= 2**63 else np.int64)


def test_chooses_among_several(tmp_path):
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file["a/x"], file["b"], file["ids"] = MATRIX, MATRIX * 2, np.arange(31)
        file["a/loop"] = file["a"]
    with pytest.raises(FormatError, match="nested too deep"):
        open_source(path)
    with h5py.File(path, "r+") as file:
        del file["a/loop"]
    assert read_file(f"{path}:a/x").tobytes() == MATRIX.tobytes()
    with pytest.raises(FormatError, match=r"2 matrices.*f\.h5:a/x"):
        open_source(path)
    with open_source(path, field="b") as source:
        assert "ids" in source.notes[0]


def test_other_files_are_not_followed(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = MATRIX
    (tmp_path / "raw").write_bytes(MATRIX.tobytes())
    layout = h5py.VirtualLayout((31, 6), "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "x", (31, 6))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["link"] = h5py.ExternalLink(tmp_path / "other.h5", "x")
        file["soft"] = h5py.SoftLink("/link")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("outside", (31, 6), "f4", external=tmp_path / "raw")
    with pytest.raises(FormatError, match="no floats") as error:
        open_source(tmp_path / "f.h5")
    assert "in other files" in str(error.value) and "link" not in str(error.value)
    with pytest.raises(FormatError, match="in other files"):
        open_source(f"{tmp_path}/f.h5:outside")


def test_without_h5py_the_pip_line_is_given(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["weight"] = MATRIX
    monkeypatch.setattr(_columns.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tierstore\[hdf5\]'"):
        open_source(tmp_path / "f.h5")


@pytest.mark.parametrize("name", ["scale_factor", "add_offset"])
def test_datasets_that_attributes_scale_are_no_values(tmp_path, name):
    """As NetCDF packs them: refused alone, and named beside others."""
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("packed", data=np.ones((31, 6), "i2")).attrs[name] = 0.5
    with pytest.raises(FormatError, match=rf"int16 \(31, 6\) packed by {name}"):
        read_file(tmp_path / "f.h5")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file.create_dataset("rows", data=MATRIX)
    with open_source(tmp_path / "f.h5") as source:
        assert np.concatenate(list(source.blocks())).tobytes() == MATRIX.tobytes()
        assert "packed by" in source.notes[0]
