"""Three tiers, host over host over disk: what a GPU over the host over the disk would be."""

import numpy as np
import pytest

from tests.oracle import records
from tests.pairs import pairs
from tests.tiers.stack import check, random_span, read
from tierstore import _io
from tierstore._disk.generation import Generation, create
from tierstore._disk.manifest import TableInfo
from tierstore._tiers.host import HostTier
from tierstore.spec import TableSpec

ROWS, DIM, WIDTH = 300, 20, 80


@pytest.mark.variants(1, 3)
@pairs(
    slots=[(1, 10), (10, 1), (7, 50), (100, 120), (50, ROWS), (ROWS, 7), (400, 400)],
    backend=["memmap", "zarr"],
)
def test_three_tiers_are_one_table(tmp_path, slots, backend):
    """Reads, writes, evictions, commits and rollbacks, in batches larger than either cache."""
    near, far = slots
    rng = np.random.default_rng([near, far])
    committed = records(rng, ROWS, WIDTH)
    with _io.Directory.open(tmp_path) as table:
        info = create(table, TableSpec(ROWS, DIM, backend=backend), 1, [committed])
        generation = Generation(table, info, store="ab" * 16, next_seq=lambda: 1)
    disk = generation.tier
    below = HostTier(disk, slots=far)
    top = HostTier(below, slots=near)
    oracle = committed.copy()
    for version in range(2, 8):
        for _ in range(8):
            rows, (lo, hi) = rng.permutation(ROWS)[: rng.integers(1, 90)], random_span(rng, WIDTH)
            oracle[rows, lo:hi] = records(rng, rows.size, hi - lo)
            top.write(rows, oracle[rows, lo:hi], lo, hi)
            wanted = rng.integers(0, ROWS, rng.integers(0, 200))
            assert np.array_equal(read(top, wanted, lo, hi), oracle[wanted, lo:hi])
            check(top)
            check(below)
        if rng.random() < 0.7:
            top.flush()
            delta = generation.seal(version)
            kept = (info.spec, info.generation)
            generation.committed(TableInfo(*kept, deltas=(*generation.info.deltas, delta)))
            committed = oracle.copy()
        else:
            gone = disk.discard()
            gone = np.union1d(gone, below.dirty())
            below.discard(gone)
            top.discard(gone)
            oracle = committed.copy()
        assert np.array_equal(read(top, np.arange(ROWS)), oracle)
    generation.close()
