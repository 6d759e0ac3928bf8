"""An array in the tiers is indexed as NumPy's, and counts add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore.speedtorch as ours
from tests.every import every
from tests.speedtorch.conftest import Place
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError, RowIndexError
from tierstore.speedtorch.base import as_numpy

torch = pytest.importorskip("torch")

SHAPES = [(7,), (20, 3), (6, 3, 4), (5000, 2)]
DTYPES = ["float64", "float32", "float16", "int64", "int32", "uint8", "bool", "uint32", "complex64"]
INDEXES = [
    [3, 0, 3],
    np.array([[1, 2], [4, 4]], np.int32),
    4,
    -2,
    np.int64(1),
    slice(1, 5),
    slice(None, None, -2),
    (slice(0, 5), slice(0, 2)),
    (slice(None), 1),
    (2, slice(None, None, 2)),
    ([0, 5, 5], [1, 0, 2]),
    ([0, 5], slice(1, None)),
    (..., 2),
    (slice(1, 3), ...),
    (np.array([[0], [4]]), np.array([0, 2])),
    np.arange(6) % 2 == 0,
    (np.arange(6) % 3 == 0, [0, 2]),
    np.arange(18).reshape(6, 3) % 4 == 0,
    [-1, -6],
    [],
]


def noise(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray:
    if dtype in ("bool", "uint8", "uint32"):
        return rng.integers(0, 2 if dtype == "bool" else 250, shape).astype(dtype)
    return (rng.normal(size=shape) * 100).astype(dtype)


@pytest.mark.variants(17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_of_every_type_and_shape(
    tmp_path: Path, rng: np.random.Generator, shape: Any, dtype: str
) -> None:
    array = noise(rng, shape, dtype)
    with ours.DataGadget(array) as gadget:
        gadget.gadgetInit()
        ids = rng.integers(0, shape[0], (2, 9))
        found = gadget.getData(ids)
        assert found.dtype == torch.from_numpy(array).dtype
        np.testing.assert_array_equal(found.numpy(), array[ids])
        rows = noise(rng, (2, 9, *shape[1:]), dtype)
        gadget.insertData(torch.from_numpy(rows), ids)
        array[ids] = rows
        np.testing.assert_array_equal(gadget.getNumpyVersion(), array)
        assert gadget.shape == shape
        gadget.saveCupy(str(tmp_path / "array.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "array.npy"), array)
    assert np.load(tmp_path / "array.npy").dtype == array.dtype


@pytest.mark.variants(1, 1)
@every(index=INDEXES)
def test_indexing_is_numpys(place: Place, rng: np.random.Generator, index: Any) -> None:
    array = noise(rng, (6, 3), "float64")
    gadget = place.gadget(array)
    gadget.gadgetInit()
    np.testing.assert_array_equal(as_numpy(gadget.getData(index)), array[index])
    np.testing.assert_array_equal(gadget.to_numpy(index), array[index])
    values = noise(rng, array[index].shape, "float64")
    gadget.insertData(torch.from_numpy(np.asarray(values)), index)
    array[index] = values
    np.testing.assert_array_equal(gadget.getNumpyVersion(), array)
    gadget.insertData(1.5, index)
    array[index] = 1.5
    np.testing.assert_array_equal(gadget.getNumpyVersion(), array)


def test_where_arrays_come_from(tmp_path: Path, rng: np.random.Generator) -> None:
    zarr = pytest.importorskip("zarr")
    array = noise(rng, (4100, 3), "float32")
    np.save(tmp_path / "array.npy", array)
    np.save(tmp_path / "columns.npy", np.asfortranarray(array))
    stored = zarr.create_array(tmp_path / "a.zarr", shape=array.shape, dtype=array.dtype)
    stored[:] = array
    sources = [
        tmp_path / "array.npy",
        str(tmp_path / "columns.npy"),
        np.load(tmp_path / "array.npy", mmap_mode="r"),
        torch.from_numpy(array),
        array.astype(">f4"),
        array[::-1][::-1],
        array.tolist(),
        stored,
    ]
    for source in sources:
        with ours.DataGadget(source) as gadget:
            gadget.gadgetInit()
            np.testing.assert_array_equal(gadget.getNumpyVersion(), array)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("no array")
    for source, error in [
        (tmp_path / "text.npy", FormatError),
        (tmp_path / "absent.npy", FileNotFoundError),
        (np.array(["a", "b"]), InvalidTypeError),
        (np.float32(3), InvalidInputError),
        (np.empty((0, 3)), InvalidInputError),
    ]:
        with pytest.raises(error):
            ours.DataGadget(source).gadgetInit()
    with pytest.raises(InvalidInputError, match="gadgetInit"):
        ours.DataGadget(np.ones(3)).getData([0])


def test_bad_indexes(rng: np.random.Generator) -> None:
    gadget = ours.DataGadget(noise(rng, (6, 3), "float32"))
    gadget.gadgetInit()
    for bad in (6, -7, [0, 6], ([0, 9], [0, 0])):
        with pytest.raises(RowIndexError, match="6 rows"):
            gadget.getData(bad)
    with pytest.raises(IndexError):
        gadget.getData((0, 3))
    with pytest.raises(TypeError, match="whole numbers"):
        gadget.getData([0.5])
    with pytest.raises(InvalidInputError, match="mask"):
        gadget.getData(np.ones(5, bool))
    with pytest.raises(InvalidInputError, match="new axes"):
        gadget.getData((None, 0))


def test_values_that_do_not_fit_the_index(rng: np.random.Generator) -> None:
    array = noise(rng, (6, 3), "float32")
    gadget = ours.DataGadget(array.copy())
    gadget.gadgetInit()
    for shape, index in (((5, 3), [0, 1]), ((2, 2), [0, 1]), ((3, 2), (slice(0, 2), slice(0, 2)))):
        with pytest.raises(InvalidInputError, match=f"{shape[0]}, {shape[1]}.*selects"):
            gadget.insertData(torch.ones(shape), index)
    np.testing.assert_array_equal(gadget.getNumpyVersion(), array)


def test_small_float64_tables_at_a_hundred_hertz() -> None:
    """As a robot's driver uses them: slices of a 6 × 3 array, both ways."""
    gadget = ours.DataGadget(np.zeros((6, 3)))
    gadget.gadgetInit()
    for step in range(20):
        command = torch.full((6, 3), float(step), dtype=torch.float64)
        gadget.insertData(command, (slice(0, 6), slice(0, 3)))
        assert torch.equal(gadget.getData((slice(0, 6), slice(0, 3))), command)
        assert gadget.CUPYcorpus[0, 0] == step


def test_arrivals() -> None:
    gadget = ours.DataGadget(np.arange(12.0).reshape(4, 3))
    gadget.gadgetInit()
    arrival = gadget.to_numpy_async([3, 1])
    gadget.insertData(torch.zeros(3), 3)
    assert arrival.done()
    np.testing.assert_array_equal(arrival.result(), [[9, 10, 11], [3, 4, 5]])


COUNTS = ["COM", "COMMM", "GPUPytorchCOM", "CPUPytorchCOM", "PytorchCOM"]


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tierstore.speedtorch.array._BLOCK_BYTES", 1000)
    expected = np.zeros((40, 40), np.int64)
    with getattr(ours, name)(40) as counts:
        with pytest.raises(InvalidInputError, match="comInit"):
            counts.getData([0])
        counts.comInit()
        for _ in range(3):
            pairs = rng.integers(0, 40, (2, 15, 10))
            counts.addCounts(*pairs)
            np.add.at(expected, tuple(pairs), 1)
            weights = rng.integers(0, 9, (15, 10))
            counts.addCounts(*pairs, weights)
            np.add.at(expected, tuple(pairs), weights)
        found = counts.getNumpyVersion()
        assert found.dtype == ("int32" if "Pytorch" in name else "uint32")
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(counts.getData(([1, 2], [3, 4])), expected[[1, 2], [3, 4]])
        counts.saveCupy("counts.npy")
        counts.saveTorch("counts.pt")
        counts.addCounts([0], [0], 5)
        for load, file in ((counts.loadCupy, "counts.npy"), (counts.loadTorch, "counts.pt")):
            load(file)
            np.testing.assert_array_equal(counts.getNumpyVersion(), expected)
        for bad in (([40], [0]), ([0], [-1])):
            with pytest.raises(RowIndexError, match=r"0\.\.39"):
                counts.addCounts(*bad)
        with pytest.raises(InvalidInputError, match="2 rows"):
            counts.addCounts([1, 2], [3])


def test_counts_take_any_type() -> None:
    for dtype in ("uint32", "int64", np.uint16, torch.int64, torch.float32):
        with ours.COM(5, dtype) as counts:
            counts.comInit(CPUPinn=True)
            counts.addCounts([1, 1], [2, 2])
            assert counts.CUPYCom[1, 2] == 2
