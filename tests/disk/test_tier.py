"""The disk tier against an array: what is committed, what is not, and what folding changes."""

import itertools
import os
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import inside
from tests.oracle import records
from tests.tiers import stack
from tests.tiers.stack import random_span, read
from tests.tries import tries
from tierstore import _core, _io, _rowcopy
from tierstore._disk import delta as live_delta
from tierstore._disk import footer, index, tier, write_queue
from tierstore._disk.generation import Generation, create
from tierstore._disk.manifest import MAX_DELTA_IMAGES, TableInfo
from tierstore._disk.segments import Segments
from tierstore._disk.tier import DiskTier
from tierstore._rowcopy import Target
from tierstore._tiers.host import HostTier
from tierstore._tiers.uncached import Uncached
from tierstore.errors import CorruptRowError, CorruptStoreError, StoreFullError, StoreIOError
from tierstore.spec import TableSpec

ROWS, DIM, WIDTH = 60, 12, 48
STORE = "0123456789abcdef" * 2
SPECS = {
    "memmap": TableSpec(ROWS, DIM),
    "zarr": TableSpec(ROWS, DIM, backend="zarr"),
    "lz4": TableSpec(ROWS, DIM, backend="zarr", compression="lz4", chunk_rows=7),
}


def rows_upto(tier: DiskTier, version: int) -> np.ndarray:
    """Return the rows in committed deltas of versions up to this one, ascending."""
    ids = [delta.ids for delta in tier.deltas if delta.info.version <= version]
    return np.unique(np.concatenate([np.empty(0, np.int64), *ids]))


class Writer:
    """A generation with its writer, committing without a store around it."""

    def __init__(self, path, spec: TableSpec, data: np.ndarray, *, queue_bytes: int = 0) -> None:
        self.path, self.version, self.queue_bytes = path, 1, queue_bytes
        with _io.Directory.open(path) as table:
            self.info = create(table, spec, 1, [data])
        self.open()

    def open(self, *, write: bool = True) -> None:
        with _io.Directory.open(self.path) as table:
            self.generation = Generation(
                table, self.info, store=STORE, next_seq=(lambda: self.version) if write else None
            )
        self.tier: DiskTier = self.generation.tier
        self.tier.queue_bytes = self.queue_bytes

    def publish(self, *deltas) -> None:
        kept = (self.info.spec, self.info.generation)
        self.info = TableInfo(*kept, deltas=deltas)
        self.generation.committed(self.info)

    def commit(self) -> None:
        self.version += 1
        delta = self.generation.seal(self.version)
        if delta is not None:
            self.publish(*self.info.deltas, delta)

    def compact(self, begin: int, end: int) -> None:
        compaction = self.generation.compact(self.tier.deltas[begin:end])
        for _ in compaction.steps():
            pass
        deltas = list(self.info.deltas)
        deltas[begin:end] = [compaction.delta.info]
        self.generation.adopt(compaction.delta)
        self.publish(*deltas)

    def fold(self, upto: int) -> None:
        for _ in self.tier.merge(upto).steps():
            pass
        self.publish(*(delta for delta in self.info.deltas if delta.version > upto))


def delivered(tier: DiskTier, rows: np.ndarray) -> np.ndarray:
    """Return what a tier delivers to slots, and to none but these."""
    some = np.random.default_rng(rows.size).permutation(rows.size + 9)
    out, slots = np.zeros((some.size, tier.record_bytes), np.uint8), some[9:]
    tier.deliver(rows, Target(out, slots))
    assert not out[some[:9]].any()
    return out[slots]


class Reader:
    """What has opened the same generation to read, and remembers every row it has seen."""

    def __init__(self, writer: Writer, committed: np.ndarray) -> None:
        self.writer, self.truth = writer, committed.copy()
        with _io.Directory.open(writer.path) as table:
            self.generation = Generation(table, writer.info, store=STORE, next_seq=None)
        self.version = writer.version
        self.seen = read(self.generation.tier, np.arange(ROWS))

    def follow(self, committed: np.ndarray) -> None:
        """Follow the writer; rows that are not said to have changed are as they were seen."""
        self.version = self.writer.version
        info = self.writer.info
        folded = min((delta.version for delta in info.deltas), default=self.writer.version + 1) - 1
        later = self.generation.later(info, folded)
        rows, tier = later.changed, self.generation.tier
        coming = np.zeros((rows.size, tier.record_bytes), np.uint8)
        known = tier.read_ahead(later.deltas, rows, coming)
        self.generation.follow(later)
        self.seen[rows] = read(tier, rows)
        assert np.array_equal(coming[known].view(self.seen.dtype), self.seen[rows][known])
        self.truth = committed.copy()

    def check(self) -> None:
        assert np.array_equal(read(self.generation.tier, np.arange(ROWS)), self.truth)
        assert np.array_equal(self.seen, self.truth)

    def close(self) -> None:
        self.generation.close()


@pytest.fixture(autouse=True)
def all_of_it_waits(monkeypatch):
    """However little is written, a thread does it where there is room for it to wait."""
    monkeypatch.setattr(write_queue, "_MIN_QUEUED_BYTES", 1)


@pytest.fixture(params=["over", "behind"])
def where(request, monkeypatch):
    """Whether rows written again are written over, or behind all others; in several parts."""
    monkeypatch.setattr(tier, "_COLLECTED_BYTES", 16 * WIDTH)
    if request.param == "behind":
        monkeypatch.setattr(live_delta, "_FEW", 1)
        monkeypatch.setattr(live_delta, "_ROWS_A_WRITE", 1000)
        monkeypatch.setattr(live_delta, "_SEGMENT_BYTES", 5 * WIDTH)
    return request.param


@pytest.fixture(params=["rows", "runs"])
def run_rows(request, monkeypatch):
    """Whether a few consecutive rows are kept as a run."""
    if request.param == "runs":
        monkeypatch.setattr(footer, "_RUN_ROWS", 2)
        monkeypatch.setattr(index, "_LONG", 3)
        monkeypatch.setattr(index, "_MOST_RUNS", 2)
    return request.param


@pytest.mark.variants(4)
@pytest.mark.parametrize("kind", SPECS)
@tries(10)
@given(seed=st.integers(0, 2**32))
def test_any_sequence_of_calls(tmp_path_factory, kind, where, run_rows, seed):
    rng = np.random.default_rng(seed)
    committed = records(rng, ROWS, WIDTH)
    oracle = committed.copy()
    queue_bytes = int(rng.choice([0, WIDTH, 9 * WIDTH, 1 << 20]))
    path = tmp_path_factory.mktemp("table")
    writer = Writer(path, SPECS[kind], oracle, queue_bytes=queue_bytes)
    reader = Reader(writer, committed)
    actions = ["read", "write", "write", "commit", "commit", "discard", "fold", "compact", "reopen"]
    actions.append("deliver")
    for _ in range(int(rng.integers(1, 40))):
        action = rng.choice(actions)
        tier = writer.tier
        if action == "read":
            rows, (lo, hi) = rng.integers(0, ROWS, rng.integers(0, 90)), random_span(rng, WIDTH)
            tier.stage(np.unique(rows))
            assert np.array_equal(read(tier, rows, lo, hi), oracle[rows, lo:hi])
        elif action == "deliver":
            rows = np.flatnonzero(rng.random(ROWS) < rng.random())
            assert np.array_equal(delivered(tier, rows), oracle[rows])
        elif action == "write":
            rows, (lo, hi) = rng.permutation(ROWS)[: rng.integers(0, ROWS)], random_span(rng, WIDTH)
            if rng.random() < 0.5:
                rows = np.arange(*np.sort(rng.integers(0, ROWS, 2)))
            oracle[rows, lo:hi] = records(rng, rows.size, hi - lo)
            Uncached(tier).write(rows, oracle[rows, lo:hi], lo, hi)
        elif action == "commit":
            writer.commit()
            committed = oracle.copy()
        elif action == "discard":
            changed = tier.discard()
            differ = np.flatnonzero((oracle != committed).any(axis=1))
            assert set(differ) <= set(changed.tolist())
            oracle = committed.copy()
        elif action == "fold":
            upto = int(rng.integers(1, writer.version + 1))
            if upto > reader.version:  # who reads an older version keeps a fold away
                reader.follow(committed)
            rows = rows_upto(tier, upto)
            writer.fold(upto)
            assert all(delta.version > upto for delta in writer.info.deltas)
            assert tier.damaged(rows) == []
        elif action == "compact" and len(writer.info.deltas) > 1:
            begin, end = np.sort(rng.permutation(len(writer.info.deltas) + 1)[:2]).tolist()
            writer.compact(begin, end)
        elif action == "reopen":
            writer.generation.close()
            oracle = committed.copy()
            writer.open(write=bool(rng.random() < 0.8))
            assert np.array_equal(read(writer.tier, np.arange(ROWS)), oracle)
            writer.generation.close()
            writer.open()
        assert tier.live is None or tier.live.count <= MAX_DELTA_IMAGES * ROWS
        reader.check()
        if rng.random() < 0.4:
            reader.follow(committed)
            reader.check()
    reader.close()
    assert np.array_equal(read(writer.tier, np.arange(ROWS)), oracle)
    writer.generation.close()


def test_what_is_read_ahead_is_of_no_delta_that_a_later_one_covers(tmp_path):
    """Two pairs of deltas became one each, before one that stays: it has the newest records."""
    rng = np.random.default_rng(8)
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, SPECS["memmap"], oracle)
    for _ in range(5):
        rows = rng.permutation(ROWS)[:40]
        oracle[rows] = records(rng, rows.size, WIDTH)
        writer.tier.write(rows, oracle[rows])
        writer.commit()
    reader = Reader(writer, oracle.copy())
    writer.compact(0, 2)
    writer.compact(1, 3)
    reader.follow(oracle.copy())
    reader.check()
    reader.close()
    writer.generation.close()


def test_readers_do_not_wait_while_a_writer_waits_for_the_disk(tmp_path, monkeypatch):
    write_piece, disk = live_delta.LiveDelta._write_piece, threading.Event()

    def slowly(live, piece):
        assert disk.wait(60)
        write_piece(live, piece)

    monkeypatch.setattr(live_delta.LiveDelta, "_write_piece", slowly)
    rng = np.random.default_rng(10)
    oracle, rows = records(rng, ROWS, WIDTH), np.arange(ROWS)
    writer = Writer(tmp_path, SPECS["memmap"], oracle, queue_bytes=8 * WIDTH)
    new = records(rng, ROWS, WIDTH)
    writer.tier.write(rows[:2], new[:2])
    writing = threading.Thread(target=writer.tier.write, args=(rows[2:], new[2:]))
    monkeypatch.setattr(tier, "_COLLECTED_BYTES", 2 * WIDTH)
    writing.start()
    while not writer.tier.live._queue._changed._waiters:
        assert writing.is_alive()
    found = []
    reading = threading.Thread(target=lambda: found.append(read(writer.tier, rows[-9:])))
    reading.start()
    reading.join(20)
    answered = len(found)
    disk.set()
    for thread in (writing, reading):
        thread.join(60)
    assert answered, "the reader waited for the disk"
    assert np.array_equal(found[0], oracle[-9:])
    assert np.array_equal(read(writer.tier, rows), new)
    writer.generation.close()


def test_a_delta_finds_the_last_record_of_a_row(tmp_path):
    rng = np.random.default_rng(9)
    writer = Writer(tmp_path, SPECS["memmap"], records(rng, ROWS, WIDTH))
    live = writer.generation._new_live()
    ids = rng.integers(0, ROWS // 2, 50)
    live.put(np.arange(50), ids, partial(_rowcopy.copy, records(rng, 50, WIDTH)))
    found, positions = live.seal(store=bytes(16), version=2).find(np.arange(ROWS))
    last = {int(row): position for position, row in enumerate(ids)}
    assert dict(zip(found.tolist(), positions.tolist(), strict=True)) == last
    live.remove()
    writer.generation.close()


def test_rows_that_arrive_in_order_are_opened_without_their_ids(tmp_path, run_rows):
    rng = np.random.default_rng(12)
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, SPECS["memmap"], oracle)
    for rows in (np.arange(5, 30), np.arange(30, 50), np.arange(9, 12)):
        oracle[rows] = records(rng, rows.size, WIDTH)
        writer.tier.write(rows, oracle[rows])
        writer.commit()
    info = writer.info.deltas[0]
    (path,) = tmp_path.rglob(info.name)
    data = bytearray(path.read_bytes())
    data[info.rows * WIDTH + 8 * 20] ^= 1  # the id of row 25
    path.write_bytes(data)
    writer.generation.close()
    if run_rows == "rows":
        with pytest.raises(CorruptStoreError, match=r"ids, checksums or footer are damaged"):
            writer.open()
        return
    writer.open()
    first = writer.tier.deltas[0]
    assert (first.first, first.span) == (5, (5, 29))
    assert np.array_equal(read(writer.tier, np.arange(ROWS)), oracle)  # as no id is needed
    for asked in (lambda: first.ids, lambda: first.sums, first.check, first.damaged):
        with pytest.raises(CorruptStoreError, match=r"ids, checksums or footer are damaged"):
            asked()
    data[info.rows * WIDTH + 8 * 20] ^= 1
    data[info.rows * (WIDTH + 8) + 4 * 20] ^= 1  # the checksum of row 25
    path.write_bytes(data)
    with pytest.raises(CorruptRowError, match="the first is row 25"):
        read(writer.tier, np.arange(ROWS))
    assert np.array_equal(read(writer.tier, np.arange(25)), oracle[:25])
    writer.generation.close()


def test_a_row_that_changes_again_takes_its_place_again(tmp_path):
    rng = np.random.default_rng(1)
    writer = Writer(tmp_path, SPECS["memmap"], records(rng, ROWS, WIDTH))
    for _ in range(50):
        data = records(rng, 5, WIDTH)
        writer.tier.write(np.array([7, 3, 9, 1, 30]), data)
    assert writer.tier.live.count == 5
    writer.commit()
    assert writer.info.deltas[0].rows == 5
    assert np.array_equal(read(writer.tier, [7, 3, 9, 1, 30]), data)


def test_commits_without_changes_write_nothing(tmp_path):
    writer = Writer(tmp_path, SPECS["memmap"], records(np.random.default_rng(2), ROWS, WIDTH))
    writer.commit()
    writer.tier.write(np.empty(0, np.int64), np.empty((0, WIDTH), np.uint8))
    writer.commit()
    assert writer.info.deltas == ()
    assert [entry.name for entry in tmp_path.rglob("delta-*")] == []


def test_what_is_uncommitted_survives_a_fold_of_what_is(tmp_path):
    rng = np.random.default_rng(4)
    oracle = records(rng, ROWS, WIDTH)
    writer = Writer(tmp_path, SPECS["memmap"], oracle)
    for rows in (np.arange(10), np.arange(5, 20)):
        oracle[rows] = records(rng, rows.size, WIDTH)
        writer.tier.write(rows, oracle[rows])
        writer.commit()
    committed = oracle.copy()
    oracle[3:8] = records(rng, 5, WIDTH)
    writer.tier.write(np.arange(3, 8), oracle[3:8])
    writer.fold(upto=2)
    assert np.array_equal(read(writer.tier, np.arange(ROWS)), oracle)
    writer.fold(upto=3)
    assert np.array_equal(read(writer.tier, np.arange(ROWS)), oracle)
    assert writer.tier.discard().tolist() == [3, 4, 5, 6, 7]
    assert np.array_equal(read(writer.tier, np.arange(ROWS)), committed)


def test_large_reads_and_deltas_go_block_by_block(tmp_path):
    rng = np.random.default_rng(5)
    oracle = records(rng, 3000, 16 * 1024)
    spec = TableSpec(3000, 4 * 1024)
    writer = Writer(tmp_path, spec, oracle)
    rows = rng.permutation(3000)[:1500]
    oracle[rows] = records(rng, 1500, 16 * 1024)
    writer.tier.write(rows, oracle[rows])
    wanted = rng.integers(0, 3000, 1000)
    assert np.array_equal(read(writer.tier, wanted), oracle[wanted])
    assert np.array_equal(read(writer.tier, wanted, 5000, 5016), oracle[wanted, 5000:5016])
    writer.commit()
    writer.fold(upto=2)
    assert np.array_equal(read(writer.tier, wanted), oracle[wanted])


@pytest.mark.parametrize("threads", [1, 4])
def test_many_rows_are_delivered_from_wherever_they_are(tmp_path, threads):
    rng = np.random.default_rng(7)
    oracle = records(rng, 9000, WIDTH)
    writer = Writer(tmp_path, TableSpec(9000, DIM), oracle, queue_bytes=1 << 20)
    wanted = np.flatnonzero(rng.random(9000) < 0.7)
    with inside.core_threads(threads):
        assert np.array_equal(delivered(writer.tier, wanted), oracle[wanted])
        for _ in range(3):
            rows = rng.permutation(9000)[:2000]
            oracle[rows] = records(rng, 2000, WIDTH)
            writer.tier.write(rows, oracle[rows])
            assert np.array_equal(delivered(writer.tier, wanted), oracle[wanted])
            writer.commit()
    stats = writer.tier.stats
    assert (stats.requested, stats.bytes_out) == (4 * wanted.size, 4 * wanted.size * WIDTH)


def test_records_that_are_not_checked_in_place_are_delivered_block_by_block(tmp_path, monkeypatch):
    """Memory for all of them at a time would come on top of the budget."""
    monkeypatch.setattr("tierstore._disk.records.most_threads", lambda: 1)
    monkeypatch.setattr("tierstore._disk.records.BLOCK_BYTES", 100 * WIDTH)
    spec = TableSpec(3000, DIM, backend="zarr", compression="zstd")
    oracle = records(np.random.default_rng(11), 3000, WIDTH)
    writer, sizes, put = Writer(tmp_path, spec, oracle), list[int](), Target.put
    wanted = np.arange(1, 3000, 2)

    def seen(target, part):
        sizes.append(len(part))
        put(target, part)

    monkeypatch.setattr(Target, "put", seen)
    assert np.array_equal(delivered(writer.tier, wanted), oracle[wanted])
    assert sizes == [100] * 15


@pytest.mark.parametrize("count", [9, 2000])
def test_a_damaged_record_is_not_kept(tmp_path, count):
    """Which of many is found once they have been put; then none of them is there."""
    writer = Writer(tmp_path, TableSpec(3000, DIM), records(np.random.default_rng(8), 3000, WIDTH))
    host = HostTier(writer.tier, slots=2500)
    (file,) = [
        each for each in tmp_path.rglob("*") if each.is_file() and each.stat().st_size > 90_000
    ]
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size - 3000 * WIDTH + 7 * WIDTH + 3)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))
    rows = np.arange(count)
    with pytest.raises(CorruptRowError) as caught:
        read(host, rows)
    assert caught.value.rows == [7]
    assert host.occupancy().used == 0
    stack.check(host)
    whole = np.setdiff1d(rows, [7])
    assert np.array_equal(read(host, whole), read(writer.tier, whole))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_delivery_that_ends_at_any_part_leaves_nothing(tmp_path, monkeypatch, error):
    """Of rows of the base and of several deltas, each of which comes in a call of the core."""
    rng, copy = np.random.default_rng(9), _core.copy_rows
    oracle = records(rng, 3000, WIDTH)
    writer, rows = Writer(tmp_path, TableSpec(3000, DIM), oracle), np.arange(2000)
    for _ in range(3):
        changed = rng.permutation(3000)[:600]
        oracle[changed] = records(rng, 600, WIDTH)
        writer.tier.write(changed, oracle[changed])
        writer.commit()
    host, last = HostTier(writer.tier, slots=2500), 0
    for number in range(1, 100):
        calls = itertools.count(1)

        def failing(*given, number=number, calls=calls):
            if next(calls) == number:
                raise error
            return copy(*given)

        with monkeypatch.context() as patch:
            patch.setattr(_core, "copy_rows", failing)
            try:
                read(host, rows)
            except error:
                last = number
        assert host.occupancy().used == (2000 if last < number else 0)
        stack.check(host)
        if last < number:
            break
    assert last >= 4
    assert np.array_equal(read(host, rows), oracle[:2000])


def test_counters(tmp_path):
    writer = Writer(tmp_path, SPECS["memmap"], records(np.random.default_rng(6), ROWS, WIDTH))
    read(writer.tier, [1, 1, 2], 0, 16)  # a record is read once, and whole
    writer.tier.write(np.array([4, 5]), np.ones((2, WIDTH), np.uint8))
    stats = writer.tier.stats
    assert (stats.requested, stats.bytes_out) == (2, 2 * WIDTH)
    assert (stats.written, stats.bytes_in) == (2, 2 * WIDTH)


# Rows that are written again before they are committed


@pytest.fixture(params=[0, 1 << 20], ids=["at once", "later"])
def writer(request, tmp_path):
    data = records(np.random.default_rng(1), 3000, WIDTH)
    writer = Writer(tmp_path, TableSpec(3000, DIM), data, queue_bytes=request.param)
    writer.data = data.copy()
    yield writer
    writer.generation.close()


def write(writer, rows):
    new = records(np.random.default_rng(len(rows)), len(rows), WIDTH)
    writer.tier.write(rows, new)
    writer.data[rows] = new


def check(writer):
    rows = np.arange(3000)
    assert np.array_equal(read(writer.tier, rows), writer.data)


SCATTERED = np.arange(0, 3000, 20)


@pytest.fixture
def narrow(monkeypatch):
    """Pieces of one record: every second one is a write of its own. Segments of a hundred."""
    monkeypatch.setattr(live_delta, "_NEAR_BYTES", 0)
    monkeypatch.setattr(live_delta, "_SEGMENT_BYTES", 100 * WIDTH)


def test_scattered_rows_are_appended_and_the_delta_stays_bounded(writer, narrow):
    rng = np.random.default_rng(3)
    write(writer, rng.permutation(3000))
    before = writer.tier.live.count
    write(writer, SCATTERED)
    assert writer.tier.live.count == before + SCATTERED.size
    sizes = []
    for _ in range(60):
        write(writer, rng.permutation(3000)[:150])
        sizes.append(writer.tier.live.count)
    assert max(sizes) <= 2 * 3000 + 3 * 100 + 150 and sizes[-1] == sizes[-20]
    assert not writer.tier.live.segments.ordered
    check(writer)
    writer.commit()
    check(writer)
    writer.generation.close()
    writer.open()
    check(writer)
    writer.fold(writer.version)
    check(writer)


def test_where_nothing_can_be_cleaned_rows_are_written_over(writer, narrow, monkeypatch):
    """Readers refuse a delta with more than three records a row."""
    monkeypatch.setattr(Segments, "fullest", lambda segments: None)
    rng = np.random.default_rng(12)
    write(writer, rng.permutation(3000))
    for _ in range(60):
        write(writer, rng.permutation(3000)[:150])
        assert writer.tier.live.count <= MAX_DELTA_IMAGES * 3000
    assert writer.tier.live.count > 8000
    check(writer)
    writer.commit()
    check(writer)


def test_neighbours_are_written_over(writer, narrow):
    write(writer, np.arange(3000))
    write(writer, np.arange(500, 900))
    assert writer.tier.live.count == 3000
    check(writer)


def test_what_was_superseded_is_discarded_with_the_rest(writer, narrow):
    write(writer, np.random.default_rng(4).permutation(3000))
    writer.commit()
    kept = writer.data.copy()
    for _ in range(3):
        write(writer, SCATTERED[::-1].copy())
    assert np.array_equal(np.sort(writer.tier.discard()), SCATTERED)
    writer.data = kept
    check(writer)


def test_where_the_disk_is_full_rows_are_written_over(writer, narrow, monkeypatch):
    rng = np.random.default_rng(5)
    write(writer, rng.permutation(3000))
    collect = writer.tier._collect

    def full(rows, get, *, resident, moves=False):
        if moves:
            raise StoreFullError("no space")
        collect(rows, get, resident=resident)

    monkeypatch.setattr(writer.tier, "_collect", full)
    while not writer.tier.live.full:
        write(writer, rng.permutation(3000)[:200])
    count = writer.tier.live.count
    write(writer, SCATTERED)
    assert writer.tier.live.count == count
    check(writer)
    writer.commit()
    check(writer)


def test_where_no_more_fits_rows_are_written_over(writer, narrow, monkeypatch):
    write(writer, np.random.default_rng(6).permutation(3000))
    live = writer.tier.live
    monkeypatch.setattr(live, "_allocated", 3000 * WIDTH)

    def allocate(file, offset, nbytes):
        raise StoreFullError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(_io.File, "allocate", allocate)
        write(writer, SCATTERED)
        assert live.count == 3000 and live.full
        check(writer)
    writer.commit()
    check(writer)


def test_rows_damaged_by_a_failed_write_are_written_over(writer, narrow, monkeypatch):
    """Behind all others they would leave the damage in the file, which then is no delta."""
    write(writer, np.random.default_rng(7).permutation(3000))
    writer.tier.live.drain()
    new = records(np.random.default_rng(8), 1, WIDTH)

    def fail(file, data, offset):
        raise StoreFullError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(_io.File, "write", fail)
        with pytest.raises(StoreFullError):
            writer.tier.write(SCATTERED[:1], new, resident=True)
    write(writer, SCATTERED)
    writer.commit()
    check(writer)


def once(patch, place, name, wanted=lambda *given: True):
    """Let a function fail the next time, as if memory had run out."""
    work, failed = getattr(place, name), []

    def fail(*given):
        if not failed and wanted(*given):
            failed.append(given)
            raise MemoryError
        return work(*given)

    patch.setattr(place, name, fail)


def test_rows_written_without_their_checksums_are_damaged(writer, narrow, monkeypatch):
    """Memory for the checksums may lack once the records are in the file."""
    write(writer, np.arange(2000))
    writer.tier.live.drain()
    mixed = np.arange(1900, 2500)
    with monkeypatch.context() as patch:
        once(patch, live_delta, "_grown", lambda array, count: array.dtype == np.uint32)
        with pytest.raises(MemoryError):
            writer.tier.write(
                mixed, records(np.random.default_rng(9), mixed.size, WIDTH), resident=True
            )
    with pytest.raises(StoreIOError, match="damaged"):
        writer.commit()
    write(writer, mixed)
    writer.commit()
    check(writer)


def test_records_that_the_index_does_not_take_are_not_committed(writer, monkeypatch):
    write(writer, np.arange(100))
    with monkeypatch.context() as patch:
        once(patch, index.Entries, "__setitem__")
        with pytest.raises(MemoryError):
            writer.tier.write(np.arange(200, 250), np.zeros((50, WIDTH), np.uint8))
    check(writer)
    writer.commit()
    writer.generation.close()
    writer.open()
    check(writer)


@pytest.mark.parametrize("place", ["copying", "writing"])
def test_a_write_that_fails_over_dead_records_leaves_no_damage(writer, narrow, monkeypatch, place):
    """Some of them are in the file then, with the checksums of rows that they are not for."""
    for name in ("_PART_BYTES", "_BLOCK_BYTES"):
        monkeypatch.setattr(write_queue, name, 10 * WIDTH)
    rng, calls = np.random.default_rng(11), []
    write(writer, rng.permutation(3000))
    segments = writer.tier.live.segments
    while segments.ordered or segments.choose(150)[-1] >= segments.count:
        write(writer, rng.permutation(3000)[:150])

    def fail(*given):
        calls.append(given)
        if len(calls) > 4:
            raise MemoryError

    def get(which, out):
        if place == "copying":
            fail(which)
        out[:] = 77

    work = _io.File.write
    writer.tier.live.drain()
    with monkeypatch.context() as patch:
        if place == "writing":
            patch.setattr(_io.File, "write", lambda *given: fail(*given) or work(*given))
        with pytest.raises(MemoryError):
            writer.tier.collect(SCATTERED, get, resident=True)
    check(writer)
    writer.commit()
    assert [delta.damaged() for delta in writer.tier.deltas] == [[]]
    writer.generation.close()
    writer.open()
    check(writer)


def test_without_memory_to_compact_rows_are_written_over(writer, narrow, monkeypatch):
    rng = np.random.default_rng(10)
    write(writer, rng.permutation(3000))
    with monkeypatch.context() as patch:
        once(patch, tier, "_read_at")
        while not writer.tier.live.full:
            write(writer, rng.permutation(3000)[:200])
    check(writer)
    writer.commit()
    check(writer)
