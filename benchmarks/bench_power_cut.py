"""What can be read after a power cut immediately after a write has returned?

The file systems are on loop devices and are shut down by the ioctl of file system tests, so this
needs root; without root, the benchmark reports this and measures nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments, workspace

import tierstore

QUESTION = "What is readable after a power cut right after an overwrite has returned"
_SHUTDOWN = 0x8004587D
CUTS = {"log flushed": 1, "log lost": 2}
FILE_SYSTEMS = {"ext4": ["mkfs.ext4", "-qF"], "XFS": ["mkfs.xfs", "-qf"]}
DIM = 64


def values(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)


def write_npy(path: Path, data: np.ndarray) -> None:
    np.save(path / "t.npy", data)


def read_npy(path: Path) -> np.ndarray:
    return np.load(path / "t.npy")


def write_memmap(path: Path, data: np.ndarray) -> None:
    mode = "r+" if (path / "m.npy").exists() else "w+"
    mapped = np.lib.format.open_memmap(path / "m.npy", mode, np.float32, data.shape)
    mapped[:] = data
    mapped.flush()


def read_memmap(path: Path) -> np.ndarray:
    return np.load(path / "m.npy")


def write_zarr(path: Path, data: np.ndarray) -> None:
    import zarr

    if not (path / "t.zarr").exists():
        zarr.create_array(path / "t.zarr", shape=data.shape, chunks=data.shape, dtype="f4")
    zarr.open_array(path / "t.zarr", mode="r+")[:] = data


def read_zarr(path: Path) -> Any:
    import zarr

    return zarr.open_array(path / "t.zarr", mode="r")[:]


def write_safetensors(path: Path, data: np.ndarray) -> None:
    from safetensors.numpy import save_file

    save_file({"t": data}, path / "t.safetensors")


def read_safetensors(path: Path) -> Any:
    from safetensors.numpy import load_file

    return load_file(path / "t.safetensors")["t"]


def write_lmdb(path: Path, data: np.ndarray) -> None:
    import lmdb

    environment = lmdb.open(str(path / "lmdb"), map_size=1 << 28)
    with environment.begin(write=True) as transaction:
        for row, record in enumerate(data):
            transaction.put(row.to_bytes(8, "big"), record.tobytes())


def read_lmdb(path: Path) -> np.ndarray:
    import lmdb

    with lmdb.open(str(path / "lmdb"), map_size=1 << 28) as environment, environment.begin() as txn:
        return np.frombuffer(b"".join(value for _, value in txn.cursor()), "<f4").reshape(-1, DIM)


def write_sqlite(path: Path, data: np.ndarray) -> None:
    base = sqlite3.connect(path / "t.sqlite")
    base.execute("pragma journal_mode=wal")
    base.execute("pragma synchronous=full")
    base.execute("create table if not exists t (id integer primary key, record blob)")
    rows = ((row, record.tobytes()) for row, record in enumerate(data))
    base.executemany("insert or replace into t values (?, ?)", rows)
    base.commit()


def read_sqlite(path: Path) -> np.ndarray:
    rows = sqlite3.connect(path / "t.sqlite").execute("select record from t order by id")
    return np.frombuffer(b"".join(record for (record,) in rows), "<f4").reshape(-1, DIM)


def write_tierstore(path: Path, data: np.ndarray) -> None:
    if not (path / "t.tier").exists():
        tierstore.create(path / "t.tier", {"t": tierstore.TableSpec(len(data), DIM)}).close()
    store = tierstore.open(path / "t.tier", "r+")
    store["t"].write(np.arange(len(data)), data)
    store.commit()
    _OPEN.append(store)  # a trainer's store is not closed either when the power fails


def read_tierstore(path: Path) -> np.ndarray:
    with tierstore.open(path / "t.tier") as store:
        return store["t"].read(np.arange(store["t"].rows))


_OPEN: list[Any] = []
Writer = tuple[Callable[[Path, np.ndarray], None], Callable[[Path], Any]]
WRITERS: dict[str, Writer] = {
    "np.save": (write_npy, read_npy),
    "np.memmap + flush": (write_memmap, read_memmap),
    "zarr": (write_zarr, read_zarr),
    "safetensors": (write_safetensors, read_safetensors),
    "LMDB": (write_lmdb, read_lmdb),
    "SQLite, WAL, full sync": (write_sqlite, read_sqlite),
    "tierstore": (write_tierstore, read_tierstore),
}


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[None]:
    _run("mount", "-o", "loop", image, place)
    try:
        yield
    finally:
        for _ in range(100):
            if subprocess.run(["umount", place], capture_output=True).returncode == 0:
                break
            time.sleep(0.05)


def cut(writer: str, image: Path, place: Path, how: int, rows: int) -> str:
    """Write, sync all, overwrite in another process, cut when it reports; return what is left."""
    command = [sys.executable, __file__, "--rows", str(rows), "--at", str(place), "--write", writer]
    with mounted(image, place):
        subprocess.run([*command, "1"], check=True, stdin=subprocess.DEVNULL, capture_output=True)
        os.sync()
        fd = os.open(place, os.O_RDONLY)
        with subprocess.Popen(
            [*command, "2"], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        ) as child:
            returned = child.stdout is not None and child.stdout.readline() == b"returned\n"
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", how))
            os.close(fd)
            child.kill()
        if not returned:
            raise RuntimeError(f"{writer} did not write")
    with mounted(image, place):
        found = subprocess.run([*command, "0"], capture_output=True, text=True)
    return found.stdout.strip() or "unreadable"


def what_is_there(writer: str, place: Path, rows: int) -> str:
    try:
        found = np.asarray(WRITERS[writer][1](place))
    except Exception:
        return "unreadable"
    for name, seed in (("old", 1), ("new", 2)):
        if np.array_equal(found, values(rows, seed)):
            return name
    return "mixed"


def measure(
    directory: Path, rows: int, repeat: int, writers: list[str], systems: list[str]
) -> dict[str, dict[str, Counter[str]]]:
    """Return how often each content was found, by writer and by file system and cut."""
    found: dict[str, dict[str, Counter[str]]] = {}
    place = directory / "place"
    place.mkdir()
    for system in systems:
        image = directory / "image"
        for name in writers:
            for label, how in CUTS.items():
                counts = found.setdefault(name, {}).setdefault(f"{system}, {label}", Counter())
                for _ in range(repeat):
                    with open(image, "wb") as file:
                        file.truncate(400 << 20)
                    _run(*FILE_SYSTEMS[system], image)
                    counts[cut(name, image, place, how, rows)] += 1
    return found


def missing() -> str | None:
    """Return why power cannot be cut here; None if it can."""
    programs = [command[0] for command in FILE_SYSTEMS.values() if shutil.which(command[0]) is None]
    if os.geteuid() != 0 or programs or not os.path.exists("/dev/loop0"):
        return f"needs root, loop devices {' '.join(programs)}"
    return None


def main() -> None:
    parser = arguments(QUESTION, rows=4000)
    parser.set_defaults(repeat=5)
    parser.add_argument("--writers", nargs="+", choices=WRITERS, default=list(WRITERS))
    parser.add_argument("--systems", nargs="+", choices=FILE_SYSTEMS, default=list(FILE_SYSTEMS))
    parser.add_argument("--at", type=Path, help="for a process of its own: where it writes")
    parser.add_argument("--write", nargs=2, help="who, and the seed of the rows; 0 reads")
    options = parser.parse_args()
    if options.write:
        writer, seed = options.write[0], int(options.write[1])
        if seed:
            WRITERS[writer][0](options.at, values(options.rows, seed))
            print("returned", flush=True)
            sys.stdin.read()
        else:
            print(what_is_there(writer, options.at, options.rows))
        return
    answer = Answer(
        "power_cut",
        QUESTION,
        f"{options.rows:,} rows of {4 * DIM} B, all overwritten",
        "tierstore: what was committed, every time",
        notes=[
            f"{options.repeat} cuts each: the file system is shut down and mounted again",
            "log flushed: its journal was written; log lost: not; old: what was synced before",
        ],
    )
    why = missing()
    if why is None:
        try:
            with workspace(options) as directory:
                found = measure(
                    directory, options.rows, options.repeat, options.writers, options.systems
                )
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode().strip()
    if why is not None:
        answer.rows = [{"writer": name} for name in options.writers]
        answer.notes.append(f"nothing was measured: {why}")
        answer.give(options)
        return
    for name, cuts in found.items():
        cells = {
            label: ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
            for label, counts in cuts.items()
        }
        answer.rows.append({"writer": name, **cells})
    ours = sum((counts for counts in found["tierstore"].values()), Counter())
    answer.ratios = {"tierstore: new ÷ cuts": ours["new"] / sum(ours.values())}
    answer.met = ours["new"] == sum(ours.values())
    answer.give(options)


if __name__ == "__main__":
    main()
