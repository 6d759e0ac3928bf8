"""Every number of every file of a store, changed: python -m tests.durability.numbers.

A number of a valid store is set to another: to one that is huge, negative, next to it, zero, or to
one that stands elsewhere in the file, so that parts overlap or end outside of it. All checksums and
sizes beside it are made right again, so that only its meaning is wrong. Then the store is opened,
read, verified, repaired, written, folded and read again. What comes back is an error of the library
or the rows that the files hold by the pages on the format, which `_Reference` reads by itself; and
it takes little memory and time. A process of its own has these limits:

    python -m tests.durability.numbers --seed 1 --count 500
    python -m tests.durability.numbers --only "plain/rows.npy: shape 0 = -1"
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import zarr

import tierstore
from tests.durability.crafting import body_of, sealed
from tests.durability.crash import seeded, small_deltas
from tests.durability.sample import make_sample
from tierstore._checksum import crc32c, row_checksums
from tierstore._io import system
from tierstore.budget import Budget
from tierstore.errors import TierStoreError

__all__ = ["Variant", "files_of", "make_store", "resealed_delta", "run", "variants"]

CPU_SECONDS = 20
MORE_BYTES = 1 << 30
"""Address space beside what the process has when it begins: what is claimed must not be taken."""

_HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_NONE = Budget(host=0)

Files = dict[str, bytes]
Body = dict[str, Any]


# -- a store with every kind of file


def make_store(path: Path) -> None:
    """Write the sample, with tables by key, scales and texts beside it."""
    make_sample(path, 5)
    rng = np.random.default_rng(3)
    with tierstore.open(path, "r+", budget=_NONE, keep=3) as store:
        store.create_table("words", tierstore.TableSpec(12, 4, keys="text"))
        store.create_table("ids", tierstore.TableSpec(dim=4, keys="int64", track_uses=True))
        scale = tierstore.Scale("float32", 4)
        store.create_table(
            "narrow", tierstore.TableSpec(6, fields={"w": tierstore.Field(8, "int8", scale=scale)})
        )
        store.create_table(
            "shuffled",
            tierstore.TableSpec(
                7, 4, init=tierstore.normal(seed=1), backend="zarr", compression="lz4", chunk_rows=4
            ),
        )
        for step in range(2):
            store["words"].write(["a", f"b{step}"], rng.standard_normal((2, 4)).astype("f4"))
            store["ids"].write([7, 90 + step], rng.standard_normal((2, 4)).astype("f4"))
            store["shuffled"].write([step, 5], rng.standard_normal((2, 4)).astype("f4"))
            store["narrow"].write([step], rng.standard_normal((1, 8)).astype("f4"))
            store.commit(step=9, payload={"model": {"w": [np.arange(3.0), 2]}, "note": b"n"})
        store["plain"].keys.lookup(["word 1"])
        store["pair"].keys.lookup([101])


def make_partitioned_store(path: Path) -> None:
    """Write a store of three partitions, with the names of tables of the sample."""
    rng = np.random.default_rng(4)
    tables = {"plain": tierstore.TableSpec(20, 4), "ids": tierstore.TableSpec(dim=4, keys="int64")}
    with tierstore.distributed.create(path, tables, partitions=3, budget=_NONE) as store:
        for step in range(2):
            rows = rng.permutation(20)[:9]
            store["plain"].write(rows, rng.standard_normal((9, 4)).astype("f4"))
            store["ids"].write(rows[:5] + step, rng.standard_normal((5, 4)).astype("f4"))
            store.commit(step=step, payload={"model": {"w": [np.arange(3.0), step]}})


def files_of(path: Path) -> Files:
    """Return the files of a store by their paths in it."""
    found = (each for each in sorted(path.rglob("*")) if each.is_file())
    return {str(each.relative_to(path)): each.read_bytes() for each in found}


def _write(files: Files, path: Path, before: Files) -> None:
    """Make the files of a directory these; `before` is what it has."""
    for name in before.keys() - files.keys():
        (path / name).unlink()
    for name, data in files.items():
        if before.get(name) != data:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


# -- what stands where


@dataclass(frozen=True)
class Variant:
    """A number at a place of a file, and what it becomes."""

    place: str
    before: int
    after: int
    change: Callable[[Files], Files]

    def __str__(self) -> str:
        """Name it, as `--only` takes it."""
        return f"{self.place} = {self.after}"


def variants(files: Files) -> list[Variant]:
    """Return every number of the files with every other value, in an order that is always same."""
    found = [
        (kind, list(look(files, name)))
        for kind, look in _LOOKS.items()
        for name in sorted(files)
        if re.fullmatch(kind, name)
    ]
    return [each for _, some in found for each in some]


def chosen(every: list[Variant], count: int, seed: int) -> list[Variant]:
    """Return `count` of the changes, of each kind of file as many, chosen at random."""
    kinds: dict[str, list[Variant]] = {}
    for each in random.Random(seed).sample(every, len(every)):
        file = each.place.partition(":")[0]
        kinds.setdefault(next(kind for kind in _LOOKS if re.fullmatch(kind, file)), []).append(each)
    turns = itertools.zip_longest(*kinds.values())
    return [each for turn in turns for each in turn if each is not None][:count]


def _others(number: int, near: list[int], low: int, high: int) -> list[int]:
    """Return the values that a number of a type is changed for."""
    wanted = [-1, 0, 1, 2, number - 1, number + 1, -number, 2 * number, low, high, *_HUGE, *near]
    return sorted({each for each in wanted if low <= each <= high and each != number})


_MORE_DIGITS = 10**30
"""A number of JSON has no type: it may be beyond any."""


def _paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield the place of each integer in parsed JSON."""
    if isinstance(value, dict | list):
        each = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in each:
            yield from _paths(inner, (*at, key))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield at, value


def _put(value: Any, at: tuple[Any, ...], number: int) -> Any:
    """Return parsed JSON with another number at a place."""
    if not at:
        return number
    changed = copy.copy(value)
    changed[at[0]] = _put(value[at[0]], at[1:], number)
    return changed


def _in_json(name: str, body: Any, write: Callable[[Files, Any], Files]) -> Iterator[Variant]:
    numbers = list(_paths(body))
    near = sorted({each for _, each in numbers})[:4]
    for at, number in numbers:
        place = f"{name}: {'.'.join(map(str, at))}"
        for other in _others(number, near, -_MORE_DIGITS, _MORE_DIGITS):

            def change(files: Files, at: Any = at, other: int = other) -> Files:
                return write(files, _put(body, at, other))

            yield Variant(place, number, other, change)


def _sealed_json(files: Files, name: str) -> Iterator[Variant]:
    body = json.loads(body_of(files[name]))

    def write(files: Files, body: Any) -> Files:
        return files | {name: _sealed(body)}

    yield from _in_json(name, body, write)


def _plain_json(files: Files, name: str) -> Iterator[Variant]:
    body = json.loads(files[name])
    yield from _in_json(name, body, lambda files, b: files | {name: json.dumps(b).encode()})


def _sealed(body: Any) -> bytes:
    return sealed(json.dumps(body, separators=(",", ":")).encode())


def _tree(files: Files, name: str) -> Iterator[Variant]:
    """The length of the header of a payload, the numbers in it, and those of the tree."""
    data = files[name]
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < length <= len(data) - 8:
        return
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]

    def write(files: Files, header: Any) -> Files:
        text = json.dumps(header).encode()
        return _listed(files, name, struct.pack("<Q", len(text)) + text + rest)

    yield from _in_json(name, header, write)
    tree = json.loads(header["__metadata__"]["tree"])
    yield from _in_json(
        f"{name}: tree",
        tree,
        lambda files, tree: write(files, header | {"__metadata__": {"tree": json.dumps(tree)}}),
    )
    yield from _in_array(files, name, "<u8", 0, 1, "length")


def _in_array(
    files: Files, name: str, dtype: str, start: int, count: int, what: str
) -> Iterator[Variant]:
    """Numbers of a type, one after another."""
    kind = np.dtype(dtype)
    numbers = np.frombuffer(files[name], kind, count, start).tolist()
    low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    for at, number in enumerate(numbers[:24]):
        near = [*numbers[at - 1 : at], *numbers[at + 1 : at + 2]]
        for other in _others(number, near, low, high):

            def change(files: Files, at: int = at, other: int = other) -> Files:
                data = bytearray(files[name])
                data[start + at * kind.itemsize : start + (at + 1) * kind.itemsize] = np.array(
                    other, kind
                ).tobytes()
                return _RESEALS[name.rpartition(".")[2]](files, name, bytes(data))

            yield Variant(f"{name}: {what} {at}", number, other, change)


def _delta(files: Files, name: str) -> Iterator[Variant]:
    data = files[name]
    end = len(data) - 64
    count, width = struct.unpack_from("<QQ", data, end + 32)
    yield from _in_array(files, name, "<i8", count * width, count, "row")
    for at, what in ((24, "version"), (32, "records"), (40, "record bytes"), (52, "first row")):
        yield from _in_array(files, name, "<u8", end + at, 1, what)


def _header_text(files: Files, name: str) -> Iterator[Variant]:
    """The numbers in the text at the start of a .npy file."""
    header = files[name][:128].partition(b"\n")[0]
    start = header.index(b"shape") if b"shape" in header else len(header)
    for number, match in enumerate(re.finditer(rb"\d+", header[start:])):
        for other in _others(int(match[0]), [], -_MORE_DIGITS, _MORE_DIGITS):

            def change(files: Files, match: Any = match, other: int = other) -> Files:
                data = files[name]
                text = str(other).encode()
                more = len(text) - len(match[0])
                at = start + match.start()
                line = data.index(b"\n")
                pad = data[at + len(match[0]) : line]
                pad = pad[:-more] if more > 0 else pad + b" " * -more
                return _RESEALS["npy"](files, name, data[:at] + text + pad + data[line:])

            yield Variant(f"{name}: shape {number}", int(match[0]), other, change)


def _keys_npy(files: Files, name: str) -> Iterator[Variant]:
    yield from _header_text(files, name)
    yield from _in_array(files, name, "<i8", 128, (len(files[name]) - 128) // 8, "key")


def _log(files: Files, name: str) -> Iterator[Variant]:
    yield from _in_array(files, name, "<i8", 0, len(files[name]) // 8, "entry")


def _sums(files: Files, name: str) -> Iterator[Variant]:
    yield from _in_array(files, name, "<u4", 0, min(8, len(files[name]) // 4), "sum")


def _index(files: Files, name: str) -> Iterator[Variant]:
    data = files[name]
    yield from _in_array(files, name, "<u4", 8, 1, "form")
    yield from _in_array(files, name, "<u8", 16, 3, "count")
    places = int.from_bytes(data[24:32], "little")
    yield from _in_array(files, name, "<u4", 64, places, "place")
    rest = 64 + 4 * places
    yield from _in_array(files, name, "<u8", rest, (len(data) - rest) // 8, "hash or row")


def _chunk(files: Files, name: str) -> Iterator[Variant]:
    """What a compressed chunk says of itself; an uncompressed one is records."""
    body = json.loads(files[name.rpartition("/")[0] + "/zarr.json"])
    if [each["name"] for each in body["codecs"]] != ["bytes"]:
        yield from _in_array(files, name, "<u1", 0, min(20, len(files[name])), "byte")
        yield from _in_array(files, name, "<u4", 4, min(3, len(files[name]) // 4 - 1), "word")


_LOOKS: dict[str, Callable[[Files, str], Iterator[Variant]]] = {
    r"(.*/)?(STORE|manifest-\d+)\.json": _sealed_json,
    r".*zarr\.json": _plain_json,
    r"(.*/)?payload-.*": _tree,
    r".*/delta-.*\.bin": _delta,
    r".*/rows\.npy": _header_text,
    r".*/keys\..*\.npy": _keys_npy,
    r".*/keys\..*\.(offsets|ends|int64)": _log,
    r".*/keys\..*\.index": _index,
    r".*\.crc": _sums,
    r".*/c\.\d+\.0": _chunk,
}


# -- checksums made right again


def _manifests(files: Files) -> Iterator[tuple[str, Body]]:
    for name in files:
        if re.fullmatch(r"(.*/)?manifest-\d+\.json", name):
            yield name, json.loads(body_of(files[name]))


def _listed(files: Files, name: str, data: bytes) -> Files:
    """Replace a file whose size and checksum stand in manifests, and the index of keys."""
    made = files | {name: data}
    last = name.rpartition("/")[2]
    for manifest, body in _manifests(files):
        known = _sealed(body)
        for info in body["payload"].values():
            if info["name"] == last:
                info.update(size=len(data), crc32c=crc32c(data))
        for table in body["tables"].values():
            for info in [*table["deltas"], table["digest"] or {}]:
                if info.get("name") == last:
                    is_delta = last.endswith(".bin")
                    total = int.from_bytes(data[-4:], "little") if is_delta else crc32c(data)
                    info.update(size=len(data), crc32c=total)
            stated = (table["keys"] or {"files": {}})["files"]
            if last in stated:
                size = stated[last][0] if table.get("by") else len(data)
                stated[last] = [size, crc32c(data[:size])]
                made = _index_of(made, name, stated)
        if (text := _sealed(body)) != known:
            made[manifest] = text
    return made


def _index_of(files: Files, name: str, stated: dict[str, Any]) -> Files:
    """Let the index of keys be that of the files of keys as they are now."""
    index = name.rpartition(".")[0] + ".index"
    if index not in files:
        return files
    data = bytearray(files[index])
    pairs = sorted((each, tuple(pair)) for each, pair in stated.items())
    data[12:16] = struct.pack("<I", crc32c(repr(pairs).encode()))
    return _resealed_index(files, index, bytes(data))


def _resealed_index(files: Files, name: str, data: bytes) -> Files:
    made = bytearray(data)
    made[60:64] = bytes(4)
    made[60:64] = struct.pack("<I", crc32c(bytes(made)))
    return files | {name: bytes(made)}


def resealed_delta(files: Files, name: str, data: bytes) -> Files:
    """Make the sums of rows, their checksum and that of the footer right."""
    made = bytearray(data)
    end = len(data) - 64
    stated = re.fullmatch(r"(.*)/[^/]*", name)
    assert stated is not None
    width = _width_of(files, stated[1])
    count = end // (width + 12)
    records = np.frombuffer(data, np.uint8, count * width).reshape(count, width)
    ids = np.frombuffer(data, "<i8", count, count * width)
    made[count * (width + 8) : end] = row_checksums(ids, records).tobytes()
    made[end + 48 : end + 52] = struct.pack("<I", crc32c(bytes(made[count * width : end])))
    made[-4:] = struct.pack("<I", crc32c(bytes(made[end:-4])))
    return _listed(files, name, bytes(made))


def _width_of(files: Files, generation: str) -> int:
    for _, body in _manifests(files):
        for name, table in body["tables"].items():
            if generation.endswith(f"{name}/{table['generation']}"):
                return _layout(table["fields"])[1]
    raise AssertionError(generation)


def _resealed_sums(files: Files, name: str, data: bytes) -> Files:
    """Make the digests of changed sums of rows right."""
    if not name.endswith("rows.crc"):
        return _listed(files, name, data)
    made = files | {name: data}
    place = name.rpartition("/")[0]
    for digest in [each for each in files if each.startswith(f"{place}/digest-")]:
        made = _listed(made, digest, struct.pack("<I", crc32c(data)))
    return made


def _base_header(files: Files, name: str, data: bytes) -> Files:
    return _listed(files, name, data) if "/keys." in name else files | {name: data}


class _Reseals(dict[str, Callable[[Files, str, bytes], Files]]):
    """By the end of a file's name; payloads and chunks have names of their own."""

    def __missing__(self, ending: str) -> Callable[[Files, str, bytes], Files]:
        def of_no_ending(files: Files, name: str, data: bytes) -> Files:
            return _listed(files, name, data) if "payload-" in name else files | {name: data}

        return of_no_ending


_RESEALS = _Reseals(
    bin=resealed_delta,
    npy=_base_header,
    offsets=_listed,
    ends=_listed,
    int64=_listed,
    index=_resealed_index,
    crc=_resealed_sums,
)


# -- what the files hold


_STORED = {"float32": "<f4", "float64": "<f8", "bfloat16": "<u2", "int8": "|i1"}


def _layout(fields: list[Body]) -> tuple[dict[str, tuple[int, int, str]], int]:
    """Return the place, dim and type of each field in a record, and the bytes of a record.

    The only fields with scales here are int8 with a float32 for each block.
    """
    at, found = 0, {}
    for each in fields:
        kind = np.dtype(_STORED[each["dtype"]])
        size, scale = each["dim"] * kind.itemsize, each.get("scale")
        step = kind.itemsize
        if scale is not None:
            blocks = 1 if scale["block"] == "row" else -(-each["dim"] // scale["block"])
            size, step = -(-size // 4) * 4 + 4 * blocks, 4
        at = -(-at // step) * step
        found[each["name"]] = at, each["dim"], each["dtype"]
        at += size
    return found, -(-at // 16) * 16


class _Reference:
    """The newest version in files, read as the pages on the format say, without the library.

    `rows(table)` are the values of each field, `keys(table)` the keys; either raises whatever for
    files that make no sense. Compressed chunks are those of the valid store.
    """

    def __init__(self, files: Files, chunks: dict[str, np.ndarray]) -> None:
        self.files, self._chunks = files, chunks
        self.body = json.loads(body_of(files[max(name for name, _ in _manifests(files))]))

    def place(self, table: str) -> str:
        return f"{table}/{self.body['tables'][table]['generation']}"

    def keys(self, table: str) -> list[Any] | None:
        info = self.body["tables"][table]
        if info["keys"] is None:
            return None
        parts = {}
        for name, (size, _) in info["keys"]["files"].items():
            data = self.files[f"{self.place(table)}/{name}"]
            parts[name.rpartition(".")[2]] = data[:size] if info.get("by") else data
        if "npy" in parts:
            return np.frombuffer(parts["npy"], "<i8", offset=128).tolist()
        if "int64" in parts:
            return np.frombuffer(parts["int64"], "<i8").tolist()
        ends = [0] * ("ends" in parts)
        ends += np.frombuffer(parts.get("ends") or parts["offsets"], "<i8").tolist()
        if ends != sorted(ends) or ends[0] != 0 or ends[-1] != len(parts["utf8"]):
            raise ValueError("these delimit no texts")
        return [parts["utf8"][a:b].decode() for a, b in itertools.pairwise(ends)]

    def _count(self, info: Body) -> int:
        """Return the rows of a table by key: it is the manifest that counts them."""
        sizes = ((info["keys"] or {"files": {}})["files"]).items()
        return next((size // 8 for name, (size, _) in sizes if not name.endswith("utf8")), 0)

    def records(self, table: str) -> np.ndarray:
        info, place = self.body["tables"][table], self.place(table)
        _, width = _layout(info["fields"])
        rows = info["rows"] if info.get("by") is None else self._count(info)
        found = self._base(table, rows, width)
        if info["sparse"]:
            sums = np.frombuffer(self.files[f"{place}/rows.crc"], "<u4")[:rows]
            found[: sums.size][sums == 0] = 0
            found[sums.size :] = 0
        for delta in info["deltas"]:
            data = self.files[f"{place}/{delta['name']}"]
            count = struct.unpack_from("<Q", data, len(data) - 32)[0]
            new = np.frombuffer(data, np.uint8, count * width).reshape(count, width)
            for row, record in zip(
                np.frombuffer(data, "<i8", count, count * width), new, strict=True
            ):
                if row < 0:
                    raise ValueError(f"row {row}")
                if row < rows or info.get("by") is None:
                    found[row] = record
        return found

    def _base(self, table: str, rows: int, width: int) -> np.ndarray:
        place = self.place(table)
        if (data := self.files.get(f"{place}/rows.npy")) is not None:
            whole = np.frombuffer(data[4096 : 4096 + rows * width], np.uint8)
            return np.resize(whole, rows * width).reshape(rows, width).copy()
        return self._chunks[table][:rows].reshape(rows, width).copy()

    def rows(self, table: str) -> dict[str, bytes]:
        records, found = self.records(table), {}
        fields = self.body["tables"][table]["fields"]
        scales = {each["name"]: each["scale"]["block"] for each in fields if "scale" in each}
        for name, (at, dim, kind) in _layout(fields)[0].items():
            stored = np.dtype(_STORED[kind])
            part = np.ascontiguousarray(records[:, at : at + dim * stored.itemsize]).view(stored)
            if kind == "bfloat16":
                part = (part.astype("<u4") << 16).view("<f4")
            if name in scales:
                after = at + -(-dim // 4) * 4
                count = -(-dim // scales[name])
                some = np.ascontiguousarray(records[:, after : after + 4 * count]).view("<f4")
                part = part * np.repeat(some, scales[name], axis=1)[:, :dim]
            found[name] = part.tobytes()
        return found


# -- what is done with a store, and what may come of it


class _Wrong(Exception):
    """What came back is neither an error of the library nor what the files hold."""


@dataclass
class _Known:
    """A valid store: its files, what each table holds, and its chunks decoded."""

    files: Files
    rows: dict[str, dict[str, bytes]]
    keys: dict[str, list[Any] | None]
    chunks: dict[str, np.ndarray]
    payload: dict[str, bytes]


def _by_row(table: Any) -> Any:
    return getattr(table, "by_row", table)


def _values(table: Any) -> dict[str, bytes]:
    count = table.rows
    if count > 1000:
        _by_row(table).read([count - 1])
        raise _Wrong(f"a table of {count} rows opens and is read")
    read = _by_row(table).read(np.arange(count), list(table.fields))
    return {name: each.tobytes() for name, each in read.items()}


def known(path: Path) -> _Known:
    """Read a valid store."""
    files = files_of(path)
    with tierstore.open(path, budget=_NONE) as store:
        rows = {name: _values(table) for name, table in store.items()}
        keys = {
            name: None if table.keys is None else _plain(table.keys[:])
            for name, table in store.items()
        }
        payload = {name: value.read() for name, value in store.payload.items()}
    chunks = {}
    for array in path.rglob("rows.zarr"):
        stored = np.ascontiguousarray(zarr.open_array(array, mode="r")[:])
        chunks[array.parts[-3]] = stored.view(np.uint8)
    return _Known(files, rows, keys, chunks, payload)


def _plain(keys: Any) -> list[Any]:
    return [each if isinstance(each, str) else int(each) for each in keys]


def _typed() -> contextlib.suppress:
    """Let errors of the library pass; a MemoryError that it did not raise is none."""
    return contextlib.suppress(TierStoreError)


@contextlib.contextmanager
def _noted(failed: list[str], what: str) -> Iterator[None]:
    """Let errors of the library pass, and note what raised one."""
    try:
        yield
    except TierStoreError as error:
        failed.append(f"{what} ({error})")


def _compare(store: Any, truth: _Known, files: Files) -> list[str]:
    """Raise _Wrong for rows, keys or a payload that the files do not hold.

    Returns what is not to be read, of which `verify` must know.
    """
    reference, failed = _Reference(files, truth.chunks), list[str]()
    for name, table in store.items():
        with _noted(failed, f"rows of {name}"):
            found = _values(table)
            if found != truth.rows.get(name) and found != _tried(reference.rows, name):
                raise _Wrong(f"rows of {name}")
        with _noted(failed, f"keys of {name}"):
            if table.keys is not None:
                keys = _plain(table.keys[:])
                if keys != truth.keys.get(name) and keys != _tried(reference.keys, name):
                    raise _Wrong(f"keys of {name}")
                some = keys[:50]
                at = np.asarray(table.lookup(some)).tolist()
                if [keys[row] for row in at] != some:
                    raise _Wrong(f"keys of {name} are found elsewhere")
    for name, value in store.payload.items():
        with _noted(failed, f"payload {name}"):
            value.read()
        with _typed():
            value.tree()
    return failed


def _tried(read: Callable[[str], Any], name: str) -> Any:
    try:
        return read(name)
    except Exception:
        return _Wrong  # equal to nothing


def _use(path: Path, variant: Variant, truth: _Known) -> None:
    """Use a store in every way; raise _Wrong, or whatever the library raises that has no type."""
    files = variant.change(truth.files)
    with _typed(), tierstore.open(path, budget=_NONE) as store:
        failed = _compare(store, truth, files)
        if failed and store.verify().ok:
            raise _Wrong(f"verify is content, but not read are {failed}")
        with _typed():
            store.versions()
    for version in (3, 4):
        with _typed(), tierstore.open(path, version=version, budget=_NONE) as store:
            for table in store.values():
                with _typed():
                    _values(table)
    with _typed():
        report = tierstore.repair(path, path.with_name("mended"))
        with tierstore.open(path.with_name("mended"), budget=_NONE) as store:
            if report.complete:
                _compare(store, truth, files)
            else:
                for table in store.values():
                    _values(table)
    with _typed(), tierstore.open(path, "r+", budget=Budget(host=1 << 16), keep=2) as store:
        store.verify(mend=True)
        before = _all_rows(store)
        with _typed():
            store["plain"].write([0], store["plain"].read([0]))
            store.commit(step=1)
            store.commit()
        with _typed():
            store.fold()
        after = _all_rows(store)
        if any(after[name] != rows for name, rows in before.items() if name in after):
            raise _Wrong("rows changed by a fold")
    with _typed(), tierstore.open(path, budget=_NONE) as store:
        for table in store.values():
            with _typed():
                _values(table)


def _all_rows(store: Any) -> dict[str, dict[str, bytes]]:
    found = {}
    for name, table in store.items():
        with _typed():
            found[name] = _values(table)
    return found


def run(place: Path, some: list[Variant], truth: _Known) -> list[str]:
    """Use a store with each change; return a line for each that went wrong."""
    wrong, path, there = [], place / "s", dict[str, bytes]()
    path.mkdir()
    for variant in some:
        _write(variant.change(truth.files), path, there)
        print(f"{variant.place} = {variant.after}", file=sys.stderr, flush=True)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            _use(path, variant, truth)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            inside = [f"{each.filename}:{each.lineno}" for each in frames][-3:]
            wrong.append(f"{variant}: was {variant.before}: {error!r:.300} at {inside}")
        shutil.rmtree(place / "mended", ignore_errors=True)
        (place / "mended.rows.csv").unlink(missing_ok=True)
        there = files_of(path)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return wrong


def main() -> None:
    """Use changed stores in this process, within limits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=0, help="0: all of them")
    parser.add_argument("--only", default="", help="those whose line begins so")
    parser.add_argument("--partitioned", action="store_true", help="of a store in partitions")
    parser.add_argument("--part", default="1/1", help="K/N of them")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as made, seeded(5), small_deltas():
        place = Path(made)
        (make_partitioned_store if given.partitioned else make_store)(place / "valid")
        truth = known(place / "valid")
        every = variants(truth.files)
        if given.partitioned:  # what is changed there for good the reference does not tell
            kinds = r": row |\.int64: |^manifest-\d+.json: tables\.\w+\.rows"
            every = [each for each in every if not re.search(kinds, each.place)]
        some = [each for each in every if str(each).startswith(given.only)]
        if given.count:
            some = chosen(some, given.count, given.seed)
        part, parts = map(int, given.part.split("/"))
        some = some[part - 1 :: parts]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        start = time.process_time()
        with mock.patch.object(system.Calls, "fsync", staticmethod(os.fstat)):  # no power fails
            wrong = run(place, some, truth)
    print("\n".join(wrong))
    print(
        f"{len(some)} of {len(every)} changes, {len(wrong)} wrong, "
        f"{time.process_time() - start:.0f} s of CPU time"
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
