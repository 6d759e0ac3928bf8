""".safetensors: files written and read by the safetensors package, and false headers."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, random_words, read_file, read_keys_of, write_file
from tests.reference.elements import BFLOAT16
from tierstore._formats import open_source
from tierstore.errors import FormatError

DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2, 2), start=0, stop=16) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_reads_what_the_package_saves(tmp_path, dtype):
    numpy = pytest.importorskip("safetensors.numpy")
    matrix = random_matrix(31, 6, dtype)
    tensors = {
        "emb.weight": matrix,
        "bias": matrix[0].copy(),
        "ids": np.arange(31),
        "e": matrix[:0, 0],
    }
    numpy.save_file(tensors, tmp_path / "file.safetensors", metadata={"format": "np"})
    assert read_file(tmp_path / "file.safetensors", block_rows=4).tobytes() == matrix.tobytes()


def test_reads_and_writes_bfloat16_as_torch_does(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    tensor = torch.randn(31, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"weight": tensor}, tmp_path / "theirs.safetensors")
    with open_source(tmp_path / "theirs.safetensors") as source:
        assert source.dtype == "bfloat16"
        (block,) = source.blocks()
    assert BFLOAT16.decode(block).tolist() == tensor.float().tolist()

    write_file(tmp_path / "ours.safetensors", block, "bfloat16")
    assert torch.equal(load_file(tmp_path / "ours.safetensors")["weight"], tensor)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "keys", [None, np.arange(31) * 5, random_words(31)], ids=["no", "int", "str"]
)
def test_the_package_reads_what_is_written(tmp_path, dtype, keys):
    numpy = pytest.importorskip("safetensors.numpy")
    matrix = random_matrix(31, 7, dtype)
    path = tmp_path / "file.safetensors"
    write_file(path, matrix, dtype, keys=keys, field="exp_avg")
    loaded = numpy.load_file(path)
    assert loaded["exp_avg"].tobytes() == matrix.tobytes()
    if keys is None:
        assert set(loaded) == {"exp_avg"}
    elif isinstance(keys, list):
        ends = loaded["keys_offsets"].tolist()
        text = loaded["keys"].tobytes()
        assert [text[a:b].decode() for a, b in pairwise(ends)] == keys
    else:
        assert loaded["keys"].tolist() == keys.tolist()
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0


def test_chooses_among_several(tmp_path):
    data = random_matrix(4, 2)
    header = {"a": entry(), "b": entry(start=16, stop=32), "__metadata__": {"x": "y"}}
    path = tmp_path / "file.safetensors"
    path.write_bytes(file_of(header, data.tobytes()))
    assert read_file(path, field="b").tobytes() == data[2:].tobytes()
    assert read_file(f"{path}:a").tobytes() == data[:2].tobytes()
    with pytest.raises(FormatError, match=r"'a' F32 \(2, 2\), 'b' F32 \(2, 2\)"):
        open_source(path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\1\2\3", "truncated"),
        (file_of({}, length=2**63), "header of"),
        (file_of({}, length=100_000_001), "header of"),
        (file_of(b"[]"), "start with"),
        (file_of(b'{"a"'), "JSON"),
        (file_of(b'{"a":NaN}'), "JSON"),
        (file_of(b'{"a":1,"a":2}'), "twice"),
        (file_of(b"{" * 100_000), "JSON"),
        (file_of(b'{"a":' * 100_000), "JSON"),
        (file_of(b'{"a":' + b"[" * 100_000), "JSON"),
        (file_of(b'{"a":' + b"9" * 100_000 + b"}"), "JSON"),
        (file_of(b"{\xff}"), "JSON"),
        (file_of({}), "nothing"),
        (file_of({"a": 7}), "must have"),
        (file_of({"a": {"dtype": "F32", "shape": [2, 2]}}), "must have"),
        (file_of({"a": entry("F99")}, b"x" * 16), "unknown dtype"),
        (file_of({"a": {**entry(), "dtype": ["F32"]}}, b"x" * 16), "unknown dtype"),
        (file_of({"a": {**entry(), "shape": 4}}, b"x" * 16), "invalid shape"),
        (file_of({"a": entry(shape=(-2, -2))}, b"x" * 16), "invalid shape"),
        (file_of({"a": entry(shape=(2.0, 2))}, b"x" * 16), "invalid shape"),
        (file_of({"a": entry(shape=(True, 4))}, b"x" * 16), "invalid shape"),
        (file_of({"a": entry(shape=[2**62] * 100)}, b"x" * 16), "invalid shape"),
        (file_of({"a": entry(shape=[2**62] * 60)}, b"x" * 16), "span of"),
        (file_of({"a": {**entry(), "data_offsets": [0, 8, 16]}}, b"x" * 16), "invalid shape"),
        (file_of({"a": entry(stop=12)}, b"x" * 12), "span of"),
        (file_of({"a": entry(start=16, stop=0)}, b"x" * 16), "span of"),
        (file_of({"a": entry()}, b"x" * 15), "truncated"),
        (file_of({"a": entry()}, b"x" * 17), "extra bytes follow"),
        (file_of({"a": entry(start=4, stop=20)}, b"x" * 20), "starts at"),
        (file_of({"a": entry(), "b": entry()}, b"x" * 32), "starts at"),
        (file_of({"a": entry(), "b": entry(start=8, stop=24)}, b"x" * 24), "starts at"),
        (file_of({"a": entry("F32", (4,))}, b"x" * 16), "no floats"),
        (file_of({"a": entry("BOOL", stop=4)}, b"x" * 4), "no floats"),
        (file_of({"a": entry("F4", (3, 1), stop=1)}, b"x"), "span of"),
        (file_of({"a": entry("F32", (0, 0), stop=0)}), "1 to"),
        (file_of({"\x1b[31m": entry("BOOL", stop=4)}, b"x" * 4), r"\\x1b"),
    ],
)
def test_bad_files_are_named_as_such(tmp_path, content, why):
    (tmp_path / "file.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=why):
        open_source(tmp_path / "file.safetensors")


def test_string_keys_whose_offsets_lie(tmp_path):
    path = tmp_path / "file.safetensors"
    write_file(path, random_matrix(3, 2), "float32", keys=["aé", "b", "c"])
    content = path.read_bytes()
    offsets = struct.pack("<4q", 0, 3, 4, 5)
    assert content.count(offsets) == 1
    for lie in [
        (0, 2**63 - 1, -(2**63), 5),
        (1, 3, 4, 5),
        (0, 3, 4, 6),
        (0, 4, 3, 5),
        (0, -1, 4, 5),
        (0, 2, 4, 5),
    ]:
        path.write_bytes(content.replace(offsets, struct.pack("<4q", *lie)))
        with pytest.raises(FormatError, match="key"):
            read_keys_of(path)


def test_a_model_in_several_files(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    matrix = random_matrix(9, 4)
    index = tmp_path / "model.safetensors.index.json"
    shards = {"head": "model-1-of-2.safetensors", "weight": "model-2-of-2.safetensors"}
    for name, tensor in (("head", matrix + 1), ("weight", matrix)):
        numpy.save_file({name: tensor}, tmp_path / shards[name])
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": shards}))
    assert read_file(f"{index}:weight").tobytes() == matrix.tobytes()
    assert read_file(f"{index}:head").tobytes() == (matrix + 1).tobytes()
    assert read_file(index, field="weight").tobytes() == matrix.tobytes()
    with pytest.raises(FormatError, match="contains 2 matrices"):
        open_source(index)
    with pytest.raises(FormatError, match="contains no 'nope'"):
        open_source(f"{index}:nope")
    (tmp_path / "model-1-of-2.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-1-of-2\.safetensors: no such file"):
        open_source(f"{index}:head")


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b.safetensors"}}',
     '{"weight_map": {"a": "/b.safetensors"}}', '{"weight_map": {"a": "b.npy"}}'],
)  # fmt: skip
def test_json_that_is_no_index_of_files_beside_it(tmp_path, text):
    (tmp_path / "b.safetensors").touch()
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(FormatError, match=r"f\.json: (not JSON|no index|empty|no list)"):
        open_source(f"{tmp_path / 'f.json'}:a")
