"""A trainer that is killed at any moment: python -m tests.durability.writer STORE SEED.

It writes rows that follow from the version alone, commits, and says each version on stdout once the
commit has returned.
"""

from __future__ import annotations

import sys

import numpy as np

import tierstore
from tierstore._disk import write_queue
from tierstore._store import compaction
from tierstore._tiers import slots
from tierstore.budget import Budget

__all__ = ["ROWS", "content"]

ROWS, DIM = 400, 6


def changes(version: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that a version changes, and their values."""
    rng = np.random.default_rng(version)
    ids = rng.permutation(ROWS)[: int(rng.integers(1, 200))]
    return ids, rng.standard_normal((ids.size, DIM)).astype(np.float32)


def content(version: int) -> np.ndarray:
    """All rows as of a version; the first holds zeros."""
    values = np.zeros((ROWS, DIM), np.float32)
    for number in range(2, version + 1):
        ids, new = changes(number)
        values[ids] = new
    return values


def main() -> None:
    """Commit until killed."""
    path, seed = sys.argv[1], int(sys.argv[2])
    compaction._MOST_DELTAS = 3  # a fold goes on behind most of the time
    write_queue._MIN_QUEUED_BYTES, slots._QUEUE_SHARE = (
        1,
        1,
    )  # as many rows wait as there are slots
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 100))
    store = tierstore.open(path, "r+", budget=Budget(host_rows=count), keep=int(rng.integers(1, 4)))
    while True:
        version = store.version + 1
        store["t"].write(*changes(version))
        payload = {"model": content(version).tobytes()} if version % 3 == 0 else None
        store.commit(step=version, payload=payload)
        print(version, flush=True)
        if rng.random() < 0.1:
            store.fold()


if __name__ == "__main__":
    main()
