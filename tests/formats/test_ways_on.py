"""Files as people have them, and a way to read each: packed, raw, of bytes, in JSON, misnamed."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tierstore
from tests.formats.matrices import write_file
from tierstore._formats import read_keys
from tierstore.errors import FormatError, InvalidInputError, MissingFileError
from tierstore.importing import import_table, preview

Matrix = npt.NDArray[Any]

ROWS, DIM = 4, 3
MATRIX = np.random.default_rng(6).standard_normal((ROWS, DIM)).astype("f4")
BYTES = np.random.default_rng(7).integers(0, 256, (ROWS, DIM), np.uint8)


def test_files_of_bytes(tmp_path: Path) -> None:
    counts = np.array(BYTES.shape, "<u4").tobytes()
    (tmp_path / "f.u8bin").write_bytes(counts + BYTES.tobytes())
    (tmp_path / "f.i8bin").write_bytes(counts + BYTES.tobytes())
    rows = [np.array([DIM], "<i4").tobytes() + row.tobytes() for row in BYTES]
    (tmp_path / "f.bvecs").write_bytes(b"".join(rows))
    for suffix, dtype in ((".u8bin", "u1"), (".i8bin", "i1"), (".bvecs", "u1")):
        found = preview(tmp_path / f"f{suffix}", rows=ROWS).first
        assert found.tobytes() == BYTES.view(dtype).astype("f4").tobytes()
        data = (tmp_path / f"f{suffix}").read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(data[:-1])
        with pytest.raises(FormatError, match=r"\d+ bytes"):
            preview(tmp_path / f"cut{suffix}")


WHOLE = ("int16", "uint16", "int32", "uint32", "int64", "uint64")


def _with_pyarrow(path: Path, matrix: Matrix) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    kind = pyarrow.list_(pyarrow.from_numpy_dtype(matrix.dtype))
    parquet.write_table(pyarrow.table({"w": pyarrow.array(list(matrix), kind)}), path)


def _with_h5py(path: Path, matrix: Matrix) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["w"] = matrix


def _with_torch(path: Path, matrix: Matrix) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.from_numpy(matrix)}, path)


WHOLE_WRITERS: dict[str, Callable[[Path, Matrix], object]] = {
    ".npy": np.save,
    ".npz": lambda path, matrix: np.savez(path, w=matrix),
    ".safetensors": lambda path, matrix: pytest.importorskip("safetensors.numpy").save_file(
        {"w": matrix}, path
    ),
    ".zarr": lambda path, matrix: (
        pytest.importorskip("zarr").create_group(path).create_array("w", data=matrix)
    ),
    ".parquet": _with_pyarrow,
    ".h5": _with_h5py,
    ".pt": _with_torch,
}


@pytest.mark.parametrize("suffix", WHOLE_WRITERS)
def test_whole_numbers_of_any_width_are_read_exactly_or_refused(
    tmp_path: Path, suffix: str
) -> None:
    for number in WHOLE:
        limits = np.iinfo(number)
        most = min(int(limits.max), 2**53)
        matrix = np.array([[max(int(limits.min), -most), 0], [1, most]], number)
        path = tmp_path / f"{number}{suffix}"
        WHOLE_WRITERS[suffix](path, matrix)
        found = preview(path)
        assert found.dtype == ("float32" if limits.bits == 16 else "float64")
        assert [list(map(int, row)) for row in found.first] == matrix.tolist()
        if limits.bits == 64:
            matrix[1, 1] = most + 1
            WHOLE_WRITERS[suffix](tmp_path / f"more-{number}{suffix}", matrix)
            with pytest.raises(FormatError, match=rf"{most + 1}, beyond 2\*\*53"):
                preview(tmp_path / f"more-{number}{suffix}")


def test_a_matrix_of_floats_goes_before_one_of_ids(tmp_path: Path) -> None:
    ids = np.arange(2 * ROWS).reshape(ROWS, 2)
    np.savez(tmp_path / "f.npz", neighbors=ids, train=MATRIX)
    found = preview(tmp_path / "f.npz")
    assert found.first.tobytes() == MATRIX[:3].tobytes()
    assert "neighbors" in str(found.notes)
    assert preview(f"{tmp_path / 'f.npz'}:neighbors", rows=ROWS).first.tolist() == ids.tolist()


def test_neighbours_as_faiss_has_them(tmp_path: Path) -> None:
    ids = np.array([[5, 2**31 - 1, 0], [7, -1, 3]], "<i4")
    lengths = np.full((2, 1), 3, "<i4")
    (tmp_path / "f.ivecs").write_bytes(np.hstack([lengths, ids]).tobytes())
    (tmp_path / "f.ibin").write_bytes(np.array([2, 3], "<u4").tobytes() + ids.tobytes())
    for name in ("f.ivecs", "f.ibin"):
        assert preview(tmp_path / name).first.tolist() == ids.tolist()
    (tmp_path / "cut.ivecs").write_bytes((tmp_path / "f.ivecs").read_bytes()[:-1])
    with pytest.raises(FormatError, match="no rows of 3 elements"):
        preview(tmp_path / "cut.ivecs")


def test_bytes_without_a_type_are_what_the_path_says(tmp_path: Path) -> None:
    """As numpy.save writes bfloat16 of ml_dtypes."""
    bits = (MATRIX.view("<u4") >> 16).astype("<u2")
    np.save(tmp_path / "f.npy", bits.view("V2"))
    with pytest.raises(FormatError, match=r"bytes without a type.*f\.npy:bfloat16"):
        preview(tmp_path / "f.npy")
    with pytest.raises(FormatError, match=r"f\.npy:bfloat16"):
        preview(f"{tmp_path / 'f.npy'}:float8_e5m2")
    found = preview(f"{tmp_path / 'f.npy'}:bfloat16", rows=ROWS)
    expected = (bits.astype("<u4") << 16).view("<f4")
    assert (found.dtype, found.first.astype("f4").tobytes()) == ("bfloat16", expected.tobytes())
    with tierstore.attach({"t": f"{tmp_path / 'f.npy'}:bfloat16"}) as attached:
        assert attached["t"].read(range(ROWS)).astype("f4").tobytes() == expected.tobytes()
    np.save(tmp_path / "floats.npy", MATRIX)
    with pytest.raises(FormatError, match="no bfloat16"):
        preview(f"{tmp_path / 'floats.npy'}:bfloat16")


def test_the_first_version_of_feather_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.feather").write_bytes(b"FEA1" + bytes(40) + b"FEA1")
    with pytest.raises(FormatError, match=r"first version.*write_feather\("):
        preview(tmp_path / "f.feather")


@pytest.mark.parametrize("name", ["f.raw", "f.dat", "weight.bin"])
def test_bytes_of_a_matrix(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for dtype in ("float32", "float64", "int8", "int16", "int64"):
        MATRIX.astype(dtype).tofile(path)
        found = preview(f"{path}:{dtype}:{DIM}", rows=ROWS)
        expected = MATRIX.astype(dtype).astype(found.dtype)
        assert found.first.tobytes() == expected.tobytes()
    MATRIX.tofile(path)
    with tierstore.attach({"t": f"{path}:float32:{DIM}"}) as attached:
        assert attached["t"].read(range(ROWS)).tobytes() == MATRIX.tobytes()
    with pytest.raises(FormatError, match="48 bytes are no rows of 5 float32"):
        preview(f"{path}:float32:5")
    for wrong in ("", ":float32:0", ":int4:3"):
        with pytest.raises(FormatError, match=f"{name}:float32:256"):
            preview(f"{path}{wrong}")


def test_a_hole_alone_is_no_rows(tmp_path: Path) -> None:
    with (tmp_path / "f.raw").open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(FormatError, match=r"claims .*, and holds 0 B"):
        preview(f"{tmp_path}/f.raw:float32:256")


def test_one_of_several_texts_in_an_archive(tmp_path: Path) -> None:
    lines = "".join(f"w{n} {' '.join(map(repr, row))}\n" for n, row in enumerate(MATRIX.tolist()))
    with zipfile.ZipFile(tmp_path / "glove.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/glove.3d.txt", lines)
        archive.writestr("other.txt", "x 1.5\n")
        archive.writestr("m.npy", b"")
    found = preview(f"{tmp_path}/glove.zip:a/glove.3d.txt", rows=ROWS)
    assert found.first.tobytes() == MATRIX.tobytes() and found.keys == ["w0", "w1", "w2", "w3"]
    with pytest.raises(FormatError, match=r"one is to be named, as in .*glove\.zip:a/glove\.3d\.t"):
        preview(tmp_path / "glove.zip")
    with pytest.raises(MissingFileError, match=r"glove\.zip: no 'none\.txt' in it, only a/glove"):
        preview(f"{tmp_path}/glove.zip:none.txt")
    with pytest.raises(ValueError, match="only text is read from an archive"):
        preview(f"{tmp_path}/glove.zip:m.npy")


def test_packed_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "f.npy", MATRIX)
    (tmp_path / "f.npy.gz").write_bytes(gzip.compress((tmp_path / "f.npy").read_bytes()))
    assert preview(tmp_path / "f.npy.gz", rows=ROWS).first.tobytes() == MATRIX.tobytes()
    with gzip.open(tmp_path / "g.npy.gz", "wb") as file:
        file.write(bytes(4 << 20))
    monkeypatch.setattr("tierstore._formats._encoding.FREE_BYTES", 0)
    with pytest.raises(FormatError, match="more than 200 times its size"):
        preview(tmp_path / "g.npy.gz")


def test_rows_and_names_as_biggraph_publishes_them(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "v.npy.gz", "wb") as file:
        np.save(file, MATRIX)
    names = [f"/m/{number}" for number in range(ROWS)]
    with gzip.open(tmp_path / "names.json.gz", "wt") as file:
        json.dump(names, file)
    store = tmp_path / "s.tier"
    import_table(store, tmp_path / "v.npy.gz", keys=tmp_path / "names.json.gz")
    with tierstore.open(store) as opened:
        table = opened["embeddings"]
        assert table.read(table.lookup(names)).tobytes() == MATRIX.tobytes()


def test_fields_that_are_not_asked_for_are_named(tmp_path: Path) -> None:
    fields = {"weight": tierstore.Field(2, "float32"), "exp_avg": tierstore.Field(2, "float32")}
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(4, fields=fields)}) as s:
        tierstore.export_table(s["t"], tmp_path / "f.parquet", field=["weight", "exp_avg"])
    (note,) = preview(tmp_path / "f.parquet").notes
    assert note.startswith("not read: exp_avg (")
    assert preview(tmp_path / "f.parquet", field=["weight", "exp_avg"]).notes == ()


def test_documents(tmp_path: Path) -> None:
    rows = MATRIX.tolist()
    objects = [{"id": f"w{n}", "v": row} for n, row in enumerate(rows)]
    mapped = {each["id"]: each["v"] for each in objects}
    for found in (objects, {"object": "list", "data": objects}, mapped, rows):
        (tmp_path / "f.json").write_text(json.dumps(found))
        seen = preview(tmp_path / "f.json", rows=ROWS)
        assert seen.first.tobytes() == MATRIX.tobytes()
        assert seen.keys == (None if found is rows else list(mapped))
        assert seen.notes == (("not read: object",) if "object" in found else ())
    for keys in (["a", "b"], [7, 2**63]):
        with gzip.open(tmp_path / "keys.json.gz", "wt") as file:
            json.dump(keys, file)
        assert list(read_keys(tmp_path / "keys.json.gz")) == keys
    for wrong in ({}, {"a": [1.5], "b": 3, "c": [2.5]}, 5, [], [[1.5], 2]):
        (tmp_path / "f.json").write_text(json.dumps(wrong))
        with pytest.raises(FormatError, match=r"f\.json"):
            preview(tmp_path / "f.json")


def test_files_under_another_suffix_are_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name in ("m.safetensors", "m.npy", "model_best.pth.tar"):
        torch.save({"w": torch.from_numpy(MATRIX)}, tmp_path / name)
    assert preview(tmp_path / "model_best.pth.tar").rows == ROWS
    for name in ("m.safetensors", "m.npy"):
        with pytest.raises(FormatError, match=r"a zip archive.* name it \.pt or \.npz"):
            preview(tmp_path / name)
    torch.save({"w": torch.from_numpy(MATRIX)}, tmp_path / "m.model")
    old = {"_use_new_zipfile_serialization": False}
    torch.save({"w": torch.from_numpy(MATRIX)}, tmp_path / "old.parquet", **old)
    torch.save({"w": torch.from_numpy(MATRIX)}, tmp_path / "old.bin", **old)
    write_file(tmp_path / "f.safetensors", MATRIX, "float32")
    for name in ("f.bin", "f.model", "f.npy"):
        (tmp_path / name).write_bytes((tmp_path / "f.safetensors").read_bytes())
    for name, way in (
        ("m.model", r"name it \.pt or \.npz"),
        ("old.parquet", r"torch\.save: name it \.pt"),
        ("f.model", r"name it \.safetensors"),
        ("f.npy", r"name it \.safetensors"),
    ):
        with pytest.raises((FormatError, InvalidInputError), match=way):
            preview(tmp_path / name)
    for name in ("f.bin", "old.bin"):  # as Hugging Face names them
        assert np.array_equal(preview(tmp_path / name, rows=ROWS).first, MATRIX)
    (tmp_path / "step100").mkdir()
    (tmp_path / "step100/.metadata").touch()
    (tmp_path / "hive/split=train").mkdir(parents=True)
    for name, way in (("step100", "dcp_to_torch_save"), ("hive", "hive/split=train")):
        with pytest.raises(FormatError, match=way):
            preview(tmp_path / name)


@pytest.mark.slow
def test_vectors_of_spark(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    vectors = [{"type": 1, "size": None, "values": row} for row in MATRIX.tolist()]
    table = pa.table({"id": [9, 8, 7, 6], "features": vectors})
    pq.write_table(table, tmp_path / "f.parquet")
    pytest.importorskip("pyarrow.feather").write_feather(table, tmp_path / "f.feather")
    for name in ("f.parquet", "f.feather"):
        found = preview(tmp_path / name, rows=ROWS)
        assert found.first.tobytes() == MATRIX.astype("f8").tobytes()
        assert found.keys == [9, 8, 7, 6] and "features.size" in " ".join(found.notes)
    pq.write_table(table.rename_columns(["features", "features"]), tmp_path / "g.parquet")
    with pytest.raises(FormatError, match="two columns are named 'features'"):
        preview(tmp_path / "g.parquet")


def test_words_that_are_cut_within_a_character(tmp_path: Path) -> None:
    words = [b"ab", "\u4e2d".encode()[:2], b"cd", b"e"]
    rows = [
        word + b" " + " ".join(map(repr, row)).encode()
        for word, row in zip(words, MATRIX.tolist(), strict=True)
    ]
    (tmp_path / "f.vec").write_bytes(b"4 3\n" + b"\n".join(rows) + b"\n")
    pairs = zip(words, MATRIX, strict=True)
    binary = b"".join(word + b" " + row.tobytes() + b"\n" for word, row in pairs)
    (tmp_path / "f.bin").write_bytes(b"4 3\n" + binary)
    for name in ("f.vec", "f.bin"):
        with pytest.raises(FormatError, match="--errors replace"):
            preview(tmp_path / name)
        found = preview(tmp_path / name, errors="replace", rows=ROWS)
        assert found.keys == ["ab", "\ufffd", "cd", "e"]
        assert found.first.tobytes() == MATRIX.tobytes()
    np.save(tmp_path / "f.npy", MATRIX)
    with pytest.raises(ValueError, match="is no text"):
        preview(tmp_path / "f.npy", errors="replace")
    with pytest.raises(ValueError, match="'strict' or 'replace'"):
        preview(tmp_path / "f.vec", errors="nope")  # type: ignore[arg-type]
