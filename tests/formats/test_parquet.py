""".parquet: what pyarrow writes and reads, and columns that do not fit."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tests.pairs import pairs
from tierstore._formats import open_sink, open_source, read_keys
from tierstore.errors import FormatError, MissingExtraError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ARROW = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}


def lists(matrix, kind) -> object:
    return pa.array([list(row) for row in matrix], kind)


@pairs(together=1, dtype=list(ARROW), kind=["fixed", "list", "large"])
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
        ([[1.0, 2.0], None, [3.0, 4.0]], "row 1 of 'v' is not 2 numbers"),
        ([[1.0, 2.0], [3.0, 4.0], [None, 1.0]], "row 2 of 'v' is not 2 numbers"),
        ([[1.0, 2.0], [1.0], [3.0, 4.0, 5.0]], "row 1 of 'v' is not 2 numbers"),
        ([[1.0, 2.0], [], [3.0, 4.0]], "row 1 of 'v' is not 2 numbers"),
        ([None, [1.0, 2.0]], "missing or null"),
        ([[], [1.0, 2.0]], "1 to"),
        ([], "has no rows, and lists of any length"),
    ],
)
def test_lists_must_be_of_one_length_without_nulls(tmp_path, rows, why):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"v": pa.array(rows, pa.list_(pa.float32()))}), path)
    with pytest.raises(FormatError, match=why):
        read_file(path)


def test_columns_that_are_no_vectors(tmp_path):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"x": [1.0, 2.0], "ids": pa.array([[True], [False]])}), path)
    with pytest.raises(FormatError, match="no floats"):
        open_source(path)
    pq.write_table(pa.table({"v": pa.array([[1.0], [2.0]]), "key": ["a", None]}), path)
    with pytest.raises(FormatError, match="nulls"):
        read_keys_of(path)


@pytest.mark.parametrize("keys", [[1, 2**64 - 1], [7, 2**63 - 1], [0, 255]])
def test_unsigned_keys(tmp_path, keys):
    path = tmp_path / "file.parquet"
    kind = pa.uint64() if keys[1] > 255 else pa.uint8()
    columns = {"v": pa.array([[1.0], [2.0]]), "key": pa.array(keys, kind)}
    pq.write_table(pa.table(columns), path)
    for found in (read_keys_of(path), read_keys(f"{path}:key")):
        assert found.tolist() == keys
        assert found.dtype == (np.uint64 if keys[1] >= 2**63 else np.int64)


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


def parts_of(matrix, words, directory, names):
    """Write a file for each name, with a part of the rows each."""
    directory.mkdir()
    bounds = np.linspace(0, len(matrix), len(names) + 1).astype(int)
    for name, start, stop in zip(names, bounds[:-1], bounds[1:], strict=True):
        columns = {"v": lists(matrix[start:stop], pa.list_(pa.float32())), "key": words[start:stop]}
        pq.write_table(pa.table(columns), directory / name)


@pytest.mark.parametrize("name", ["items", "items.parquet"])
def test_files_of_a_directory_are_joined_in_the_order_of_their_numbers(tmp_path, name):
    matrix, words = random_matrix(33, 4), random_words(33)
    names = [f"data_{n}.parquet" for n in range(11)]  # data_10 comes after data_9
    parts_of(matrix, words, tmp_path / name, names)
    (tmp_path / name / "_SUCCESS").touch()
    (tmp_path / name / "_metadata.parquet").write_bytes(b"none")
    assert read_file(tmp_path / name, block_rows=4).tobytes() == matrix.tobytes()
    assert read_file(f"{tmp_path / name}:v").tobytes() == matrix.tobytes()
    assert read_keys_of(tmp_path / name) == words
    assert read_keys(f"{tmp_path / name}:key") == words


def test_files_of_a_directory_must_have_the_same_columns(tmp_path):
    matrix = random_matrix(6, 3)
    parts_of(matrix, random_words(6), tmp_path / "d", ["a.parquet", "b.parquet"])
    pq.write_table(pa.table({"v": lists(matrix, pa.list_(pa.float64()))}), tmp_path / "d/b.parquet")
    with pytest.raises(FormatError, match=r"b\.parquet has other columns than a\.parquet: v, key"):
        open_source(tmp_path / "d")
    (tmp_path / "d/b.parquet").write_bytes(b"PAR1")
    with pytest.raises(FormatError, match=r"b\.parquet: not a Parquet file"):
        open_source(tmp_path / "d")


@pytest.mark.parametrize("kinds", ["fff", "hdf", "ccc"])
def test_wide_tables_have_a_column_for_each_element(tmp_path, kinds):
    path, rng = tmp_path / "f.parquet", np.random.default_rng(4)
    columns = [
        (rng.standard_normal(31) * 40).astype({"f": "f4", "h": "f2", "d": "f8", "c": "i1"}[kind])
        for kind in kinds
    ]
    rest = {"key": random_words(31), "user_id": range(31)}
    pq.write_table(pa.table({**rest, **{f"f{n}": c for n, c in enumerate(columns)}}), path)
    with open_source(path) as source:
        assert source.dtype == ("float64" if "d" in kinds else "float32")
        expected = np.stack(columns, axis=1).astype(source.dtype)
        assert np.concatenate(list(source.blocks(7))).tobytes() == expected.tobytes()
        assert source.keys == rest["key"]
        assert source.read_as == 'keys from "key", 3 numbers from "f0" to "f2"'
        assert "user_id" in source.notes[0]


def test_nulls_in_wide_tables_are_refused_by_name(tmp_path):
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"a": [1.0, 2.0], "b": [1.0, None]}), path)
    with pytest.raises(FormatError, match="'b' has nulls, 1 of 2"):
        read_file(path)


@pytest.mark.parametrize("dtype", ["i1", "u1"])
def test_lists_of_bytes_are_numbers(tmp_path, dtype):
    matrix = np.random.default_rng(5).integers(0, 256, (9, 4)).astype(dtype)
    pq.write_table(pa.table({"v": list(matrix)}), tmp_path / "f.parquet")
    assert read_file(tmp_path / "f.parquet").tobytes() == matrix.astype("f4").tobytes()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 6)], ids=str)
def test_a_column_of_tensors_is_one_of_lists_if_they_have_one_dimension(tmp_path, suffix, shape):
    matrix, path = random_matrix(9, 6), tmp_path / f"f{suffix}"
    lists = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), 6)
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), shape), lists)
    table = pa.table({"id": range(10, 19), "rows": tensors})
    if suffix == ".parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=4)
    if len(shape) > 1:
        with pytest.raises(FormatError, match=r"no column of numbers .*fixed_shape_tensor"):
            read_file(path)
        return
    assert read_file(path, block_rows=4).tobytes() == matrix.tobytes()
    assert read_keys_of(path).tolist() == list(range(10, 19))
