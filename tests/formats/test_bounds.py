"""Small files that claim or unpack to much are refused before memory is taken for it.

Each is read in a process that may have little memory. What would read it without asking first, the
decoder that is used or stands in its place, shows that the memory would have been taken: it fails.
"""

import gzip
import json
import os
import pickle
import struct
import zipfile
import zlib

import numcodecs
import numpy as np
import pytest

from tests.formats.frugal import ENOUGH, HEADROOM, overran, read_frugally
from tests.formats.matrices import random_matrix, random_words, write_file
from tests.reference.formats import write_without_us
from tierstore._formats import open_source, read_keys
from tierstore.errors import FormatError
from tierstore.sizing import load_stream

LARGE = 400 << 20  # more than the process may have


def pt(path, pickled, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")


def calling(name, number):
    """A pickle that calls a builtin with a number, as one that torch loads may."""
    return b"\x80\x02cbuiltins\n" + name + b"\nJ" + struct.pack("<i", number) + b"\x85R."


def pt_that_allocates(path):
    pt(path, calling(b"bytearray", LARGE))


def pt_of_empty_dicts(path):
    pt(path, b"\x80\x02]" + b"(" + b"}" * 5_000_000 + b"e.", compression=zipfile.ZIP_DEFLATED)


def pt_of_far_memo(path):
    """The pickle of the standard library makes an array as long as the index is large."""
    pt(path, b"\x80\x02}r" + struct.pack("<I", LARGE >> 3) + b".")


def parquet_of_one_long_list(path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values = pa.array(np.zeros(LARGE // 4, np.float32))
    lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    pq.write_table(pa.table({"weight": lists}), path)


def parquet_of_one_long_key(path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    keys = pa.DictionaryArray.from_arrays(np.zeros(200, np.int32), pa.array(["k" * (LARGE // 100)]))
    weight = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(200, np.float32)), 1)
    pq.write_table(pa.table({"weight": weight, "key": keys.cast(pa.string())}), path)


def parquet_of_keys_that_begin_alike(path):
    """Keys without what they share with the one before: the footer says 1 MiB, they take 400."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    count = LARGE >> 20
    table = pa.table({"x": np.zeros(count), "key": ["k" * (1 << 20)] * count})
    pq.write_table(
        table, path, use_dictionary=False, column_encoding={"key": "DELTA_BYTE_ARRAY", "x": "PLAIN"}
    )


def feather_of_one_long_list(path):
    pa, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    values = pa.array(np.zeros(LARGE // 4, np.float32))
    lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    feather.write_feather(pa.table({"weight": lists}), path, compression="zstd")


def hdf5_of_one_large_chunk(path):
    with pytest.importorskip("h5py").File(path, "w") as file:
        shape = (4, LARGE // 16)
        data = file.create_dataset("w", shape, "f4", chunks=shape, compression="gzip")
        data[:] = 0


def hdf5_of_a_chunk_that_unpacks_to_more(path):
    """The chunk is said to be of 1 KiB: HDF5 unpacks what its filter gives before it looks."""
    with pytest.importorskip("h5py").File(path, "w") as file:
        data = file.create_dataset("w", (64, 4), "f4", chunks=(64, 4), compression="gzip")
        data.id.write_direct_chunk((0, 0), zlib.compress(bytes(LARGE)))


def hdf5_of_one_text_for_many(path):
    """Texts are places in a heap, and all of these are the same place."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file["w"] = np.zeros((100, 2), np.float32)
        keys = file.create_dataset("keys", (100,), h5py.string_dtype())
        keys[0] = "k" * (LARGE // 100)
    with h5py.File(path) as file:
        start = file["keys"].id.get_offset()
    data = bytearray(path.read_bytes())
    data[start : start + 1600] = data[start : start + 16] * 100
    path.write_bytes(data)


def zarr_array(path, codec, chunk):
    path.mkdir()
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, codec]
    array = {
        "zarr_format": 3, "node_type": "array", "shape": [4, 4], "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 4]}},
        "chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": codecs,
    }  # fmt: skip
    (path / "zarr.json").write_text(json.dumps(array))
    (path / "c/0").mkdir(parents=True)
    (path / "c/0/0").write_bytes(chunk)


ZSTD = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}


def zarr_of_large_zstd_frames(path):
    frame = bytes(numcodecs.Zstd().encode(np.zeros(LARGE // 8, np.uint8)))
    zarr_array(path, ZSTD, frame * 10)


def zarr_of_a_zstd_frame_of_unknown_size(path):
    block = struct.pack("<I", (128 << 10) << 3 | 1 << 1)[:3] + b"\0"  # a byte, 128 KiB times
    last = struct.pack("<I", 1 << 3 | 1 << 1 | 1)[:3] + b"\0"
    frame = struct.pack("<IBB", 0xFD2FB528, 0, 0x58) + block * (LARGE >> 17) + last
    zarr_array(path, ZSTD, frame * 2)


def zarr_of_large_gzip(path):
    data = gzip.compress(bytes(LARGE // 4))
    zarr_array(path, {"name": "gzip", "configuration": {"level": 1}}, data * 6)


def zarr_of_large_blosc(path):
    codec = {
        "name": "blosc",
        "configuration": {
            "typesize": 1, "cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0,
        },
    }  # fmt: skip
    zarr_array(path, codec, bytes(numcodecs.Blosc("lz4").encode(np.zeros(LARGE, np.uint8))))


def zarr_v2(path, compressor, filters, chunk):
    path.mkdir()
    array = {
        "zarr_format": 2, "shape": [4, 4], "chunks": [4, 4], "dtype": "<f4", "fill_value": 0,
        "order": "C", "compressor": compressor, "filters": filters,
    }  # fmt: skip
    (path / ".zarray").write_text(json.dumps(array))
    (path / "0.0").write_bytes(chunk)


def zarr_of_the_second_version(path):
    frame = bytes(numcodecs.Zstd().encode(np.zeros(LARGE // 8, np.uint8)))
    zarr_v2(path, {"id": "zstd", "level": 0}, None, frame * 10)


def zarr_of_long_keys(path):
    import zarr

    group = zarr.create_group(path)
    group.create_array("weight", data=random_matrix(4, 2))
    keys = group.create_array("keys", shape=(LARGE,), chunks=(LARGE // 8,), dtype="u1")
    for start in range(0, LARGE, LARGE // 8):
        keys[start : start + LARGE // 8] = 65
    group.create_array("keys_offsets", data=np.array([0, 1, 2, 3, LARGE]))


def npz_entries(path, **arrays):
    """Write arrays given as a header, a block and how often it comes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (array, times) in arrays.items():
            shape = (len(array) * times, *array.shape[1:])
            header = f"{{'descr': {array.dtype.str!r}, 'fortran_order': False, 'shape': {shape}}}"
            text = header.encode().ljust(117) + b"\n"
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                entry.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
                for _ in range(times):
                    entry.write(array.tobytes())


def npz_of_long_keys(path):
    keys = np.array(["k" * (1 << 18)])
    npz_entries(path, weight=(random_matrix(400, 2), 1), keys=(keys, 400))


def npz_of_many_entries(path, count=600_000):
    """Only the directory is there: entries are looked at when they are opened."""
    entry = b"PK\1\2" + bytes(24) + struct.pack("<HHH", 8, 0, 0) + bytes(12)
    entries = b"".join(entry + b"%08d" % number for number in range(count))
    end = struct.pack("<4s4HIIH", b"PK\5\6", 0, 0, count % 65536, count % 65536, len(entries), 0, 0)
    path.write_bytes(entries + end)


def safetensors(path, header):
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def safetensors_of_empty_dicts(path):
    safetensors(path, b'{"__metadata__":[' + b"{}," * 5_000_000 + b"1]}")


def safetensors_of_many_tensors(path):
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    entries = b"".join(entry % number for number in range(400_000))
    safetensors(path, b"{" + entries + b'"__metadata__":{}}')


def csv_of_a_long_line(path):
    path.write_bytes(b"1," * 5_000_000 + b"1\n")


def csv_of_quoted_line_ends(path):
    path.write_bytes(b'"1\n",' * 5_000_000 + b"1\n")


def vec_of_a_long_line(path):
    path.write_bytes(b"word" + b" 1" * 5_000_000 + b"\n")


CASES = {
    pt_that_allocates: (".pt", "torch"),
    pt_of_empty_dicts: (".pt", "torch"),
    pt_of_far_memo: (".pt", None),
    parquet_of_one_long_list: (".parquet", "parquet"),
    parquet_of_one_long_key: (".parquet", "parquet"),
    parquet_of_keys_that_begin_alike: (".parquet", "parquet"),
    feather_of_one_long_list: (".feather", "feather"),
    hdf5_of_one_large_chunk: (".h5", "hdf5"),
    hdf5_of_a_chunk_that_unpacks_to_more: (".h5", "hdf5"),
    hdf5_of_one_text_for_many: (".h5", "hdf5"),
    zarr_of_large_zstd_frames: (".zarr", "zarr"),
    zarr_of_a_zstd_frame_of_unknown_size: (".zarr", "zarr"),
    zarr_of_large_gzip: (".zarr", "zarr"),
    zarr_of_large_blosc: (".zarr", "zarr"),
    zarr_of_the_second_version: (".zarr", "zarr"),
    zarr_of_long_keys: (".zarr", "zarr"),
    npz_of_long_keys: (".npz", "npz"),
    npz_of_many_entries: (".npz", "zip"),
    safetensors_of_empty_dicts: (".safetensors", "json"),
    safetensors_of_many_tensors: (".safetensors", "json"),
    csv_of_a_long_line: (".csv", "csv"),
    csv_of_quoted_line_ends: (".csv", "csv"),
    vec_of_a_long_line: (".vec", None),
}


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.fault(55)
@pytest.mark.slow
@pytest.mark.nightly(
    "pt_of_empty_dicts",
    "npz_of_many_entries",
    "parquet_of_one_long_list",
    "zarr_of_long_keys",
    "hdf5_of_one_large_chunk",
)
def test_a_made_up_file_costs_an_error(tmp_path, make):
    suffix, control = CASES[make]
    path, good = tmp_path / f"file{suffix}", tmp_path / f"good{suffix}"
    make(path)
    if suffix in (".zarr", ".parquet", ".feather"):
        write_file(good, random_matrix(9, 3), "float32")
    if suffix == ".h5":
        write_without_us(good, random_matrix(9, 3))
    found = read_frugally("source", path, good if good.exists() else None)
    assert found["error"].startswith("FormatError"), found
    assert found["more"] < ENOUGH
    if control == "torch":
        pytest.importorskip("torch")
        pt(good, b"\x80\x02}.")
    if control is not None:
        without = read_frugally(control, path, good if good.exists() else None)
        assert overran(without), without


@pytest.mark.slow
def test_padded_keys_take_what_they_hold(tmp_path):
    """A file of holes: 400 strings of 1 MiB each, all of them padding."""
    keys = np.lib.format.header_data_from_array_1_0(np.empty(0, "<U262144")) | {"shape": (400,)}
    with (tmp_path / "keys.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, keys)
        file.truncate(file.tell() + (400 << 20))
    found = read_frugally("keys", tmp_path / "keys.npy")
    assert found["error"] == ""
    assert found["more"] < ENOUGH
    assert read_keys(tmp_path / "keys.npy") == [""] * 400


@pytest.mark.slow
def test_a_stream_unpacks_the_ids_alone(tmp_path):
    path = tmp_path / "ids.npz"
    ids = np.array([5, 3], np.int64)
    npz_entries(path, ids=(ids, 1), other=(np.zeros(1 << 20, np.int64), LARGE >> 23))
    found = read_frugally("stream", path)
    assert found["error"] == ""
    assert found["more"] < ENOUGH
    assert load_stream(path, column="ids").ids == 2
    without = read_frugally("npz", path)
    assert overran(without)
    with pytest.raises(FormatError, match=r"'other' would take .* \(memory=, --memory\)"):
        load_stream(path, column="other", memory="1MiB")


def test_more_memory_lets_large_keys_through(tmp_path):
    path, words = tmp_path / "file.npz", random_words(3000)
    write_file(path, random_matrix(3000, 2), "float32", keys=words)
    with open_source(path, memory="64KiB") as source, pytest.raises(FormatError, match="--memory"):
        _ = source.keys
    with open_source(path, memory="16MiB") as source:
        assert source.keys == words


class Evil:
    def __reduce__(self):
        return (os.system, ("touch ran",))


@pytest.mark.parametrize(
    ("compressor", "filters"),
    [({"id": "pickle"}, None), (None, [{"id": "zlib"}, {"id": "pickle"}]), ({"id": "lzma"}, None)],
)
def test_codecs_that_are_no_part_of_zarr_are_not_run(tmp_path, monkeypatch, compressor, filters):
    """numcodecs has one that unpickles, and some that cannot be asked how much they unpack to."""
    monkeypatch.chdir(tmp_path)
    zarr_v2(tmp_path / "file.zarr", compressor, filters, pickle.dumps(Evil()))
    with pytest.raises(FormatError):
        open_source(tmp_path / "file.zarr")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("compressor", ["zstd", "blosc", "lz4", "gzip", "zlib", "bz2"])
def test_the_codecs_of_zarr_v2_are_read(tmp_path, compressor):
    import zarr

    matrix = random_matrix(40, 6)
    array = zarr.create_array(
        tmp_path / "file.zarr", shape=(40, 6), chunks=(7, 6), dtype="f4", zarr_format=2,
        compressors=numcodecs.get_codec({"id": compressor}),
    )  # fmt: skip
    array[:] = matrix
    with open_source(tmp_path / "file.zarr") as source:
        assert np.concatenate(list(source.blocks())).tobytes() == matrix.tobytes()


def test_a_zstd_frame_of_unknown_size_is_read(tmp_path):
    block = struct.pack("<I", 64 << 3 | 1)[:3]  # raw, the last
    matrix = random_matrix(4, 4)
    frame = struct.pack("<IBB", 0xFD2FB528, 0, 0x58) + block + matrix.tobytes()
    zarr_array(tmp_path / "file.zarr", ZSTD, frame)
    with open_source(tmp_path / "file.zarr") as source:
        assert np.concatenate(list(source.blocks())).tobytes() == matrix.tobytes()


def test_a_chunk_that_is_no_file_does_not_block(tmp_path):
    path = tmp_path / "file.zarr"
    write_file(path, random_matrix(9, 3), "float32")
    chunk = next(file for file in (path / "weight/c").rglob("*") if file.is_file())
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(FormatError, match="not a chunk file"):
        open_source(path)


def test_the_headroom_is_what_is_checked():
    assert ENOUGH < HEADROOM < LARGE
