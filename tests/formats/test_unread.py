"""Nothing of a file is left out without a word: scales, objects, ids, pointers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.formats.matrices import random_matrix
from tierstore._formats import SOURCE_SUFFIXES, open_source
from tierstore.errors import AmbiguousFileError, FormatError, InvalidInputError
from tierstore.importing import preview

ROWS = 8
ELEMENTS = np.arange(ROWS * 4).reshape(ROWS, 4).astype(np.int8)


def written(path: Path, **arrays: Any) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy").save_file(arrays, path)
    elif path.suffix == ".pt":
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(each) for name, each in arrays.items()}, path)
    else:
        with pytest.importorskip("h5py").File(path, "w") as file:
            for name, each in arrays.items():
                file[name] = each
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".h5"])
def test_elements_beside_their_scales_are_refused(tmp_path: Path, suffix: str) -> None:
    scale = np.full(ROWS, 4, np.float32)
    for name in ("weight_scale", "weight_scale_inv", "scales", "weight.absmax", "SCB"):
        path = written(tmp_path / f"q{suffix}", **{"emb.weight": ELEMENTS, f"emb.{name}": scale})
        for read in (preview, lambda src: tierstore.import_table(tmp_path / "s.tier", src)):
            with pytest.raises(FormatError, match=rf"beside them emb.{name}.*attach"):
                read(path)
        assert not (tmp_path / "s.tier").exists()
    path = written(tmp_path / f"p{suffix}", **{"emb.weight": ELEMENTS, "out.weight_scale": scale})
    assert preview(f"{path}:emb.weight").rows == ROWS
    floats = ELEMENTS.astype("f4")
    path = written(tmp_path / f"f{suffix}", **{"emb.weight": floats, "emb.weight_scale": scale})
    assert preview(path).rows == ROWS


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt", ".h5"])
def test_packed_elements_beside_their_scales_are_refused(tmp_path: Path, suffix: str) -> None:
    """As GPTQ has them: four bits of eight elements in each int32."""
    packed = np.full((ROWS, 2), 0x76543210, np.int32)
    scales = np.full((ROWS, 1), 0.5, np.float32)
    path = written(tmp_path / f"q{suffix}", **{"e.qweight": packed, "e.scales": scales})
    for src in (path, f"{path}:e.qweight"):
        with pytest.raises(FormatError, match=r"packed elements, and beside them e\.scales"):
            preview(src)


def test_elements_of_float8_beside_their_scales(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    elements = torch.ones(ROWS, 4).to(torch.float8_e4m3fn)
    tensors = {"emb.weight": elements, "emb.weight_scale": torch.full((ROWS, 1), 4.0)}
    save(tensors, tmp_path / "q.safetensors")
    torch.save(tensors, tmp_path / "q.pt")
    for name in ("q.safetensors", "q.pt"):
        with pytest.raises(FormatError, match="weight_scale"):
            preview(f"{tmp_path / name}:emb.weight")


def test_arrays_of_objects_are_named(tmp_path: Path) -> None:
    words = np.array([f"w{n}" for n in range(ROWS)], object)
    np.savez(tmp_path / "f.npz", vectors=random_matrix(ROWS, 3), vocab=words)
    (note,) = preview(tmp_path / "f.npz").notes
    assert note.startswith("not read: vocab (unreadable") and "objects" in note


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_ids_as_floats_are_no_elements(tmp_path: Path, suffix: str) -> None:
    pa = pytest.importorskip("pyarrow")
    values = random_matrix(ROWS, 2)
    ids = np.arange(ROWS) + 1e6
    table = pa.table({"user_id": ids, "f0": values[:, 0], "f1": values[:, 1]})
    path = tmp_path / f"f{suffix}"
    if suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        pytest.importorskip("pyarrow.feather").write_feather(table, path)
    with pytest.raises(AmbiguousFileError, match="'user_id' has the name of keys"):
        preview(path)
    found = preview(path, key_column=False)
    assert found.dim == 2 and "user_id" in found.notes[0]  # f0 and f1 are a family


@pytest.mark.parametrize("suffix", [s for s in SOURCE_SUFFIXES if s not in (".zarr", ".projector")])
def test_pointers_of_git_lfs_are_named(tmp_path: Path, suffix: str) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 130\n"
    (tmp_path / f"f{suffix}").write_text(text)
    with pytest.raises(FormatError, match="git lfs pull"):
        open_source(tmp_path / f"f{suffix}")


def test_floats_are_not_rounded_to_whole_numbers(tmp_path: Path) -> None:
    fields = {"w": tierstore.Field(3), "n": tierstore.Field(3, "int8")}
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(9, fields=fields)}) as s:
        for dtype in ("int8", "uint8"):
            with pytest.raises(InvalidInputError, match="a scale for each row"):
                tierstore.export_table(s["t"], tmp_path / "w.npy", field="w", dtype=dtype)
        tierstore.export_table(s["t"], tmp_path / "n.npy", field="n", dtype="int8")
    assert not (tmp_path / "w.npy").exists()


def test_other_tools_read_the_numbers_of_a_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    values = np.array([[1.5, -2.0, 0.25]] * 4, np.float32)
    for dtype in ("bfloat16", "float8_e4m3fn", "float16"):
        spec = tierstore.TableSpec(4, 3, dtype=dtype, init=tierstore.from_array(values))
        with tierstore.create(tmp_path / f"{dtype}.tier", {"t": spec}) as store:
            tierstore.export_table(store["t"], tmp_path / f"{dtype}.zarr")
        found = zarr.open_group(tmp_path / f"{dtype}.zarr", mode="r")["weight"]
        assert np.array_equal(found[:], values)
