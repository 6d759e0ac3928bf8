""".parquet: what pyarrow writes and reads, and columns that do not fit."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tierstore._formats import open_sink, open_source
from tierstore.errors import FormatError, MissingExtraError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ARROW = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}


def lists(matrix, kind) -> object:
    return pa.array([list(row) for row in matrix], kind)


@pytest.mark.parametrize("dtype", ARROW)
@pytest.mark.parametrize("kind", ["fixed", "list", "large"])
def test_reads_lists_of_every_kind(tmp_path, dtype, kind):
    matrix = random_matrix(31, 6, dtype)
    element = ARROW[dtype]
    arrow_type = {
        "fixed": pa.list_(element, 6), "list": pa.list_(element), "large": pa.large_list(element)
    }[kind]  # fmt: skip
    table = pa.table({"id": range(31), "vector": lists(matrix, arrow_type)})
    pq.write_table(table, tmp_path / "file.parquet", row_group_size=10)
    assert read_file(tmp_path / "file.parquet", block_rows=7).tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / "file.parquet") is None


@pytest.mark.parametrize(
    "keys", [None, np.arange(31) * 5, random_words(31)], ids=["no", "int", "str"]
)
@pytest.mark.parametrize("dtype", ARROW)
def test_pyarrow_reads_what_is_written(tmp_path, keys, dtype):
    matrix = random_matrix(31, 6, dtype)
    write_file(tmp_path / "file.parquet", matrix, dtype, keys=keys, field="exp_avg")
    table = pq.read_table(tmp_path / "file.parquet")
    assert table.schema.field("exp_avg").type.list_size == 6
    assert np.array(table["exp_avg"].to_pylist(), matrix.dtype).tobytes() == matrix.tobytes()
    assert table.column_names == (["exp_avg"] if keys is None else ["key", "exp_avg"])
    if keys is not None:
        assert table["key"].to_pylist() == list(keys)

    column = (
        pq.ParquetFile(tmp_path / "file.parquet").metadata.row_group(0).column(keys is not None)
    )
    # DuckDB reads this encoding of wider types alone.
    assert ("BYTE_STREAM_SPLIT" in column.encodings) == (matrix.itemsize > 2)
    assert column.compression == "ZSTD"
    assert not column.has_dictionary_page
    if keys is not None:  # where key = …, without reading every group
        found = pq.ParquetFile(tmp_path / "file.parquet").metadata.row_group(0).column(0).statistics
        assert (found.min, found.max) == (min(keys), max(keys))


@pytest.mark.parametrize(
    "key",
    [
        pa.array(random_words(9)),
        pa.array(random_words(9), pa.large_string()),
        pa.array(random_words(9)).dictionary_encode(),
        pa.array(range(100, 109), pa.int8()),
        pa.array(range(100, 109), pa.uint64()),
        pa.array([2**62 + i for i in range(9)]),
    ],
    ids=lambda key: str(key.type)[:12],
)
def test_reads_keys_of_every_kind(tmp_path, key):
    vectors = lists(random_matrix(9, 2), pa.list_(pa.float32(), 2))
    pq.write_table(
        pa.table({"v": vectors, "key": key}), tmp_path / "file.parquet", row_group_size=4
    )
    assert list(read_keys_of(tmp_path / "file.parquet")) == key.to_pylist()


def test_names_with_dots_and_several_vectors(tmp_path):
    first, second = random_matrix(9, 2, seed=1), random_matrix(9, 3, seed=2)
    columns = {
        "a": pa.array([{"b": i} for i in range(9)]),
        "a.b": lists(first, pa.list_(pa.float32())),
        "c": lists(second, pa.list_(pa.float32())),
    }
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table(columns), path)
    assert read_file(f"{path}:a.b").tobytes() == first.tobytes()
    assert read_file(path, field="c").tobytes() == second.tobytes()
    with pytest.raises(FormatError, match="2 matrices"):
        open_source(path)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([[1.0, 2.0], None, [3.0, 4.0]], "not all 2 numbers"),
        ([[1.0, 2.0], [None, 1.0], [3.0, 4.0]], "not all 2 numbers"),
        ([[1.0, 2.0], [1.0], [3.0, 4.0, 5.0]], "not all 2 numbers"),
        ([[1.0, 2.0], [], [3.0, 4.0]], "not all 2 numbers"),
        ([None, [1.0, 2.0]], "missing or null"),
        ([[], [1.0, 2.0]], "1 to"),
        ([], "missing or null"),
    ],
)
def test_lists_must_be_of_one_length_without_nulls(tmp_path, rows, why):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"v": pa.array(rows, pa.list_(pa.float32()))}), path)
    with pytest.raises(FormatError, match=why):
        read_file(path)


def test_columns_that_are_no_vectors(tmp_path):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0], "ids": pa.array([[1], [2]])}), path)
    with pytest.raises(FormatError, match="no floats"):
        open_source(path)
    pq.write_table(pa.table({"v": pa.array([[1.0], [2.0]]), "key": ["a", None]}), path)
    with pytest.raises(FormatError, match="nulls"):
        read_keys_of(path)
    huge = pa.array([1, 2**63], pa.uint64())
    pq.write_table(pa.table({"v": pa.array([[1.0], [2.0]]), "key": huge}), path)
    with pytest.raises(FormatError):
        read_keys_of(path)


def test_without_pyarrow_the_pip_line_is_given(tmp_path, monkeypatch):
    path = tmp_path / "file.parquet"
    write_file(path, random_matrix(3, 2), "float32")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tierstore\[parquet\]'"):
        open_source(path)
    with (
        pytest.raises(MissingExtraError),
        open_sink(tmp_path / "new.parquet", rows=1, dim=1, dtype="float32"),
    ):
        pass
    assert list(tmp_path.iterdir()) == [path]
