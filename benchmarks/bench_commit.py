"""What does a commit cost, compared with writing its bytes once and a memory-mapped file?"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from common import Answer, arguments, back_free_memory, in_turn, medians, workspace
from figures import Figure, give, keep_in_memory, processor

import tierstore

QUESTION = "A durable commit with one row in a hundred changed, at random"
COLD = "memmap scatter + flush, cold"
MOST = 1.5
"""Maximum of a commit relative to writing the bytes once."""


def write_once(path: Path, data: memoryview) -> None:
    """Write bytes to a new file and sync it: the least that durability can cost."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)


def measure(directory: Path, rows: int, dim: int, count: int, repeat: int) -> dict[str, float]:
    """Return median seconds of making `count` random rows of a table durable, each way."""
    rng = np.random.default_rng(7)
    spec = tierstore.TableSpec(rows, dim, init=tierstore.normal(seed=7))
    budget = tierstore.Budget(host=max(spec.nbytes // 4, 1 << 20))
    store = tierstore.create(directory / "bench.tier", {"item": spec}, budget=budget)
    table = store["item"]
    mapped = [np.lib.format.open_memmap(directory / "rows.npy", "w+", np.float32, (rows, dim))]
    done = 0
    for block in table.scan():
        mapped[0][done : done + len(block)] = block
        done += len(block)
    mapped[0].flush()

    ids = np.empty(0, np.int64)
    values = np.empty((count, dim), np.float32)
    once = directory / "once"

    def change(name: str) -> None:
        nonlocal ids
        once.unlink(missing_ok=True)
        if name == "write once, fsync":
            ids = rng.choice(rows, count, replace=False)
            rng.standard_normal(out=values, dtype=np.float32)
        elif name == "tierstore commit":
            table.write(ids, values)
        elif name == COLD:
            drop_pages()
        back_free_memory()

    def write_and_commit() -> None:
        table.write(ids, values)
        store.commit()

    def scatter_and_flush() -> None:
        mapped[0][ids] = values
        mapped[0].flush()

    def drop_pages() -> None:
        """Drop the pages of the mapped file from memory, as for a table larger than memory."""
        mapped.clear()
        fd = os.open(directory / "rows.npy", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        mapped.append(np.load(directory / "rows.npy", mmap_mode="r+"))

    contestants = {
        "write once, fsync": lambda: write_once(once, values.data.cast("B")),
        "tierstore commit": store.commit,
        "tierstore write + commit": write_and_commit,
        "memmap scatter + flush": scatter_and_flush,
        COLD: scatter_and_flush,
    }
    found = medians(in_turn(contestants, repeat, change))
    store.close()
    return found


def compared(directory: Path, rows: int, dim: int, count: int, repeat: int) -> dict[str, Figure]:
    """Return what a write of `count` random rows takes, and the commit of them."""
    rng = np.random.default_rng(7)
    spec = tierstore.TableSpec(rows, dim, init=tierstore.normal(seed=7))
    budget = tierstore.Budget(host=max(spec.nbytes // 4, 1 << 20))
    with tierstore.create(directory / "bench.tier", {"item": spec}, budget=budget) as store:
        batch: tuple[np.ndarray, np.ndarray]

        def draw(count: int = count) -> None:
            nonlocal batch
            ids = rng.choice(rows, count, replace=False)
            batch = ids, rng.standard_normal((count, dim), dtype=np.float32)

        def write() -> None:
            store["item"].write(*batch)

        def change(count: int = count) -> None:
            draw(count)
            write()

        return {
            f"write of {count:,} rows": processor(write, repeat, draw),
            f"commit of {count:,} rows": processor(store.commit, repeat, change),
            "commit of one row": processor(store.commit, 4 * repeat, lambda: change(1)),
        }


def main() -> None:
    options = arguments(QUESTION, rows=1 << 21, dim=128, one_in=100).parse_args()
    count = options.rows // options.one_in
    nbytes = count * options.dim * 4
    answer = Answer(
        "commit",
        QUESTION,
        f"{count:,} of {options.rows:,} rows of {4 * options.dim} B: {nbytes / 2**20:.1f} MiB and "
        "12 B a row for ids and checksums, once and in order; a memory-mapped file moves a page of "
        "4 KiB for nearly each",
        f"at most {MOST} times writing those bytes to a new file and syncing it, and 20 times "
        "faster than a memmap's scatter and flush",
        notes=[
            "cold: no page of the mapped file is in memory, as where a table is larger; else all",
            "the host tier holds a quarter of the table",
        ],
    )
    if options.figures:
        keep_in_memory(options)
    with workspace(options) as directory:
        if options.figures:
            rows = min(options.rows, 1 << 18)
            count = max(1, rows // options.one_in)
            give(options, compared(directory, rows, options.dim, count, options.repeat))
            return
        found = measure(directory, options.rows, options.dim, count, options.repeat)
    once, memmap = found["write once, fsync"], found["memmap scatter + flush"]
    for name, seconds in found.items():
        answer.rows.append(
            {"what": name, "ms": 1e3 * seconds, "MB/s": nbytes / seconds / 1e6}
            | {"times write once": seconds / once}
        )
    answer.ratios = {
        "commit ÷ write once": found["tierstore commit"] / once,
        "memmap ÷ commit": memmap / found["tierstore commit"],
        "memmap, cold ÷ commit": found[COLD] / found["tierstore commit"],
        "memmap ÷ (write + commit)": memmap / found["tierstore write + commit"],
    }
    answer.met = (
        answer.ratios["commit ÷ write once"] <= MOST and answer.ratios["memmap ÷ commit"] >= 20
    )
    answer.give(options)


if __name__ == "__main__":
    main()
