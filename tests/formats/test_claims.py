"""What files claim of themselves against what they hold: a kilobyte must not fill a disk."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import tierstore
from tests.reference.formats import write_without_us
from tierstore._formats import SOURCE_SUFFIXES, open_source
from tierstore.errors import FormatError
from tierstore.importing import import_table, preview
from tierstore_cli.main import cli

RNG = np.random.default_rng(38)
ROWS, DIM = 1 << 30, 1 << 10
"""4 TiB of float32, more than there is."""
SMALL = 1 << 12, 64
"""1 MiB."""


def _strided(path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save(torch.ones(4, 4).as_strided((ROWS, DIM), (0, 0)), path)


def _unwritten(path: Path) -> None:
    with pytest.importorskip("h5py").File(path, "w") as file:
        file.create_dataset("weight", (ROWS, DIM), "f4", chunks=(64, DIM))
        file["weight"][:64] = RNG.standard_normal((64, DIM))


def _chunks_left_out(path: Path) -> None:
    array = pytest.importorskip("zarr").create_array(
        path, shape=(ROWS, DIM), chunks=(1 << 12, DIM), dtype="f4", fill_value=0.0
    )
    array[:1] = RNG.standard_normal((1, DIM))


def _holes(path: Path) -> None:
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (ROWS, DIM)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * ROWS * DIM)


def _tensor_of_holes(path: Path) -> None:
    shape, end = [ROWS, DIM], 4 * ROWS * DIM
    text = f'{{"weight":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}'.encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


def _model_of_holes(path: Path) -> None:
    _tensor_of_holes(path.with_name("m-1.safetensors"))
    path.write_text('{"weight_map": {"weight": "m-1.safetensors"}}')


def _counts_of_holes(path: Path, size: int = 4) -> None:
    with path.open("wb") as file:
        file.write(np.array([ROWS, DIM], "<u4").tobytes())
        file.truncate(8 + size * ROWS * DIM)


LIARS: dict[str, Callable[[Path], object]] = {
    ".fbin": _counts_of_holes,
    ".i8bin": lambda path: _counts_of_holes(path, 1),
    ".u8bin": lambda path: _counts_of_holes(path, 1),
    ".h5": _unwritten,
    ".h5ad": _unwritten,
    ".hdf5": _unwritten,
    ".json": _model_of_holes,
    ".npy": _holes,
    ".ckpt": _strided,
    ".pt": _strided,
    ".pth": _strided,
    ".safetensors": _tensor_of_holes,
    ".zarr": _chunks_left_out,
}
"""Files of some kilobytes that claim 4 TiB."""


def _column(path: Path) -> Any:
    pyarrow = pytest.importorskip("pyarrow")
    zeros = pyarrow.array(np.zeros(SMALL[0] * SMALL[1], np.float32))
    column = pyarrow.FixedSizeListArray.from_arrays(zeros, SMALL[1])
    return pyarrow.table({"weight": column})


def _arrow_of_zeros(path: Path) -> None:
    table = _column(path)
    pytest.importorskip("pyarrow.feather").write_feather(table, path, compression="zstd")


def _stream_of_zeros(path: Path) -> None:
    table = _column(path)
    pyarrow = pytest.importorskip("pyarrow")
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(path, table.schema, options=options) as writer:
        writer.write_table(table)


def _parquet_of_zeros(path: Path) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(_column(path), path, compression="zstd")


PACKED: dict[str, Callable[[Path], object]] = {
    ".arrow": _arrow_of_zeros,
    ".arrows": _stream_of_zeros,
    ".feather": _arrow_of_zeros,
    ".npz": lambda path: np.savez_compressed(path, weight=np.zeros(SMALL, np.float32)),
    ".parquet": _parquet_of_zeros,
    ".csv.gz": lambda path: path.write_bytes(gzip.compress(_text_of_zeros(".csv"))),
    ".tsv.bz2": lambda path: path.write_bytes(bz2.compress(_text_of_zeros(".tsv"))),
    ".jsonl.xz": lambda path: path.write_bytes(lzma.compress(_text_of_zeros(".jsonl"))),
}
"""Files that really unpack to so many rows, of zeros: over 200 times what they hold."""

COUNTED = {".bin", ".csv", ".fvecs", ".jsonl", ".ndjson", ".projector", ".tsv", ".txt", ".vec"}
"""Formats whose rows are all in the file, each with its bytes; packed texts are above."""
OTHERS = {".bvecs", ".dat", ".i8bin", ".ibin", ".ivecs", ".raw", ".u8bin"}
"""Formats of whole numbers, or of what the path says; see test_ways_on.py."""


def _text_of_zeros(suffix: str) -> bytes:
    rows, dim = SMALL[0] // 2, SMALL[1]
    if suffix == ".jsonl":
        return (b'{"v": [' + b",".join([b"0.0"] * dim) + b"]}\n") * rows
    mark = {".csv": b",", ".tsv": b"\t"}.get(suffix, b" ")
    line = mark.join([b"0.0"] * dim) + b"\n"
    return line * rows


def test_every_format_is_tried() -> None:
    packed = {f".{name.split('.')[1]}" for name in PACKED}
    assert set(LIARS) | packed | COUNTED | OTHERS == set(SOURCE_SUFFIXES)


def used(path: Path) -> int:
    return sum(each.stat().st_blocks for each in path.rglob("*")) * 512


@pytest.mark.fault(55)
@pytest.mark.parametrize("suffix", LIARS)
def test_a_claim_is_refused_before_disk_is_taken(tmp_path: Path, suffix: str) -> None:
    source = tmp_path / f"file{suffix}"
    LIARS[suffix](source)
    assert used(tmp_path) < 8 << 20
    stores = tmp_path / "stores"
    stores.mkdir()
    with tierstore.create(stores / "old.tier", {}) as store:
        before = used(stores)
        for target in (store, stores / "new.tier"):
            with pytest.raises(FormatError, match=r"1,073,741,824 rows of 1,024 float32, 4\.0 TiB"):
                import_table(target, str(source))
        with pytest.raises(FormatError, match="--expand"):
            preview(str(source))
        assert used(stores) <= before + (64 << 10)
        assert store.version == 1
        assert os.listdir(stores) == ["old.tier"]


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("suffix", PACKED)
def test_packed_zeros_are_refused_and_taken_by_name(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore._formats.claims.FREE_BYTES", 1 << 10)
    source = tmp_path / f"file{suffix}"
    PACKED[suffix](source)
    with pytest.raises(FormatError, match="less than a 200th; if you trust it"):
        import_table(tmp_path / "s.tier", str(source))
    assert not (tmp_path / "s.tier").exists()
    done = import_table(tmp_path / "s.tier", str(source), expand=True)
    with tierstore.open(tmp_path / "s.tier") as store:
        assert store["embeddings"].rows == done.rows > 1000
        assert not store["embeddings"].read(range(done.rows)).any()


@pytest.mark.variants(8)
@pytest.mark.parametrize("suffix", [s for s in SOURCE_SUFFIXES if s not in OTHERS])
def test_honest_files_load(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they pack as well as trained rows ever do: few values, each often."""
    monkeypatch.setattr("tierstore._formats.claims.FREE_BYTES", 0)
    matrix = RNG.choice(np.float32([-1.5, 0.25, 2.0]), (300, 8))
    write_without_us(tmp_path / f"file{suffix}", matrix)
    import_table(tmp_path / "s.tier", str(tmp_path / f"file{suffix}"))
    with tierstore.open(tmp_path / "s.tier") as store:
        np.testing.assert_array_equal(store["embeddings"].read(range(300)), matrix)


def test_a_sparse_file_is_taken_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holes are zeros, on the command line too; attaching reserves nothing, and takes it."""
    monkeypatch.setattr("tierstore._formats.claims.FREE_BYTES", 1 << 20)
    source = tmp_path / "rows.npy"
    rows = np.lib.format.open_memmap(source, "w+", np.float32, ((8 << 20) // 256, 64))
    some = RNG.standard_normal((2, 64), np.float32)
    rows[[7, 5000]] = some
    rows.flush()
    count = len(rows)
    del rows
    command = ["load", str(tmp_path / "s.tier"), str(source)]
    failed = CliRunner().invoke(cli, command)
    assert failed.exit_code and "--expand" in failed.stderr
    assert not (tmp_path / "s.tier").exists()
    with tierstore.attach({"t": str(source)}) as attached:
        np.testing.assert_array_equal(attached["t"].read([7, 5000]), some)
    assert CliRunner().invoke(cli, [*command, "--expand"]).exit_code == 0
    with tierstore.open(tmp_path / "s.tier") as store:
        table = store["embeddings"]
        assert table.rows == count
        np.testing.assert_array_equal(table.read([7, 5000]), some)
        assert not table.read(range(8, 5000)).any()


def test_a_zarr_store_of_objects_is_asked_too(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    place = zarr.storage.MemoryStore()
    array = zarr.create_array(place, shape=(ROWS, DIM), chunks=(1 << 14, DIM), dtype="f4")
    array[:1, :4] = 1.5
    with pytest.raises(FormatError, match="less than a 200th"):
        open_source(place)


def test_zip_bombs_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore._formats.claims.FREE_BYTES", 1 << 10)
    source = tmp_path / "rows.csv.zip"
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.csv", _text_of_zeros(".csv"))
    with pytest.raises(FormatError, match="less than a 200th"):
        import_table(tmp_path / "s.tier", str(source))
