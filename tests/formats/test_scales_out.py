"""Floats that are exported in 8 bits have a scale for each row beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tierstore
from tierstore._formats import SINK_SUFFIXES
from tierstore._formats.base import FORMATS
from tierstore.errors import InvalidInputError

ROWS, DIM = 37, 6
Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def from_npz(path: Path) -> Arrays:
    with np.load(path) as found:
        return found["weight"], found["weight_scale"]


def from_safetensors(path: Path) -> Arrays:
    pytest.importorskip("safetensors")
    from safetensors.numpy import load_file

    found = load_file(path)
    return found["weight"], found["weight_scale"]


def from_zarr(path: Path) -> Arrays:
    zarr = pytest.importorskip("zarr")
    found = zarr.open_group(path, mode="r")
    return found["weight"][:], found["weight_scale"][:]


def from_parquet(path: Path) -> Arrays:
    pq = pytest.importorskip("pyarrow.parquet")
    return from_table(pq.read_table(path))


def from_arrow(path: Path) -> Arrays:
    feather = pytest.importorskip("pyarrow.feather")
    return from_table(feather.read_table(path))


def from_stream(path: Path) -> Arrays:
    with pytest.importorskip("pyarrow.ipc").open_stream(path) as reader:
        return from_table(reader.read_all())


def from_table(table: Any) -> Arrays:
    elements = np.array(table["weight"].to_pylist())
    return elements, np.array(table["weight_scale"].to_pylist(), np.float32)[:, None]


READERS = {
    ".npz": from_npz, ".safetensors": from_safetensors, ".zarr": from_zarr,
    ".parquet": from_parquet, ".arrow": from_arrow, ".feather": from_arrow,
    ".arrows": from_stream,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray[np.float32]]:
    rows = np.random.default_rng(5).standard_normal((ROWS, DIM)).astype("f4")
    rows[3], rows[4, 2] = 0, np.nan
    path = tmp_path_factory.mktemp("scales") / "s.tier"
    spec = tierstore.TableSpec(
        ROWS,
        fields={
            "weight": tierstore.Field(DIM),
            "narrow": tierstore.Field(DIM, "int8", scale=tierstore.Scale()),
        },
    )
    with tierstore.create(path, {"t": spec}) as store:
        store["t"].write(range(ROWS), rows, "weight")
        store["t"].write(range(ROWS), np.nan_to_num(rows), "narrow")
        store.commit()
        store.set_keys("t", [f"k{row}" for row in range(ROWS)])
    return path, rows


@pytest.mark.parametrize("suffix", READERS)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_other_tools_multiply_elements_by_scales(
    made: tuple[Path, npt.NDArray[np.float32]], suffix: str, dtype: str, tmp_path: Path
) -> None:
    path, rows = made
    out = tmp_path / f"q{suffix}"
    with tierstore.open(path, "r+") as store:
        if dtype == "uint8":
            rows = np.abs(rows)
            store["t"].write(range(ROWS), rows, "weight")
        done = tierstore.export_table(store["t"], out, field="weight", dtype=dtype)
        store.rollback()
    assert (done.rows, done.dim, done.dtype) == (ROWS, DIM, dtype)
    assert any("weight_scale" in note for note in done.notes)
    elements, scales = READERS[suffix](out)
    assert elements.shape == (ROWS, DIM) and scales.shape == (ROWS, 1)
    most = np.iinfo(dtype).max
    nan = np.isnan(rows).any(1)
    largest = np.abs(rows[~nan]).max(1, keepdims=True)
    assert np.isnan(scales[nan]).all()
    np.testing.assert_allclose(scales[~nan], np.where(largest > 0, largest / most, 1), rtol=1e-6)
    assert (np.abs(elements[~nan] * scales[~nan] - rows[~nan]) <= 0.51 * scales[~nan]).all()
    if suffix != ".feather" and dtype == "int8":
        assert np.abs(elements[~nan]).max() == most


@pytest.mark.parametrize("suffix", [".safetensors", ".zarr"])
def test_the_pair_is_attached(
    made: tuple[Path, npt.NDArray[np.float32]], suffix: str, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    path, _ = made
    out = tmp_path / f"q{suffix}"
    with tierstore.open(path) as store:
        tierstore.export_table(store["t"], out, field="narrow", dtype="int8")
        expected = store["t"].read(range(ROWS), "narrow")
    pair = (f"{out}:narrow", f"{out}:narrow_scale")
    with tierstore.attach({"q": pair}) as attached:
        found = attached["q"].read(range(ROWS))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(tierstore.errors.FormatError, match="narrow_scale"):
        tierstore.import_table(tmp_path / "x.tier", out)


def test_files_of_one_array_are_refused(
    made: tuple[Path, npt.NDArray[np.float32]], tmp_path: Path
) -> None:
    path, _ = made
    with tierstore.open(path) as store:
        for suffix in SINK_SUFFIXES:
            if suffix in READERS:
                assert FORMATS[suffix].holds_scales
                continue
            with pytest.raises(InvalidInputError, match="a scale for each row"):
                tierstore.export_table(store["t"], tmp_path / f"q{suffix}", dtype="int8")
        with pytest.raises(InvalidInputError, match="one field"):
            both = ["weight", "narrow"]
            tierstore.export_table(store["t"], tmp_path / "q.parquet", field=both, dtype="int8")
    assert not list(tmp_path.iterdir())
