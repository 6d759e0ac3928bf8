"""Nothing that a file or a table holds gets lost without a word."""

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix
from tierstore.errors import InvalidInputError

ROWS = 6


@pytest.fixture
def matrix():
    return random_matrix(ROWS, 3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.tier"


def noted(done, *words) -> bool:
    return any(all(word in note for word in words) for note in done.notes)


def parquet(path, matrix, columns):
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table({**columns, "weight": pyarrow.array(list(matrix))}), path)


def safetensors(path, matrix, columns):
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({**columns, "weight": matrix}, path)


def torch_file(path, matrix, columns):
    torch = pytest.importorskip("torch")
    torch.save({n: torch.from_numpy(a) for n, a in {**columns, "weight": matrix}.items()}, path)


def zarr_group(path, matrix, columns):
    group = pytest.importorskip("zarr").create_group(path)
    for name, array in {**columns, "weight": matrix}.items():
        group.create_array(name, data=array)


WRITERS = {
    "f.npz": lambda path, matrix, columns: np.savez(path, weight=matrix, **columns),
    "f.parquet": parquet,
    "f.safetensors": safetensors,
    "f.pt": torch_file,
    "f.zarr": zarr_group,
}


@pytest.mark.parametrize("name", WRITERS)
def test_columns_of_whole_numbers_are_keys_by_name_or_noted(tmp_path, path, matrix, name):
    ids = np.arange(ROWS) * 3 + 1
    WRITERS[name](tmp_path / name, matrix, {"serial": ids})
    done = tierstore.import_table(path, tmp_path / name)
    assert not done.keys and noted(done, "serial", "--key-column")
    for table, how in [
        ("b", {"keys": f"{tmp_path / name}:serial"}),
        ("c", {"key_column": "serial"}),
    ]:
        again = tierstore.import_table(path, tmp_path / name, table=table, **how)
        assert again.keys and again.notes == ()
    WRITERS[name](tmp_path / f"g{name}", matrix, {"item_id": ids})
    done = tierstore.import_table(path, tmp_path / f"g{name}", table="d")
    assert done.keys and done.notes == ()
    with tierstore.open(path) as store:
        assert [store[each].keys[:].tolist() for each in "bcd"] == [ids.tolist()] * 3


def test_a_column_that_is_read_as_keys_is_not_noted_and_others_are(tmp_path, path, matrix):
    ids = np.arange(ROWS) * 3 + 1
    parquet(tmp_path / "f.parquet", matrix, {"a": ids, "b": ids + 1})
    done = tierstore.import_table(path, tmp_path / "f.parquet", keys=f"{tmp_path}/f.parquet:a")
    assert done.keys and noted(done, "row: b;", "--key-column b (key_column='b')")
    parquet(tmp_path / "other.parquet", matrix, {"a": ids})
    done = tierstore.import_table(path, tmp_path / "f.parquet", keys=f"{tmp_path}/other.parquet:a")
    assert done.keys and noted(done, "row: a, b;")


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "f.parquet"])
def test_keys_of_another_length_are_not_ignored_without_a_word(tmp_path, path, matrix, name):
    WRITERS[name](tmp_path / name, matrix, {"keys": np.arange(1, ROWS)})
    done = tierstore.import_table(path, tmp_path / name)
    assert not done.keys and noted(done, "'keys' is not read", str(ROWS - 1))


def test_keys_that_are_read_need_no_note(tmp_path, path, matrix):
    np.savez(tmp_path / "f.npz", weight=matrix, keys=np.arange(1, ROWS + 1))
    done = tierstore.import_table(path, tmp_path / "f.npz")
    assert done.keys and done.notes == ()


def test_new_rows_under_old_keys_are_noted(tmp_path, path, matrix):
    np.save(tmp_path / "f.npy", matrix)
    tierstore.import_table(path, tmp_path / "f.npy", keys=list("abcdef"))
    done = tierstore.import_table(path, tmp_path / "f.npy")
    assert noted(done, "kept the 6 keys", "--keys")
    assert tierstore.import_table(path, tmp_path / "f.npy", keys=list("uvwxyz")).notes == ()


def test_types_that_a_table_narrows_are_noted(tmp_path, path, matrix):
    np.save(tmp_path / "f.npy", matrix)
    tierstore.import_table(path, tmp_path / "f.npy")
    np.save(tmp_path / "g.npy", matrix.astype("f8") / 3)
    done = tierstore.import_table(path, tmp_path / "g.npy")
    assert noted(done, "float64", "rounded to float32")
    asked = tierstore.import_table(path, tmp_path / "g.npy", table="b", dtype="float32")
    assert asked.notes == ()


def test_keys_beside_a_file_are_noted(tmp_path, path, matrix):
    np.save(tmp_path / "f.npy", matrix)
    tierstore.import_table(path, tmp_path / "f.npy", keys=list("abcdef"))
    with tierstore.open(path) as store:
        done = tierstore.export_table(store["embeddings"], tmp_path / "g.npy")
        assert noted(done, "the keys are in g.keys.npy", ".npy")
        assert tierstore.importing.read_keys(tmp_path / "g.keys.npy") == list("abcdef")
        assert tierstore.export_table(store["embeddings"], tmp_path / "g.npz").notes == ()
    done = tierstore.import_table(path, tmp_path / "g.npy", table="other")
    beside = str(tmp_path / "g.keys.npy")
    assert noted(done, "not read: the keys in g.keys.npy", f"keys={beside!r}", "--keys")


@pytest.mark.parametrize("keys", [list("abcabd"), [5, 6, 7, 5, 6, 8]])
def test_keys_that_come_twice(tmp_path, path, matrix, keys):
    np.save(tmp_path / "f.npy", matrix)
    with pytest.raises(
        InvalidInputError, match=r"4 of the 6.*rows 0 and 3, .*rows 1 and 4; .*first"
    ):
        tierstore.import_table(path, tmp_path / "f.npy", keys=keys)
    assert not path.exists()
    for which, rows in (("first", [0, 1, 2, 5]), ("last", [2, 3, 4, 5])):
        done = tierstore.import_table(
            path, tmp_path / "f.npy", keys=keys, table=which, duplicates=which
        )
        assert done.rows == 4 and noted(done, "left out 2 rows")
        with tierstore.open(path) as store:
            assert list(store[which].keys[:]) == [keys[row] for row in rows]
            assert np.array_equal(store[which].read(np.arange(4)), matrix[rows])
    with pytest.raises(InvalidInputError, match="duplicates is"):
        tierstore.import_table(path, tmp_path / "f.npy", duplicates="some")


def test_the_first_three_keys_that_come_twice_are_named(tmp_path, path):
    np.save(tmp_path / "f.npy", random_matrix(10, 2))
    with pytest.raises(InvalidInputError) as error:
        tierstore.import_table(path, tmp_path / "f.npy", keys=list("abcdeabcde"))
    assert str(error.value).count(" in rows ") == 3
