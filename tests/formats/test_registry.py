"""Suffixes, names within files, element types, and what goes wrong below a sink."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, read_file, write_file
from tests.reference.elements import BFLOAT16
from tierstore._dtypes import convert
from tierstore._formats import SINK_SUFFIXES, SOURCE_SUFFIXES, open_sink, open_source, split_name
from tierstore.errors import FormatError, InvalidInputError, StoreFullError, StoreIOError
from tierstore.spec import DTYPES

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Those of bytes are compared in tests/test_dtypes.py."""


def test_an_unknown_suffix_lists_the_known_ones(tmp_path):
    for name in ("file.absent", "file", ".npy", "file.npy.gz"):
        with pytest.raises(FileNotFoundError, match="no such file") as missing:
            open_source(tmp_path / name)
        assert missing.value.filename == str(tmp_path / name)
        assert isinstance(missing.value, FormatError)
        (tmp_path / name).touch()
        with pytest.raises(InvalidInputError) as error:
            open_source(tmp_path / name)
        assert all(suffix in str(error.value) for suffix in SOURCE_SUFFIXES)
        with pytest.raises(InvalidInputError) as error:
            open_sink(tmp_path / name, rows=1, dim=1, dtype="float32")
        assert all(suffix in str(error.value) for suffix in SINK_SUFFIXES)


@pytest.mark.parametrize(
    ("name", "way"),
    [("f.kv", "save_word2vec_format"), ("f.pkl", "numpy.save"), ("f.7z", "out of the archive"),
     ("f.xlsx", "CSV"), ("f.f32", ".raw"), ("f.RAW", "f.RAW:float32:256")],
)  # fmt: skip
def test_files_that_others_write_say_the_way(tmp_path, name, way):
    (tmp_path / name).touch()
    with pytest.raises((InvalidInputError, FormatError), match=re.escape(way)):
        open_source(tmp_path / name)


def test_suffixes_are_of_either_case(tmp_path):
    matrix = random_matrix(3, 2)
    write_file(tmp_path / "FILE.NPY", matrix, "float32")
    assert read_file(tmp_path / "FILE.NPY").tobytes() == matrix.tobytes()


@pytest.mark.parametrize(
    ("text", "file", "name"),
    [
        ("a.npz", "a.npz", None),
        ("a.npz:w", "a.npz", "w"),
        ("a.npz:", "a.npz", ""),
        ("b:c/a.pt:x.y:z", "b:c/a.pt", "x.y:z"),
        ("a.ZARR:w", "a.ZARR", "w"),
        ("a:b", "a:b", None),
        ("exists.npz:w", "exists.npz:w", None),
    ],
)
def test_names_are_split_from_paths(tmp_path, monkeypatch, text, file, name):
    monkeypatch.chdir(tmp_path)
    Path("exists.npz:w").touch()
    assert split_name(text) == (Path(file), name)


def test_a_file_may_bear_a_colon(tmp_path):
    matrix = random_matrix(3, 2)
    write_file(tmp_path / "a.npz:b.npz", matrix, "float32")
    assert read_file(tmp_path / "a.npz:b.npz").tobytes() == matrix.tobytes()


@pytest.mark.parametrize("field", ["key", "keys", "keys_offsets"])
def test_keys_and_a_field_cannot_share_a_name(tmp_path, field):
    matrix = random_matrix(3, 2)
    write_file(tmp_path / "file.npz", matrix, "float32", field=field)
    with pytest.raises(InvalidInputError, match="together with keys"):
        write_file(tmp_path / "new.npz", matrix, "float32", field=field, keys=[1, 2, 4])


@pytest.mark.parametrize("shape", [(-1, 3), (3, 0)])
def test_shapes_that_are_none(tmp_path, shape):
    with (
        pytest.raises(InvalidInputError, match="needs rows"),
        open_sink(tmp_path / "file.npy", rows=shape[0], dim=shape[1], dtype="float32"),
    ):
        pass


def test_precision_is_not_lost_unasked(tmp_path):
    with pytest.raises(InvalidInputError, match=r"float64.*--dtype"):
        write_file(tmp_path / "file.bin", random_matrix(3, 2, "float64"), "float64")


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_conversions_round_as_torch_does(source, target):
    torch = pytest.importorskip("torch")
    matrix = random_matrix(40, 9, source)
    tensor = torch.from_numpy(matrix.view(np.int16) if source == "bfloat16" else matrix.copy())
    if source == "bfloat16":
        tensor = tensor.view(torch.bfloat16)
    if (source, target) == ("float64", "bfloat16"):
        tensor = tensor.float()
    expected = tensor.to(getattr(torch, target)).to(torch.float64).numpy()

    found = convert(matrix, source, target)
    assert found.dtype == DTYPES[target]
    widened = BFLOAT16.decode(found) if target == "bfloat16" else found
    assert np.array_equal(widened.astype(np.float64), expected)
    assert np.array_equal(np.signbit(widened), np.signbit(expected))
    assert (found is matrix) == (source == target)


@pytest.mark.parametrize("suffix", SINK_SUFFIXES)
@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, StoreFullError), (errno.EIO, StoreIOError)]
)
def test_failures_of_the_file_system(tmp_path, monkeypatch, suffix, code, error):
    def failing_open(path, *args, **kwargs):
        raise OSError(code, "injected")

    if suffix == ".zarr":
        from zarr.storage import _local

        monkeypatch.setattr(_local, "_atomic_write", failing_open)
    else:
        monkeypatch.setattr(Path, "open", failing_open)
    with pytest.raises(error, match=r"file.*injected.*no file was left") as raised:
        write_file(tmp_path / f"file{suffix}", random_matrix(3, 2), "float32")
    assert raised.value.errno == code
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_nothing_optional_is_imported_before_it_is_needed():
    program = (
        "import sys, tierstore.importing, tierstore.exporting\n"
        "print({'torch', 'pyarrow', 'zarr', 'safetensors', 'cupy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
