"""How long does it take to open a store for writing after its trainer was killed?"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from common import Answer, arguments, workspace
from figures import Figure, give

import tierstore

QUESTION = "Opening a store for writing after a kill, one row in a hundred in its deltas"
_COMMITS = 10


def train_and_die(path: Path, rows: int, dim: int) -> None:
    """Make a table, commit one row in a hundred in ten versions, write more, and be killed."""
    spec = tierstore.TableSpec(rows, dim, sparse=True)
    tierstore.create(path, {"t": spec}).close()
    store = tierstore.open(path, "r+", budget=tierstore.Budget(host=256 << 20))
    rng = np.random.default_rng(3)
    count = max(1, rows // 100 // _COMMITS)
    for step in range(_COMMITS + 1):
        ids = rng.choice(rows, count, replace=False)
        store["t"].write(ids, rng.standard_normal((count, dim), dtype=np.float32))
        if step < _COMMITS:
            store.commit(step=step, confirm=False)
    os._exit(0)


def open_and_die(path: Path) -> None:
    """Print the seconds until the store is open and of the first read, without imports.

    Then the same in processor time.
    """
    with tierstore.open(path, "r"):
        pass
    forget(path)
    begin = np.array([time.perf_counter(), time.process_time()])
    store = tierstore.open(path, "r+", budget=tierstore.Budget(host=256 << 20))
    opened = np.array([time.perf_counter(), time.process_time()])
    store["t"].read(np.arange(0, store["t"].rows, max(1, store["t"].rows // 100)))
    read = np.array([time.perf_counter(), time.process_time()])
    print(*np.transpose([opened - begin, read - opened]).ravel(), flush=True)
    os._exit(0)


def forget(path: Path) -> None:
    """Drop the pages of the store from memory, as after a start of the machine."""
    os.sync()
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(directory: Path, rows: int, dim: int, repeat: int) -> tuple[list[float], int]:
    """Return median seconds of opening and of the first read, and the bytes of the deltas.

    First as the clock tells them, then in processor time.
    """
    path = directory / f"{rows}.tier"
    me = [sys.executable, __file__, "--rows", str(rows), "--dim", str(dim), "--at", str(path)]
    subprocess.run([*me, "--act", "train"], check=True)
    seconds = []
    for _ in range(repeat):
        done = subprocess.run([*me, "--act", "open"], check=True, capture_output=True, text=True)
        seconds.append(tuple(map(float, done.stdout.split())))
    nbytes = sum(file.stat().st_size for file in path.rglob("delta-*"))
    return [statistics.median(column) for column in zip(*seconds, strict=True)], nbytes


def main() -> None:
    parser = arguments(QUESTION, rows=20 << 20, dim=128)
    parser.set_defaults(repeat=7)
    parser.add_argument("--at", type=Path, help="for a process of its own: the store")
    parser.add_argument("--act", choices=["train", "open"])
    options = parser.parse_args()
    if options.act == "train":
        train_and_die(options.at, options.rows, options.dim)
    if options.act == "open":
        open_and_die(options.at)
    if options.figures:
        with workspace(options) as directory:
            rows = min(options.rows, 2 << 20)
            (*_, opened, read), _ = measure(directory, rows, options.dim, options.repeat)
        give(options, {"open after a kill": Figure(opened), "first 100 rows": Figure(read)})
        return
    answer = Answer(
        "recovery",
        QUESTION,
        "ids and checksums of the deltas, 12 B a row; the base is not read, whatever its size",
        "a table of 10 GiB with 1 % of its rows in deltas: at most 1 s",
        notes=[
            "the table is sparse: rows never written take no disk space, and are never read here",
            "no page of the store is in memory; ten deltas; a delta that was not committed goes",
        ],
    )
    with workspace(options) as directory:
        for share in (100, 10, 1):
            rows = max(1000, options.rows // share)
            (opened, read, *_), nbytes = measure(directory, rows, options.dim, options.repeat)
            answer.rows.append(
                {"table": f"{rows * options.dim * 4 / 2**30:.2f} GiB", "rows": rows}
                | {"deltas MB": nbytes / 1e6, "open ms": 1e3 * opened}
                | {"first 100 rows ms": 1e3 * read}
            )
    answer.ratios = {"1 s ÷ opening the largest": 1e3 / answer.rows[-1]["open ms"]}
    answer.met = answer.rows[-1]["open ms"] <= 1000
    answer.give(options)


if __name__ == "__main__":
    main()
