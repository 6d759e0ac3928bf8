"""Locks: a single writer, even if files are removed or replaced; folds and readers by version."""

import fcntl
import os
import subprocess
import sys

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import _io
from tierstore._store.locking import ReaderLock, WriterLock, describe, make_note
from tierstore.budget import Budget
from tierstore.errors import ConcurrentWriterError, LockedError

ROWS, DIM = 300, 5
EVERY = np.arange(ROWS)
NONE = Budget(host=0)


@pytest.fixture
def path(tmp_path):
    tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(ROWS, DIM)}).close()
    return tmp_path / "s"


@pytest.fixture
def directory(path):
    with _io.Directory.open(path) as directory:
        yield directory


def change(store, seed):
    """Write random rows; return all rows as they are then."""
    rng = np.random.default_rng(seed)
    store["t"].write(
        rng.choice(ROWS, 40, replace=False), rng.standard_normal((40, DIM), np.float32)
    )
    return store["t"].read(EVERY)


def opened(path, mode="r", **options):
    return tierstore.open(path, mode, budget=NONE, **options)


def test_readers_are_known_by_their_versions(directory):
    writer = WriterLock(directory, allow_untested=False)
    assert writer.readers(100) == []
    readers = [ReaderLock(directory) for _ in range(3)]
    for reader, version in zip(readers, (9, 4, 5), strict=True):
        reader.hold(version)
    assert writer.readers(100) == [4, 5, 9]
    assert writer.readers(4) == []
    assert writer.readers(0) == []
    assert writer.reads_other_than([4, 5])
    assert not writer.reads_other_than([4, 5, 9])
    readers[1].close()
    assert writer.readers(100) == [5, 9]
    readers[2].hold(7)
    assert writer.readers(100) == [5, 7, 9]
    readers[2].hold_only(7)
    assert writer.readers(100) == [7, 9]
    with writer.without_readers_before(8) as is_free:
        assert not is_free
    with writer.without_readers_before(7) as is_free:
        assert is_free
        monkey = ReaderLock(directory)
        assert not monkey._store.lock_range(6, 1, exclusive=False)
        monkey.hold(7)
    monkey.hold(6)
    with pytest.raises(LockedError):
        WriterLock(directory, allow_untested=False)
    for lock in (*readers, monkey, writer):
        lock.close()
    WriterLock(directory, allow_untested=False).close()


def test_readers_that_follow_do_not_stop_folds(path):
    with opened(path, "r+") as store, opened(path) as reader:
        for seed in range(5):
            rows = change(store, seed)
            store.commit()
            with pytest.raises(LockedError, match=f"version {store.version - 1} is open"):
                store.fold()
            reader.refresh()
            store.fold()
            assert store.info().folded
            assert np.array_equal(reader["t"].read(EVERY), rows)


def test_a_reader_of_a_version_that_is_folded_while_it_is_opened_looks_again(path, monkeypatch):
    """The fold comes between the reading of the manifest and the lock."""
    with opened(path, "r+") as store:
        hold = ReaderLock.hold

        def late(self, version, **options):
            monkeypatch.setattr(ReaderLock, "hold", hold)
            change(store, 1)
            store.commit()
            store.fold()
            hold(self, version, **options)

        monkeypatch.setattr(ReaderLock, "hold", late)
        with opened(path) as reader:
            assert reader.version == store.version == 2
            assert np.array_equal(reader["t"].read(EVERY), store["t"].read(EVERY))
        change(store, 2)
        store.commit()
        with opened(path) as reader:  # version 2 is let go of
            store.fold()


@pytest.mark.fault(21)
def test_removing_lock_lets_no_second_writer_in(path):
    with opened(path, "r+") as store:
        rows = change(store, 1)
        (path / "LOCK").unlink()
        with pytest.raises(LockedError):
            opened(path, "r+")
        store.commit()
        assert (path / "LOCK").exists()
        with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
            opened(path, "r+")
    with opened(path) as again:
        assert np.array_equal(again["t"].read(EVERY), rows)


@pytest.mark.fault(21)
@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_writer_whose_store_file_is_another_publishes_nothing(path, how):
    with opened(path, "r+") as store:
        change(store, 1)
        data = (path / "STORE.json").read_bytes()
        (path / "STORE.json").unlink()
        if how == "replaced":
            (path / "STORE.json").write_bytes(data)
        before = sorted(path.glob("manifest-*"))
        with pytest.raises(ConcurrentWriterError, match="removed or replaced"):
            store.commit()
        assert inside.door(store).closed
        assert sorted(path.glob("manifest-*")) == before


@pytest.mark.fault(21)
def test_a_writer_whose_lock_file_another_program_has_publishes_nothing(path):
    with opened(path, "r+") as store:
        change(store, 1)
        (path / "LOCK").unlink()
        with (path / "LOCK").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(ConcurrentWriterError, match="nothing was published"):
                store.commit()


def test_a_note_of_another_writer_in_the_lock_file_publishes_nothing(path):
    """As on a file system whose locks do not work: the last one to open it leaves its note."""
    with opened(path, "r+") as store:
        change(store, 1)
        note = (path / "LOCK").read_bytes()
        (path / "LOCK").write_bytes(note.replace(b"pid ", b"pid 1"))
        with pytest.raises(ConcurrentWriterError, match="locks of this file system do not work"):
            store.commit()
    with opened(path) as reader:
        assert reader.version == 1


@pytest.mark.parametrize("read", range(1, 6))
def test_a_version_between_two_that_are_kept_is_seen(directory, read):
    writer, reader = WriterLock(directory, allow_untested=False), ReaderLock(directory)
    reader.hold(read)
    kept = {1, 2, 3, 4, 5} - {read}
    assert writer.reads_other_than(kept) and not writer.reads_other_than(kept | {read})
    reader.close()
    assert not writer.reads_other_than(kept)
    writer.close()


def test_a_lock_file_that_is_replaced_while_it_is_taken_is_not_trusted(path, monkeypatch):
    lock, replaced = _io.File.lock, []

    def late(self, *, exclusive):
        taken = lock(self, exclusive=exclusive)
        if not replaced:
            replaced.append(self.path)
            (path / "LOCK").unlink()
        return taken

    monkeypatch.setattr(_io.File, "lock", late)
    with opened(path, "r+"), (path / "LOCK").open("r") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert replaced


def test_the_file_of_locks_may_be_missing(path):
    (path / "LOCK").unlink()
    with opened(path, "r+") as store:
        rows = change(store, 1)
        store.commit()
        store.fold()
    with opened(path) as reader:
        assert np.array_equal(reader["t"].read(EVERY), rows)


def test_the_holder_is_described():
    note = make_note()
    assert "this very process" in describe(note)
    other = note.replace(b"pid %d " % os.getpid(), b"pid %d " % os.getppid())
    assert describe(other) == f"pid {os.getppid()} on {os.uname().nodename}"
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    gone = note.replace(b"pid %d " % os.getpid(), b"pid %d " % process.pid)
    assert "has ended" in describe(gone)
    assert "has ended" not in describe(gone.replace(b"boot ", b"boot 0"))
    assert describe(b"") == "another process"
    assert describe(b"pid 4 on elsewhere") == "'pid 4 on elsewhere'"
