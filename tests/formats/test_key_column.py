"""The column of keys of Parquet, Arrow and HDF5, by `key_column`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix, random_words
from tierstore._formats import TextOptions, open_source
from tierstore.errors import InvalidInputError

pa = pytest.importorskip("pyarrow")
ROWS = 20
MATRIX = random_matrix(ROWS, 2, "float32")
COLUMNS = {
    "sku": random_words(ROWS), "number": [7 * n + 1 for n in range(ROWS)],
    "a": MATRIX[:, 0].tolist(), "b": MATRIX[:, 1].tolist(),
}  # fmt: skip


def written(path: Path) -> Path:
    table = pa.table(COLUMNS | {each: pa.array(COLUMNS[each], pa.float32()) for each in "ab"})
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.fixture(params=["parquet", "arrow"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return written(tmp_path / f"items.{request.param}")


@pytest.mark.parametrize(("column", "name"), [("sku", "sku"), (1, "sku"), (2, "number")])
def test_a_column_is_the_keys_and_not_in_the_matrix(file: Path, column: Any, name: str) -> None:
    with open_source(file, text=TextOptions(key_column=column)) as source:
        assert source.keys is not None
        assert list(source.keys) == COLUMNS[name]
        assert np.concatenate(list(source.blocks(7))).tobytes() == MATRIX.tobytes()
        (note,) = source.notes
        assert name not in note and f"{'number' if name == 'sku' else 'sku'}; --key-column" in note


def test_no_column_is_the_keys(tmp_path: Path) -> None:
    table = pa.table({"key": COLUMNS["sku"], "a": COLUMNS["a"], "b": COLUMNS["b"]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "f.parquet")
    with open_source(tmp_path / "f.parquet", text=TextOptions(key_column=False)) as source:
        assert source.keys is None and source.notes == ()
    with open_source(tmp_path / "f.parquet") as source:
        assert list(source.keys or ()) == COLUMNS["sku"]


@pytest.mark.parametrize("column", ["a", "nothing", 9, 0])
def test_a_column_that_cannot_be_keys(file: Path, column: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"no column "):
        open_source(file, text=TextOptions(key_column=column))


def test_a_dataset_is_the_keys(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "f.h5", "w") as made:
        made["vectors"], made["number"] = MATRIX, COLUMNS["number"]
    with open_source(tmp_path / "f.h5", text=TextOptions(key_column="number")) as source:
        assert list(source.keys) == COLUMNS["number"] and source.notes == ()


@pytest.mark.parametrize("options", [{"key_column": "x"}, {"sep": ","}, {"header": True}])
def test_files_without_columns_take_no_options(tmp_path: Path, options: Any) -> None:
    np.save(tmp_path / "f.npy", MATRIX)
    what = "key-column" if "key_column" in options else "is no text"
    with pytest.raises(InvalidInputError, match=what):
        open_source(tmp_path / "f.npy", text=TextOptions(**options))


def test_a_separator_is_none_of_parquet(file: Path) -> None:
    with pytest.raises(InvalidInputError, match="is no text"):
        open_source(file, text=TextOptions(key_column="sku", sep=","))


@pytest.mark.parametrize("how", [{"key_column": "sku"}, {"keys": "{}:sku"}])
def test_no_note_tells_of_the_column_that_is_the_keys(
    file: Path, tmp_path: Path, how: dict[str, str]
) -> None:
    options: Any = {name: value.format(file) for name, value in how.items()}
    done = tierstore.import_table(tmp_path / "s.tier", file, **options)
    assert done.keys and not any("sku" in note for note in done.notes)
    with tierstore.open(tmp_path / "s.tier") as store:
        table = store["embeddings"]
        assert table.read(table.lookup(COLUMNS["sku"])).tobytes() == MATRIX.tobytes()
