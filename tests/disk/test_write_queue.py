"""Background writes, against an array that is written at once."""

import gc
import mmap
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import inside
from tests.oracle import records
from tierstore import _parts
from tierstore._disk import write_queue
from tierstore._disk.behind import Behind
from tierstore._disk.write_queue import Piece, WriteQueue

ROWS, WIDTH = 50, 32


@pytest.fixture(autouse=True)
def all_of_it_waits(monkeypatch):
    monkeypatch.setattr(write_queue, "_MIN_QUEUED_BYTES", 1)


class File:
    """Where pieces are written, by whom, and how many bytes were waiting then."""

    def __init__(self, room: int, behind: Behind | None = None) -> None:
        self.data = np.zeros((ROWS, WIDTH), np.uint8)
        self.threads: list[str] = []
        self.most = 0
        self.failing = lambda: False
        self.queue = WriteQueue(self.write, WIDTH, room, behind)

    def write(self, piece: Piece) -> None:
        self.threads.append(threading.current_thread().name)
        waiting = sum(block.nbytes - mmap.PAGESIZE for _, block in inside.waiting(self.queue))
        self.most = max(self.most, waiting)
        self.data[piece.positions[::2]] = piece.records[::2]
        if self.failing():
            raise OSError("the disk is full")
        self.data[piece.positions] = piece.records

    def read(self, positions: np.ndarray) -> np.ndarray:
        waiting = list(self.queue.find(positions))
        out = self.data[positions]
        for which, waiting_records, at in waiting:
            out[which] = waiting_records[at]
        return out


class Gate:
    """Holds writes up until it is opened."""

    def __init__(self, file: File) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._write, file.queue._write = file.queue._write, self.write

    def write(self, piece: Piece) -> None:
        self.reached.set()
        assert self.open.wait(60)
        self._write(piece)


def put(queue: WriteQueue, piece: Piece, *, now: bool = False) -> None:
    def fill(part: slice, out: np.ndarray) -> None:
        out[:] = piece.records[part]

    queue.put(piece.positions, piece.rows, fill, cached=piece.cached, now=now)


def some(rng: np.random.Generator, count: int) -> Piece:
    positions = np.sort(rng.permutation(ROWS)[:count]).astype(np.int64)
    return Piece(positions, positions + 7, records(rng, count, WIDTH))


def one(rng: np.random.Generator, position: int) -> Piece:
    return Piece(np.array([position]), np.array([position]), records(rng, 1, WIDTH))


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("threads", [True, False])
@given(seed=st.integers(0, 2**32), room=st.sampled_from([0, 1, 2, 5, 60, 1000]))
def test_any_sequence_of_calls(monkeypatch, threads, seed, room):
    """Queued records are readable immediately and never lost, even if some writes fail."""
    if not threads:
        monkeypatch.setattr(threading.Thread, "start", none_to_be_had)
    rng, noise = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    file, oracle = File(room * WIDTH), np.zeros((ROWS, WIDTH), np.uint8)
    share = rng.choice([0, 0.1, 0.6])
    file.failing = lambda: noise.random() < share
    for _ in range(int(rng.integers(1, 60))):
        action = rng.choice(["put", "put", "read", "drain"])
        if action == "put":
            piece = some(rng, int(rng.integers(1, ROWS)))
            positions, data = piece.positions.copy(), piece.records.copy()
            try:
                put(file.queue, piece, now=rng.random() < 0.2)
            except OSError:
                found = file.read(positions)
                taken = (found == data).all(axis=1)
                if room:
                    assert np.array_equal(found[~taken], oracle[positions[~taken]])
                oracle[positions] = found
            else:
                oracle[positions] = data
            piece.positions[:], piece.rows[:], piece.records[:] = 0, 0, 0
        elif action == "read":
            positions = rng.integers(0, ROWS, int(rng.integers(0, 90)))
            assert np.array_equal(file.read(positions), oracle[positions])
        else:
            try:
                file.queue.drain()
            except OSError:
                assert share
            else:
                assert np.array_equal(file.data, oracle)
    assert np.array_equal(file.read(np.arange(ROWS)), oracle)
    file.failing = lambda: False
    file.queue.drain()
    assert np.array_equal(file.data, oracle)
    assert file.most <= room * WIDTH and not file.queue._spare


def there_first(here, there):
    """Call two functions, the second first, as a thread may that is faster."""
    there()
    here()


def here_first(here, there):
    """Call two functions in order, as where no thread is free."""
    here()
    there()


@pytest.mark.parametrize("beside", [there_first, here_first, _parts.beside])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 29, ROWS])
def test_who_waits_copies_each_part_while_the_one_before_is_written(monkeypatch, beside, count):
    monkeypatch.setattr(write_queue, "_PART_BYTES", 7 * WIDTH)
    monkeypatch.setattr(write_queue, "beside", beside)
    rng, file = np.random.default_rng(count), File(1000 * WIDTH)
    piece = some(rng, count)
    put(file.queue, piece, now=True)
    expected = np.zeros_like(file.data)
    expected[piece.positions] = piece.records
    assert np.array_equal(file.data, expected)
    assert len(file.threads) == -(-count // 7) and not file.queue._spare


def none_to_be_had(thread):
    raise RuntimeError("can't start new thread")


def test_a_caller_goes_on_while_a_thread_writes():
    rng, file = np.random.default_rng(1), File(3 * WIDTH)
    gate = Gate(file)
    pieces = [one(rng, 4), one(rng, 9), one(rng, 4)]
    for piece in pieces:
        put(file.queue, piece)
    assert gate.reached.wait(60) and not file.threads
    assert np.array_equal(
        file.read(np.array([9, 4, 3]))[:2, 0], [p.records[0, 0] for p in pieces[1:]]
    )
    gate.open.set()
    file.queue.drain()
    assert file.threads == ["tierstore-write"] * 3
    assert np.array_equal(file.data[[9, 4]], np.concatenate([p.records for p in pieces[1:]]))


def test_who_finds_no_room_waits_for_it():
    rng, file = np.random.default_rng(2), File(2 * WIDTH)
    gate = Gate(file)
    pieces = [one(rng, position) for position in range(3)]

    def put_all():
        for piece in pieces:
            put(file.queue, piece)

    caller = threading.Thread(target=put_all)
    caller.start()
    assert gate.reached.wait(60)
    while len(inside.waiting(file.queue)) < 2:
        pass
    caller.join(0.05)
    assert caller.is_alive() and len(inside.waiting(file.queue)) == 2
    gate.open.set()
    caller.join(60)
    file.queue.drain()
    assert np.array_equal(file.data[:3], np.concatenate([p.records for p in pieces]))
    assert file.most == 2 * WIDTH


def test_what_a_thread_could_not_write_is_the_next_callers_error():
    rng, file = np.random.default_rng(3), File(9 * WIDTH)
    file.failing = lambda: True
    first, second = one(rng, 1), one(rng, 2)
    put(file.queue, first)
    while not file.queue._idle():
        pass
    for attempt in (lambda: put(file.queue, second), file.queue.drain):
        with pytest.raises(OSError, match="the disk is full"):
            attempt()
        assert np.array_equal(file.read(np.array([1])), first.records)
        assert not file.read(np.array([2])).any()
    file.failing = lambda: False
    put(file.queue, second)
    file.queue.drain()
    assert np.array_equal(file.data[1:3], np.concatenate([first.records, second.records]))


def test_what_is_dropped_is_not_written():
    rng, file = np.random.default_rng(4), File(9 * WIDTH)
    gate = Gate(file)
    pieces = [one(rng, position) for position in range(3)]
    for piece in pieces:
        put(file.queue, piece)
    assert gate.reached.wait(60)
    dropping = threading.Thread(target=file.queue.drop)
    dropping.start()
    while len(inside.waiting(file.queue)) > 1:
        pass
    gate.open.set()
    dropping.join(60)
    assert not inside.waiting(file.queue) and file.queue._idle()
    assert np.array_equal(file.data[:1], pieces[0].records) and not file.data[1:].any()


def test_one_thread_writes_the_queues_of_a_store_in_turn():
    rng, behind = np.random.default_rng(8), Behind()
    files = [File(9 * WIDTH, behind) for _ in range(3)]
    gate, order = Gate(files[0]), list[int]()
    for number, file in enumerate(files):
        whole = file.queue._write
        file.queue._write = lambda piece, n=number, whole=whole: (whole(piece), order.append(n))
    for round in range(3):  # the thread waits at the first piece
        for file in files:
            put(file.queue, one(rng, round))
    assert gate.reached.wait(60)
    thread = behind._thread
    gate.open.set()
    for file in files:
        file.queue.drain()
    assert order == [0, 1, 2] * 3
    put(files[1].queue, one(rng, 7))
    files[1].queue.drain()
    assert behind._thread is thread and thread.is_alive()
    behind.close()
    assert not thread.is_alive()
    put(files[1].queue, one(rng, 8))  # by the caller, where it is not written in the end
    files[1].queue.drain()
    assert files[1].threads[-1] == threading.current_thread().name


def test_a_thread_ends_with_the_last_reference(monkeypatch):
    file = File(9 * WIDTH)
    put(file.queue, one(np.random.default_rng(9), 3))
    file.queue.drain()
    thread = file.queue._behind._thread
    assert thread.is_alive()
    del file
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_no_caller_finds_the_thread_idle_between_two_pieces():
    """It would write the second beside the thread, and one of both would drop the third."""
    idle = list[int]()

    class Watched(WriteQueue):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_turn" and threading.current_thread().name == "tierstore-write":
                idle.extend([len(self._waiting)] * self._idle())

    rng, file = np.random.default_rng(12), File(9 * WIDTH)
    file.queue = Watched(file.write, WIDTH, 9 * WIDTH)
    gate = Gate(file)
    pieces = [one(rng, position) for position in range(4)]
    for piece in pieces:
        put(file.queue, piece)
    assert gate.reached.wait(60)
    gate.open.set()
    file.queue.drain()
    assert idle == [0]
    assert np.array_equal(file.data[:4], np.concatenate([p.records for p in pieces]))


def test_a_new_thread_leaves_the_pieces_of_a_dead_one_to_the_caller(monkeypatch):
    rng, behind = np.random.default_rng(13), Behind()
    file, other = File(9 * WIDTH, behind), File(9 * WIDTH, behind)
    with monkeypatch.context() as patch:
        patch.setattr(Behind, "alive", property(lambda behind: True))  # it dies before it begins
        put(file.queue, one(rng, 1))
        behind._jobs.put(behind._jobs.get())
    assert not file.threads
    gate = Gate(file)
    drain = threading.Thread(target=file.queue.drain)
    drain.start()
    assert gate.reached.wait(60)
    put(other.queue, one(rng, 2))
    other.queue.drain()  # after the job of the first queue, which the new thread has found
    assert other.threads == ["tierstore-write"]
    gate.open.set()
    drain.join(60)
    assert file.threads == [drain.name] and not inside.waiting(file.queue)


def test_threads_end_together_where_starting_one_was_interrupted(monkeypatch):
    rng, behind, started = np.random.default_rng(14), Behind(), list[threading.Thread]()
    start = threading.Thread.start

    def interrupted(thread):
        started.append(thread)
        start(thread)
        behind._thread = None  # it is not noted that the thread runs
        raise KeyboardInterrupt

    file = File(9 * WIDTH, behind)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        put(file.queue, one(rng, 1))
    put(file.queue, one(rng, 2))
    file.queue.drain()
    assert sorted(file.data.any(axis=1).nonzero()[0]) == [1, 2] and behind.alive
    behind.close()
    started[0].join(60)
    assert not started[0].is_alive()


def test_a_thread_that_died_leaves_its_work_to_the_caller(monkeypatch):
    rng, file = np.random.default_rng(10), File(9 * WIDTH)
    monkeypatch.setattr(Behind, "alive", property(lambda behind: False))
    monkeypatch.setattr(Behind, "ask", lambda behind, job: True)
    pieces = [one(rng, position) for position in range(3)]
    for piece in pieces:
        put(file.queue, piece)
    file.queue.drain()
    assert np.array_equal(file.data[:3], np.concatenate([p.records for p in pieces]))


@pytest.mark.parametrize("asked", [True, False])
def test_an_interrupt_while_the_thread_is_asked_loses_nothing(monkeypatch, asked):
    rng, file, ask = np.random.default_rng(11), File(9 * WIDTH), Behind.ask

    def interrupted(behind, job):
        if asked:
            assert ask(behind, job)
        raise KeyboardInterrupt

    pieces = [one(rng, position) for position in range(3)]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Behind, "ask", interrupted)
        put(file.queue, pieces[0])
    for piece in pieces[1:]:
        put(file.queue, piece)
    file.queue.drain()
    assert np.array_equal(file.data[:3], np.concatenate([p.records for p in pieces]))


def test_records_lie_in_pages_as_in_the_file():
    rng, file = np.random.default_rng(7), File(ROWS * WIDTH)
    gate = Gate(file)
    for first in (0, 3, 40):
        positions = np.arange(first, first + 5)
        put(file.queue, Piece(positions, positions, records(rng, 5, WIDTH), cached=first > 3))
    assert gate.reached.wait(60)
    for piece, _ in inside.waiting(file.queue):
        assert (piece.records.ctypes.data - piece.positions[0] * WIDTH) % mmap.PAGESIZE == 0
        assert piece.cached == (piece.positions[0] > 3)
    gate.open.set()
    file.queue.drain()


def test_no_thread_lives_where_nothing_waits(monkeypatch):
    rng, file = np.random.default_rng(5), File(0)
    put(file.queue, some(rng, 20))
    assert file.threads == [threading.current_thread().name]
    monkeypatch.setattr(write_queue, "_MIN_QUEUED_BYTES", 3 * WIDTH)
    small = File(99 * WIDTH)
    put(small.queue, some(rng, 2))
    assert small.threads == [threading.current_thread().name]
    put(small.queue, some(rng, 3))
    small.queue.drain()
    assert small.threads[1:] == ["tierstore-write"] and small.queue._idle()


def test_no_thread_lives_where_the_room_is_for_small_blocks(monkeypatch):
    """A batch cut into blocks of a few records waited for a thread at each of them."""
    monkeypatch.setattr(write_queue, "_MIN_QUEUED_BYTES", 3 * WIDTH)
    rng = np.random.default_rng(7)
    little, enough = File(8 * WIDTH), File(12 * WIDTH)
    for file in (little, enough):
        put(file.queue, some(rng, 40))
        file.queue.drain()
    assert little.threads == [threading.current_thread().name]
    assert set(enough.threads) == {"tierstore-write"}


def test_what_is_put_now_is_written_by_the_caller_after_what_waits():
    rng, file = np.random.default_rng(6), File(99 * WIDTH)
    first, last = some(rng, 20), some(rng, 20)
    expected = file.data.copy()
    for piece in (first, last):
        expected[piece.positions] = piece.records
    put(file.queue, first)
    put(file.queue, last, now=True)
    assert file.threads == ["tierstore-write", threading.current_thread().name]
    assert np.array_equal(file.data, expected) and not inside.waiting(file.queue)
