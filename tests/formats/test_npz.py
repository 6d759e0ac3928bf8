""".npz: files written and read by NumPy itself, and archives with false claims."""

import io
import zipfile

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tierstore._formats import open_source
from tierstore.errors import FormatError, InvalidInputError


def as_npy(array) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8"])
def test_reads_what_numpy_saves(tmp_path, save, dtype):
    matrix = (
        random_matrix(31, 6).astype(dtype) if dtype != "<f2" else random_matrix(31, 6, "float16")
    )
    words = np.array(random_words(31))
    save(tmp_path / "file.npz", vectors=matrix, keys=words, counts=np.arange(31))
    expected = matrix.astype(matrix.dtype.newbyteorder("<"))
    assert read_file(tmp_path / "file.npz", block_rows=4).tobytes() == expected.tobytes()
    assert read_keys_of(tmp_path / "file.npz") == list(words)


@pytest.mark.parametrize("dtype", ["uint8", ">i4", "int64", "uint64"])
def test_reads_integer_keys_of_any_width(tmp_path, dtype):
    np.savez(
        tmp_path / "file.npz", weight=random_matrix(9, 2), keys=np.arange(9)[::-1].astype(dtype)
    )
    keys = read_keys_of(tmp_path / "file.npz")
    assert keys.dtype == np.int64
    assert list(keys) == list(range(9))[::-1]


def test_an_array_of_other_length_is_no_keys(tmp_path):
    np.savez(tmp_path / "file.npz", weight=random_matrix(9, 2), keys=np.arange(8))
    assert read_keys_of(tmp_path / "file.npz") is None


@pytest.mark.parametrize("keys", [random_words(31), np.arange(31) * 3, None])
def test_numpy_loads_what_is_written(tmp_path, keys):
    matrix = random_matrix(31, 6)
    write_file(tmp_path / "file.npz", matrix, "float32", keys=keys, field="exp_avg")
    with np.load(tmp_path / "file.npz", allow_pickle=False) as loaded:
        assert loaded["exp_avg"].tobytes() == matrix.tobytes()
        assert ("keys" in loaded) == (keys is not None)
        if keys is not None:
            assert list(loaded["keys"]) == list(keys)


def test_chooses_among_several(tmp_path):
    first, second = random_matrix(4, 3, seed=1), random_matrix(5, 2, seed=2)
    path = tmp_path / "file.npz"
    np.savez(path, first=first, second=second, vector=np.arange(3.0))
    assert read_file(path, field="first").tobytes() == first.tobytes()
    assert read_file(f"{path}:second", field="first").tobytes() == second.tobytes()
    with pytest.raises(FormatError, match=r"2 matrices.*'first'.*'second'.*file\.npz:first"):
        open_source(path, field="weight")
    with pytest.raises(FormatError, match="no 'third'"):
        open_source(f"{path}:third")
    with pytest.raises(FormatError, match=r"'vector' is float64 \(3,\)"):
        open_source(f"{path}:vector")


def test_nothing_to_choose_from(tmp_path):
    np.savez(tmp_path / "file.npz", a=np.arange(3), b=np.zeros((2, 2), bool))
    with pytest.raises(FormatError, match="no floats"):
        open_source(tmp_path / "file.npz")


def test_a_damaged_entry_is_noticed(tmp_path):
    path = tmp_path / "file.npz"
    write_file(path, random_matrix(40, 8), "float32")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match="CRC"):
        read_file(path)


def test_an_entry_must_be_as_long_as_its_header_says(tmp_path):
    for change in (lambda data: data[:-1], lambda data: data + b"\0"):
        with zipfile.ZipFile(tmp_path / "file.npz", "w") as archive:
            archive.writestr("weight.npy", change(as_npy(random_matrix(4, 4))))
        with pytest.raises(FormatError, match="makes"):
            open_source(tmp_path / "file.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused(tmp_path, method):
    with zipfile.ZipFile(tmp_path / "file.npz", "w", method) as archive:
        archive.writestr("weight.npy", as_npy(random_matrix(4, 4)))
    with pytest.raises(FormatError, match="NumPy does not use"):
        open_source(tmp_path / "file.npz")


def test_pickled_objects_are_refused(tmp_path):
    np.savez(tmp_path / "file.npz", weight=np.array([[1, "a"]], object))
    with pytest.raises(FormatError, match="objects"):
        open_source(tmp_path / "file.npz")


def test_objects_beside_the_matrix_do_no_harm(tmp_path):
    matrix = random_matrix(4, 3)
    np.savez(tmp_path / "file.npz", weight=matrix, names=np.array(["a", None], object))
    assert read_file(tmp_path / "file.npz").tobytes() == matrix.tobytes()
    with pytest.raises(FormatError, match=r"'names' is unreadable .*objects"):
        open_source(tmp_path / "file.npz", field="names")


def test_keys_that_cannot_be_read_are_not_passed_over(tmp_path):
    np.savez(tmp_path / "file.npz", weight=random_matrix(2, 2), keys=np.array(["a", None], object))
    with pytest.raises(FormatError, match="'keys' is unreadable"):
        read_keys_of(tmp_path / "file.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<f2"])
def test_columns_are_read_as_rows(tmp_path, save, dtype):
    matrix = np.random.default_rng(0).standard_normal((31, 5)).astype(dtype)
    save(tmp_path / "file.npz", weight=np.asfortranarray(matrix), keys=np.arange(31) * 3)
    for rows in (None, 4):
        found = read_file(tmp_path / "file.npz", block_rows=rows)
        assert found.tobytes() == matrix.astype("<" + dtype[1:]).tobytes()
    assert list(read_keys_of(tmp_path / "file.npz")) == list(range(0, 93, 3))


def test_columns_that_are_damaged(tmp_path):
    matrix = np.asfortranarray(np.random.default_rng(0).standard_normal((400, 5)))
    np.savez_compressed(tmp_path / "file.npz", weight=matrix)
    data = bytearray((tmp_path / "file.npz").read_bytes())
    data[5000] ^= 0xFF
    (tmp_path / "file.npz").write_bytes(data)
    with pytest.raises(FormatError):
        read_file(tmp_path / "file.npz")


@pytest.mark.parametrize("key", ["ends in nul\0", "x" * 2000])
def test_keys_that_numpy_strings_cannot_hold(tmp_path, key):
    with pytest.raises(InvalidInputError):
        write_file(tmp_path / "file.npz", random_matrix(2, 2), "float32", keys=["a", key])


def test_keys_that_are_no_characters(tmp_path):
    for code in (0x110000, 0xD800):
        keys = np.array([code, 65], "<u4").view("<U1")
        with zipfile.ZipFile(tmp_path / "file.npz", "w") as archive:
            archive.writestr("weight.npy", as_npy(random_matrix(2, 2)))
            header = as_npy(np.array(["a", "b"]))[:-8]
            archive.writestr("keys.npy", header + keys.tobytes())
        with pytest.raises(FormatError, match="not characters"):
            read_keys_of(tmp_path / "file.npz")
