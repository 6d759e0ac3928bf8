"""Damage in any file of a store is found by `verify` or when it is read, and never read as a row.

Rows 35, 36, 37 and 54 of the list of faults in the durability notes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests.durability.sample import Sample, sample
from tests.durability.twin import State
from tierstore import TableSpec, _core
from tierstore.budget import Budget
from tierstore.errors import (
    CorruptRowError,
    CorruptStoreError,
    FormatError,
    NotAStoreError,
    VersionError,
)

DAMAGE = (CorruptStoreError, FormatError, NotAStoreError)


@pytest.fixture(scope="module")
def store() -> Iterator[Sample]:
    with sample() as made:
        yield made


def is_noticed(store: Sample) -> bool:
    """Read every version as far as it goes, and verify; whether anything said so.

    Whatever is returned must be what was committed.
    """
    noticed = False
    older = [version for version in store.versions if version != store.newest]
    for version in [None, *older]:
        try:
            with tierstore.open(store.path, version=version, budget=Budget(host=0)) as reader:
                assert version in (None, reader.version)
                noticed |= _fails_to_read(reader, store.versions[reader.version])
                noticed |= version is None and not reader.verify().ok
        except DAMAGE:
            noticed = True
        except VersionError:
            continue  # its manifest is damaged: opening the newest, or verifying it, says so
    return noticed


def _fails_to_read(reader: tierstore.Store, truth: State) -> bool:
    failed = False
    for name, table in reader.items():
        wanted = truth["tables"][name]
        for field, data in wanted["fields"].items():
            try:
                assert table.read(np.arange(table.rows), field).tobytes() == data, (name, field)
            except CorruptRowError as error:
                failed = True
                _check_good_rows(table, field, data, error.rows)
        try:
            assert (None if table.keys is None else list(table.keys[:])) == wanted["keys"]
        except CorruptStoreError:
            failed = True
        assert dict(table.scalars) == wanted["scalars"]
    for name, data in truth["payload"].items():
        try:
            assert reader.payload[name].read() == data
        except CorruptStoreError:
            failed = True
    assert reader.step == truth["step"]
    return failed


def _check_good_rows(table: tierstore.Table, field: str, data: bytes, bad: list[int]) -> None:
    """The rows that an error did not name are read as they were, the others not at all."""
    width = len(data) // table.rows
    named = set(bad)
    for row in range(table.rows):
        try:
            found = table.read([row], field).tobytes()
            assert found == data[row * width : (row + 1) * width], (table.name, field, row)
        except CorruptRowError as error:
            assert error.rows == [row]
            named.discard(row)
    assert not named


@contextmanager
def damaged(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """Change the content of a file for a while."""
    before = path.read_bytes()
    path.write_bytes(change(before))
    try:
        yield
    finally:
        path.write_bytes(before)


def flipped(bit: int) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    return flip


def survives_flip(store: Sample, path: Path, bit: int) -> bool:
    """Whether a flipped bit goes unnoticed, and every row is read as it was."""
    with damaged(path, flipped(bit)):
        return not is_noticed(store)


def bits_of(store: Sample) -> list[tuple[Path, int]]:
    """Every bit of every file."""
    return [(path, bit) for path in store.files() for bit in range(8 * path.stat().st_size)]


def without_effect(path: Path, bit: int) -> bool:
    """Bits of a compressed chunk that say nothing of its content: it decodes to the same rows."""
    import numcodecs

    if path.parent.parent.parent.name != "packed" or not path.name.startswith("c."):
        return False
    data = path.read_bytes()
    return bytes(numcodecs.Zstd().decode(flipped(bit)(data))) == bytes(
        numcodecs.Zstd().decode(data)
    )


def test_the_sample_is_whole(store: Sample) -> None:
    assert not is_noticed(store)
    assert len(store.versions) == 3


@pytest.mark.fault(36, 37)
def test_a_flipped_bit_is_noticed(store: Sample) -> None:
    every = bits_of(store)
    few = [(path, bit) for path, bit in every if path.name != "rows.npy" or bit > 8 * 4096]
    rng = random.Random(37)
    for path, bit in [*rng.sample(few, 16), *rng.sample(every, 4)]:
        if survives_flip(store, path, bit):
            assert without_effect(path, bit), f"{path.name}: bit {bit}"


@pytest.mark.torture
@pytest.mark.parametrize("part", range(8))
def test_every_flipped_bit_is_noticed(store: Sample, part: int) -> None:
    """An eighth of all bits, one of each byte."""
    bits = bits_of(store)[part::8]
    missed = [(path, bit) for path, bit in bits if survives_flip(store, path, bit)]
    slack = [found for found in missed if without_effect(*found)]
    print(f"{len(bits)} bits, {len(slack)} without effect")
    assert missed == slack


@pytest.mark.torture
def test_every_truncation_is_noticed(store: Sample) -> None:
    count = 0
    for path in store.files():
        for size in range(path.stat().st_size):
            with damaged(path, lambda data, size=size: data[:size]):
                assert is_noticed(store), f"{path.name} cut to {size} bytes"
            count += 1
    print(f"{count} truncations")


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda data: b"",
    "a byte less": lambda data: data[:-1],
    "a page less": lambda data: data[:-4096],
    "half": lambda data: data[: len(data) // 2],
    "a byte more": lambda data: data + b"\0",
    "a page more": lambda data: data + bytes(4096),
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "doubled": lambda data: data + data,
    "reversed": lambda data: data[::-1],
}


LONG = ("half", "a page less", "a page more", "ones", "doubled", "reversed")
"""Cuts that the others stand for, but where a check is of whole pages or of a file's ends."""


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=pytest.mark.slow if cut in LONG else ()) for cut in CUTS]
)
@pytest.mark.fault(35, 36, 54)
@pytest.mark.slow
@pytest.mark.nightly("doubled", "reversed", "ones", "a page more", "a page less")
def test_a_cut_or_extended_file_is_noticed(store: Sample, cut: str) -> None:
    for path in store.files():
        data = path.read_bytes()
        if CUTS[cut](data) == data:
            continue
        with damaged(path, CUTS[cut]):
            assert is_noticed(store), path.name
            assert path.read_bytes() == CUTS[cut](data), "the damaged file was written to"


@pytest.mark.fault(36)
def test_a_missing_file_is_noticed(store: Sample) -> None:
    """But for manifests, since a version without its own is one that was swept, and derived ones.

    Keys are found without their index.
    """
    for path in store.files():
        if not path.name.startswith("manifest") and path.suffix != ".index":
            hidden = path.with_name("hidden")
            path.rename(hidden)
            try:
                assert is_noticed(store), path.name
            finally:
                hidden.rename(path)


@pytest.mark.fault(36)
@pytest.mark.slow
def test_a_swapped_file_is_noticed(store: Sample) -> None:
    """Files of the same kind in each other's place: another version's, another table's."""
    for kind in ("delta-*", "manifest-*", "payload-*", "rows.*", "c.*", "zarr.json", "keys.*"):
        group = [path for path in store.files() if path.match(kind)]
        for number, path in enumerate(group):
            for other in (group[number - 1], group[number - 2]):
                data = other.read_bytes()
                if data != path.read_bytes():
                    with damaged(path, lambda _, data=data: data):
                        assert is_noticed(store), f"{path.name} replaced by {other.name}"


@pytest.mark.fault(36)
@pytest.mark.slow
def test_files_of_another_store_are_noticed(store: Sample) -> None:
    with sample(seed=6) as foreign:
        for path, other in zip(store.files(), foreign.files(), strict=True):
            data = other.read_bytes()
            assert path.name[:5] == other.name[:5]
            if data != path.read_bytes():
                with damaged(path, lambda _, data=data: data):
                    assert is_noticed(store), path.name


@pytest.mark.fault(36)
def test_a_delta_of_a_copy_that_went_on_by_itself_is_noticed(tmp_path: Path) -> None:
    """It is of the same store, table, version and rows; only the manifest knows of another."""
    paths = [tmp_path / name for name in "ab"]
    tierstore.create(paths[0], {"t": tierstore.TableSpec(9, 2)}).close()
    shutil.copytree(paths[0], paths[1])
    for number, path in enumerate(paths):
        with tierstore.open(path, "r+") as store:
            store["t"].write([3], np.full((1, 2), number, np.float32))
            store.commit()
    one, other = (next(path.rglob("delta-*")) for path in paths)
    shutil.copy2(other, one)
    with pytest.raises(CorruptStoreError, match="from another"), tierstore.open(paths[0]) as store:
        store["t"].read([3])


@pytest.mark.fault(67)
def test_all_damaged_rows_are_listed(store: Sample) -> None:
    """Verifying goes on after the first one (row 67)."""
    base = next((store.path / "plain").rglob("rows.npy"))
    with (
        damaged(base, flipped(8 * 4096 + 1)),
        damaged(base, flipped(8 * (4096 + 3 * 16) + 5)),
        tierstore.open(store.path) as reader,
    ):
        assert reader.verify().bad_rows["plain"] == [0, 3]


def _constant(_: object, value: int = 0) -> int:
    return value


def _unseen(*given: Any, copy_rows: Callable[..., int] = _core.copy_rows) -> int:
    copy_rows(*given)
    return 0


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    ("check", "mutant", "kind"),
    [
        ("tierstore._strictjson.crc32c", _constant, "manifest-*"),
        ("tierstore._store.payload.crc32c", _constant, "payload-*"),
        ("tierstore._disk.keys.crc32c", _constant, "keys.*"),
        ("tierstore._checksum.crc32c", _constant, "delta-*"),
        ("tierstore._core.copy_rows", _unseen, "rows.npy"),
        ("tierstore._core.copy_rows", _unseen, "delta-*"),
    ],
)
def test_without_a_checksum_damage_passes(check: str, mutant: Callable, kind: str) -> None:
    """A negative control: where a checksum is always the same, flipped bits show it."""
    with mock.patch(check, mutant), sample() as store:
        assert not is_noticed(store)
        bits = [(path, bit) for path, bit in bits_of(store) if path.match(kind)]
        random.Random(1).shuffle(bits)
        assert any(_passes(store, path, bit) for path, bit in bits[:2000])


def _passes(store: Sample, path: Path, bit: int) -> bool:
    try:
        return survives_flip(store, path, bit)
    except Exception:
        return True  # something wrong was returned


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("part", [slice(0, 99), slice(0, 500), slice(500, 600), slice(0, 0)])
def test_a_chunk_of_fewer_records_is_refused(tmp_path: Path, compression: str, part: slice) -> None:
    """A decoder fills what a chunk says it holds, and leaves the rest of its output as it was."""
    import numcodecs

    rows = np.random.default_rng(7).standard_normal((1000, 4), np.float32)
    spec = TableSpec(1000, 4, backend="zarr", compression=compression, chunk_rows=1000)
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        store["t"].write(np.arange(1000), rows)
        store.commit()
        store.fold()
    (chunk,) = (tmp_path / "s").glob("t/*/**/c.0.0")
    codec = numcodecs.Zstd() if compression == "zstd" else numcodecs.Blosc("lz4")
    chunk.write_bytes(codec.encode(rows[part].tobytes()))
    with (
        tierstore.open(tmp_path / "s", budget=Budget(host=0)) as store,
        pytest.raises(CorruptStoreError, match="bytes of records"),
    ):
        store["t"].read([0, 999])
