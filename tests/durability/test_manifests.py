"""Manifests and STORE.json that are damaged, crafted or from the future (rows 38, 39 and 42)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.durability.crafting import body_of, newest_manifest, resealed, sealed
from tests.durability.sample import Sample, sample
from tests.durability.test_corruption import damaged
from tests.every import every
from tierstore import _io
from tierstore._disk.manifest import manifest_name
from tierstore.budget import Budget
from tierstore.errors import (
    CommitFailedError,
    CorruptStoreError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    NewerVersionError,
    StoreIOError,
)

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def store() -> Iterator[Sample]:
    with sample() as made:
        yield made


def opens(store: Sample) -> None:
    """Open the store without work that has no end, and without writing to it."""
    start = time.process_time()
    try:
        with tierstore.open(store.path, budget=Budget(host=0)) as reader:
            for table in reader.values():
                table.read([0])
    finally:
        assert time.process_time() - start < 60


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Change a text in the body and seal it again, as an attacker would."""

    def change(data: bytes) -> bytes:
        body = body_of(data)
        assert old in body
        return sealed(body.replace(old, new, 1))

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "half": lambda data: data[: len(data) // 2],
    "garbage": lambda data: bytes(range(256)) * 9,
    "text": lambda data: b"hello\n",
    "null": lambda data: b"null",
    "list": lambda data: sealed(b"[]"),
    "no body": lambda data: sealed(b"{}"),
    "a digit that the checksum contradicts": lambda data: data.replace(b'"step":1', b'"step":2'),
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "carriage returns": lambda data: data.replace(b"\n", b"\r\n"),
    "spaces": lambda data: data.replace(b":", b": "),
    "invalid utf-8": replaced(b'"uuid":"', b'"uuid":"\xff'),
    "deep": lambda data: sealed(b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": lambda data: sealed(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "long number": lambda data: sealed(b'{"format":' + b"9" * 5000 + b"}"),
    "100 MB": lambda data: data + bytes(100 << 20),
    "16 MB of brackets": lambda data: sealed(b'{"format":' + b"[" * (15 << 20) + b"}"),
    "a key twice": replaced(b'"seq":', b'"step":1,"seq":'),
    "NaN": replaced(b'"version":5', b'"version":NaN'),
    "infinite": replaced(b'"version":5', b'"version":1e400'),
    "minus infinity": replaced(b'"version":5', b'"version":-Infinity'),
    "a float": replaced(b'"version":5', b'"version":5.0'),
    "a boolean": replaced(b'"version":5', b'"version":true'),
    "negative": replaced(b'"version":5', b'"version":-5'),
    "a text": replaced(b'"version":5', b'"version":"5"'),
    "another number": replaced(b'"seq":5', b'"seq":6'),
    "another store": replaced(b'"uuid":"', b'"uuid":"0'),
    "uuid in capitals": replaced(b'"uuid":"', b'"uuid":"A'),
    "unknown key": replaced(b'"seq":', b'"needs":["erasure coding"],"seq":'),
    "key missing": replaced(b'"floor":0,', b""),
    "a floor above the version": replaced(b'"floor":0', b'"floor":6'),
    "a confirmed version above": replaced(b'"confirmed":5', b'"confirmed":6'),
    "a last version below": replaced(b'"last_version":5', b'"last_version":4'),
    "rows as float": replaced(b'"rows":6', b'"rows":6e0'),
    "no rows": replaced(b'"rows":6', b'"rows":0'),
    "more rows": replaced(b'"rows":6', b'"rows":7'),
    "fewer rows": replaced(b'"rows":6', b'"rows":5'),
    "2**40 rows": replaced(b'"rows":6', b'"rows":1099511627776'),
    "2**63 rows": replaced(b'"rows":6', b'"rows":9223372036854775808'),
    "2**64 + 6 rows": replaced(b'"rows":6', b'"rows":18446744073709551622'),
    "dim overflows": replaced(b'"dim":3', b'"dim":4611686018427387904'),
    "another dim": replaced(b'"dim":3', b'"dim":4'),
    "no dim": replaced(b'"dim":3', b'"dim":0'),
    "object dtype": replaced(b'"dtype":"float32"', b'"dtype":"object"'),
    "big-endian dtype": replaced(b'"dtype":"float32"', b'"dtype":">f4"'),
    "another dtype": replaced(b'"dtype":"float32"', b'"dtype":"float16"'),
    "field named twice": replaced(b'"name":"moment"', b'"name":"weight"'),
    "field name": replaced(b'"name":"moment"', b'"name":"mo ment"'),
    "no fields": replaced(b'{"name":"weight","dim":3,"dtype":"float32"}', b""),
    "unknown backend": replaced(b'"backend":"memmap"', b'"backend":"pickle"'),
    "other backend": replaced(b'"backend":"memmap"', b'"backend":"zarr"'),
    "unknown compression": replaced(b'"compression":"zstd"', b'"compression":"bz2"'),
    "no chunk rows": replaced(b'"chunk_rows":3', b'"chunk_rows":null'),
    "other chunk rows": replaced(b'"chunk_rows":3', b'"chunk_rows":2'),
    "huge chunk rows": replaced(b'"chunk_rows":3', b'"chunk_rows":1099511627776'),
    "delta too small": replaced(b'"size":120', b'"size":119'),
    "delta with other rows": replaced(b'"rows":2,', b'"rows":3,'),
    "delta with 2**62 rows": replaced(b'"rows":2,', b'"rows":4611686018427387904,'),
    "no delta": replaced(b'"deltas":[{', b'"deltas":[{},{'),
    "payload of unknown kind": replaced(b'"kind":"tree"', b'"kind":"pickle"'),
    "keys of unknown kind": replaced(b'"kind":"int64"', b'"kind":"uint8"'),
    "keys of other kind": replaced(b'"kind":"int64"', b'"kind":"str"'),
}  # fmt: skip


@pytest.mark.fault(38, 39)
@every(damage=DAMAGE)
def test_a_bad_manifest_is_refused(store: Sample, damage: str) -> None:
    with (
        damaged(newest_manifest(store.path), DAMAGE[damage]),
        pytest.raises((FormatError, CorruptStoreError)) as caught,
    ):
        opens(store)
    assert len(str(caught.value)) < 1000
    opens(store)


@pytest.mark.fault(40)
@every(
    old=["payload-00000000000000000005", "g00000000000000000001", "delta-00000000000000000005"],
    name=["", ".", "..", "../s", "a/b", "/etc/passwd", r"a\u0000b", "x" * 300, "STORE.json",
          r"\ud800"],
)  # fmt: skip
def test_a_bad_name_is_refused(store: Sample, old: str, name: str) -> None:
    """Row 40: names that lead elsewhere, in every place that holds one."""

    def change(data: bytes) -> bytes:
        body = body_of(data).decode()
        start = body.index(f'"{old}')
        end = body.index('"', start + 1)
        return sealed(f'{body[:start]}"{name}{body[end:]}'.encode())

    with (
        damaged(newest_manifest(store.path), change),
        pytest.raises((FormatError, CorruptStoreError)),
    ):
        opens(store)


@pytest.mark.parametrize("name", ["", ".", "..", "../s", "a/b", "LOCK", "x" * 300, "a\\u0000b"])
def test_a_bad_table_name_is_refused(store: Sample, name: str) -> None:
    with (
        damaged(newest_manifest(store.path), replaced(b'"plain":', f'"{name}":'.encode())),
        pytest.raises((FormatError, CorruptStoreError)),
    ):
        opens(store)


IDENTITY: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(range(256)),
    "null": lambda data: sealed(b"null"),
    "another uuid": replaced(b'"uuid":"', b'"uuid":"0'),
    "no uuid": lambda data: sealed(b'{"format":2,"parent":null}'),
    "bad parent": replaced(b'"parent":null', b'"parent":7'),
    "unknown key": replaced(b'"parent":null', b'"parent":null,"more":1'),
    "large": lambda data: data + bytes(1 << 20),
    "a format that was never released": replaced(b'"format":2', b'"format":1'),
}


@pytest.mark.parametrize("damage", IDENTITY)
@pytest.mark.fault(38)
def test_a_bad_identity_is_refused(store: Sample, damage: str) -> None:
    with (
        damaged(store.path / "STORE.json", IDENTITY[damage]),
        pytest.raises((FormatError, CorruptStoreError)),
    ):
        opens(store)


CONTRADICTIONS: dict[str, Edit] = {
    "a delta of no records": lambda body: body["tables"]["word"]["deltas"][0].update(rows=0),
    "keys of more rows": lambda body: _sized(body["tables"]["word"], ".ends", 2**40),
    "keys beyond 64 bits": lambda body: _sized(body["tables"]["word"], ".utf8", 2**63),
    "texts of no keys": lambda body: _sized(body["tables"]["word"], ".ends", 0),
    "no keys with a checksum": lambda body: _sized(body["tables"]["number"], ".int64", 0),
}


def _sized(table: dict[str, Any], ending: str, size: int) -> None:
    files = table["keys"]["files"]
    name = next(each for each in files if each.endswith(ending))
    files[name] = [size, files[name][1]]


@pytest.mark.fault(39)
def test_numbers_of_a_manifest_that_contradict_each_other_are_refused() -> None:
    """Before any of them is believed: `repair` takes the version before, and says so."""
    with sample() as store:
        with tierstore.open(store.path, "r+", budget=Budget(host=0)) as writer:
            writer.create_table("word", tierstore.TableSpec(5, 4, keys="text"))
            writer.create_table("number", tierstore.TableSpec(5, 4, keys="int64"))
            writer["word"].write(["a", "b"], np.ones((2, 4), np.float32))
            writer["number"].write([3, 5], np.ones((2, 4), np.float32))
            writer.commit()
        path = newest_manifest(store.path)
        sound = path.read_bytes()
        for what, change in CONTRADICTIONS.items():
            path.write_bytes(resealed(sound, change))
            with pytest.raises(FormatError) as caught:
                tierstore.open(store.path)
            assert len(str(caught.value)) < 1000, what
            report = tierstore.repair(store.path, store.path.parent / what)
            assert path.name in report.left_out, what


NEWER: dict[str, Callable[[bytes], bytes]] = {
    "format": replaced(b'"format":2', b'"format":3'),
    "entry": replaced(b'"seq":', b'"needs":["erasure coding"],"seq":'),
    "entry of a table": replaced(b'"rows":6', b'"rows":6,"shards":2'),
    "entry of a field": replaced(b'"dim":3', b'"dim":3,"sparsity":2'),
    "entry of a delta": replaced(b'"rows":2', b'"rows":2,"packed":true'),
    "entry of keys": replaced(b'"kind":"int64"', b'"kind":"int64","salt":7'),
    "entry of a payload": replaced(b'"kind":"tree"', b'"kind":"tree","packed":true'),
    "entry of a digest": replaced(b'"digest":{', b'"digest":{"levels":2,'),
    "element type": replaced(b'"dtype":"float32"', b'"dtype":"int4"'),
    "backend": replaced(b'"backend":"memmap"', b'"backend":"parquet"'),
    "compression": replaced(b'"compression":"zstd"', b'"compression":"zstd2"'),
    "kind of keys": replaced(b'"kind":"int64"', b'"kind":"int128"'),
    "kind of payload": replaced(b'"kind":"tree"', b'"kind":"graph"'),
}
"""What a later version may write: its checksum is right, and this version does not know it."""


@pytest.mark.parametrize("version", ["newest", "older"])
@every(what=NEWER)
@pytest.mark.fault(42)
def test_what_a_newer_version_wrote_is_refused_whole(what: str, version: str) -> None:
    """Row 42: no older version stands in for it; nothing is repaired, removed or changed."""
    with sample() as store, tierstore.open(store.path, budget=Budget(host=0)) as reader:
        path = newest_manifest(store.path).with_name(manifest_name(4))
        data = newest_manifest(store.path).read_bytes()
        if version == "newest":
            body = body_of(data).replace(b'"seq":5,"version":5,', b'"seq":6,"version":6,')
            data = sealed(body.replace(b'"last_version":5', b'"last_version":6'))
            path = path.with_name(manifest_name(6))
        before = reader["plain"].read(np.arange(6))
        path.write_bytes(NEWER[what](data))
        content = {each: each.read_bytes() for each in store.files()}
        calls: list[Callable[[], Any]] = [
            lambda: tierstore.open(store.path, "r+"),
            lambda: tierstore.open(store.path, version=3),
            lambda: tierstore.open(store.path, "r+", version=3, discard_newer=True),
            lambda: tierstore.repair(store.path, store.path.parent / "mended"),
            lambda: tierstore.repair(store.path, store.path.parent / "mended", adopt=True),
            reader.versions,
            reader.verify,
        ]
        if version == "newest":
            calls += [lambda: tierstore.open(store.path), reader.refresh]
        for call in calls:
            with pytest.raises(NewerVersionError, match="pip install --upgrade") as caught:
                call()
            assert "repair" not in str(caught.value)
        assert np.array_equal(reader["plain"].read(np.arange(6)), before)
        assert {each: each.read_bytes() for each in store.files()} == content
        assert {each.name for each in store.path.parent.iterdir()} == {store.path.name}


@pytest.mark.fault(42)
def test_an_identity_of_a_newer_version_is_refused_by_repair_too(store: Sample) -> None:
    for change in (NEWER["format"], replaced(b'"parent":null', b'"parent":null,"region":1')):
        with damaged(store.path / "STORE.json", change):
            for call in (tierstore.open, lambda path: tierstore.repair(path, f"{path}-mended")):
                with pytest.raises(NewerVersionError, match="pip install --upgrade"):
                    call(store.path)


def test_an_interrupted_commit_of_a_newer_version_is_not_adopted_in_part() -> None:
    with sample() as store:
        newest = newest_manifest(store.path)
        body = json.loads(body_of(newest.read_bytes())) | {"seq": 6, "version": 6, "needs": 1}
        beside = store.path / f"{manifest_name(6)}.01234567.tmp"
        beside.write_bytes(sealed(json.dumps(body, separators=(",", ":")).encode()))
        with pytest.raises(NewerVersionError):
            tierstore.repair(store.path, store.path.parent / "mended", adopt=True)


def test_an_older_version_opens_beside_a_damaged_newest(store: Sample) -> None:
    with damaged(newest_manifest(store.path), lambda data: data[:-5]):
        with pytest.raises(FormatError, match=r"tierstore.open\(path, version=N\)"):
            opens(store)
        with tierstore.open(store.path, version=4) as reader:
            assert reader.version == 4
            assert newest_manifest(store.path).name in reader.verify().bad_files


def test_a_writer_goes_on_from_an_older_version_beside_a_damaged_newest() -> None:
    with sample() as store:
        newest = newest_manifest(store.path)
        newest.write_bytes(newest.read_bytes()[:-5])
        with tierstore.open(store.path, "r+", version=4, discard_newer=True) as writer:
            assert writer.version == 4
            writer.commit(step=9)
        with tierstore.open(store.path) as reader:
            assert (reader.version, reader.step) == (6, 9)  # 5 was given before
            assert reader.verify().ok


@pytest.mark.parametrize(
    ("step", "scalars"),
    [
        (2**63, {}),
        (-(2**63) - 1, {}),
        (1, {"text": "x" * (17 << 20)}),
        (1, {"deep": json.loads("[" * 900 + "]" * 900)}),
        (1, {"number": float("nan")}),
        (1, {"object": object()}),
    ],
    ids=["step", "negative step", "large", "deep", "NaN", "object"],
)
def test_an_unreadable_manifest_is_not_published(
    tmp_path: Path, step: int, scalars: dict[str, Any]
) -> None:
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        store["t"].scalars.update(scalars)
        try:
            store.commit(step=step, payload={"model": b"x"})
        except (InvalidInputError, InvalidTypeError):
            store["t"].scalars.clear()
            assert store.commit(step=7) == 2
    with tierstore.open(tmp_path / "s") as store:
        assert store.version == 2


def test_a_manifest_that_no_reader_would_take_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        monkeypatch.setattr("tierstore._store.ledger.MAX_BYTES", 5_000)
        store["t"].scalars["text"] = "x" * 6_000
        with pytest.raises(InvalidInputError, match="keep large values in the payload"):
            store.commit()
        store["t"].scalars["text"] = "x"
        assert store.commit() == 2


def test_on_an_untested_file_system_a_manifest_is_synced_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a sync of the directory may not be passed on, as by FUSE."""
    synced: list[str] = []
    sync = _io.File.sync
    monkeypatch.setattr(_io.File, "sync", lambda file: (synced.append(file.path), sync(file)))
    for tested in (True, False):
        if not tested:
            monkeypatch.setattr(_io, "TESTED", frozenset())
        path = tmp_path / f"{tested}"
        with tierstore.create(path, {"t": tierstore.TableSpec(3, 4)}, allow_untested=True) as store:
            synced.clear()
            store["t"].scalars["a"] = 1
            store.commit()
        name = manifest_name(2)
        assert any(each.endswith(name) for each in map(str, synced)) == (not tested)


@pytest.mark.parametrize("text", ["[" * 100, '{"', "\ud800", "é\0\n\x1b[31m", "}" * 70])
def test_texts_among_the_scalars_come_back(tmp_path: Path, text: str) -> None:
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        store["t"].scalars["text"] = text
        store.commit()
    with tierstore.open(tmp_path / "s") as store:
        assert store["t"].scalars == {"text": text}


def test_a_whole_manifest_of_another_store_is_refused(tmp_path: Path) -> None:
    """As of a directory that was copied over another."""
    spec = tierstore.TableSpec(6, 3, init=tierstore.normal(seed=1))
    for name in ("one", "other"):
        tierstore.create(tmp_path / name, {"t": spec}).close()
    (mine,) = (tmp_path / "one").glob("manifest-*.json")
    (theirs,) = (tmp_path / "other").glob("manifest-*.json")
    mine.write_bytes(theirs.read_bytes())
    with pytest.raises(FormatError, match="belongs to another store"):
        tierstore.open(tmp_path / "one")


def test_a_manifest_that_was_read_before_is_read_again(store: Sample) -> None:
    """What an open store knows of a manifest holds as long as its bytes are the same."""
    with tierstore.open(store.path, budget=Budget(host=0)) as reader:
        versions = reader.versions()
        assert reader.versions() == versions
        with damaged(newest_manifest(store.path), lambda data: data[:-2]):
            assert len(reader.versions()) == len(versions) - 1
        assert reader.versions() == versions


@pytest.mark.parametrize("kind", ["commit", "alter"])
def test_what_fails_after_publishing_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """On a file system that was never tested, the manifest is opened once more to be synced."""
    rows = np.random.default_rng(0).standard_normal((9, 4), np.float32)
    store = tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(9, 4)})
    store["t"].write(np.arange(9), rows)
    if kind == "alter":
        store.commit()
    opened = _io.Directory.open_file

    def fails(directory: _io.Directory, name: str, *options: Any, **named: Any) -> Any:
        if name == manifest_name(2 if kind == "commit" else 3):
            assert directory.exists(name), "this is not what the test is about"
            raise StoreIOError(f"cannot open {name}: too many files are open")
        return opened(directory, name, *options, **named)

    with monkeypatch.context() as patch:
        patch.setattr("tierstore._io.TESTED", frozenset())
        patch.setattr(_io.Directory, "open_file", fails)
        with pytest.raises(CommitFailedError, match="open the store again"):
            if kind == "commit":
                store.commit()
            else:
                store.create_table("u", tierstore.TableSpec(3, 4, init=tierstore.normal(std=1.0)))
    store.close()

    with tierstore.open(tmp_path / "s") as store:
        assert store.verify().ok
        assert np.array_equal(store["t"].read(np.arange(9)), rows)
        assert list(store) == (["t"] if kind == "commit" else ["t", "u"])
