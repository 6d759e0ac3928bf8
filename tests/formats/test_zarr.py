""".zarr: what zarr itself writes and reads, and arrays with parts missing."""

import json
import os
import shutil
import signal
import warnings
from itertools import pairwise

import numpy as np
import pytest
import zarr

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tests.pairs import pairs
from tierstore._formats import open_source
from tierstore.errors import FormatError


@pytest.mark.variants(1, 4)
@pairs(
    zarr_format=[2, 3],
    chunks=[(100, 6), (4, 6), (7, 4), (1, 1)],
    dtype=["<f2", ">f4", "<f8"],
)
def test_reads_arrays_that_zarr_writes(tmp_path, zarr_format, chunks, dtype):
    matrix = (
        random_matrix(31, 6).astype(dtype) if dtype != "<f2" else random_matrix(31, 6, "float16")
    )
    chunks = tuple(min(c, n) for c, n in zip(chunks, matrix.shape, strict=True))
    array = zarr.create_array(
        tmp_path / "file.zarr",
        shape=matrix.shape,
        chunks=chunks,
        dtype=matrix.dtype,
        zarr_format=zarr_format,
        config={"write_empty_chunks": True},
    )
    array[:] = matrix
    expected = matrix.astype(matrix.dtype.newbyteorder("<")).tobytes()
    for block_rows in (1, 5, 8, None):
        assert read_file(tmp_path / "file.zarr", block_rows=block_rows).tobytes() == expected


def test_reads_shards(tmp_path):
    matrix = random_matrix(50, 6)
    array = zarr.create_array(
        tmp_path / "file.zarr", shape=(50, 6), chunks=(3, 3), shards=(12, 6), dtype="f4"
    )
    array[:] = matrix
    assert read_file(tmp_path / "file.zarr", block_rows=5).tobytes() == matrix.tobytes()
    (tmp_path / "file.zarr/c/4/0").unlink()
    with open_source(tmp_path / "file.zarr") as source:
        assert source.notes == ("1 chunk is not stored and reads as 0.0, the fill value",)
    matrix[48:] = 0
    assert read_file(tmp_path / "file.zarr", block_rows=5).tobytes() == matrix.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "keys", [None, np.arange(31) * 5, random_words(31)], ids=["no", "int", "str"]
)
def test_zarr_opens_what_is_written(tmp_path, dtype, keys):
    matrix = random_matrix(31, 6, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_file(tmp_path / "file.zarr", matrix, dtype, keys=keys, field="exp_avg")
        group = zarr.open(tmp_path / "file.zarr", mode="r")
    assert group["exp_avg"][:].tobytes() == matrix.tobytes()
    assert group["exp_avg"].attrs["dtype"] == dtype
    if keys is None:
        assert list(group.array_keys()) == ["exp_avg"]
    elif isinstance(keys, list):
        ends, text = group["keys_offsets"][:].tolist(), group["keys"][:].tobytes()
        assert [text[a:b].decode() for a, b in pairwise(ends)] == keys
    else:
        assert group["keys"][:].tolist() == keys.tolist()


def test_chooses_among_several(tmp_path):
    path, matrix = tmp_path / "file.zarr", random_matrix(6, 3)
    group = zarr.create_group(path)
    group.create_array("a", data=matrix)
    group.create_array("b", data=matrix * 2)
    group.create_array("bool", data=np.ones((6, 3), bool))
    assert read_file(f"{path}:a").tobytes() == matrix.tobytes()
    with pytest.raises(FormatError, match=r"2 matrices.*file\.zarr:a"):
        open_source(path, field="weight")
    with pytest.raises(FormatError, match="'bool' is bool"):
        open_source(f"{path}:bool")


def test_missing_chunks_are_no_zeros(tmp_path):
    path = tmp_path / "file.zarr"
    write_file(path, random_matrix(9, 3), "float32")
    shutil.rmtree(path / "weight/c")
    with pytest.raises(FormatError, match="all 1 chunk files of 'weight' are missing"):
        open_source(path)
    shutil.rmtree(path)
    write_file(path, random_matrix(9_001, 200), "float32")
    shutil.rmtree(path / "weight/c/1")
    with pytest.raises(FormatError, match=r"some chunk files of 'weight' are missing: it was cop"):
        open_source(path)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("fill", [0.0, -1.5, float("nan")])
def test_chunks_that_others_leave_out_are_fill_values(tmp_path, zarr_format, fill):
    matrix = random_matrix(40, 6)
    matrix[8:32] = fill
    array = zarr.create_array(
        tmp_path / "file.zarr", shape=(40, 6), chunks=(8, 6), dtype="f4", fill_value=fill,
        zarr_format=zarr_format,
    )  # fmt: skip
    array[:] = matrix
    with open_source(tmp_path / "file.zarr") as source:
        assert source.notes == (f"3 chunks are not stored and read as {fill}, the fill value",)
        assert np.concatenate(list(source.blocks(7))).tobytes() == matrix.tobytes()


def test_without_a_fill_value_there_is_nothing_to_read(tmp_path):
    path = tmp_path / "file.zarr"
    array = zarr.create_array(
        path, shape=(40, 6), chunks=(8, 6), dtype="f4", zarr_format=2, fill_value=None
    )
    array[:8] = random_matrix(8, 6)
    with pytest.raises(FormatError, match="or has no fill value"):
        open_source(path)


def test_metadata_that_claims_too_much(tmp_path):
    path = tmp_path / "file.zarr"
    write_file(path, random_matrix(9, 3), "float32")
    metadata = path / "weight/zarr.json"
    original = json.loads(metadata.read_text())
    for shape, chunk, why in [
        ([2**50, 3], [9, 3], "at most"),
        ([9, 2**30], [9, 3], "at most"),
        ([10**9, 3], [9, 3], "missing"),
        ([9, 3], [2**40, 3], "rechunk"),
        ([9], [9], "no floats"),
    ]:
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        metadata.write_text(
            json.dumps(original | {"shape": shape, "chunk_grid": grid, "dimension_names": None})
        )
        with pytest.raises(FormatError, match=why):
            open_source(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b'{"zarr_format": 9}'])
def test_metadata_that_is_none(tmp_path, content):
    path = tmp_path / "file.zarr"
    write_file(path, random_matrix(9, 3), "float32")
    for name in ("zarr.json", "weight/zarr.json"):
        before = (path / name).read_bytes()
        (path / name).write_bytes(content)
        with pytest.raises(FormatError):
            read_file(path)
        (path / name).write_bytes(before)


def test_chunks_too_large_for_memory_are_refused(tmp_path):
    write_file(tmp_path / "file.zarr", random_matrix(10_000, 8), "float32", block_rows=10_000)
    with pytest.raises(FormatError, match=r"rechunk.*937\.5 KiB of memory.*--memory"):
        open_source(tmp_path / "file.zarr", memory="500KiB")


def test_string_keys_whose_offsets_lie(tmp_path):
    path = tmp_path / "file.zarr"
    write_file(path, random_matrix(3, 2), "float32", keys=["aé", "b", "c"])
    offsets = zarr.open(path, mode="r+")["keys_offsets"]
    for lie in [(1, 3, 4, 5), (0, 3, 4, 6), (0, 4, 3, 5), (0, 2, 4, 5)]:
        offsets[:] = lie
        with pytest.raises(FormatError, match="key"):
            read_keys_of(path)


@pytest.mark.parametrize("keys", [None, [5, 6, 7], ["a", "b", "c"]])
def test_every_array_names_its_dimensions(tmp_path, keys):
    """Without them xarray refuses the group; arrays of one dimension's name have one length."""
    import zarr

    write_file(tmp_path / "file.zarr", random_matrix(3, 2), "float32", keys=keys)
    lengths = {}
    for _, array in zarr.open_group(tmp_path / "file.zarr", mode="r").arrays():
        for name, length in zip(array.metadata.dimension_names, array.shape, strict=True):
            assert lengths.setdefault(name, length) == length
    assert {"row": 3, "dim": 2}.items() <= lengths.items()


@pytest.mark.fault(28)
def test_an_interrupt_waits_for_the_threads_of_zarr(tmp_path, monkeypatch):
    """They write files, and would go on where what was written is being removed."""
    set_item, written = zarr.Array.__setitem__, []

    def pressed(array, *given):
        os.kill(os.getpid(), signal.SIGINT)
        set_item(array, *given)
        written.append(sorted(array.store.root.rglob("c/*/*")))

    monkeypatch.setattr(zarr.Array, "__setitem__", pressed)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file.zarr", random_matrix(31, 6), "float32")
    (files,) = written
    assert files
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("packing", [{"scale_factor": 0.01}, {"add_offset": 1.5}], ids=str)
def test_arrays_that_attributes_scale_are_no_values(tmp_path, zarr_format, packing):
    """As xarray packs them by the conventions of NetCDF: refused alone, and named beside others."""
    group = zarr.open_group(tmp_path / "f.zarr", mode="w", zarr_format=zarr_format)
    packed = group.create_array("packed", data=np.ones((5, 3), "i2"))
    packed.attrs.update(packing)
    with pytest.raises(FormatError, match=rf"int16 \(5, 3\) packed by {next(iter(packing))}"):
        read_file(tmp_path / "f.zarr")
    matrix = random_matrix(5, 3)
    group.create_array("rows", data=matrix)
    with open_source(tmp_path / "f.zarr") as source:
        assert np.concatenate(list(source.blocks())).tobytes() == matrix.tobytes()
        assert "packed by" in source.notes[0]
