"""Every column, array, list and index beside the rows of a file is read, or named, in each format.

Files are made by each format's own library, with columns of random kinds under random names.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tries import tries
from tierstore._formats import read_keys
from tierstore.errors import FormatError
from tierstore.importing import Preview, preview

ROWS = 5
MATRIX = np.random.default_rng(3).standard_normal((ROWS, 3)).astype("f4")
NAMES = (
    "one",
    "two",
    "keys",
    "key",
    "item_id",
    "word",
    "x0",
    "x1",
    "note",
    "index",
    "weight_scale",
)
Extras = dict[str, Any]

KINDS: dict[str, Callable[[int], Any]] = {
    "integers": lambda seed: np.random.default_rng(seed).permutation(90)[:ROWS].astype("i8"),
    "narrow": lambda seed: np.random.default_rng(seed).permutation(90)[:ROWS].astype("u1"),
    "floats": lambda seed: np.random.default_rng(seed).standard_normal(ROWS).astype("f4"),
    "flags": lambda seed: np.arange(ROWS) % 2 == seed % 2,
    "texts": lambda seed: np.array([f"w{seed}-{n}" for n in range(ROWS)]),
    "matrix of whole numbers": lambda seed: np.full((ROWS, 2), seed, "i8"),
    "shorter": lambda seed: np.arange(ROWS - 1) + seed,
    "cube": lambda seed: np.full((ROWS, 2, 2), seed, "f4"),
    "objects": lambda seed: np.array([None, *range(ROWS - 1)], object),
}
TABLE = ("integers", "narrow", "floats", "flags", "texts", "matrix of whole numbers")
NUMBERS = [name for name in KINDS if name not in ("texts", "objects")]


def npz(path: Path, extras: Extras) -> None:
    np.savez(path, weight=MATRIX, **extras)


def safetensors(path: Path, extras: Extras) -> None:
    pytest.importorskip("safetensors.numpy").save_file({"weight": MATRIX, **extras}, path)


def pt(path: Path, extras: Extras) -> None:
    torch = pytest.importorskip("torch")
    saved: dict[str, Any] = {"weight": torch.from_numpy(MATRIX)}
    for name, each in extras.items():
        saved[name] = each.tolist() if each.dtype.kind in "UO" else torch.from_numpy(each)
    torch.save(saved, path)


def zarr(path: Path, extras: Extras) -> None:
    group = pytest.importorskip("zarr").create_group(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts have no specification
        for name, each in {"weight": MATRIX, **extras}.items():
            group.create_array(name, data=each)


def h5(path: Path, extras: Extras) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        for name, each in {"weight": MATRIX, **extras}.items():
            file[name] = each.astype("S") if each.dtype.kind == "U" else each


def arrow(path: Path, extras: Extras) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {name: pa.array(list(each)) for name, each in {**extras, "weight": MATRIX}.items()}
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    else:
        pytest.importorskip("pyarrow.feather").write_feather(pa.table(columns), path)


def jsonl(path: Path, extras: Extras) -> None:
    columns = {**{name: each.tolist() for name, each in extras.items()}, "weight": MATRIX.tolist()}
    rows = [{name: each[row] for name, each in columns.items()} for row in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def csv(path: Path, extras: Extras) -> None:
    columns = {**{n: each.tolist() for n, each in extras.items()}, "weight": MATRIX.tolist()}
    rows = [[columns[name][row] for name in columns] for row in range(ROWS)]
    lines = [",".join(f'"{cell}"' for cell in row) for row in [list(columns), *rows]]
    path.write_text("\n".join(lines) + "\n")


WRITERS: dict[str, tuple[Callable[[Path, Extras], None], list[str]]] = {
    ".npz": (npz, list(KINDS)),
    ".safetensors": (safetensors, NUMBERS),
    ".pt": (pt, list(KINDS)),
    ".zarr": (zarr, [name for name in KINDS if name != "objects"]),
    ".jsonl": (jsonl, [*TABLE, "objects"]),
    ".csv": (csv, ["integers", "narrow", "floats", "flags", "texts"]),
    ".h5": (h5, [name for name in KINDS if name != "objects"]),
    ".parquet": (arrow, list(TABLE)),
    ".feather": (arrow, list(TABLE)),
}


def check(found: Preview, extras: Extras) -> None:
    """Check that the rows are those of the matrix, and each other array is the keys or named."""
    assert found.first.tobytes() == MATRIX[: len(found.first)].tobytes()
    said = " ".join(found.notes).replace("makes it the keys", "")
    unnamed = [name for name in extras if not re.search(rf"(?<!-)\b{name}\b(?!-)", said)]
    if found.keys is None:
        assert not unnamed
    else:
        (name,) = unnamed
        expected = extras[name][: len(found.keys)].tolist()
        assert list(map(str, found.keys)) == list(map(str, expected))


@pytest.mark.parametrize(
    "suffix",
    [
        pytest.param(s, marks=[pytest.mark.slow] if s in (".h5", ".parquet", ".feather") else [])
        for s in WRITERS
    ],
)
@tries(8)
@given(data=st.data())
def test_what_is_beside_the_rows_is_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    write, kinds = WRITERS[suffix]
    chosen = data.draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(kinds), max_size=4))
    extras = {name: KINDS[kind](seed) for seed, (name, kind) in enumerate(chosen.items(), 7)}
    path = tmp_path_factory.mktemp("file") / f"f{suffix}"
    write(path, extras)
    try:
        check(preview(path), extras)
    except FormatError as error:  # which names what it is about
        assert any(name in str(error) for name in extras)


@pytest.mark.slow
def test_the_index_of_pandas_is_a_key_or_named(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    described = {"index_columns": [{"kind": "range", "start": 40, "stop": 50, "step": 2}]}
    table = pa.table({"f0": MATRIX[:, 0], "f1": MATRIX[:, 1]})
    metadata = {"pandas": json.dumps(described)}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "f.parquet")
    (note,) = preview(tmp_path / "f.parquet").notes
    assert "the index of pandas, range(40, 50, 2)" in note
    numbered = pa.table({"f0": MATRIX[:, 0], "__index_level_0__": [9, 7, 5, 3, 1]})
    pq.write_table(numbered, tmp_path / "g.parquet")
    found = preview(tmp_path / "g.parquet")
    assert (found.dim, found.keys) == (1, [9, 7, 5])
    for text in ("[", '{"index_columns": 5}', '{"index_columns": [{"kind": "range"}]}'):
        table = numbered.replace_schema_metadata({"pandas": text})
        pq.write_table(table, tmp_path / "h.parquet")
        assert preview(tmp_path / "h.parquet").notes == ()


@pytest.mark.slow
def test_keys_are_read_from_any_file_that_holds_them(tmp_path: Path) -> None:
    words = KINDS["texts"](1)
    for suffix in (".npz", ".pt", ".zarr", ".jsonl", ".h5", ".feather"):
        write, kinds = WRITERS[suffix]
        whole = KINDS["integers"](2)
        extras = {"note": words if "texts" in kinds and suffix != ".zarr" else whole, "keys": whole}
        write(tmp_path / f"f{suffix}", extras)
        assert list(read_keys(f"{tmp_path}/f{suffix}:note")) == extras["note"].tolist()
        assert list(read_keys(tmp_path / f"f{suffix}")) == whole.tolist()
        with pytest.raises(FormatError, match="no column 'weight' of integers or strings"):
            read_keys(f"{tmp_path}/f{suffix}:weight")


def test_rows_in_nested_bare_and_wide_objects(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    rows = MATRIX.tolist()

    def write(*lines: Any) -> Preview:
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        return preview(path, rows=ROWS)

    nested = write(*({"id": n + 4, "data": {"vector": row}} for n, row in enumerate(rows)))
    assert nested.keys == [4, 5, 6, 7, 8]
    assert nested.read_as == 'keys from "id", 3 numbers from "data.vector"'
    bare = write(*rows)
    wide = write(*({"id": f"w{n}", **dict(zip("abc", r, strict=True))} for n, r in enumerate(rows)))
    assert wide.keys == [f"w{n}" for n in range(ROWS)] and bare.keys is None
    for each in (nested, bare, wide):
        assert each.first.tobytes() == MATRIX.tobytes()
    with pytest.raises(FormatError, match="line 2, 'b' is missing or null; need a number"):
        write({"a": 0.5, "b": 1.5}, {"a": 0.5})
    with pytest.raises(FormatError, match="line 2 is no list of numbers"):
        write([0.5], {"a": 0.5})


def test_arrays_in_groups_of_groups(tmp_path: Path) -> None:
    group = pytest.importorskip("zarr").create_group(tmp_path / "f.zarr")
    group.create_array("obsm/pca/X", data=MATRIX)
    found = preview(f"{tmp_path}/f.zarr:obsm/pca/X")
    assert found.first.tobytes() == preview(tmp_path / "f.zarr").first.tobytes()
