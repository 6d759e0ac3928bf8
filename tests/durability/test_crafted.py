"""Made-up payload trees and keys, with valid checksums: a typed error, nothing else.

Manifests and STORE.json of that kind are in test_manifests.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.durability.crafting import crafted
from tests.durability.numbers import files_of, resealed_delta
from tests.durability.sample import Sample, sample
from tests.every import every
from tierstore.budget import Budget
from tierstore.errors import CorruptStoreError, FormatError, InvalidInputError, InvalidTypeError

ROOT = Path(__file__).parents[2]

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def store() -> Iterator[Sample]:
    with sample() as made:
        yield made


def tree_file(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_tree(tree: object, **tensors: Any) -> bytes:
    text = tree if isinstance(tree, str) else json.dumps(tree)
    return tree_file({"__metadata__": {"tree": text}, **tensors}, bytes(24))


def tensor(shape: object, span: object, dtype: object = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


LEAF = {"tensor": "0"}
WHOLE = tensor([6], [0, 24])
TREES: dict[str, bytes] = {
    "empty": b"",
    "cut": struct.pack("<Q", 100),
    "header as long as memory": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header of 2 GB": struct.pack("<Q", 2 << 30) + b"{}",
    "no JSON": tree_file(b"{"),
    "a list": tree_file([]),
    "no metadata": tree_file({}),
    "metadata is a text": tree_file({"__metadata__": "x"}),
    "no tree": tree_file({"__metadata__": {}}),
    "more metadata": tree_file({"__metadata__": {"tree": "1", "more": "2"}}),
    "metadata twice": tree_file(b'{"__metadata__":{"tree":"1"},"__metadata__":{"tree":"1"}}'),
    "tree is no JSON": with_tree("{", a=WHOLE),
    "tree is NaN": with_tree("NaN", a=WHOLE),
    "surrogates": tree_file(b'{"__metadata__":{"tree":"\\ud800"}}'),
    "deep header": tree_file(b'{"a":' * 100_000),
    "deep tree": with_tree("[" * 100_000, a=WHOLE),
    "deeper than is written": with_tree('{"list":[' * 120 + "1" + "]}" * 120, a=WHOLE),
    "unknown tag": with_tree({"pickle": "gASV"}, a=WHOLE),
    "two tags": with_tree({"list": [], "dict": []}, a=WHOLE),
    "no tag": with_tree({}, a=WHOLE),
    "bare list": with_tree([1], a=WHOLE),
    "tensor that is missing": with_tree({"tensor": "b"}, a=WHOLE),
    "tensor by number": with_tree({"tensor": 0}, a=WHOLE),
    "tensor by list": with_tree({"tensor": ["a"]}, a=WHOLE),
    "float": with_tree({"float": "1e3"}, a=WHOLE),
    "float by list": with_tree({"float": ["nan"]}, a=WHOLE),
    "dict by dict": with_tree({"dict": {"a": 1}}, a=WHOLE),
    "item of one": with_tree({"dict": [["a"]]}, a=WHOLE),
    "item that is a text": with_tree({"dict": ["ab"]}, a=WHOLE),
    "key is true": with_tree({"dict": [[True, 1]]}, a=WHOLE),
    "key is a list": with_tree({"dict": [[[], 1]]}, a=WHOLE),
    "key twice": with_tree({"dict": [["a", 1], ["a", 2]]}, a=WHOLE),
    "list of nothing": with_tree({"list": None}, a=WHOLE),
    "bytes behind": with_tree(1, a=tensor([1], [0, 4])),
    "bytes missing": with_tree(1, a=tensor([7], [0, 28])),
    "gap": with_tree(1, a=tensor([2], [0, 8]), b=tensor([3], [12, 24])),
    "overlap": with_tree(1, a=tensor([4], [0, 16]), b=tensor([4], [8, 24])),
    "backwards": with_tree(1, a=tensor([2], [8, 0])),
    "negative offset": with_tree(1, a=tensor([6], [-24, 0])),
    "offset as float": with_tree(1, a=tensor([6], [0.0, 24.0])),
    "one offset": with_tree(1, a=tensor([6], [24])),
    "offsets are a text": with_tree(1, a=tensor([6], "ab")),
    "other shape": with_tree(1, a=tensor([5], [0, 24])),
    "negative side": with_tree(1, a=tensor([-2, -3], [0, 24])),
    "side is true": with_tree(1, a=tensor([True, 6], [0, 24])),
    "shape is a number": with_tree(1, a=tensor(6, [0, 24])),
    "product beyond 2**64": with_tree(1, a=tensor([2**63, 2**63], [0, 24])),
    "no elements, huge sides": with_tree(1, a=tensor([2**62, 2**62, 0], [0, 0]), b=WHOLE),
    "a thousand sides": with_tree(1, a=tensor([1] * 1000 + [6], [0, 24])),
    "unknown dtype": with_tree(1, a=tensor([6], [0, 24], "F8_E4M3")),
    "dtype is a number": with_tree(1, a=tensor([6], [0, 24], 4)),
    "key of a tensor missing": with_tree(1, a={"dtype": "F32", "shape": [6]}),
    "unknown key of a tensor": with_tree(1, a={**WHOLE, "strides": [4]}),
    "tensor is null": with_tree(1, a=None),
    "truth values beyond 1": tree_file(
        {"__metadata__": {"tree": "1"}, "a": tensor([2], [0, 2], "BOOL")}, b"\1\2"
    ),
}  # fmt: skip


@every(name=TREES)
def test_a_crafted_tree_is_refused(store: Sample, name: str) -> None:
    with (
        crafted(store.path, "payload", "model", TREES[name]),
        tierstore.open(store.path) as reader,
    ):
        assert reader.payload["model"].read() == TREES[name]
        with pytest.raises(FormatError) as caught:
            reader.payload["model"].tree()
        assert len(str(caught.value)) < 1000


def test_a_tree_that_is_right_is_read(store: Sample) -> None:
    """The crafting itself is sound: without a fault there is no error."""
    data = with_tree({"list": [{"tensor": "a"}, {"float": "nan"}]}, a=WHOLE)
    with crafted(store.path, "payload", "model", data), tierstore.open(store.path) as reader:
        array, number = reader.payload["model"].tree()
        assert array.tolist() == [0] * 6
        assert np.isnan(number)


def npy(text: str, values: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00\x76\x00" + text.encode().ljust(117) + b"\n" + values


def offsets(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


INTS = "{'descr': '<i8', 'fortran_order': False, 'shape': (5,)}"
KEYS: dict[str, tuple[str, str, bytes]] = {
    "empty file of ints": ("pair", "npy", b""),
    "no ints": ("pair", "npy", npy(INTS, b"")),
    "too few ints": ("pair", "npy", npy(INTS, bytes(32))),
    "half an int": ("pair", "npy", npy(INTS, bytes(39))),
    "too many ints": ("pair", "npy", npy(INTS, bytes(48))),
    "code in the header": ("pair", "npy", npy("__import__('os').abort()", bytes(40))),
    "other shape": ("pair", "npy", npy(INTS.replace("5,", "1, 5"), bytes(40))),
    "big-endian": ("pair", "npy", npy(INTS.replace("<", ">"), bytes(40))),
    "no magic": ("pair", "npy", bytes(168)),
    "no offsets": ("plain", "offsets", b""),
    "too few offsets": ("plain", "offsets", offsets(0, 6, 12, 18, 24, 36)),
    "half an offset": ("plain", "offsets", offsets(0, 6, 12, 18, 24, 30, 36)[:-1]),
    "first is not 0": ("plain", "offsets", offsets(1, 6, 12, 18, 24, 30, 36)),
    "last is beyond": ("plain", "offsets", offsets(0, 6, 12, 18, 24, 30, 37)),
    "last is before": ("plain", "offsets", offsets(0, 6, 12, 18, 24, 30, 35)),
    "descending": ("plain", "offsets", offsets(0, 6, 24, 18, 12, 30, 36)),
    "negative": ("plain", "offsets", offsets(0, -6, 12, 18, 24, 30, 36)),
    "2**63 - 1": ("plain", "offsets", offsets(0, 2**63 - 1, 12, 18, 24, 30, 36)),
    "not UTF-8": ("plain", "utf8", b"\xff" * 36),
    "cut in a letter": ("plain", "utf8", b"word " + "é".encode() * 15 + b"x"),
    "other length": ("plain", "utf8", b"word"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_crafted_keys_are_refused(store: Sample, name: str) -> None:
    table, ending, data = KEYS[name]
    with (
        crafted(store.path, "keys", f"{table}.{ending}", data),
        tierstore.open(store.path, budget=Budget(host=0)) as reader,
    ):
        with pytest.raises(CorruptStoreError):
            reader[table].keys[:]  # type: ignore[index]
        assert reader[table].read([0]).shape[0] == 1


def numbers(*options: object) -> None:
    """Change numbers of a store, in a process with little memory; fail for what is wrong."""
    command = [sys.executable, "-m", "tests.durability.numbers", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1:]
    assert done.returncode == 0, f"{done.returncode}, the last was {last}: {done.stdout[-6000:]}"
    assert " 0 wrong" in done.stdout


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--seed", 1, "--count", 10], id="few"),
        pytest.param(["--seed", 2, "--count", 200], marks=pytest.mark.slow, id="some"),
        pytest.param(
            ["--seed", 3, "--count", 40, "--partitioned"],
            marks=pytest.mark.slow,
            id="partitions",
        ),
        *(
            pytest.param(["--part", f"{part}/8"], marks=pytest.mark.nightly, id=f"part {part}")
            for part in range(1, 9)
        ),
        pytest.param(["--partitioned"], marks=pytest.mark.nightly, id="all of partitions"),
    ],
)
def test_no_number_of_any_file_makes_a_wrong_row(options: list[object]) -> None:
    """Each is set to others, with right checksums; `make nightly` tries every one."""
    numbers(*options)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_footer_does_not_say_which_rows_a_few_records_are_of(first: int) -> None:
    """It does of 65,536 rows that ascend by one; another row would be read from an older place."""
    with sample() as store:
        files = files_of(store.path)
        name = min(each for each in files if each.startswith("holes/") and "delta-" in each)
        data = bytearray(files[name])
        data[-12:-4] = first.to_bytes(8, "little")
        for path, content in resealed_delta(files, name, bytes(data)).items():
            (store.path / path).write_bytes(content)
        with (
            tierstore.open(store.path) as reader,
            pytest.raises(CorruptStoreError, match="ids, checksums or footer"),
        ):
            reader["holes"].read([0])


@pytest.mark.parametrize("row", [-1, 6, 2**40])
def test_a_row_that_no_table_has_is_not_left_out_of_a_repair_in_silence(row: int) -> None:
    with sample() as store:
        files = files_of(store.path)
        name = max(each for each in files if each.startswith("plain/") and "delta-" in each)
        data = bytearray(files[name])
        ids = len(data) - 64 - 2 * 12
        data[ids : ids + 8] = row.to_bytes(8, "little", signed=True)
        for path, content in resealed_delta(files, name, bytes(data)).items():
            (store.path / path).write_bytes(content)
        with (
            tierstore.open(store.path) as reader,
            pytest.raises(CorruptStoreError, match="outside the table"),
        ):
            reader["plain"].read([0])
        report = tierstore.repair(store.path, store.path.parent / "mended")
        assert (report.complete, report.tables["plain"].unknown) == (False, 1)


def looped() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [looped(), nested(101), nested(5000), [10**5000], {10**5000: 1}, {"a": {1, 2}}],
    ids=["in itself", "101 levels", "5000 levels", "long int", "long key", "set"],
)
def test_an_unreadable_tree_is_not_written(tmp_path: Path, value: Any) -> None:
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 4)}) as store:
        with pytest.raises((InvalidInputError, InvalidTypeError)):
            store.commit(payload={"model": value})
        assert store.commit(payload={"model": [nested(99), 2**4000 - 1]}) == 2
        assert store.payload["model"].tree() == [nested(99), 2**4000 - 1]
