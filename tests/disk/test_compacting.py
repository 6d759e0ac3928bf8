"""Compacting deltas into one, step by step, beside what uses the table, and its failures."""

from unittest import mock

import numpy as np
import pytest

from tests.disk.test_tier import DIM, ROWS, SPECS, WIDTH, Writer
from tests.oracle import records
from tests.tiers.stack import read
from tierstore import _io
from tierstore._disk import merging
from tierstore._disk.index import DeltaIndex
from tierstore._disk.manifest import DeltaInfo
from tierstore.errors import CorruptRowError, StoreFullError, StoreIOError
from tierstore.spec import TableSpec

EVERY = np.arange(ROWS)


@pytest.fixture(autouse=True, params=[1 << 20, 17], ids=["sorted", "windows"])
def small_parts(request, monkeypatch):
    """Take a few records a step, by their ids sorted or by windows of rows."""
    monkeypatch.setattr(merging, "_WINDOW_ROWS", request.param)
    monkeypatch.setattr(merging, "_IDS", 5)
    monkeypatch.setattr(merging, "_STEP_BYTES", 3 * WIDTH)


@pytest.fixture
def rng():
    return np.random.default_rng(8)


def change(writer: Writer, rng: np.random.Generator, oracle: np.ndarray) -> None:
    rows = rng.permutation(ROWS)[: int(rng.integers(1, ROWS))]
    oracle[rows] = records(rng, rows.size, WIDTH)
    writer.tier.write(rows, oracle[rows])


def committed(path, rng, count, kind="memmap"):
    """Return a writer with a number of deltas, and the table after each version."""
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(path, SPECS[kind], oracle)
    versions = {1: oracle.copy()}
    for _ in range(count):
        change(writer, rng, oracle)
        writer.commit()
        versions[writer.version] = oracle.copy()
    return writer, versions


def compact(writer: Writer, begin: int, end: int) -> None:
    compaction = writer.generation.compact(writer.tier.deltas[begin:end])
    for _ in compaction.steps():
        pass
    publish(writer, compaction)


def publish(writer: Writer, compaction) -> None:
    names = [delta.info for delta in compaction.deltas]
    deltas = list(writer.info.deltas)
    at = deltas.index(names[0])
    deltas[at : at + len(names)] = [compaction.delta.info]
    writer.generation.adopt(compaction.delta)
    writer.publish(*deltas)


def opened(writer: Writer, *deltas: DeltaInfo) -> np.ndarray:
    """Return the table as it is opened by a manifest that names these deltas."""
    info = writer.info
    writer.info = type(info)(info.spec, info.generation, deltas=deltas)
    writer.open(write=False)
    found = read(writer.tier, EVERY)
    writer.generation.close()
    writer.info = info
    return found


@pytest.mark.variants(11, 19)
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("begin", "end"), [(0, 2), (1, 4), (2, 6), (0, 6)])
def test_the_newest_image_of_each_row_stays(tmp_path, rng, kind, begin, end):
    writer, versions = committed(tmp_path, rng, 6, kind)
    before = writer.info.deltas
    compact(writer, begin, end)
    one = writer.info.deltas[begin]
    assert len(writer.info.deltas) == 6 - (end - begin) + 1
    assert one.version == before[end - 1].version
    rows = np.unique(np.concatenate([writer_ids(tmp_path, each) for each in before[begin:end]]))
    assert np.array_equal(writer.tier.deltas[begin].ids, rows)
    assert np.array_equal(read(writer.tier, EVERY), versions[7])
    assert writer.tier.deltas[begin].damaged() == []
    assert np.array_equal(opened(writer, *writer.info.deltas), versions[7])
    for count in range(7):  # older manifests name the deltas that it was made of
        assert np.array_equal(opened(writer, *before[:count]), versions[count + 1])


def writer_ids(path, info: DeltaInfo) -> np.ndarray:
    """Return the ids in a delta's file, read by the format alone."""
    (file,) = path.rglob(info.name)
    data = file.read_bytes()
    return np.frombuffer(data, "<i8", info.rows, info.rows * WIDTH)


def test_reads_writes_and_commits_go_on_between_its_steps(tmp_path, rng):
    writer, versions = committed(tmp_path, rng, 4)
    oracle = versions[5].copy()
    last = oracle.copy()
    compaction = writer.generation.compact(writer.tier.deltas[:4])
    for number, _ in enumerate(compaction.steps()):
        if number % 3 == 0:
            change(writer, rng, oracle)
        if number % 5 == 1:
            writer.commit()
            last = oracle.copy()
        assert np.array_equal(read(writer.tier, EVERY), oracle), number
    change(writer, rng, oracle)
    change(writer, rng, oracle)
    publish(writer, compaction)
    assert np.array_equal(read(writer.tier, EVERY), oracle)
    writer.tier.discard()
    assert np.array_equal(read(writer.tier, EVERY), last)
    compact(writer, 0, len(writer.info.deltas))
    assert len(writer.info.deltas) == 1
    writer.fold(writer.version)
    assert np.array_equal(read(writer.tier, EVERY), last)
    assert writer.tier.damaged(EVERY) == []


def test_one_that_is_stopped_leaves_no_file(tmp_path, rng):
    writer, versions = committed(tmp_path, rng, 3)
    before = set(tmp_path.rglob("delta-*"))
    for taken in range(8):
        steps = writer.generation.compact(writer.tier.deltas).steps()
        for _ in range(taken + 1):
            next(steps)
        assert set(tmp_path.rglob("delta-*")) > before
        steps.close()
        assert set(tmp_path.rglob("delta-*")) == before
    assert np.array_equal(read(writer.tier, EVERY), versions[4])


@pytest.mark.parametrize("call", ["allocate", "write", "sync"])
def test_one_that_fails_leaves_no_file(tmp_path, rng, call):
    writer, versions = committed(tmp_path, rng, 3)
    before = set(tmp_path.rglob("delta-*"))
    with (
        mock.patch.object(_io.File, call, side_effect=StoreFullError("no space")),
        pytest.raises(StoreFullError),
    ):
        compact(writer, 0, 3)
    assert set(tmp_path.rglob("delta-*")) == before
    compact(writer, 0, 3)
    assert np.array_equal(read(writer.tier, EVERY), versions[4])


def lost_writes(self, data, offset, *, write=_io.File.write):
    """Write zeros where records belong: a disk that takes bytes and loses them."""
    write(self, data if offset % WIDTH or len(data) % WIDTH else bytes(len(data)), offset)


def test_what_reads_otherwise_is_not_published(tmp_path, rng):
    writer, versions = committed(tmp_path, rng, 3)
    before = set(tmp_path.rglob("delta-*"))
    with (
        mock.patch.object(_io.File, "write", lost_writes),
        pytest.raises(StoreIOError, match=r"differ in .* from what was written"),
    ):
        compact(writer, 0, 3)
    assert set(tmp_path.rglob("delta-*")) == before
    assert np.array_equal(read(writer.tier, EVERY), versions[4])


def test_without_reading_back_lost_records_would_be_published(tmp_path, rng, monkeypatch):
    """The negative control of the test before."""
    monkeypatch.setattr("tierstore._disk.merging.Compaction._prove", lambda *given: iter(()))
    writer, _ = committed(tmp_path, rng, 3)
    with mock.patch.object(_io.File, "write", lost_writes):
        compact(writer, 0, 3)
    assert writer.tier.deltas[0].damaged() != []


def test_damage_is_not_copied(tmp_path, rng):
    writer, _ = committed(tmp_path, rng, 3)
    file = tmp_path / writer.info.generation / writer.info.deltas[2].name
    data = bytearray(file.read_bytes())
    data[5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptRowError, match="not match the checksum"):
        compact(writer, 0, 3)


# Positions


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("runs", [False, True])
def test_positions_that_are_left_unused_are_used_again(tmp_path, rng, monkeypatch, runs):
    """The index has room for a number of positions, which many compactions must not use up."""
    if runs:
        monkeypatch.setattr("tierstore._disk.footer._RUN_ROWS", 2)
        monkeypatch.setattr("tierstore._disk.index._LONG", 2)
    monkeypatch.setattr("tierstore._disk.index._MAX_POSITIONS", 1500)
    closed = []
    gaps = DeltaIndex._close_gaps
    monkeypatch.setattr(DeltaIndex, "_close_gaps", lambda index: (closed.append(1), gaps(index)))
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, TableSpec(ROWS, DIM), oracle)
    for number in range(120):
        for _ in range(2):
            change(writer, rng, oracle)
            writer.commit()
        if number % 3 == 0:
            change(writer, rng, oracle)
        compact(writer, 0, len(writer.info.deltas) - 1)
        assert np.array_equal(read(writer.tier, EVERY), oracle), number
    assert closed
