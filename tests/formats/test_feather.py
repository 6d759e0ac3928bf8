""".arrow and .feather: what pyarrow, pandas and Hugging Face write, and files that are damaged."""

import json

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tierstore._formats import open_source, read_keys
from tierstore.errors import FormatError, InvalidInputError

pa = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")

MATRIX, WORDS = random_matrix(31, 6), random_words(31)


def table(start=0, stop=31):
    vectors = pa.array(list(MATRIX[start:stop]), pa.list_(pa.float32()))
    return pa.table({"key": WORDS[start:stop], "v": vectors})


def write_stream(path, content, *, rows=8):
    with path.open("wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=rows)


@pytest.mark.parametrize("compression", ["uncompressed", "lz4", "zstd"])
def test_reads_files_however_they_are_packed(tmp_path, compression):
    path = tmp_path / "f.feather"
    feather.write_feather(table(), path, compression=compression, chunksize=8)
    assert read_file(path, block_rows=5).tobytes() == MATRIX.tobytes()
    assert read_keys_of(path) == WORDS
    assert read_keys(path) == WORDS


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_pyarrow_maps_what_is_written(tmp_path, dtype):
    matrix = random_matrix(31, 6, dtype)
    write_file(tmp_path / "f.arrow", matrix, dtype, keys=WORDS)
    with pa.memory_map(str(tmp_path / "f.arrow")) as mapped:
        before = pa.total_allocated_bytes()
        found = pa.ipc.open_file(mapped).read_all()
        assert pa.total_allocated_bytes() == before
        assert np.array(found["weight"].to_pylist(), dtype).tobytes() == matrix.tobytes()
        assert found["key"].to_pylist() == WORDS


def data_set(path, **state):
    """A data set as Dataset.save_to_disk makes one of three files."""
    path.mkdir()
    names = [f"data-{n:05}-of-00003.arrow" for n in range(3)]
    for n, name in enumerate(names):
        write_stream(path / name, table(11 * n, min(31, 11 * n + 11)))
    files = {"_data_files": [{"filename": name} for name in names], "_split": "train"} | state
    (path / "state.json").write_text(json.dumps(files))


def test_reads_data_sets_of_hugging_face(tmp_path):
    data_set(tmp_path / "set")
    for place in (tmp_path / "set", f"{tmp_path / 'set'}:v"):
        assert read_file(place, block_rows=7).tobytes() == MATRIX.tobytes()
    assert read_keys_of(tmp_path / "set") == WORDS


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"_data_files": []}, "does not list"),
        ({"_data_files": None}, "does not list"),
        ({"_data_files": ["a"]}, "does not list"),
        ({"_data_files": [{"filename": "../set/data-00000-of-00003.arrow"}]}, "does not list"),
        ({"_data_files": [{"filename": "none.arrow"}]}, "no such file"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "flatten_indices"),
    ],
)
def test_states_of_data_sets_that_are_not_followed(tmp_path, state, why):
    data_set(tmp_path / "set", **state)
    with pytest.raises(FormatError, match=why):
        open_source(tmp_path / "set")


def test_a_split_must_be_named(tmp_path):
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/dataset_dict.json").write_text('{"splits": ["train"]}')
    data_set(tmp_path / "sets/train")
    with pytest.raises(FormatError, match=r"splits train; name one, as in .*/sets/train"):
        open_source(tmp_path / "sets")
    assert read_file(tmp_path / "sets/train").tobytes() == MATRIX.tobytes()


def test_files_of_several_formats_are_not_joined(tmp_path):
    feather.write_feather(table(), tmp_path / "a.feather")
    write_file(tmp_path / "b.parquet", MATRIX, "float32")
    with pytest.raises(InvalidInputError, match="several formats"):
        open_source(tmp_path)


def test_a_stream_cut_between_batches_is_not_a_shorter_one(tmp_path):
    path = tmp_path / "f.arrow"
    write_stream(path, table())
    content = path.read_bytes()
    assert read_file(path).tobytes() == MATRIX.tobytes()
    path.write_bytes(content[:-8])
    with pytest.raises(FormatError, match="end of the stream is missing"):
        open_source(path)
