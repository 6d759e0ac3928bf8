"""How fast does a file of another program open, and how fast are its rows read from the disk?"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from coldness import make_cold, random_reads
from common import Answer, arguments, in_child, private_bytes, workspace

import tierstore

QUESTION = "Open a sparse file of 100 GB in place and read its first row; and read cold rows"
DIM = 128
TIER = "2GiB"
MOST_SECONDS, MOST_BYTES = 1.0, 50 << 20
MOST_RESIDENT = 0.001


def write_sparse(path: Path, rows: int) -> str:
    """Make a file of `rows` x DIM float32, all holes after the header; return what to attach."""
    nbytes = rows * DIM * 4
    with path.open("wb") as file:
        if path.suffix == ".npy":
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, DIM)}
            np.lib.format.write_array_header_1_0(file, header)
        else:
            entry = {"dtype": "F32", "shape": [rows, DIM], "data_offsets": [0, nbytes]}
            text = json.dumps({"memory": entry}).encode()
            file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + nbytes)
    return str(path) if path.suffix == ".npy" else f"{path}::memory"


def opened(place: str, budget: str) -> tuple[float, float, int]:
    """Return seconds until it is attached, until a row was read, and private bytes for both."""
    before = private_bytes()
    begin = time.perf_counter()
    with tierstore.attach({"t": place}, budget=budget) as tables:
        attached = time.perf_counter() - begin
        tables["t"].read([0])
        read = time.perf_counter() - begin
        return attached, read, private_bytes() - before


def cold_rates(directory: Path, options: argparse.Namespace) -> tuple[list[float], ...]:
    """Return the disk's random reads a second, rows a second, and shares in memory before."""
    path = directory / "rows.npy"
    shape = (options.rows, DIM)
    given = np.lib.format.open_memmap(path, "w+", "<f4", shape)
    rng = np.random.default_rng(3)
    for start in range(0, options.rows, 1 << 16):
        stop = min(start + (1 << 16), options.rows)
        given[start:stop] = rng.random((stop - start, DIM), np.float32)
    del given
    limits, rates, shares = [], [], []
    for _ in range(options.repeat):
        ids = rng.permutation(options.rows)[: options.batch]
        expected = np.asarray(np.load(path, mmap_mode="r")[ids])
        limits.append(random_reads(path, options.batch))
        shares.append(make_cold(path))
        with tierstore.attach({"t": path}, budget=tierstore.Budget(host=0)) as tables:
            begin = time.perf_counter()
            found = tables["t"].read(ids)
            rates.append(options.batch / (time.perf_counter() - begin))
        if not np.array_equal(found, expected):
            raise RuntimeError("other rows were read")
    return limits, rates, shares


def main() -> None:
    parser = arguments(QUESTION, rows=4 << 20, batch=32_768, gigabytes=100)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    answer = Answer(
        "attach",
        QUESTION,
        f"a header and one page; {options.batch:,} blocks of 4 KiB, one for nearly every row",
        "the first row within 1 s and 50 MB of private memory; at least 0.8 of the disk's random "
        "reads",
        notes=[
            "each file is opened in a process of its own, which has imported tierstore",
            "a host tier counts 4 bytes for each row of the file to its budget",
            "pages of that map take memory when a row of theirs is used",
            "limit: 4 KiB reads at random places, 256 in flight, past the page cache",
            "cold: pages were dropped before each gather, and mincore counted what was left",
        ],
    )
    met = True
    with workspace(options) as directory:
        for suffix in (".npy", ".safetensors"):
            for gigabytes, budget in (
                (1, "0"),
                (options.gigabytes, "0"),
                (options.gigabytes, TIER),
            ):
                file = directory / f"{gigabytes}{suffix}"
                place = write_sparse(file, gigabytes * 10**9 // (4 * DIM))
                found = [in_child(opened, place, budget) for _ in range(options.repeat)]
                file.unlink()
                attached, read = (statistics.median(each[at] for each in found) for at in (0, 1))
                most = max(each[2] for each in found)
                answer.rows.append(
                    {"what": f"{gigabytes} GB {suffix}, host tier {budget}"}
                    | {"attached, ms": 1e3 * attached, "first row, ms": 1e3 * read}
                    | {"private, MB": most / 1e6}
                )
                met &= read <= MOST_SECONDS
                met &= most <= MOST_BYTES
        limits, rates, shares = cold_rates(directory, options)
    limit, rate = statistics.median(limits), statistics.median(rates)
    answer.rows.append({"what": "the disk's random reads", "rows/s": limit})
    answer.rows.append(
        {"what": f"{options.batch:,} cold rows, attached", "rows/s": rate}
        | {"in memory before, %": 100 * max(shares)}
    )
    answer.ratios["of the disk's random reads"] = rate / limit
    answer.met = met and rate >= 0.8 * limit and max(shares) <= MOST_RESIDENT
    answer.give(options)


if __name__ == "__main__":
    main()
