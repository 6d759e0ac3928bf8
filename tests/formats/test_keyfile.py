"""Keys in a file of their own."""

import os

import numpy as np
import pytest

from tests.formats.matrices import random_integers, random_uint64, random_words
from tierstore._formats import open_source, read_keys
from tierstore.errors import FormatError, InvalidInputError

WORDS = ["two words", " lead", "tab\there", '"quoted"', *random_words(20)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_words_one_a_line(tmp_path, end):
    for text in (end.join(WORDS), end.join(WORDS) + end):
        (tmp_path / "keys.txt").write_text(text, encoding="utf-8", newline="")
        assert read_keys(tmp_path / "keys.txt") == WORDS


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_mark_at_the_start_is_no_part_of_a_key(tmp_path, encoding):
    (tmp_path / "keys.txt").write_text("7\n9\n", encoding=encoding)
    assert read_keys(tmp_path / "keys.txt").tolist() == [7, 9]


def test_whole_numbers_are_integers(tmp_path):
    for numbers in (random_integers(30), np.arange(5), random_uint64(30)):
        (tmp_path / "keys.txt").write_text("".join(f"{n}\n" for n in numbers))
        np.save(tmp_path / "keys.npy", numbers.astype(numbers.dtype.newbyteorder(">")))
        for name in ("keys.txt", "keys.npy"):
            keys = read_keys(tmp_path / name)
            assert keys.dtype == numbers.dtype
            assert keys.tolist() == numbers.tolist()
    (tmp_path / "keys.txt").write_text("1\n2\n03\n")
    assert read_keys(tmp_path / "keys.txt") == ["1", "2", "03"]


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u1", "<u8"])
def test_integers_in_an_array(tmp_path, dtype):
    np.save(tmp_path / "keys.npy", np.arange(9)[::-1].astype(dtype))
    keys = read_keys(tmp_path / "keys.npy")
    assert keys.dtype == np.int64
    assert keys.tolist() == list(range(9))[::-1]


@pytest.mark.parametrize("order", ["<", ">"])
def test_strings_in_an_array(tmp_path, order):
    words = np.array(WORDS)
    np.save(tmp_path / "keys.npy", words.astype(words.dtype.newbyteorder(order)))
    assert read_keys(tmp_path / "keys.npy") == WORDS


def test_a_column_of_a_parquet_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "table.parquet"
    columns = {"key": WORDS, "item": np.arange(len(WORDS)) * 2, "x": np.ones(len(WORDS))}
    pq.write_table(pa.table(columns), path)
    assert read_keys(path) == WORDS
    assert read_keys(f"{path}:key") == WORDS
    assert read_keys(f"{path}:item").tolist() == columns["item"].tolist()
    for column in ("x", "none"):
        with pytest.raises(FormatError, match=r"\['key', 'item'\]"):
            read_keys(f"{path}:{column}")


def test_arrays_of_texts_say_what_to_save(tmp_path):
    words = np.array(["one", "two"], object)
    np.save(tmp_path / "keys.npy", words, allow_pickle=True)
    with pytest.raises(FormatError, match=r"astype\(str\)"):
        read_keys(tmp_path / "keys.npy")
    np.save(tmp_path / "keys.npy", words.astype(str))
    assert list(read_keys(tmp_path / "keys.npy")) == ["one", "two"]


def test_bytes_of_numpy_are_texts(tmp_path):
    words = ["a", "", "é", "longer"]
    encoded = np.array([word.encode() for word in words])
    np.save(tmp_path / "keys.npy", encoded)
    assert list(read_keys(tmp_path / "keys.npy")) == words
    np.savez(tmp_path / "f.npz", weight=np.ones((4, 2)), keys=encoded)
    with open_source(tmp_path / "f.npz") as source:
        assert list(source.keys) == words


def test_files_that_hold_no_keys(tmp_path):
    for name, content in [
        ("empty-line.txt", b"a\n\nb\n"),
        ("latin1.txt", b"caf\xe9\n"),
        ("long.txt", b"x" * (1 << 21)),
        ("none.npy", b""),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError):
            read_keys(tmp_path / name)
    for array in (np.ones(3), np.ones((2, 2), int), np.array([b"\xff"]), np.array([True])):
        np.save(tmp_path / "keys.npy", array)
        with pytest.raises(FormatError):
            read_keys(tmp_path / "keys.npy")
    np.save(tmp_path / "keys.npy", np.arange(9))
    with (tmp_path / "keys.npy").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(FormatError, match="extra bytes"):
        read_keys(tmp_path / "keys.npy")


def test_paths_that_are_no_files_of_keys(tmp_path):
    os.mkfifo(tmp_path / "keys.txt")
    with pytest.raises(FormatError, match="regular"):
        read_keys(tmp_path / "keys.txt")
    with pytest.raises(FormatError, match="no such file"):
        read_keys(tmp_path / "none.txt")
    for name in ("keys.bin", "keys", "keys.vec"):
        with pytest.raises(InvalidInputError, match="are read from"):
            read_keys(tmp_path / name)
    for name in ("keys.npy:name", "keys.txt:name"):
        with pytest.raises(InvalidInputError, match=r"a name|columns"):
            read_keys(tmp_path / name)
