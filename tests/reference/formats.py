"""Files of vectors of each format, made without the library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.reference import entry

Matrix = npt.NDArray[np.float32]


def _lines(separator: str, *, counts: bool = False) -> Callable[[Path, Matrix], None]:
    def make(path: Path, matrix: Matrix) -> None:
        lines = [
            separator.join([f"word{row}", *map(repr, values)])
            for row, values in enumerate(matrix.tolist())
        ]
        head = [f"{matrix.shape[0]} {matrix.shape[1]}"] if counts else []
        path.write_text("\n".join([*head, *lines]) + "\n")

    return make


def _binary(path: Path, matrix: Matrix) -> None:
    rows = [b"word%d %b\n" % (row, values.tobytes()) for row, values in enumerate(matrix)]
    path.write_bytes(b"%d %d\n" % matrix.shape + b"".join(rows))


def _parquet(path: Path, matrix: Matrix) -> None:
    pyarrow, parquet = map(pytest.importorskip, ("pyarrow", "pyarrow.parquet"))
    column = pyarrow.array(list(matrix), pyarrow.list_(pyarrow.float32()))
    parquet.write_table(pyarrow.table({"weight": column}), path)


def _torch(path: Path, matrix: Matrix) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.from_numpy(matrix)}, path)


def _zarr(path: Path, matrix: Matrix) -> None:
    group: Any = pytest.importorskip("zarr").create_group(path)
    group.create_array("weight", data=matrix)


def _jsonl(path: Path, matrix: Matrix) -> None:
    lines = [json.dumps({"id": f"w{n}", "embedding": row}) for n, row in enumerate(matrix.tolist())]
    path.write_text("\n".join(lines))


def _index(path: Path, matrix: Matrix) -> None:
    """A model in files of their own, as transformers has it."""
    shard = f"{path.stem}-1-of-1.safetensors"
    pytest.importorskip("safetensors.numpy").save_file({"weight": matrix}, path.with_name(shard))
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {"weight": shard}}))


def _fvecs(path: Path, matrix: Matrix) -> None:
    """As the reader of faiss has it: every row is an int32 and its floats."""
    rows = [np.array([len(row)], "<i4").tobytes() + row.tobytes() for row in matrix]
    path.write_bytes(b"".join(rows))


def _fbin(path: Path, matrix: Matrix) -> None:
    path.write_bytes(np.array(matrix.shape, "<u4").tobytes() + matrix.tobytes())


def _bin_of_bytes(path: Path, matrix: Matrix) -> None:
    path.write_bytes(np.array(matrix.shape, "<u4").tobytes() + matrix.astype("u1").tobytes())


def _bvecs(path: Path, matrix: Matrix) -> None:
    rows = [np.array([len(r)], "<i4").tobytes() + r.astype("u1").tobytes() for r in matrix]
    path.write_bytes(b"".join(rows))


def _ivecs(path: Path, matrix: Matrix) -> None:
    rows = [np.array([len(row), *row], "<i4").tobytes() for row in matrix.astype("<i4")]
    path.write_bytes(b"".join(rows))


def _ibin(path: Path, matrix: Matrix) -> None:
    path.write_bytes(np.array(matrix.shape, "<u4").tobytes() + matrix.astype("<i4").tobytes())


def _stream(path: Path, matrix: Matrix) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array(list(matrix), pyarrow.list_(pyarrow.float32()))
    table = pyarrow.table({"weight": column})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def _bytes(path: Path, matrix: Matrix) -> None:
    matrix.tofile(path)


OF_BYTES = (".bvecs", ".i8bin", ".u8bin")
"""Formats of whole numbers from 0 to 127, or to 255."""
OF_INT32 = (".ibin", ".ivecs")
"""Formats of whole numbers, which are read as float64."""
UNSAID = (".dat", ".raw")
"""Formats of which the path says the type and the length of rows, :float32:5."""


def _feather(path: Path, matrix: Matrix) -> None:
    """As pyarrow writes it: packed, unlike what the library writes."""
    pyarrow, feather = map(pytest.importorskip, ("pyarrow", "pyarrow.feather"))
    column = pyarrow.array(list(matrix), pyarrow.list_(pyarrow.float32()))
    feather.write_feather(pyarrow.table({"weight": column}), path)


def _projector(path: Path, matrix: Matrix) -> None:
    path.mkdir()
    np.savetxt(path / "vectors.tsv", matrix, delimiter="\t")


def _hdf5(path: Path, matrix: Matrix) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file["model/weight"] = matrix


WRITERS: dict[str, Callable[[Path, Matrix], object]] = {
    ".arrow": _feather,
    ".arrows": _stream,
    ".bin": _binary,
    ".bvecs": _bvecs,
    ".ckpt": _torch,
    ".csv": _lines(","),
    ".dat": _bytes,
    ".fbin": _fbin,
    ".feather": _feather,
    ".fvecs": _fvecs,
    ".h5": _hdf5,
    ".h5ad": _hdf5,
    ".hdf5": _hdf5,
    ".i8bin": _bin_of_bytes,
    ".ibin": _ibin,
    ".ivecs": _ivecs,
    ".json": _index,
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".npy": np.save,
    ".npz": lambda path, matrix: np.savez(path, weight=matrix),
    ".parquet": _parquet,
    ".projector": _projector,
    ".pt": _torch,
    ".pth": _torch,
    ".raw": _bytes,
    ".safetensors": lambda path, matrix: pytest.importorskip("safetensors.numpy").save_file(
        {"weight": matrix}, path
    ),
    ".tsv": _lines("\t"),
    ".txt": _lines(" "),
    ".u8bin": _bin_of_bytes,
    ".vec": _lines(" ", counts=True),
    ".zarr": _zarr,
}


def write_without_us(path: Path, matrix: Matrix) -> None:
    """Make a file of float32s of the format that its suffix says; raises for one without an entry.

    Skips the test where the tool that makes such files is missing.
    """
    entry(WRITERS, path.suffix)(path, matrix)
