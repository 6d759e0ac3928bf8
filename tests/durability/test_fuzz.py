"""Mutants of manifests, STORE.json, deltas, payload trees, keys and imports (rows 37, 38 and 55).

They keep a valid checksum where that is what it takes to reach the parser behind it.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.crafting import body_of, newest_manifest, sealed
from tests.durability.fuzzing import (
    OURS,
    THEIRS,
    corpus,
    fuzz,
    name_of_failure,
    run_one,
)
from tests.durability.sample import Sample, sample
from tests.durability.sanitized import in_a_process as sanitized
from tests.durability.test_corruption import damaged
from tierstore.budget import Budget
from tierstore.errors import TierStoreError

VALUES = [
    b"0", b"1", b"-1", b"9223372036854775807", b"1e3", b"1.5", b"null", b"true", b"[]", b"{}",
    b'""', b'"x"', b'"zarr"', b'"../x"',
]  # fmt: skip


@pytest.fixture(scope="module")
def store() -> Iterator[Sample]:
    with sample() as made:
        yield made


def values(rng: random.Random, data: bytes) -> bytes:
    """Change one value of a JSON text for another, so that it stays JSON."""
    marks = [at for at, byte in enumerate(data) if byte in b":[,"]
    start = rng.choice(marks) + 1
    stop = min((at for at in range(start, len(data)) if data[at] in b",]}"), default=len(data))
    return data[:start] + rng.choice(VALUES) + data[stop:]


@pytest.mark.parametrize("target", [*OURS, *THEIRS])
def test_the_corpus_is_taken_or_refused(tmp_path: Path, target: str) -> None:
    """Every target has inputs that are good, and what was found once is not found again."""
    taken = [run_one(target, data, tmp_path) for data in corpus(target)]
    assert any(taken)


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("target", OURS)
@pytest.mark.fault(38, 55)
def test_a_parser_takes_any_bytes(target: str) -> None:
    assert 0 < fuzz(target, 1, 0, 700) < 700


def in_a_process(target: str, count: int, place: Path) -> str:
    """Fuzz within limits of time and memory, in a process that may die of it."""
    progress = place / "progress"
    progress.write_bytes(bytes(8))
    command = [sys.executable, "-m", "tests.durability.fuzzing", target, "--seed", "2"]
    command += ["--count", str(count), "--progress", str(progress)]
    done = subprocess.run(command, capture_output=True, text=True)
    number = int.from_bytes(progress.read_bytes(), "little")
    if done.returncode:
        pytest.fail(
            f"{name_of_failure(target, 2, number)}: {done.returncode}\n{done.stderr[-3000:]}"
        )
    return done.stdout


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("target", THEIRS)
def test_an_import_through_another_library_takes_any_bytes(target: str, tmp_path: Path) -> None:
    in_a_process(target, 60 if target == "import.parquet" else 150, tmp_path)


ENDLESS, LARGE = "while True: pass", "x = bytes([1]) * (1 << 28)"


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(("code", "ends"), [(ENDLESS, -signal.SIGPROF), (LARGE, 1)])
def test_the_limits_hold(code: str, ends: int) -> None:
    """A negative control of the tests in a process: an endless loop and a large array are found."""
    script = (
        "from tests.durability import fuzzing\n"
        "def bad(data, place):\n"
        f"    {code}\n"
        "first = fuzzing.fuzz\n"
        "def fuzz(*given):\n"
        "    if len(given) == 5:  # not the ones before the limits\n"
        "        fuzzing._ALL['tree'] = fuzzing.Target(bad)\n"
        "    return first(*given)\n"
        "fuzzing.fuzz = fuzz\n"
        "fuzzing.main()\n"
    )
    command = [sys.executable, "-c", script, "tree", "--count", "1"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == ends
    assert ends < 0 or b"more memory than before" in done.stderr


@pytest.mark.torture
@pytest.mark.parametrize("target", OURS)
def test_a_parser_takes_a_million_inputs(target: str, tmp_path: Path) -> None:
    print(in_a_process(target, 1_000_000, tmp_path))


@pytest.mark.torture
@pytest.mark.parametrize("target", THEIRS)
def test_an_import_takes_ten_thousand_inputs(target: str, tmp_path: Path) -> None:
    # Each input of Parquet starts a process, which takes a third of a second.
    print(in_a_process(target, 1000 if target == "import.parquet" else 10_000, tmp_path))


def opens_or_says_why(path: Path) -> None:
    try:
        with tierstore.open(path, budget=Budget(host=0)) as reader:
            for table in reader.values():
                table.read(np.arange(table.rows))
                if table.keys is not None:
                    table.keys[:]
            for value in reader.payload.values():
                if value.kind == "tree":
                    value.tree()
            reader.verify()
    except (TierStoreError, MemoryError):
        pass


@pytest.mark.slow
def test_a_crafted_manifest_opens_or_says_why(store: Sample) -> None:
    """With a valid checksum, as an attacker would write it."""
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


OUTSIDE = (
    "import numpy as np; from tierstore import _core; "
    "few = np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (2, 64), (64, 1)); "
    "_core.sum_rows(np.arange(2), few, np.empty(2, np.uint32))"
)
"""A negative control: memory that is smaller than its shape says."""


@pytest.mark.parametrize(
    "count",
    [pytest.param(40, marks=pytest.mark.slow), pytest.param(5000, marks=pytest.mark.torture)],
)
def test_no_crafted_store_reaches_memory_outside_of_its_buffers(tmp_path: Path, count: int) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("not shown: gcc is missing")
    found = sanitized(tmp_path, OUTSIDE)
    assert found.returncode
    assert "AddressSanitizer: heap-buffer-overflow" in found.stderr
    call = f"from tests.durability.sanitized import use_many; use_many(1, 0, {count})"
    found = sanitized(tmp_path, call)
    assert (found.returncode, found.stderr.count("--count 1")) == (0, count), found.stderr[-6000:]
