"""Counts of keys that have no row yet, against a Counter."""

from collections import Counter

import numpy as np

from tierstore._keys.admission import Candidates


def test_a_batch_counts_once():
    candidates, truth = Candidates(), Counter()
    rng = np.random.default_rng(1)
    for _ in range(30):
        codes = rng.integers(0, 500, 100, np.uint64) << np.uint64(40)
        truth.update(set(codes.tolist()))
        assert candidates.use(codes).tolist() == [truth[code] for code in codes.tolist()]


def test_keys_with_a_row_are_counted_from_the_start():
    candidates, truth = Candidates(most=400), Counter()
    rng = np.random.default_rng(2)
    for _ in range(60):
        codes = rng.integers(0, 200, 50, np.uint64) << np.uint64(40)
        truth.update(set(codes.tolist()))
        uses = candidates.use(codes)
        assert uses.tolist() == [truth[code] for code in codes.tolist()]
        admitted = codes[uses >= 3]
        candidates.forget(np.concatenate([admitted, rng.integers(1, 9, 3, np.uint64)]))
        for code in admitted.tolist():
            truth[code] = 0


def test_seldom_ones_are_forgotten():
    candidates = Candidates(most=1000)
    often = np.arange(20, dtype=np.uint64)
    for step in range(50):
        new = np.arange(100, dtype=np.uint64) + np.uint64(1000 + 100 * step)
        assert (candidates.use(np.concatenate([often, new]))[20:] == 1).all()
        assert len(candidates._map) <= 1000
    assert (candidates.use(often) == 51).all()
