"""Made-up stores, all of whose checksums are right, cost an error and not the memory they claim."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crafting import newest_manifest, replaced, resealed
from tests.durability.test_crafted import tree_file
from tierstore._disk.footer import FOOTER_BYTES
from tierstore.budget import Allowance, Budget
from tierstore.errors import CorruptStoreError, FormatError, InvalidInputError, TierStoreError

LITTLE = 48 << 20
"""Bytes that Python and NumPy may allocate for a store that is refused."""


@contextmanager
def frugal(most: int = LITTLE) -> Iterator[None]:
    """Fail if more memory is taken at any time than `most`."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@contextmanager
def with_manifest(store: Path, change: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    path = newest_manifest(store)
    with replaced(path, resealed(path.read_bytes(), change)):
        yield


def made(path: Path, **spec: Any) -> Path:
    """Make a store of one table with a delta and a payload."""
    spec = {"rows": 16, "dim": 4} | spec
    with tierstore.create(path, {"t": tierstore.TableSpec(**spec)}) as store:
        store["t"].write([3], np.full((1, 4), 2.5, np.float32))
        store.commit(payload={"model": {"w": np.arange(7.0)}})
    return path


def opened(path: Path) -> None:
    with tierstore.open(path, budget=Budget(host=0)) as store:
        store["t"].read([0])


@pytest.mark.fault(39)
@pytest.mark.parametrize("chunk_rows", [1, 4096])
def test_chunks_are_not_named_before_they_are_opened(tmp_path: Path, chunk_rows: int) -> None:
    """One of 3e7 files is missing, and so are 2**20 less one."""
    path = made(tmp_path / "s", backend="zarr")
    rows = 30_000_000 if chunk_rows == 1 else 4096 << 20
    with (
        with_manifest(path, lambda b: b["tables"]["t"].update(rows=rows, chunk_rows=chunk_rows)),
        frugal(),
        pytest.raises((FormatError, CorruptStoreError)),
    ):
        opened(path)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_chunk_that_is_decoded_has_a_bounded_size(tmp_path: Path, compression: str) -> None:
    path = made(tmp_path / "s", backend="zarr", compression=compression)
    change = {"rows": 2**27, "chunk_rows": 2**27}
    with (
        with_manifest(path, lambda body: body["tables"]["t"].update(change)),
        frugal(),
        pytest.raises(FormatError, match=r"2147483648 bytes; at most 268435456"),
    ):
        opened(path)
    with pytest.raises(InvalidInputError, match="choose fewer chunk_rows"):
        tierstore.TableSpec(2**27, 4, backend="zarr", compression=compression, chunk_rows=2**27)
    with pytest.raises(InvalidInputError, match="choose more chunk_rows"):
        tierstore.TableSpec(2**27, 4, backend="zarr", chunk_rows=1)


def test_few_large_chunks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore._disk import chunks

    monkeypatch.setattr(chunks, "_CACHED_BYTES", 3 * 64)
    made(tmp_path / "s", backend="zarr", compression="zstd", chunk_rows=4)
    with tierstore.open(tmp_path / "s", budget=Budget(host=0)) as store:
        found = store["t"].read(np.arange(16))
        assert found[3].tolist() == [2.5] * 4
        records = inside.base(inside.generation(store["t"]).tier)._records
        assert len(records._decoded) == 3


def test_a_delta_has_no_more_records_than_are_written(tmp_path: Path) -> None:
    """A file of holes, 250 million times row 0 of a table of 16."""
    path, count = made(tmp_path / "s"), 250_000_000
    size = count * (16 + 12) + FOOTER_BYTES

    def change(body: dict[str, Any]) -> None:
        body["tables"]["t"]["deltas"][0].update(rows=count, size=size)

    with with_manifest(path, change):
        delta = next(path.glob("t/g*/delta-*"))
        os.truncate(delta, size)
        with frugal(), pytest.raises(FormatError, match=r"250000000 records .* 16 rows"):
            opened(path)


def test_a_delta_being_written_stays_within_that(tmp_path: Path) -> None:
    """The greatest delta is one that is about to be compacted when all rows are written again."""
    rows = 500
    with tierstore.create(
        tmp_path / "s", {"t": tierstore.TableSpec(rows, 512)}, budget=Budget(host=0)
    ) as store:
        rng, most = np.random.default_rng(3), 0
        for _ in range(40):
            some = np.sort(rng.choice(rows, rng.integers(1, rows + 1), replace=False))
            store["t"].write(some, rng.standard_normal((some.size, 512)).astype(np.float32))
            live = inside.generation(store["t"]).tier.live
            most = max(most, live.count if live is not None else 0)
        store.commit()
        assert rows < most <= 3 * rows
        (delta,) = inside.generation(store["t"]).info.deltas
        assert delta.rows <= 3 * rows
    with tierstore.open(tmp_path / "s") as reader:
        assert reader.verify().ok


@pytest.mark.slow
def test_ids_of_a_delta_are_laid_in_windows(tmp_path: Path) -> None:
    with tierstore.create(
        tmp_path / "s", {"t": tierstore.TableSpec(1000, 4)}, budget=Budget(host=0)
    ) as store:
        tier = inside.generation(store["t"]).tier
        ids = np.random.default_rng(1).integers(0, 1000, 6_000_000)
        delta = SimpleNamespace(ids=ids, first=None, info=SimpleNamespace(rows=ids.size))
        with frugal(32 << 20):
            inside.index(tier)._exchange(0, 0, [delta])
        last = ids.size - 1 - np.unique(ids[::-1], return_index=True)[1]
        # Of an id that repeats the last one counts.
        assert np.array_equal(inside.index(tier).entries.take(np.arange(1000)), last + 1)
        inside.index(tier)._exchange(0, 1, [])


def test_scalars_of_a_table_are_bounded(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    scalars = {"step": [{} for _ in range(40_000)]}
    with (
        with_manifest(path, lambda body: body["tables"]["t"].update(scalars=scalars)),
        pytest.raises(FormatError, match=r"scalars take \d+ bytes; at most 65536"),
    ):
        opened(path)
    with tierstore.open(path, "r+") as store:
        store["t"].scalars["step"] = "x" * 70_000
        with pytest.raises(InvalidInputError, match=r"scalars .* at most 65536"):
            store.commit()
        store["t"].scalars["step"] = "x" * 60_000
        store.commit()


# Payloads


@contextmanager
def payload_of(path: Path, data: bytes, size: int | None = None) -> Iterator[None]:
    """Replace the payload by a file of `data` with holes up to `size`, whose checksum is right."""
    from tierstore._checksum import crc32c

    size = len(data) if size is None else size
    found, zeros = crc32c(data), bytes(1 << 24)
    for at in range(len(data), size, len(zeros)):
        found = crc32c(zeros[: min(len(zeros), size - at)], found)

    def change(body: dict[str, Any]) -> None:
        body["payload"]["model"].update(size=size, crc32c=found)

    file = next(path.glob("payload-*"))
    with with_manifest(path, change), replaced(file, data):
        os.truncate(file, size)
        yield


def with_empty_tensors(count: int) -> bytes:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    tensors = {str(number): entry for number in range(count)}
    return tree_file({"__metadata__": {"tree": "1"}, **tensors})


@pytest.mark.slow
@pytest.mark.nightly
def test_a_header_is_bounded_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path / "s")
    with payload_of(path, with_empty_tensors(150_000)), tierstore.open(path) as store:
        payload = store.payload["model"]
        with frugal(), pytest.raises(FormatError, match=r"header of .*memory=, --memory"):
            payload.tree(memory="32MiB")
        assert payload.tree() == 1
        monkeypatch.setattr(Allowance, "check", lambda *given: None)
        with pytest.raises(AssertionError), frugal():
            payload.tree(memory="32MiB")


@pytest.mark.slow
def test_a_file_of_holes_is_no_tree(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    with payload_of(path, b"", 1 << 30), tierstore.open(path) as store, frugal():
        for read in (store.payload["model"].tree, store.payload["model"].read):
            with pytest.raises(FormatError, match="a file of holes would take"):
                read()
        store.payload["model"].verify()


def test_holes_are_read_where_they_are_allowed(tmp_path: Path) -> None:
    """Copies of files may leave out zeros, which are none the less what was committed."""
    path, size = made(tmp_path / "s"), 64 << 20
    with payload_of(path, b"begin", size), tierstore.open(path) as store:
        with pytest.raises(FormatError, match="holes"):
            store.payload["model"].read(memory="32MiB")
        assert store.payload["model"].read() == b"begin".ljust(size, b"\0")


def test_a_value_is_held_once(tmp_path: Path) -> None:
    data = np.random.default_rng(4).bytes(56 << 20)  # more than LITTLE
    array = np.frombuffer(data, np.float32).reshape(-1, 64)
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        store.commit(payload={"raw": data, "tree": {"w": array, "b": array[:5]}})
        with frugal(len(data) + LITTLE):
            assert store.payload["raw"].read() == data
        with frugal(len(data) + LITTLE):
            tree = store.payload["tree"].tree()
        assert tree["w"].tobytes() == data
        assert tree["b"].tobytes() == array[:5].tobytes()


def test_damage_is_told_from_what_was_made_up(tmp_path: Path) -> None:
    path = made(tmp_path / "s")
    file = next(path.glob("payload-*"))
    for at in range(0, file.stat().st_size, 7):
        data = bytearray(file.read_bytes())
        data[at] ^= 64
        with (
            replaced(file, bytes(data)),
            tierstore.open(path) as store,
            pytest.raises(CorruptStoreError),
        ):
            store.payload["model"].tree()


# Which file a payload is


def test_a_text_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("content")
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        texts = {"note": str(tmp_path / "secret"), "run": "epoch three", "empty": ""}
        store.commit(payload=texts)
        assert {name: store.payload[name].kind for name in texts} == dict.fromkeys(texts, "tree")
        assert {name: store.payload[name].tree() for name in texts} == texts
        store.commit(payload={"file": tmp_path / "secret"})
        assert store.payload["file"].kind == "file"
        assert store.payload["file"].read() == b"content"


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "loop", "missing"])
def test_only_regular_files_are_copied(tmp_path: Path, kind: str) -> None:
    """None of them blocks or runs forever."""
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        with pytest.raises(InvalidInputError, match="payload"):
            store.commit(payload={"file": path})
        assert store.version == 1
        assert store.commit() == 2


def test_a_file_that_grows_is_copied_up_to_the_size_it_had(tmp_path: Path) -> None:
    path, stop = tmp_path / "log", threading.Event()
    path.write_bytes(b"x" * (20 << 20))

    def grow() -> None:
        with path.open("ab") as file:
            while not stop.is_set():
                file.write(b"y" * (1 << 16))
                file.flush()
                time.sleep(0.001)

    writer = threading.Thread(target=grow)
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        writer.start()
        try:
            store.commit(payload={"log": path})
        finally:
            stop.set()
            writer.join()
        copied = store.payload["log"].read()
        assert copied.startswith(b"x" * (20 << 20))
        assert path.read_bytes().startswith(copied)


# Keys


def test_offsets_of_keys_are_looked_at_in_blocks(tmp_path: Path) -> None:
    """A file of holes for 20 million keys, all of them empty."""
    from tierstore import _io
    from tierstore._checksum import crc32c
    from tierstore._disk.keys import Keys, open_keys
    from tierstore._disk.manifest import KeysInfo

    rows = 20_000_000
    names = {"keys.00000000.offsets": 8 * (rows + 1), "keys.00000000.utf8": 1}
    found = 0
    for name, size in names.items():
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)
    zeros = bytes(1 << 20)
    for at in range(0, names["keys.00000000.offsets"], len(zeros)):
        found = crc32c(zeros[: names["keys.00000000.offsets"] - at], found)
    sums = {"keys.00000000.offsets": found, "keys.00000000.utf8": crc32c(b"\0")}
    info = KeysInfo("str", {name: (size, sums[name]) for name, size in names.items()})
    with (
        _io.Directory.open(tmp_path) as directory,
        frugal(),
        pytest.raises(CorruptStoreError, match="do not delimit"),
    ):
        Keys(open_keys(directory, info), info, rows)


def test_every_refusal_names_what_to_do() -> None:
    with pytest.raises(TierStoreError) as caught:
        Allowance("file.npz", "1MiB").take(5 << 20, "its keys")
    assert str(caught.value) == (
        "file.npz: its keys would take 5.0 MiB of memory, but only 1.0 MiB of 1.0 MiB are left; "
        "if you trust the file, allow more (memory=, --memory)"
    )
    assert json.dumps(str(caught.value)).isascii()
