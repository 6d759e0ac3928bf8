"""Merging deltas into the base, step by step, while the table is used."""

import numpy as np
import pytest

from tests import inside
from tests.disk.test_tier import DIM, ROWS, SPECS, WIDTH, Writer, rows_upto
from tests.oracle import records
from tests.tiers.stack import read
from tierstore._disk import merging

EVERY = np.arange(ROWS)


@pytest.fixture(autouse=True, params=[256, 2])
def small_parts(request, monkeypatch):
    """Make a merge of few rows use many windows or two, parts of ids, and steps."""
    monkeypatch.setattr(merging, "_MOST_WINDOWS", request.param)
    monkeypatch.setattr(merging, "_WINDOW_ROWS", 17)
    monkeypatch.setattr(merging, "_IDS", 5)
    monkeypatch.setattr(merging, "_STEP_BYTES", 3 * WIDTH)


def change(writer: Writer, rng: np.random.Generator, oracle: np.ndarray) -> None:
    rows = rng.permutation(ROWS)[: int(rng.integers(1, ROWS))]
    oracle[rows] = records(rng, rows.size, WIDTH)
    writer.tier.write(rows, oracle[rows])


def in_base(writer: Writer) -> np.ndarray:
    found = np.empty((ROWS, WIDTH), np.uint8)
    inside.base(writer.tier).read(EVERY, found)
    return found


@pytest.mark.parametrize("kind", SPECS)
def test_the_base_takes_the_newest_image_up_to_a_version(tmp_path, kind):
    rng = np.random.default_rng(1)
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, SPECS[kind], oracle)
    versions = [oracle.copy()]
    for _ in range(4):
        change(writer, rng, oracle)
        writer.commit()
        versions.append(oracle.copy())
    for version in (1, 3, 5):
        assert len(list(writer.tier.merge(version).steps())) > 10 or version == 1
        assert np.array_equal(in_base(writer), versions[version - 1])
        assert writer.tier.damaged(EVERY) == []
        assert np.array_equal(read(writer.tier, EVERY), oracle)


@pytest.mark.parametrize("kind", SPECS)
def test_reads_writes_and_commits_go_on_between_its_steps(tmp_path, kind):
    rng = np.random.default_rng(2)
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, SPECS[kind], oracle)
    for _ in range(3):
        change(writer, rng, oracle)
        writer.commit()
    committed = oracle.copy()
    upto = writer.version
    for number, _ in enumerate(writer.tier.merge(upto).steps()):
        if number % 3 == 0:
            change(writer, rng, oracle)
        if number % 5 == 1:
            writer.commit()
            committed = oracle.copy()
        if number % 7 == 2:
            writer.tier.discard()
            oracle[:] = committed
        assert np.array_equal(read(writer.tier, EVERY), oracle), number
    change(writer, rng, oracle)
    writer.publish(*(delta for delta in writer.info.deltas if delta.version > upto))
    assert np.array_equal(read(writer.tier, EVERY), oracle)
    writer.tier.discard()
    assert np.array_equal(read(writer.tier, EVERY), committed)
    writer.generation.close()
    writer.open()
    assert np.array_equal(read(writer.tier, EVERY), committed)


@pytest.mark.parametrize("kind", SPECS)
def test_one_that_was_stopped_is_done_again(tmp_path, kind):
    rng = np.random.default_rng(3)
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, SPECS[kind], oracle)
    for _ in range(3):
        change(writer, rng, oracle)
        writer.commit()
        steps = writer.tier.merge(writer.version).steps()
        for _ in range(4):
            next(steps)
        steps.close()
        assert np.array_equal(read(writer.tier, EVERY), oracle)
    writer.fold(writer.version)
    assert writer.info.deltas == ()
    assert np.array_equal(in_base(writer), oracle)


def test_what_other_deltas_hold_is_not_touched(tmp_path):
    """A row that only a later version changed stays as it is in the base."""
    rng = np.random.default_rng(4)
    oracle = records(rng, ROWS, DIM * 4)
    writer = Writer(tmp_path, SPECS["memmap"], oracle)
    for row in (3, 40):
        writer.tier.write(np.array([row]), records(rng, 1, WIDTH))
        writer.commit()
    assert rows_upto(writer.tier, 2).tolist() == [3]
    assert len(list(writer.tier.merge(2).steps())) == 2  # one to write it, one to prove it
    assert np.flatnonzero((in_base(writer) != oracle).any(axis=1)).tolist() == [3]
