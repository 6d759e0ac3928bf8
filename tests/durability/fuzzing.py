"""Mutants of good and bad files, given to every parser: python -m tests.durability.fuzzing TARGET.

A parser returns something or raises one of its typed errors. The process dies of anything else, of
two seconds of CPU time for one input, and of 200 MiB more memory than it began with; how far it was
is kept in the file --progress, and the same seed and number make the same input again:

    python -m tests.durability.fuzzing manifest --seed 1 --first 4711 --count 1

The corpus is committed, a directory a target; what was found once stays in it.
"""

from __future__ import annotations

import _io as streams
import argparse
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.durability.crafting import body_of, sealed
from tests.durability.crash import scratch
from tests.formats.test_fuzz import read_all
from tierstore import _io
from tierstore._checksum import crc32c
from tierstore._disk.delta import Delta
from tierstore._disk.keys import Keys, open_keys
from tierstore._disk.manifest import DeltaInfo, Identity, KeysInfo, Manifest
from tierstore._formats import read_keys
from tierstore._formats.npy import read_header
from tierstore._store.payload import decode_tree
from tierstore.budget import Allowance
from tierstore.errors import CorruptStoreError, FormatError

__all__ = ["CORPUS", "OURS", "THEIRS", "corpus", "fuzz", "name_of_failure", "run_one"]

CORPUS = Path(__file__).with_name("corpus")
CPU_SECONDS = 2
MORE_BYTES = 200 << 20
_BACKSTOP_BYTES = 4 << 30

_WORDS = [
    b"0", b"1", b"-1", b"255", b"4294967295", b"9223372036854775807", b"9223372036854775808",
    b"1e3", b"1e400", b"1.5", b"null", b"true", b"NaN", b"[]", b"{}", b'""', b'"x"', b'"../x"',
    b"[", b"]", b"{", b"}", b",", b":", b'"', b"'", b"(", b")", b"\\", b"\\u0000", b"\\ud800",
    b"\0", b"\xff", b"\xe2\x82", b" ", b"\n", b"\r\n", b"\t", b"inf", b"float64", b"|O", b">f8",
    b"True",
]  # fmt: skip
_NUMBERS = [0, 1, 2, 7, 8, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]

Run = Callable[[bytes, Path], object]
Finish = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True)
class Target:
    """A parser: what it does with bytes, given a directory; what makes checksums right again."""

    run: Run
    finish: Finish = lambda rng, data: data


def corpus(name: str) -> list[bytes]:
    """Return the committed inputs of a target; a directory counts as an archive of its files."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def mutant(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Change a few places of an input: bits, numbers, words, pieces that go, move or come twice."""
    data = bytearray(rng.choice(seeds))
    if rng.random() < 0.4 and b":" in data:
        return _other_value(rng, bytes(data))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.3:
            at = min(at, rng.randrange(64))
        kind = rng.randrange(8)
        length = rng.choice((1, 1, 2, 4, 8, 40))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = (rng.choice(_NUMBERS) + rng.randrange(-1, 2)) % 2**64
            width = rng.choice((1, 2, 4, 8))
            data[at : at + width] = number.to_bytes(8, "little")[:width]
        elif kind == 2:
            data[at:at] = rng.choice(_WORDS)
        elif kind == 3:
            data[at : at + length] = rng.choice(_WORDS)
        elif kind == 4:
            del data[at : at + length]
        elif kind == 5:
            data[at:at] = data[at : at + length] * rng.choice((1, 1, 3))
        elif kind == 6:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at : at + length] = other[start : start + length]
        else:
            del data[at + rng.randrange(9) :]
    return bytes(data)


def _other_value(rng: random.Random, data: bytes) -> bytes:
    """Change one value of what looks like JSON for another, so that it stays JSON."""
    start = rng.choice([at for at, byte in enumerate(data) if byte in b":[,"]) + 1
    end = next((at for at in range(start, len(data)) if data[at] in b",]}"), len(data))
    return data[:start] + rng.choice(_WORDS[:18]) + data[end:]


# -- the parsers


def _sealed_again(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.2 or b'"body":' not in data:
        return data
    return sealed(body_of(data))


def _decoded(decode: Callable[[bytes, str], Manifest | Identity]) -> Run:
    def run(data: bytes, _: Path) -> None:
        found = decode(data, "m")
        assert decode(found.encode(), "m") == found

    return run


_FOOTER = struct.Struct("<8s16sQQQI")
_STORE = bytes(range(16))
_RECORD = 16


def _delta_sealed(rng: random.Random, data: bytes) -> bytes:
    """Make the footer say what it must of the bytes before it, most of the time."""
    count = max(0, (len(data) - 64) // (_RECORD + 12))
    body = data[: count * (_RECORD + 12)]
    if rng.random() < 0.2:
        return data
    tail = crc32c(body[count * _RECORD :])
    head = _FOOTER.pack(b"TSDELTA1", _STORE, 5, count, _RECORD, tail).ljust(60, b"\0")
    return body + head + struct.pack("<I", crc32c(head))


def _delta(data: bytes, place: Path) -> None:
    name = "delta-00000000000000000005-00000000.bin"
    (place / name).write_bytes(data)
    count = max(0, (len(data) - 64) // (_RECORD + 12))
    info = DeltaInfo(name, len(data), count, 5, int.from_bytes(data[-4:], "little"))
    with _io.Directory.open(place) as directory:
        delta = Delta.open(directory, info, store=_STORE, record_bytes=_RECORD)
    bad = set(delta.damaged())
    good = np.flatnonzero(~np.isin(delta.ids, sorted(bad)))
    out = np.empty((good.size, _RECORD), np.uint8)
    delta.read(good, out)
    assert (out == delta.records[good]).all()


def _header_measured(rng: random.Random, data: bytes) -> bytes:
    """Set the length of a header to reach its last brace, most of the time."""
    if rng.random() < 0.2 or len(data) < 8:
        return data
    return (max(0, data.rfind(b"}") - 7)).to_bytes(8, "little") + data[8:]


def _tree(data: bytes, _: Path) -> None:
    decode_tree(streams.BytesIO(data), len(data), "t", lambda array, code: array, Allowance("t"))


def _keys(data: bytes, place: Path) -> None:
    """One byte says ints or texts; texts have a byte for their number, offsets, then UTF-8."""
    if data[:1] < b"\x80":
        rows, files = max(1, (len(data) - 129) // 8), {"keys.00000000.npy": data[1:]}
    else:
        rows = max(1, data[1] if len(data) > 1 else 0)
        at = 2 + 8 * (rows + 1)
        files = {"keys.00000000.offsets": data[2:at], "keys.00000000.utf8": data[at:]}
    for name, content in files.items():
        (place / name).write_bytes(content)
    kind = "int64" if len(files) == 1 else "str"
    info = KeysInfo(kind, {name: (len(each), crc32c(each)) for name, each in files.items()})
    with _io.Directory.open(place) as directory:
        keys = Keys(open_keys(directory, info), info, rows)
    every = keys[:]
    if len(set(every.tolist())) == rows:
        assert keys.lookup(every).tolist() == list(range(rows))


def _npy_header(data: bytes, place: Path) -> None:
    assert read_header(streams.BytesIO(data), place).nbytes <= len(data)


def _key_file(suffix: str) -> Run:
    def run(data: bytes, place: Path) -> None:
        (place / f"k{suffix}").write_bytes(data)
        read_keys(place / f"k{suffix}")

    return run


def _imported(suffix: str) -> Run:
    def run(data: bytes, place: Path) -> None:
        path = place / f"f{suffix}"
        path.write_bytes(data)
        read_all(path)

    return run


def _zarr(data: bytes, place: Path) -> None:
    """The files of an array, each behind its name and length."""
    path = place / "f.zarr"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    while data:
        name, _, rest = data.partition(b"\n")
        length, _, rest = rest.partition(b"\n")
        file = path / os.path.normpath("/" + name.decode("latin-1").replace("\0", "")).lstrip("/")
        size = int(length) if length.isdigit() and len(length) < 9 else 0
        if len(file.name) < 200 and file != path:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(rest[:size])
            except OSError:
                pass  # a file where a directory should be: as good a mutant as others
        data = rest[size:]
    read_all(path)


OURS: dict[str, Target] = {
    "manifest": Target(_decoded(Manifest.decode), _sealed_again),
    "identity": Target(_decoded(Identity.decode), _sealed_again),
    "delta": Target(_delta, _delta_sealed),
    "tree": Target(_tree, _header_measured),
    "keys": Target(_keys),
    "npy-header": Target(_npy_header),
    "keys.txt": Target(_key_file(".txt")),
    "keys.npy": Target(_key_file(".npy")),
    "import.npy": Target(_imported(".npy")),
    "import.safetensors": Target(_imported(".safetensors"), _header_measured),
    "import.bin": Target(_imported(".bin")),
    "import.vec": Target(_imported(".vec")),
    "import.tsv": Target(_imported(".tsv")),
}
"""Parsers that are written here."""

THEIRS: dict[str, Target] = {
    "import.npz": Target(_imported(".npz")),
    "import.parquet": Target(_imported(".parquet")),
    "import.pt": Target(_imported(".pt")),
    "import.zarr": Target(_zarr),
}
"""Parsers of zipfile, pyarrow, torch and zarr, behind our checks."""

_ALL = {**OURS, **THEIRS}


# -- giving inputs to them


def made(name: str, seeds: list[bytes], seed: int, number: int) -> bytes:
    """Return an input, which depends on nothing else."""
    rng = random.Random(seed << 40 | number)
    return _ALL[name].finish(rng, mutant(rng, seeds))


def run_one(name: str, data: bytes, place: Path) -> bool:
    """Give an input to a parser; return whether it was taken."""
    try:
        _ALL[name].run(data, place)
    except (FormatError, CorruptStoreError):
        return False
    return True


def fuzz(name: str, seed: int, first: int, count: int, progress: Any = None) -> int:
    """Give `count` mutants to a parser; return how many were taken."""
    seeds, taken = corpus(name), 0
    with scratch() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(first, first + count):
            data = made(name, seeds, seed, number)
            if progress is not None:
                progress[:8] = number.to_bytes(8, "little")
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            try:
                taken += run_one(name, data, place)
            except BaseException as error:
                raise AssertionError(f"{name_of_failure(name, seed, number)}: {data!r}") from error
    return taken


def name_of_failure(name: str, seed: int, number: int) -> str:
    """Return the command that gives an input to its parser again."""
    return f"python -m tests.durability.fuzzing {name} --seed {seed} --first {number} --count 1"


def _peak_bytes() -> int:
    """Return the most memory this program has had; `ru_maxrss` would count its parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Fuzz one target in this process, within limits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=_ALL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--progress", type=Path)
    given = parser.parse_args()
    fuzz(given.target, given.seed, 1 << 39, 20)  # what it imports and keeps does not count
    before = _peak_bytes()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + _BACKSTOP_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    progress = mmap.mmap(-1, 8)
    if given.progress is not None:
        with given.progress.open("r+b") as file:
            progress = mmap.mmap(file.fileno(), 8)
    start = time.process_time()
    taken = fuzz(given.target, given.seed, given.first, given.count, progress)
    signal.setitimer(signal.ITIMER_PROF, 0)
    more = _peak_bytes() - before
    print(
        f"{given.target}: {given.count} inputs, seed {given.seed}, {taken} taken, "
        f"{time.process_time() - start:.0f} s of CPU time, {more >> 20} MiB more memory"
    )
    if more > MORE_BYTES:
        raise SystemExit(f"{more} bytes more memory than before")


if __name__ == "__main__":
    main()
