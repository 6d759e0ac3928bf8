"""Is a read of rows that are all in the host tier as fast as a gather from a plain tensor?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Answer, arguments, in_child, in_turn, medians, workspace
from figures import Figure, give, processor

import tierstore

QUESTION = "Reading rows that are all in the host tier, against a gather from a plain RAM tensor"


def measure(path: Path, threads: int, ids_per_batch: int, repeat: int) -> dict[str, float]:
    """Return median seconds of reading a batch, each way, with this many threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(7)
    with tierstore.open(path, budget=tierstore.Budget(host="64GiB")) as store:
        table = store["item"]
        tensor = torch.cat([torch.from_numpy(block.copy()) for block in table.scan()])
        for start in range(0, table.rows, 1 << 16):
            table.read(np.arange(start, min(start + (1 << 16), table.rows)))
        ids = torch.empty(ids_per_batch, dtype=torch.int64)
        out = torch.empty((ids_per_batch, table.dim))

        def draw(_: str) -> None:
            torch.randint(table.rows, ids.shape, generator=generator, out=ids)
            time.sleep(0.05)  # torch's threads spin for a while after their work

        draw("")
        if not torch.equal(table.read(ids), tensor[ids]):
            raise RuntimeError("tierstore and torch read different rows")
        return medians(
            in_turn(
                {
                    "torch.index_select": lambda: torch.index_select(tensor, 0, ids),
                    "torch.index_select(out=)": lambda: torch.index_select(tensor, 0, ids, out=out),
                    "tierstore": lambda: table.read(ids),
                },
                repeat,
                draw,
            )
        )


def compared(path: Path, batch: int, repeat: int) -> dict[str, Figure]:
    """Return what a read of a batch takes, on one processor."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    rng = np.random.default_rng(7)
    with tierstore.open(path, budget=tierstore.Budget(host="64GiB"), device="cpu") as store:
        table = store["item"]
        table.read(np.arange(table.rows))
        batches = [rng.integers(0, table.rows, batch) for _ in range(8)]
        every = processor(lambda: [table.read(ids) for ids in batches], repeat)
        return {f"read of {batch:,} rows": Figure(every.seconds / len(batches))}


def main() -> None:
    parser = arguments(QUESTION, rows=1 << 21, dim=128, batch=65_536)
    options = parser.parse_args()
    nbytes = options.batch * options.dim * 4
    answer = Answer(
        "host_read",
        QUESTION,
        f"{options.batch:,} rows of {4 * options.dim} B: {nbytes >> 20} MiB read at random places, "
        f"{nbytes >> 20} MiB written in order",
        "at least 0.8 of torch.index_select with the same threads",
    )
    cpus = len(os.sched_getaffinity(0))
    with workspace(options) as directory:
        rows = min(options.rows, 1 << 17) if options.figures else options.rows
        spec = tierstore.TableSpec(rows, options.dim, init=tierstore.normal(seed=7))
        tierstore.create(directory / "bench.tier", {"item": spec}).close()
        if options.figures:
            give(options, compared(directory / "bench.tier", options.batch, options.repeat))
            return
        for threads in sorted({1, cpus}):
            found: dict[str, Any] = in_child(
                measure, directory / "bench.tier", threads, options.batch, options.repeat
            )
            peer = found["torch.index_select"]
            for name, seconds in found.items():
                answer.rows.append(
                    {
                        "reader": name,
                        "threads": threads,
                        "ms": 1e3 * seconds,
                        "M rows/s": options.batch / seconds / 1e6,
                        "of torch": peer / seconds,
                    }
                )
            answer.ratios[f"of torch.index_select, {threads} threads"] = peer / found["tierstore"]
    answer.met = min(answer.ratios.values()) >= 0.8
    answer.give(options)


if __name__ == "__main__":
    main()
