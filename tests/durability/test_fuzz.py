"""Mutated manifests, STORE.json, delta footers and payload trees: typed errors, or a whole store.

The mutants keep a valid checksum where that is what it takes to reach the parser behind it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.crafting import body_of, newest_manifest, sealed
from tests.durability.sample import Sample, sample
from tests.durability.test_corruption import damaged
from tierstore.budget import Budget
from tierstore.errors import FormatError, TierStoreError
from tierstore.manifest import Identity, Manifest

TOKENS = [
    b"0", b"1", b"-1", b"9223372036854775807", b"1e3", b"1.5", b"null", b"true", b"[]", b"{}",
    b'""', b'"x"', b'"zarr"', b'"../x"', b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\0",
    b"\xff", b"NaN",
]  # fmt: skip


@pytest.fixture(scope="module")
def store() -> Iterator[Sample]:
    with sample() as made:
        yield made


def mutant(rng: random.Random, data: bytes) -> bytes:
    """Change a few places of a JSON text: bytes, numbers, pieces doubled, dropped or moved."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((0, 1, 1, 3, 10, 60)))
        middle = rng.choice((b"", rng.choice(TOKENS), data[start:stop] * 2, rng.randbytes(2)))
        data = data[:start] + middle + data[stop:]
    return data


def values(rng: random.Random, data: bytes) -> bytes:
    """Change one value of a JSON text for another, so that it stays JSON."""
    marks = [at for at, byte in enumerate(data) if byte in b":[,"]
    start = rng.choice(marks) + 1
    stop = min((at for at in range(start, len(data)) if data[at] in b",]}"), default=len(data))
    return data[:start] + rng.choice(TOKENS[:14]) + data[stop:]


def parse(decode: Callable[[bytes, str], Manifest | Identity], data: bytes) -> None:
    """A parser returns something that it writes and reads again, or says FormatError."""
    try:
        found = decode(data, "m")
    except FormatError:
        return
    assert decode(found.encode(), "m") == found


def fuzz(store: Sample, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for path, decode in (
        (newest_manifest(store.path), Manifest.decode),
        (store.path / "STORE.json", Identity.decode),
    ):
        data = path.read_bytes()
        body = body_of(data)
        for number in range(count):
            changed = (mutant, values)[number % 2](rng, body)
            try:
                parse(decode, sealed(changed) if number % 5 else mutant(rng, data))
            except Exception as error:
                raise AssertionError(f"seed {seed}, number {number}: {changed!r}") from error


def test_parsers_take_any_bytes(store: Sample) -> None:
    fuzz(store, 1, 3000)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10))
def test_parsers_take_a_million_inputs(store: Sample, seed: int) -> None:
    fuzz(store, 100 + seed, 100_000)


def opens_or_says_why(path: Path) -> None:
    try:
        with tierstore.open(path, budget=Budget(host=0)) as reader:
            for table in reader.tables.values():
                table.read(np.arange(table.rows))
                if table.keys is not None:
                    table.keys[:]
            for value in reader.payload.values():
                if value.kind == "tree":
                    value.tree()
            reader.verify()
    except (TierStoreError, MemoryError):
        pass


def test_a_crafted_manifest_opens_or_says_why(store: Sample) -> None:
    """With a valid checksum, as somebody with bad intent would write it."""
    rng = random.Random(2)
    data = newest_manifest(store.path).read_bytes()
    body = body_of(data)
    for _ in range(300):
        changed = values(rng, body)
        with damaged(newest_manifest(store.path), lambda _, changed=changed: sealed(changed)):
            try:
                opens_or_says_why(store.path)
            except Exception as error:
                raise AssertionError(f"{changed!r}") from error
