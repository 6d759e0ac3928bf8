"""Folds that go on behind the caller: when they begin and end, who waits, and what errors do."""

import os
import signal
import threading
import time
import warnings
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.stepwise import Stepwise, folds_in_steps
from tierstore._disk.generation import Generation
from tierstore._disk.merging import Merge
from tierstore._store import compaction
from tierstore.budget import Budget
from tierstore.errors import LockedError, StoreFullError

ROWS, DIM = 200, 8
EVERY = np.arange(ROWS)
BACKENDS = {
    "memmap": {},
    "zarr": {"backend": "zarr"},
    "zstd": {"backend": "zarr", "compression": "zstd", "chunk_rows": 16},
}

pytestmark = pytest.mark.slow("zarr")
"""Its chunks are plain files, as memmap's one; those of zstd are compressed."""


class Trainer:
    """A store with an account of its rows."""

    def __init__(self, path, **spec):
        self.rng = np.random.default_rng(5)
        self.truth = self.rng.standard_normal((ROWS, DIM)).astype(np.float32)
        spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(self.truth), **spec)
        self.path = path
        self.versions = {1: self.truth.copy()}
        self.store = tierstore.create(path, {"t": spec}, budget=Budget(host_rows=20))

    def commit(self, count=1):
        for _ in range(count):
            rows = self.rng.permutation(ROWS)[: int(self.rng.integers(20, ROWS))]
            self.truth[rows] = self.rng.standard_normal((rows.size, DIM))
            self.store["t"].write(rows, self.truth[rows])
            self.versions[self.store.commit()] = self.truth.copy()

    def deltas(self):
        return [delta.info.version for delta in inside.disk(self.store["t"]).deltas]

    def check(self):
        assert np.array_equal(self.store["t"].read(EVERY), self.truth)
        assert self.store.verify().ok


@pytest.fixture
def steps():
    with folds_in_steps():
        yield


@pytest.fixture(params=BACKENDS)
def trainer(request, tmp_path):
    trainer = Trainer(tmp_path / "s", **BACKENDS[request.param])
    yield trainer
    trainer.store.close()


def test_a_fold_reports_the_rows_it_passed(trainer):
    trainer.commit(2)
    seen = []
    trainer.store.fold(progress=lambda *at: seen.append(at))
    done, totals = zip(*seen, strict=True)
    assert set(totals) == {2 * ROWS}  # written, then verified
    assert list(done) == sorted(done)
    assert done[0] <= ROWS < done[-1] == 2 * ROWS
    seen.clear()
    trainer.store.fold(progress=lambda *at: seen.append(at))
    assert seen == [(1, 1)]  # nothing was left to fold
    trainer.check()


def test_a_fold_that_its_callback_ends_is_repeated(trainer):
    trainer.commit(3)

    def stop(done, total):
        raise KeyError(done)

    with pytest.raises(KeyError):
        trainer.store.fold(progress=stop)
    trainer.check()
    assert trainer.deltas()
    trainer.store.fold()
    assert not trainer.deltas()
    trainer.check()


def begun(trainer):
    """Commit until a fold is under way, and return it."""
    trainer.commit(3)
    fold = Stepwise.newest
    assert fold is not None and not fold.done()
    return fold


@pytest.mark.variants(1, 1)
def test_commits_reads_and_readers_go_on_while_it_does(trainer, steps):
    fold = begun(trainer)
    readers = []
    while not fold.done():
        fold.step()
        trainer.check()
        for version in trainer.store.versions():
            reader = tierstore.open(trainer.path, version=version.version, budget=Budget(host=0))
            readers.append((reader, trainer.versions[reader.version]))
        if len(readers) == 20:
            trainer.commit()
    for reader, expected in readers:
        assert np.array_equal(reader["t"].read(EVERY), expected)
        assert reader.verify().ok
        reader.close()
    before = trainer.deltas()
    trainer.commit()
    assert before[0] == 2
    assert trainer.deltas() == [*before[2:], trainer.store.version]
    trainer.check()


def test_a_reader_puts_folds_off_while_it_is_older(trainer, steps):
    fold = begun(trainer)
    with tierstore.open(trainer.path, budget=Budget(host=0)) as reader:
        fold.finish()
        before, seen = reader.version, trainer.versions[reader.version]
        trainer.commit(5)
        assert inside.manifest(trainer.store).floor <= before
        assert np.array_equal(reader["t"].read(EVERY), seen)
        with pytest.raises(LockedError):
            trainer.store.fold()
        reader.refresh()
        trainer.store.fold()
        assert trainer.deltas() == []
        assert np.array_equal(reader["t"].read(EVERY), trainer.truth)
    trainer.commit()
    trainer.check()


def test_an_error_is_a_warning_and_the_next_commit_begins_anew(trainer, steps):
    fold = begun(trainer)
    error = StoreFullError("no space")
    with mock.patch("tierstore._disk.base.Base.write", side_effect=error):
        fold.step()
    with pytest.warns(RuntimeWarning, match="postponed: no space"):
        trainer.commit()
    trainer.check()
    trainer.commit()
    assert Stepwise.newest is not fold
    Stepwise.newest.finish()
    trainer.commit()
    trainer.check()


def test_a_commit_waits_where_deltas_come_faster_than_they_go(trainer, steps):
    fold = begun(trainer)
    trainer.commit(2)
    assert not fold.done()
    trainer.commit()
    assert fold.done()
    trainer.check()


@pytest.mark.variants(6, 11)
@pytest.mark.parametrize("change", ["grow", "set_keys", "add_fields", "replace", "fold"])
def test_what_cannot_be_done_beside_it_waits_for_it(trainer, steps, change):
    fold = begun(trainer)
    store = trainer.store
    fresh = trainer.rng.standard_normal((ROWS, DIM)).astype(np.float32)
    {
        "grow": lambda: store.grow("t", ROWS + 1),
        "set_keys": lambda: store.set_keys("t", list(range(ROWS))),
        "add_fields": lambda: store.add_fields("t", {"more": tierstore.Field(2)}),
        "replace": lambda: store.replace_table(
            "t",
            tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(fresh)),
            reinitialize=True,
        ),
        "fold": store.fold,
    }[change]()
    assert fold.done()
    store.close()
    with tierstore.open(trainer.path, "r+", budget=Budget(host=0)) as again:
        expected = fresh if change == "replace" else trainer.truth
        assert np.array_equal(again["t"].read(EVERY), expected)
        assert again.verify().ok


@pytest.mark.variants(3)
@pytest.mark.parametrize("commits", [0, 2])
def test_closing_waits_for_it_only_where_much_has_gathered(trainer, steps, monkeypatch, commits):
    """A session leaves an unfinished fold to the next; deltas never accumulate without limit."""
    monkeypatch.setattr(compaction, "_QUICK_BYTES", 0)
    fold = begun(trainer)
    fold.step()
    trainer.commit(commits)
    deltas = trainer.deltas()
    trainer.store.close()
    assert fold.done()
    trainer.store = tierstore.open(trainer.path, "r+", budget=Budget(host_rows=7))
    assert (trainer.deltas() == deltas) == (not commits)
    trainer.check()
    assert trainer.store.verify().ok
    trainer.commit()
    again = Stepwise.newest
    assert again is not fold
    again.finish()
    trainer.commit()
    assert trainer.deltas() != deltas and len(trainer.deltas()) < 4
    trainer.check()


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_closing_folds_what_takes_few_pages(tmp_path, packed, scattered):
    """As many rows, beside each other or pages apart; compressed chunks are rewritten whole."""
    rng = np.random.default_rng(7)
    rows, count, given = 3 << 20, 20_000, {}
    if packed:
        given = {"backend": "zarr", "compression": "zstd", "chunk_rows": 4096}
    spec = tierstore.TableSpec(rows, 16, sparse=True, **given)
    ids = np.sort(rng.choice(rows, count, replace=False)) if scattered else np.arange(count)
    values = rng.standard_normal((count, 16), np.float32)
    with tierstore.create(tmp_path / "a.tier", {"t": spec}, budget=Budget(host=0)) as store:
        for version in range(3):
            store["t"].write(ids, values + version)
            store.commit()
    with tierstore.open(tmp_path / "a.tier", budget=Budget(host=0)) as store:
        deltas = inside.manifest(store).tables["t"].deltas
        assert len(deltas) == (3 if scattered else 1)
        assert np.array_equal(store["t"].read(ids), values + 2)
        assert store.verify().ok


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_small_store_stays_a_small_multiple_of_its_data(tmp_path, monkeypatch, asynchronous):
    """Written whole in each commit: its base, the version before, and the newest commit."""
    monkeypatch.setattr(compaction.BackgroundWork, "done", lambda self: self._worker.join() or True)
    rows = np.arange(8192)
    values = np.random.default_rng(3).standard_normal((rows.size, 64), np.float32)  # 2 MiB
    spec = tierstore.TableSpec(rows.size, 64)
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=Budget(host_rows=500)) as store:
        store["t"].write(rows[:9], values[:9])
        for version in range(1, 12):
            store["t"].write(rows, values * version)
            store.commit_async().result() if asynchronous else store.commit()
            store["t"].write(rows[:50], values[:50])  # what a fold is published beside
            if version > 4:
                assert used(tmp_path / "s") <= 3.2 * spec.nbytes
            with tierstore.open(tmp_path / "s", version=store.version - 1) as older:
                assert np.array_equal(older["t"].read(rows[60:]), values[60:] * (version - 1))
        store.commit()
        assert store.verify().ok
    assert used(tmp_path / "s") <= 3.2 * spec.nbytes
    with tierstore.open(tmp_path / "s") as store:
        assert np.array_equal(store["t"].read(rows[:50]), values[:50])
        assert np.array_equal(store["t"].read(rows[50:]), values[50:] * 11)
        assert len(store.versions()) == 2


def used(path):
    """Return the bytes of the files of a store."""
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def test_leaving_by_an_error_gives_it_up(trainer, steps):
    with pytest.raises(ValueError, match="mine"), trainer.store:
        fold = begun(trainer)
        before = Stepwise.newest
        raise ValueError("mine")
    assert fold is before
    with tierstore.open(trainer.path, budget=Budget(host=0)) as again:
        assert np.array_equal(again["t"].read(EVERY), trainer.truth)
        assert again.verify().ok


def test_a_reader_finds_a_version_that_is_published_again(trainer, steps):
    """The fold ends between the moments a reader of that version reads its manifest and deltas."""
    fold = begun(trainer)
    fold.finish()
    version, init = trainer.store.version, Generation.__init__

    def end_the_fold_first(self, *args, **options):
        monkey.stop()
        trainer.store.confirm(version)
        init(self, *args, **options)

    monkey = mock.patch.object(Generation, "__init__", end_the_fold_first)
    monkey.start()
    with tierstore.open(trainer.path, version=version, budget=Budget(host=0)) as reader:
        assert np.array_equal(reader["t"].read(EVERY), trainer.truth)
        assert reader.verify().ok


# With the thread itself


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(compaction, "_MOST_DELTAS", 1)
    monkeypatch.setattr("tierstore._disk.merging._STEP_BYTES", 512)


@pytest.mark.variants(1, 1)
@pytest.mark.filterwarnings("error")
def test_a_thread_folds_behind_many_commits(trainer, soon):
    trainer.commit(60)
    trainer.store.close()
    assert len(list(trainer.path.rglob("delta-*"))) < 60
    trainer.store = tierstore.open(trainer.path, "r+", budget=Budget(host_rows=7))
    trainer.check()


def test_an_interrupt_while_closing_waits_gives_it_up(trainer, soon, monkeypatch):
    """A fold that never ends; the store remains as committed, and can be opened."""
    going = threading.Event()

    def endless(self):
        while True:
            going.set()
            time.sleep(0.001)
            yield 0

    monkeypatch.setattr(Merge, "steps", endless)
    trainer.commit(5)
    assert going.wait(60)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        trainer.store.close()
    assert "tierstore-fold" not in [thread.name for thread in threading.enumerate()]
    monkeypatch.undo()
    with tierstore.open(trainer.path, "r+", budget=Budget(host=0)) as again:
        assert np.array_equal(again["t"].read(EVERY), trainer.truth)
        assert again.verify().ok


def test_without_a_thread_it_is_put_off(trainer, soon):
    with (
        mock.patch("_thread.start_new_thread", side_effect=RuntimeError("can't start new thread")),
        pytest.warns(RuntimeWarning, match="cannot start a thread to fold"),
    ):
        trainer.commit(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.commit()
    trainer.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_is_not_lost_in_a_destructor(trainer, monkeypatch):
    """Python drops what a destructor raises; files that are closed have one, in Python."""
    steps = Merge.steps

    class Dropped:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def interrupted(self):
        Dropped()
        yield from steps(self)

    trainer.commit(2)
    monkeypatch.setattr(Merge, "steps", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.store.fold()
    monkeypatch.undo()
    assert trainer.store.info().folded
    trainer.commit()
    trainer.check()
