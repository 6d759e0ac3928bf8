"""The contract of a base: every backend passes the same tests."""

import contextlib
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracle import records
from tests.pairs import pairs
from tests.reference.backends import variants
from tests.tries import tries
from tierstore import _checksum, _io
from tierstore._disk import readahead
from tierstore._disk import records as base_records
from tierstore._disk.base import Base
from tierstore.errors import CorruptRowError, CorruptStoreError, FormatError, InvalidInputError
from tierstore.spec import BACKENDS as DISK_BACKENDS
from tierstore.spec import Field, TableSpec

BACKENDS = variants()
RAW = ("memmap", "zarr", "zarr-chunks")
every_backend = pytest.mark.parametrize("kind", BACKENDS)


def make_spec(kind: str, rows: int, *, dim: int = 8, sparse: bool = False) -> TableSpec:
    spec = TableSpec(rows, dim, sparse=sparse, **BACKENDS[kind])
    return DISK_BACKENDS[spec.backend].completed(spec)


def blocks_of(data: np.ndarray, rows: int = 1000) -> Iterator[np.ndarray]:
    for start in range(0, len(data), rows):
        yield data[start : start + rows]


def create(path: Path, spec: TableSpec, data: np.ndarray, **options: object) -> Base:
    return Base.create(_io.Directory.open(path), spec, blocks_of(data), **options)


def reopen(path: Path, spec: TableSpec) -> Base:
    return Base.open(_io.Directory.open(path), spec)


def read(base: Base, rows: object) -> np.ndarray:
    rows = np.asarray(rows, np.int64)
    out = np.empty((rows.size, base.record_bytes), np.uint8)
    base.read(rows, out)
    return out


def files_of(path: Path) -> list[Path]:
    """The files that hold records."""
    return sorted(path.glob("rows.npy")) + sorted(path.glob("rows.zarr/c.*"))


def open_below(path: Path) -> list[str]:
    """What this process has open under a path; other tests may have left what they will."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in found if each.startswith(f"{path}/")]


@pytest.mark.variants(17)
@every_backend
@pytest.mark.parametrize("rows", [1, 5, 4096, 10_001])
def test_what_was_created_is_read_in_any_order(tmp_path, kind, rows):
    rng = np.random.default_rng(rows)
    spec, data = make_spec(kind, rows), records(rng, rows, 32)
    seen: list[tuple[int, int]] = []
    base = create(tmp_path, spec, data, progress=lambda *at: seen.append(at))
    assert seen[-1] == (rows, rows)
    for each in (base, reopen(tmp_path, spec)):
        assert (each.rows, each.record_bytes) == (rows, 32)
        wanted = rng.integers(0, rows, 3000)
        assert np.array_equal(read(each, wanted), data[wanted])
        assert np.array_equal(read(each, np.arange(rows)), data)
        assert read(each, []).shape == (0, 32)
        each.prefetch(wanted)
        assert each.damaged(np.arange(rows)) == []
        assert each.damaged_files() == []
        each.close()


@pytest.mark.variants(3)
@every_backend
@tries(10)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 2**32))
def test_writes_over_some_rows_leave_the_others(tmp_path_factory, kind, rows, dim, seed):
    path, rng = tmp_path_factory.mktemp("base"), np.random.default_rng(seed)
    spec = make_spec(kind, rows, dim=dim)
    width = spec.layout.record_bytes
    data = records(rng, rows, width)
    base = create(path, spec, data)
    for _ in range(4):
        chosen = np.flatnonzero(rng.random(rows) < rng.random())
        data[chosen] = records(rng, chosen.size, width)
        base.write(chosen, data[chosen], _checksum.row_checksums(chosen, data[chosen]))
        assert np.array_equal(read(base, np.arange(rows)), data)
    base.sync()
    base.close()
    assert np.array_equal(read(reopen(path, spec), np.arange(rows)), data)


@pytest.mark.variants(1, 2)
@pairs(together=1, kind=list(BACKENDS), cached=[True, False])
def test_many_rows_of_a_large_table_are_written(monkeypatch, tmp_path, kind, cached):
    """Dense and thin parts of several blocks, across the edges of chunks, in memory or not."""
    monkeypatch.setattr(base_records, "BLOCK_BYTES", 300_000)
    monkeypatch.setattr(readahead, "looks_resident", lambda *given: cached)
    rng = np.random.default_rng(3)
    spec, data = make_spec(kind, 40_000, dim=68), records(rng, 40_000, 272)
    base = create(tmp_path, spec, data)
    for _ in range(2):
        dense, thin = np.arange(3000, 9000), rng.choice(30_000, 200, replace=False) + 10_000
        chosen = np.unique(np.concatenate([dense[rng.random(dense.size) < 0.6], thin, [39_999]]))
        data[chosen] = records(rng, chosen.size, 272)
        base.write(chosen, data[chosen], _checksum.row_checksums(chosen, data[chosen]))
        assert np.array_equal(read(base, np.arange(40_000)), data)
    base.sync()
    base.close()
    assert np.array_equal(read(reopen(tmp_path, spec), np.arange(40_000)), data)


@pytest.mark.parametrize("kind", RAW)
def test_blocks_that_are_not_in_memory_are_rewritten_past_the_page_cache(
    monkeypatch, tmp_path, kind
):
    rng = np.random.default_rng(4)
    spec, data = make_spec(kind, 20_000, dim=64), records(rng, 20_000, 256)
    base = create(tmp_path, spec, data)
    chosen = np.flatnonzero(rng.random(20_000) < 0.3)
    moved = dict.fromkeys((True, False), 0)
    write = _io.direct.write
    monkeypatch.setattr(
        _io.direct, "write", lambda *given: (moved.update({cached: given[1].size}), write(*given))
    )
    for cached in moved:
        monkeypatch.setattr(readahead, "looks_resident", lambda *given, cached=cached: cached)
        data[chosen] = records(rng, chosen.size, 256)
        base.write(chosen, data[chosen], _checksum.row_checksums(chosen, data[chosen]))
        assert np.array_equal(read(base, np.arange(20_000)), data)
    assert moved[True] == 0 and moved[False] > 0


@every_backend
def test_any_changed_byte_is_found_and_never_returned(tmp_path, kind):
    rng = np.random.default_rng(4)
    spec, data = make_spec(kind, 500), records(rng, 500, 32)
    create(tmp_path, spec, data).close()
    sums = tmp_path / "rows.crc"
    content = bytearray(sums.read_bytes())
    for row in (3, 321):
        content[4 * row + 1] ^= 0x10
    sums.write_bytes(content)

    base = reopen(tmp_path, spec)
    assert base.damaged(np.arange(500)) == [3, 321]
    assert np.array_equal(read(base, [4, 320, 4]), data[[4, 320, 4]])
    with pytest.raises(CorruptRowError, match=r"2 rows .*first is row 3;") as error:
        read(base, [321, 3, 321, 0])
    assert error.value.rows == [3, 321]


@pytest.mark.parametrize("kind", RAW)
def test_damaged_records_are_named(tmp_path, kind):
    rng = np.random.default_rng(5)
    spec, data = make_spec(kind, 9000), records(rng, 9000, 32)
    create(tmp_path, spec, data).close()
    offset = mmap.PAGESIZE if kind == "memmap" else 0
    with files_of(tmp_path)[0].open("r+b") as file:
        file.seek(offset + 32 * 77 + 5)
        file.write(bytes([data[77, 5] ^ 1]))
    base = reopen(tmp_path, spec)
    assert base.damaged(np.arange(9000)) == [77]
    with pytest.raises(CorruptRowError):
        read(base, [77])


@pytest.mark.parametrize("kind", ["zstd", "lz4-chunks"])
def test_damaged_chunks_cost_their_rows_and_no_others(tmp_path, kind):
    rng = np.random.default_rng(6)
    spec, data = make_spec(kind, 500), records(rng, 500, 32)
    create(tmp_path, spec, data).close()
    chunk = files_of(tmp_path)[0]
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    base = reopen(tmp_path, spec)
    assert base.damaged(np.arange(500)) == list(range(min(spec.chunk_rows, 500)))
    with pytest.raises(CorruptStoreError, match="restore it from a copy"):
        read(base, [0])


@pytest.mark.parametrize("change", ["cut", "longer", "gone", "link", "directory"])
@pytest.mark.parametrize(
    ("kind", "which"),
    [*((kind, "checksums") for kind in BACKENDS), *((kind, "records") for kind in RAW)],
)
def test_files_that_are_not_as_they_were_made(tmp_path, kind, change, which):
    spec = make_spec(kind, 100)
    create(tmp_path, spec, records(np.random.default_rng(7), 100, 32)).close()
    path = tmp_path / "rows.crc" if which == "checksums" else files_of(tmp_path)[0]
    content = path.read_bytes()
    path.unlink()
    if change == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif change == "directory":
        path.mkdir()
    elif change != "gone":
        path.write_bytes(content[:-1] if change == "cut" else content + b"\0")
    with pytest.raises((CorruptStoreError, FormatError)) as error:
        reopen(tmp_path, spec)
    assert path.name in str(error.value)


@pytest.mark.parametrize("kind", ["memmap", "zarr"])
@pytest.mark.parametrize(
    "other",
    [
        {"rows": 99},
        {"rows": 101},
        {"dim": 4},
        {"dtype": "float16", "dim": 16},
        {"dim": None, "dtype": None, "fields": {"w": Field(5)}},
        {"dim": None, "dtype": None, "fields": {"weight": Field(4), "m": Field(4)}},
    ],
    ids=str,
)
def test_the_files_of_another_table_are_refused(tmp_path, kind, other):
    spec = make_spec(kind, 100)
    create(tmp_path, spec, records(np.random.default_rng(8), 100, 32)).close()
    changed = replace(spec, **{"fields": {}, "chunk_rows": None, **other})
    with pytest.raises((CorruptStoreError, FormatError)):
        reopen(tmp_path, DISK_BACKENDS[changed.backend].completed(changed))


@every_backend
@pytest.mark.parametrize("rows", [99, 101, 2000])
def test_blocks_must_add_up_to_the_table(tmp_path, kind, rows):
    data = records(np.random.default_rng(9), rows, 32)
    with pytest.raises(InvalidInputError, match="the table 100"):
        create(tmp_path, make_spec(kind, 100), data)


@pytest.mark.parametrize(
    "block", [np.zeros((10, 31), np.uint8), np.zeros((10, 4), "f8"), np.zeros(10, np.uint8)]
)
def test_blocks_must_be_of_records(tmp_path, block):
    with _io.Directory.open(tmp_path) as directory, pytest.raises(InvalidInputError, match="32"):
        Base.create(directory, make_spec("memmap", 10), [block])


@every_backend
def test_sparse_tables_take_no_space_until_rows_are_written(tmp_path, kind):
    rng = np.random.default_rng(10)
    spec = make_spec(kind, 1 << 16, dim=64, sparse=True)
    base = create(tmp_path, spec, np.empty((0, 256), np.uint8))
    assert used_bytes(tmp_path) < 1 << 16
    assert not read(base, [0, 77, spec.rows - 1]).any()
    chosen = np.array([0, 5000, spec.rows - 1])
    data = records(rng, 3, 256)
    base.write(chosen, data, _checksum.row_checksums(chosen, data))
    assert np.array_equal(read(base, [5000, 0, 1, spec.rows - 1])[[1, 0, 3]], data)
    assert base.damaged(np.arange(spec.rows)) == []
    assert used_bytes(tmp_path) < 1 << 20


@every_backend
def test_a_sparse_table_is_made_of_the_rows_that_are_not_zero(tmp_path, kind):
    rng = np.random.default_rng(11)
    spec, data = make_spec(kind, 3000, sparse=True), records(rng, 2500, 32)
    data[rng.random(2500) < 0.5] = 0
    data[rng.random(2500) < 0.5, 1:] = 0  # rows most of whose bytes are zero
    base = create(tmp_path, spec, data)
    assert np.array_equal(read(base, np.arange(2500)), data)
    assert not read(base, np.arange(2500, 3000)).any()


def used_bytes(path: Path) -> int:
    return sum(512 * file.stat().st_blocks for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", RAW)
def test_space_is_reserved_unless_the_table_is_sparse(tmp_path, kind):
    spec = make_spec(kind, 5000)
    create(tmp_path, spec, np.zeros((5000, 32), np.uint8)).close()
    assert used_bytes(tmp_path) >= spec.nbytes + 4 * spec.rows


@every_backend
def test_nothing_is_left_open(tmp_path, kind):
    spec = make_spec(kind, 5000)
    create(tmp_path, spec, records(np.random.default_rng(11), 5000, 32)).close()
    assert open_below(tmp_path) == []
    base = reopen(tmp_path, spec)
    assert not any(os.path.isfile(each) for each in open_below(tmp_path))
    rows = np.arange(5000)
    data = records(np.random.default_rng(12), 5000, 32)
    base.write(rows, data, _checksum.row_checksums(rows, data))
    assert f"{tmp_path}/rows.crc" in open_below(tmp_path)
    base.sync()
    assert not any(os.path.isfile(each) for each in open_below(tmp_path))
    base.write(rows, data, _checksum.row_checksums(rows, data))
    base.close()
    assert open_below(tmp_path) == []


@pytest.mark.parametrize(
    ("rows", "dim", "chunk_rows", "expected"),
    [
        (100, 8, None, 100),
        (100, 8, 1 << 20, 100),
        (1 << 22, 32, None, 1 << 17),
        (1 << 22, 32, 512, 512),
    ],
)
def test_raw_chunks_hold_whole_pages_of_whole_rows(rows, dim, chunk_rows, expected):
    spec = TableSpec(rows, dim, backend="zarr", chunk_rows=chunk_rows)
    assert DISK_BACKENDS["zarr"].completed(spec).chunk_rows == expected


def test_raw_chunks_of_odd_sizes_are_refused():
    with pytest.raises(InvalidInputError, match="multiple of 512"):
        DISK_BACKENDS["zarr"].completed(TableSpec(1 << 20, 32, backend="zarr", chunk_rows=500))


@every_backend
@pytest.mark.parametrize("dim", [8, 5])
def test_other_programs_read_the_rows(tmp_path, kind, dim):
    rng = np.random.default_rng(12)
    spec = make_spec(kind, 5000, dim=dim)
    matrix = rng.standard_normal((5000, dim)).astype(np.float32)
    data = np.zeros((5000, spec.layout.record_bytes), np.uint8)
    spec.layout.view(data, "weight")[:] = matrix
    create(tmp_path, spec, data).close()
    backend = DISK_BACKENDS[spec.backend]
    line = backend.opening_line(spec.layout, str(tmp_path / backend.entry))
    found = eval(line, {"np": np, "zarr": pytest.importorskip("zarr")})
    assert np.array_equal(found, matrix)
