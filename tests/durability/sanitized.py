"""Crafted stores, used with a core under sanitizers: python -m tests.durability.sanitized.

Files of a small store are changed at random and sealed again, as an attacker would: manifests,
deltas, keys, payloads, checksums and base files. A process whose core is built with address and
undefined-behaviour sanitizers, and with checks of every index, opens, reads, verifies, changes and
folds it. The process ends at the first access outside of a buffer, and at any error that has no
type of the library. The same seed and number make the same store again:

    python -m tests.durability.sanitized --seed 1 --first 4711 --count 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tierstore
from tests.durability.crafting import body_of, newest_manifest, sealed
from tests.durability.crash import scratch, seeded, small_deltas
from tests.durability.fuzzing import mutant
from tests.durability.sample import make_sample
from tierstore import _io
from tierstore._checksum import crc32c, row_checksums
from tierstore._disk import footer
from tierstore.budget import Budget
from tierstore.errors import TierStoreError

__all__ = ["in_a_process", "use_many"]

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
_CPU_SECONDS = 60
_ROWS = 1000
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_NUMBERS = [-(2**63), -1, 0, 1, 2, 6, 9, 2**31, 2**40, 2**62, 2**63 - 1]

Body = dict[str, Any]


# -- how a store is changed


def _craft(rng: random.Random, store: Path) -> None:
    """Change one to three places of a store, and mostly what else says so."""
    path = newest_manifest(store)
    body = json.loads(body_of(path.read_bytes()))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((_deltas, _deltas, _base, _listed, _any))(rng, store, body)
    text = json.dumps(body, separators=(",", ":")).encode()
    if rng.random() < 0.3:
        text = mutant(rng, [text])
    path.write_bytes(sealed(text))


def _numbers(rng: random.Random, array: np.ndarray) -> None:
    """Set some numbers to others: next to them, of another place, or at the ends of their type."""
    for _ in range(rng.choice((1, 1, 2, 5)) if array.size else 0):
        at, other = rng.randrange(array.size), rng.randrange(array.size)
        near = (int(array[at]) + rng.choice((-1, 1)) + 2**63) % 2**64 - 2**63
        array[at] = rng.choice((near, int(array[other]), rng.choice(_NUMBERS)))


def _deltas(rng: random.Random, store: Path, body: Body) -> None:
    """Change row ids and records of a delta, and what its footer says, with right checksums."""
    name, table = rng.choice(list(body["tables"].items()))
    info = rng.choice(table["deltas"])
    path = store / name / table["generation"] / info["name"]
    data = path.read_bytes()
    width = sum(field["dim"] * _BYTES[field["dtype"]] for field in table["fields"])
    count = max(0, len(data) - footer.FOOTER_BYTES) // (width + 12)
    records = np.frombuffer(data[: count * width], np.uint8).reshape(count, width).copy()
    ids = np.frombuffer(data[count * width : count * (width + 8)], "<i8").copy()
    if rng.random() < 0.3:  # more of them, or none
        count = rng.choice((0, 1, 3, 40))
        records, ids = np.resize(records, (count, width)), np.resize(ids, count)
    if rng.random() < 0.8:
        _numbers(rng, ids)
    sums = row_checksums(ids, records)
    if rng.random() < 0.2:
        sums ^= np.uint32(rng.randrange(2**32))
    if rng.random() < 0.2:
        width = rng.choice((0, 1, width - 1, width + 1, 2**31, 2**63))
    beside = ids.tobytes() + sums.tobytes()
    first = rng.choice([*_NUMBERS[1:-1], *range(9)]) if rng.random() < 0.2 else None
    stated = rng.choice((count, count + 1, 2**62)) if rng.random() < 0.2 else count
    identity = bytes.fromhex(body["uuid"])
    end, checksum = footer.make(identity, info["version"], stated, width, crc32c(beside), first)
    path.write_bytes(records.tobytes() + beside + end)
    info.update(rows=stated, size=path.stat().st_size, crc32c=checksum)


def _base(rng: random.Random, store: Path, body: Body) -> None:
    """Change base files or checksums of rows, cut or lengthen them; and the digest of these."""
    name, table = rng.choice(list(body["tables"].items()))
    generation = store / name / table["generation"]
    sums = generation / "rows.crc"
    files = [*generation.glob("rows.*"), *generation.glob("rows.zarr/*")]
    path = rng.choice([path for path in sorted(files) if path.is_file()])
    path.write_bytes(mutant(rng, [path.read_bytes()]))
    digest = generation / table["digest"]["name"]
    data = np.array([crc32c(sums.read_bytes())], "<u4").tobytes()
    digest.write_bytes(data)
    table["digest"].update(size=len(data), crc32c=crc32c(data))


def _listed(rng: random.Random, store: Path, body: Body) -> None:
    """Change a file whose size and checksum the manifest has: keys, payloads and digests."""
    size, checksum = "size", "crc32c"
    files: list[tuple[Path, Any, Any, Any]] = [
        (store / info["name"], info, size, checksum) for info in body["payload"].values()
    ]
    for name, table in body["tables"].items():
        generation, info = store / name / table["generation"], table["digest"]
        files.append((generation / info["name"], info, size, checksum))
        keys = (table["keys"] or {"files": {}})["files"]
        files += [(generation / file, stated, 0, 1) for file, stated in keys.items()]
    path, info, size, checksum = rng.choice(files)
    data = mutant(rng, [path.read_bytes()])
    path.write_bytes(data)
    info[size], info[checksum] = len(data), crc32c(data)


def _any(rng: random.Random, store: Path, body: Body) -> None:
    """Change any file, and nothing that is said of it."""
    path = rng.choice([path for path in sorted(store.rglob("*")) if path.is_file()])
    path.write_bytes(mutant(rng, [path.read_bytes()]))


# -- how it is used


_REFUSED = suppress(TierStoreError, MemoryError)


def _use(path: Path) -> None:
    """Read all that opens, then change it, fold it, and read it again."""
    for mode in ("r", "r+"):
        with _REFUSED:
            _read(path, mode)
    with _REFUSED, tierstore.open(path, "r+", budget=Budget(host=0)) as store:
        store.fold()
    with _REFUSED:
        _read(path, "r")


def _read(path: Path, mode: Any) -> None:
    with tierstore.open(path, mode, budget=Budget(host=0 if mode == "r" else 1 << 16)) as store:
        for table in store.values():
            by_row = getattr(table, "by_row", table)
            rows = np.r_[np.arange(min(table.rows, _ROWS)), table.rows - 1]
            for some in (rows, *rows[:10]):  # each by itself, too: a bad one hides those behind it
                with _REFUSED:
                    by_row.read(np.atleast_1d(some))
            with _REFUSED:
                list(table.keys[:] if table.keys is not None else [])
        for value in store.payload.values():
            with _REFUSED:
                value.read()
        store.verify(mend=mode == "r+")
        if mode == "r+":
            for table in store.values():
                by_row = getattr(table, "by_row", table)
                with _REFUSED:
                    by_row.write([0, 1], by_row.read([0, 1]))
            store.commit()


@contextmanager
def _copies_of_files() -> Iterator[None]:
    """Give files as memory of exactly their size, whose ends the sanitizers see."""

    def copied(*given: Any, **options: Any) -> Any:
        return map_files(*given, **options).copy()

    map_files = _io.map_files
    with mock.patch("tierstore._io.map_files", copied):
        yield


def use_many(seed: int, first: int, count: int) -> None:
    """Craft and use `count` stores in this process; say which one an error is of."""
    with scratch() as place, seeded(5), small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_sample(place / "sample", 5)
        for number in range(first, first + count):
            rng = random.Random(seed << 40 | number)
            shutil.copytree(place / "sample", place / "s")
            _craft(rng, place / "s")
            print(f"--seed {seed} --first {number} --count 1", file=sys.stderr)
            signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
            with _copies_of_files() if number % 2 else nullcontext():
                _use(place / "s")
            shutil.rmtree(place / "s")
    signal.setitimer(signal.ITIMER_PROF, 0)


# -- the core under sanitizers


def in_a_process(place: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program on a copy of the library in `place` whose core is built with sanitizers."""
    if not (place / "tierstore").exists():
        leave = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / "tierstore", place / "tierstore", ignore=leave)
        shutil.copy(ROOT / "hatch_build.py", place)
        debug = os.environ | {"CC": f"gcc {SANITIZERS}", "TIERSTORE_CORE_DEBUG": "1"}
        subprocess.run([sys.executable, place / "hatch_build.py"], env=debug, check=True)
    library = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    options = "detect_leaks=0:allocator_may_return_null=1:soft_rss_limit_mb=2000"
    environment = {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": options,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(place), str(ROOT), str(ROOT / "cli")]),
        "TIERSTORE_CORE_DEBUG": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=place,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def main() -> None:
    """Use stores in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        call = f"use_many({given.seed}, {given.first}, {given.count})"
        program = f"from tests.durability.sanitized import use_many; {call}"
        done = in_a_process(Path(place), program)
    print(done.stderr[-6000:])
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
