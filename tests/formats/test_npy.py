""".npy: files written and read by NumPy itself, and headers with false claims."""

import ast
import struct

import numpy as np
import pytest

from tests.every import every
from tests.formats.matrices import random_matrix, read_file, write_file
from tierstore._formats import open_source
from tierstore.errors import FormatError

DTYPES = ["float16", "float32", "float64"]


def npy(header: object, data: bytes = b"", version: bytes = b"\1\0", length: int | None = None):
    text = header if isinstance(header, bytes) else repr(header).encode() + b"\n"
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + version + size + text + data


def header(descr: object = "<f4", order: object = False, shape: object = (2, 2)) -> dict:
    return {"descr": descr, "fortran_order": order, "shape": shape}


@every(dtype=DTYPES, order=["<", ">"], layout=["C", "F"], shape=[(0, 3), (1, 4), (4, 1), (31, 6)])
def test_reads_what_numpy_saves(tmp_path, dtype, order, layout, shape):
    matrix = random_matrix(*shape, dtype)
    stored = np.asarray(matrix.astype(matrix.dtype.newbyteorder(order)), order=layout)
    np.save(tmp_path / "file.npy", stored)
    assert read_file(tmp_path / "file.npy", block_rows=5).tobytes() == matrix.tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_reads_every_version(tmp_path, version):
    matrix = random_matrix(3, 4)
    with (tmp_path / "file.npy").open("wb") as file:
        np.lib.format.write_array(file, matrix, version=version)
    assert read_file(tmp_path / "file.npy").tobytes() == matrix.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_maps_what_is_written(tmp_path, dtype):
    matrix = random_matrix(31, 6, dtype)
    write_file(tmp_path / "file.npy", matrix, dtype)
    mapped = np.load(tmp_path / "file.npy", mmap_mode="r", allow_pickle=False)
    assert mapped.dtype == matrix.dtype
    assert mapped.offset % 64 == 0
    assert mapped.tobytes() == matrix.tobytes()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (npy(header("|O"), b"x" * 16), "objects"),
        (npy(header([("a", "<f4")]), b"x" * 16), "objects or records"),
        (npy(header("f4,f4"), b"x" * 32), "objects or records"),
        (npy(header("<c8"), b"x" * 32), "need floats"),
        (npy(header("<m8"), b"x" * 32), "need floats"),
        (npy(header("|V2"), b"x" * 8), "npy:bfloat16"),
        (npy(header("|V3"), b"x" * 12), "without a type"),
        (npy(header("<V2", shape=(4,)), b"x" * 8), "need floats"),
        (npy(header("|b1"), b"x" * 4), "need floats"),
        (npy(header("<f16"), b"x" * 64), "need floats"),
        (npy(header("<U99999999999999"), b""), "need floats"),
        (npy(header("<U0", shape=(2,)), b""), "need floats"),
        (npy(header(7), b""), "need floats"),
        (npy(header(shape=(4,)), b"x" * 16), r"\(rows, dim\)"),
        (npy(header(shape=(1, 2, 2)), b"x" * 16), r"\(rows, dim\)"),
        (npy(header(shape=()), b"x" * 4), r"\(rows, dim\)"),
        (npy(header(shape=(-1, 2)), b""), "not a shape"),
        (npy(header(shape=(True, 4)), b"x" * 16), "not a shape"),
        (npy(header(shape=(2.0, 2)), b"x" * 16), "not a shape"),
        (npy(header(shape=[2, 2]), b"x" * 16), "not a shape"),
        (npy(header(shape=(2**62, 2**62)), b"x" * 16), "truncated"),
        (npy(header(shape=(3, 0)), b""), "1 to"),
        (npy(header(shape=(0, 2**40)), b""), "at most"),
        (npy(header(order=0), b"x" * 16), "True or False"),
        (npy({**header(), "extra": 1}, b"x" * 16), "must hold"),
        (npy(b"__import__('os').abort()\n"), "literals"),
        (npy(b"(" * 9000), "literals"),
        (npy(b"-" * 9000 + b"1"), "literals"),
        (npy(b"[" * 9000 + b"]" * 900), "literals"),
        (npy(b"\xff\xfe"), "literals"),
        (npy(b"7\n"), "must hold"),
        (npy(header(), b"x" * 15), "truncated"),
        (npy(header(), b"x" * 17), "extra bytes follow"),
        (npy(header(), b"x" * 16, version=b"\4\0"), "version 4.0"),
        (npy(header(), b"x" * 16, version=b"\2\0", length=3 << 30), "header of"),
        (npy(header(), b"", length=500), "truncated"),
        (b"\x93NUMPY\1\0\1", "truncated"),
        (b"\x93NUMPX\1\0", "magic"),
    ],
)
@pytest.mark.fault(55)
def test_bad_files_are_named_as_such(tmp_path, content, why):
    (tmp_path / "file.npy").write_bytes(content)
    with pytest.raises(FormatError, match=why):
        open_source(tmp_path / "file.npy")
    assert (tmp_path / "file.npy").read_bytes() == content


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = tmp_path / "file.npy"
    write_file(path, random_matrix(20, 4), "float32")
    with open_source(path) as source:
        blocks = source.blocks(5)
        next(blocks)
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(FormatError, match="truncated"):
            list(blocks)


def test_another_thread_that_parses_does_not_get_in_the_way(tmp_path, monkeypatch):
    """Python 3.11 says so where two threads parse at once, whatever the text is."""
    np.save(tmp_path / "a.npy", array := np.random.default_rng(0).normal(size=(5, 3)))
    calls, parse = [], ast.literal_eval

    def disturbed(text):
        calls.append(text)
        if len(calls) <= 3:
            raise SystemError("AST constructor recursion depth mismatch (before=36, after=32)")
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", disturbed)
    assert np.array_equal(read_file(tmp_path / "a.npy"), array)
    assert len(calls) > 3
