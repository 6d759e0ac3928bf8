"""A base belongs to its manifests: one of a different time is refused and reported by verify."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tierstore import _io
from tierstore._disk import base as bases
from tierstore._disk.backends.memmap import DATA_OFFSET
from tierstore._disk.base import Base
from tierstore._disk.generation import Generation
from tierstore._store.compaction import Folder
from tierstore._store.reading import Reading
from tierstore.budget import Budget
from tierstore.errors import CorruptRowError, CorruptStoreError

BLOCK = 64
ROWS, DIM = 10 * BLOCK + 17, 3
EVERY = np.arange(ROWS)
RECORD = tierstore.TableSpec(ROWS, DIM).layout.record_bytes
NONE = Budget(host=0)
BACKENDS: dict[str, dict[str, Any]] = {
    "memmap": {},
    "zarr": {"backend": "zarr"},
    "zstd": {"backend": "zarr", "chunk_rows": 128, "compression": "zstd"},
    "sparse": {"sparse": True},
}

Rows = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Set the block size to 64 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bases, "DIGEST_ROWS", BLOCK)
        patch.setattr("tierstore._disk.generation.DIGEST_ROWS", BLOCK)
        yield


@pytest.fixture(scope="module", params=BACKENDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small_blocks: None
) -> Path:
    """A store at version 2, folded, all of whose rows are written."""
    place = tmp_path_factory.mktemp("made") / "s"
    spec = tierstore.TableSpec(ROWS, DIM, **BACKENDS[request.param])
    tierstore.create(place, {"t": spec}).close()
    with opened(place, "r+") as store:
        write(store, 1)
        store.commit()
        store.fold()
    return place


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "s")


def opened(path: Path, mode: str = "r", **options: Any) -> tierstore.Store:
    return tierstore.open(path, mode, budget=NONE, **options)


def write(store: tierstore.Store, seed: int, rows: Any = EVERY) -> Rows:
    """Write random values to rows; return all rows as they are then."""
    rng = np.random.default_rng(seed)
    store["t"].write(rows, rng.standard_normal((len(rows), DIM)).astype(np.float32))
    return rows_of(store)


def rows_of(store: tierstore.Store) -> Rows:
    found: Rows = store["t"].read(EVERY)
    return found


def generation(path: Path) -> Path:
    return next((path / "t").glob("g*"))


def base_files(path: Path) -> list[Path]:
    """The files of the base, relative to the store."""
    found = [file for file in generation(path).rglob("*") if file.is_file()]
    return [file.relative_to(path) for file in found if file.name.startswith(("rows.", "c."))]


def first_half(old: bytes, new: bytes) -> bytes:
    half = len(new) // 2
    return old[:half] + new[half:]


def last_rows(old: bytes, new: bytes) -> bytes:
    return new[:-40] + old[-40:]


def is_refused(path: Path) -> None:
    with pytest.raises(CorruptStoreError, match="a different time"):
        opened(path)
    with pytest.raises(CorruptStoreError, match="a different time"):
        opened(path, "r+")


@pytest.mark.fault(53)
def test_a_base_from_a_backup_is_refused(path: Path, tmp_path: Path) -> None:
    """The base of a fold before; opening without the comparison gives the old rows."""
    old = rows_before = None
    with opened(path) as store:
        rows_before = rows_of(store)
    shutil.copytree(path, tmp_path / "backup")
    with opened(path, "r+") as store:
        for seed in (2, 3):
            rows = write(store, seed)
            store.commit()
        store.fold()
    for file in base_files(path):
        shutil.copy(tmp_path / "backup" / file, path / file)
    is_refused(path)
    with mock.patch.object(Generation, "check_base"), opened(path) as store:
        old = rows_of(store)
        assert np.array_equal(old, rows_before)  # the negative control
        assert not np.array_equal(old, rows)
        report = store.verify()
        assert not report.ok
        assert any("a different time" in text for text in report.bad_files)


@pytest.mark.variants(4)
@pytest.mark.fault(53)
@pytest.mark.parametrize("fold_between", [False, True])
def test_files_copied_around_a_fold_are_refused(
    path: Path, tmp_path: Path, fold_between: bool
) -> None:
    """The base is copied, the writer commits and folds, the rest is copied."""
    copy = tmp_path / "copy"
    for file in base_files(path):
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path / file, copy / file)
    with opened(path, "r+") as store:
        rows = write(store, 5)
        store.commit()
        if fold_between:
            store.fold()
    for file in path.rglob("*"):
        there = copy / file.relative_to(path)
        if file.is_file() and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, there)
    if fold_between or not list(path.rglob("delta-*")):
        is_refused(copy)
    else:
        with opened(copy) as store:
            assert np.array_equal(rows_of(store), rows)


@pytest.mark.fault(53)
@pytest.mark.parametrize("mix", [first_half, last_rows])
def test_a_base_that_was_half_copied_is_refused(
    tmp_path: Path, mix: Callable[[bytes, bytes], bytes]
) -> None:
    path = tmp_path / "s"
    tierstore.create(path, {"t": tierstore.TableSpec(ROWS, DIM)}).close()
    with opened(path, "r+") as store:
        write(store, 1)
        store.commit()
        store.fold()
    old = {file: (path / file).read_bytes() for file in base_files(path)}
    with opened(path, "r+") as store:
        write(store, 2)
        store.commit()
        store.fold()
    for file, data in old.items():
        (path / file).write_bytes(mix(data, (path / file).read_bytes()))
    is_refused(path)


@pytest.mark.variants(2, 8)
@pytest.mark.fault(53)
@pytest.mark.parametrize("how", ["saved", "repaired", "updated"])
def test_the_base_of_another_copy_is_refused(path: Path, tmp_path: Path, how: str) -> None:
    """Copies have digests of their own, from the start."""
    copies = [tmp_path / "one", tmp_path / "other"]
    for seed, copy in enumerate(copies, 2):
        with opened(path, "r+") as store:
            write(store, seed)
            store.commit()
            if how == "updated":
                store.update_copy(copy)
            elif how == "saved":
                store.save(copy)
        if how == "repaired":
            tierstore.repair(path, copy)
        with opened(copy) as store:
            assert store.verify().ok
    one, other = map(generation, copies)
    for file in base_files(copies[0]):
        relative = (copies[0] / file).relative_to(one)
        shutil.copy(one / relative, other / relative)
    is_refused(copies[1])


@pytest.mark.fault(54)
def test_lost_extents_of_a_sparse_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tierstore.create(path, {"t": tierstore.TableSpec(ROWS, DIM, sparse=True)}).close()
    with opened(path, "r+") as store:
        write(store, 1, EVERY[:200])
        store.commit()
        store.fold()
    with opened(path) as store:
        assert store.verify().ok
    sums = generation(path) / "rows.crc"
    rows = generation(path) / "rows.npy"
    data = bytearray(rows.read_bytes())
    first, width = DATA_OFFSET, RECORD
    assert data[first + 70 * width : first + 90 * width] != bytes(20 * width)
    data[first + 70 * width : first + 90 * width] = bytes(20 * width)
    rows.write_bytes(data)
    data = bytearray(sums.read_bytes())
    data[4 * 70 : 4 * 90] = bytes(4 * 20)
    sums.write_bytes(data)
    is_refused(path)
    with mock.patch.object(Generation, "check_base"), opened(path) as store:
        assert not store["t"].read([80]).any()  # the negative control: lost, and no error
        assert not store.verify().ok


def test_damaged_checksums_close_no_other_rows(path: Path) -> None:
    """A flipped bit is damage of a row, as before, not a base of a different time."""
    with opened(path) as store:
        rows = rows_of(store)
    sums = generation(path) / "rows.crc"
    data = bytearray(sums.read_bytes())
    data[4 * 100] ^= 1
    sums.write_bytes(data)
    with opened(path, "r+") as store:
        others = np.delete(EVERY, 100)
        assert np.array_equal(store["t"].read(others), rows[others])
        with pytest.raises(CorruptRowError):
            store["t"].read([100])
        report = store.verify()
        assert (report.bad_rows, report.bad_files) == ({"t": [100]}, [])
        store["t"].write([100], rows[100:101])
        store.commit()
        store.fold()
        assert store.verify().ok
    with opened(path) as store:
        assert np.array_equal(rows_of(store), rows)


def test_a_damaged_record_is_damage_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tierstore.create(path, {"t": tierstore.TableSpec(ROWS, DIM)}).close()
    rows = generation(path) / "rows.npy"
    data = bytearray(rows.read_bytes())
    data[DATA_OFFSET + 5 * RECORD] ^= 1
    rows.write_bytes(data)
    with opened(path) as store:
        assert store.verify().bad_rows == {"t": [5]}


def digest_file(path: Path) -> Path:
    return next(generation(path).glob("digest-*"))


@pytest.mark.variants(5)
@pytest.mark.parametrize("how", ["missing", "cut", "older"])
def test_a_digest_that_is_not_the_one_named_is_refused(
    path: Path, tmp_path: Path, how: str
) -> None:
    """As where a whole generation comes from a backup."""
    old = generation(path)
    shutil.copytree(old, tmp_path / "old")
    with opened(path, "r+") as store:
        write(store, 2)
        store.commit()
        store.fold()
    file = digest_file(path)
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        shutil.rmtree(old)
        shutil.copytree(tmp_path / "old", old)
    with pytest.raises(CorruptStoreError, match=r"digest-.* restore the whole store"):
        opened(path)


def test_a_damaged_digest_is_found_and_written_anew(path: Path) -> None:
    file = digest_file(path)
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with opened(path, "r+") as store:
        (bad,) = store.verify().bad_files
        assert bad.endswith(file.name)
        rows = write(store, 2, [7])
        store.commit()
        store.fold()
        assert store.verify().ok
    assert not file.exists()
    with opened(path) as store:
        assert np.array_equal(rows_of(store), rows)


@pytest.mark.variants(2)
def test_a_digest_that_is_carried_over_is_that_of_the_whole_base(path: Path) -> None:
    rng = np.random.default_rng(7)
    with opened(path, "r+", keep=2) as store:
        for seed in range(8):
            rows = np.unique(rng.integers(0, ROWS, rng.integers(1, 5)))
            write(store, seed, rows)
            store.commit()
            if seed % 3 == 2:
                store.fold()
                with _io.Directory.open(generation(path)) as directory:
                    expected = bases.block_sums(directory, ROWS).astype("<u4").tobytes()
                assert digest_file(path).read_bytes() == expected
    assert len(list(generation(path).glob("digest-*"))) <= 2  # of the two versions that are kept


def test_a_fold_that_was_cut_short_is_no_other_moment(path: Path) -> None:
    touched = np.r_[3:9, 300:320]
    with opened(path, "r+") as store:
        rows = write(store, 2, touched)
        store.commit()
        with (
            mock.patch.object(Base, "sync", side_effect=KeyboardInterrupt),
            mock.patch.object(Folder, "fold_if_quick"),
            pytest.raises(KeyboardInterrupt),
        ):
            store.fold()
        with mock.patch.object(Folder, "fold_if_quick"):
            store.close()
    with opened(path) as store:
        assert np.array_equal(rows_of(store), rows)
        assert store.verify().ok
    with opened(path, "r+") as store:
        store.fold()
    with opened(path) as store:
        assert store.info().folded
        assert np.array_equal(rows_of(store), rows)
        assert store.verify().ok


@pytest.mark.variants(4)
@pytest.mark.parametrize("version", [None, 3])
def test_a_fold_that_begins_while_a_reader_opens_is_no_other_moment(
    path: Path, version: int | None
) -> None:
    """It writes to the base between the look at the floor and the comparison."""
    with opened(path, "r+", keep=1) as store:
        rows = write(store, 2, np.arange(0, ROWS, 7))
        store.commit()
        find, done = Reading._find, []

        def find_and_fold(self: Reading, wanted: int | None) -> Any:
            found = find(self, wanted)
            if not done:
                done.append(True)
                store.fold()
            return found

        with (
            mock.patch.object(Reading, "_find", find_and_fold),
            opened(path, version=version) as reader,
        ):
            assert np.array_equal(rows_of(reader), rows)
        assert done


def test_of_a_large_table_some_blocks_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore._disk.generation._CHECKED_BYTES", 4 * BLOCK * 3)
    path = tmp_path / "s"
    tierstore.create(path, {"t": tierstore.TableSpec(ROWS, DIM)}).close()
    shutil.copytree(path, tmp_path / "empty")
    with opened(path, "r+") as store:
        write(store, 2)
        store.commit()
        store.fold()
    sizes = []
    sums = bases.block_sums

    def counted(*given: Any) -> Any:
        found = sums(*given)
        sizes.append(found.size)
        return found

    monkeypatch.setattr(bases, "block_sums", counted)
    opened(path).close()
    assert sizes == [3]
    for file in base_files(path):
        shutil.copy(tmp_path / "empty" / file, path / file)
    is_refused(path)


@pytest.mark.slow
def test_holes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse table of a billion rows costs no billion checksums."""
    path = tmp_path / "s"
    rows = 3 << 20
    tierstore.create(path, {"t": tierstore.TableSpec(rows, DIM, sparse=True)}).close()
    read: list[int] = []
    whole_read = _io.File.read

    def counted(self: _io.File, nbytes: int, offset: int = 0) -> bytes:
        if self.path.endswith("rows.crc"):
            read.append(nbytes)
        return whole_read(self, nbytes, offset)

    monkeypatch.setattr(_io.File, "read", counted)
    with opened(path, "r+") as store:
        store["t"].write([rows // 2], np.ones((1, DIM), np.float32))
        store.commit()
        store.fold()
    opened(path).close()
    assert sum(read) < 1 << 20
