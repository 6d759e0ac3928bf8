"""Readers that follow a writer, and readers that stay: what a refresh, commit and manifest cost.

Costs are counted: files opened, ids gone through, names in a manifest. Time is not looked at.
"""

import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch
from tests.pairs import pairs
from tierstore._disk.base import Base
from tierstore._disk.compressed import CompressedRecords
from tierstore._disk.delta import Delta
from tierstore._disk.generation import Generation
from tierstore._store.compaction import Folder
from tierstore._store.locking import WriterLock
from tierstore._store.reading import Reading
from tierstore._store.versions import History
from tierstore._tiers import host
from tierstore.budget import Budget
from tierstore.errors import CorruptRowError, CorruptStoreError, StoreIOError

ROWS, DIM, BATCH = 600, 8, 30
NONE = Budget(host=0)
EVERY = np.arange(ROWS)
BACKENDS = {
    "memmap": {},
    "zarr": {"backend": "zarr"},
    "zstd": {"backend": "zarr", "compression": "zstd", "chunk_rows": 16},
}

pytestmark = pytest.mark.slow("zarr")
"""Its chunks are plain files, as memmap's one; those of zstd are compressed."""


@pytest.fixture
def root():
    with scratch() as path:
        yield path


class Trainer:
    """A store of equal tables, what they hold, and what they held at each version."""

    def __init__(self, path, tables=1, *, rows=ROWS, batch=BATCH, **spec):
        self.path, self.rows, self.batch = Path(path), rows, batch
        self.rng = np.random.default_rng(11)
        self.truth = self.rng.standard_normal((tables, rows, DIM)).astype(np.float32)
        self.names = [f"t{number}" for number in range(tables)]
        specs = {
            name: tierstore.TableSpec(rows, DIM, init=tierstore.from_array(truth), **spec)
            for name, truth in zip(self.names, self.truth, strict=True)
        }
        self.store = tierstore.create(path, specs, budget=NONE)
        self.truths = {1: self.truth.copy()}

    def commit(self, tables=None, **options):
        for number in range(len(self.names)) if tables is None else tables:
            ids = self.rng.permutation(self.rows)[: self.batch]
            self.truth[number, ids] = self.rng.standard_normal((ids.size, DIM))
            self.store[self.names[number]].write(ids, self.truth[number, ids])
        version = self.store.commit(**options)
        self.truths[version] = self.truth.copy()
        return version

    def check(self, store):
        """Compare every row that a store shows with what its version held."""
        for name, truth in zip(self.names, self.truths[store.version], strict=True):
            assert np.array_equal(store[name].read(np.arange(self.rows)), truth), store.version

    def forget_versions(self, keep):
        self.truths = {version: self.truths[version] for version in keep}

    def deltas(self, name="t0"):
        return len(inside.disk(self.store[name]).deltas)

    def files(self):
        return len(list(self.path.rglob("delta-*")))

    def disk_bytes(self):
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def floor(self):
        return inside.manifest(self.store).floor

    def newest_manifest(self):
        return max(self.path.glob("manifest-*")).read_text()


@contextmanager
def counted(owner, name):
    """Count the calls of a method, by what comes first."""
    calls, method = [], getattr(owner, name)

    def counting(self, *given, **options):
        calls.append(given)
        return method(self, *given, **options)

    with mock.patch.object(owner, name, counting):
        yield calls


@contextmanager
def deltas_opened():
    """Collect the deltas that are opened, with the rows they hold."""
    opened, init = [], Delta.__init__

    def noting(self, directory, info, **options):
        opened.append(info)
        init(self, directory, info, **options)

    with mock.patch.object(Delta, "__init__", noting):
        yield opened


# Refresh


@pytest.mark.variants(1, 1)
@pairs(together=1, kind=list(BACKENDS), host_rows=[0, 50, ROWS])
def test_a_refresh_costs_what_changed(root, monkeypatch, kind, host_rows):
    """Open files are never opened again, regardless of the number of deltas."""
    monkeypatch.setattr("tierstore._store.compaction._MOST_DELTAS", 16)
    trainer = Trainer(root / "s", 2, **BACKENDS[kind])
    with tierstore.open(trainer.path, budget=Budget(host_rows=host_rows)) as reader:
        for number in range(36):
            trainer.commit(tables=[number % 2])
            named = {each.info.name for t in reader.values() for each in inside.disk(t).deltas}
            with (
                deltas_opened() as opened,
                mock.patch.object(Base, "open", side_effect=AssertionError("opened again")),
            ):
                assert reader.refresh()
            assert not named & {each.name for each in opened}
            assert len(opened) <= 3, number
            trainer.check(reader)
        assert reader.verify().ok
    trainer.store.close()


@pytest.mark.variants(1, 1)
@pairs(tables=[1, 3], renewed=[1, 4 * DIM * 7, 1 << 20])
def test_a_refresh_reads_what_changed_and_no_more(root, monkeypatch, tables, renewed):
    """Rows in memory stay, those that changed are read again, more of them than that are missed."""
    monkeypatch.setattr(host, "_RENEWED_BYTES", renewed)
    trainer = Trainer(root / "s", tables)
    with tierstore.open(trainer.path, budget=Budget(host_rows=ROWS)) as reader:

        def read_below():
            return sum(inside.disk(table).stats.requested for table in reader.values())

        trainer.check(reader)
        for _ in range(60):
            trainer.commit()
            before = read_below()
            reader.refresh()
            again = read_below() - before
            assert again == min(BATCH * tables, max(1, renewed // (4 * DIM)))
            trainer.check(reader)
            assert read_below() - before == BATCH * tables
    trainer.store.close()


def test_a_damaged_row_that_changed_is_told_to_who_reads_it(root, monkeypatch):
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=Budget(host_rows=ROWS)) as reader:
        trainer.check(reader)
        trainer.commit()
        with monkeypatch.context() as patch:

            def damaged(self, positions, *others):
                raise CorruptRowError(f"row {self.ids[positions][0]} is damaged")

            patch.setattr(Delta, "read", damaged)
            patch.setattr(Delta, "deliver", damaged)
            assert reader.refresh()
            with pytest.raises(CorruptRowError):
                reader["t0"].read(EVERY)
        trainer.check(reader)
    trainer.store.close()


def test_a_refresh_looks_for_manifests_once(root):
    """No fold can have started where an older version is protected; opening looks twice."""
    trainer = Trainer(root / "s")
    with (
        counted(History, "newest") as looks,
        tierstore.open(trainer.path, budget=Budget(host_rows=50)) as reader,
    ):
        assert len(looks) == 2
        for _ in range(3):
            trainer.commit()
            looks.clear()
            assert reader.refresh()
            assert len(looks) == 1
        looks.clear()
        reader.restore(reader.version - 1)
        reader.refresh()
        trainer.check(reader)
    trainer.store.close()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param((History, "_load"), id="the manifest"),
        pytest.param((Delta, "__init__"), id="a delta"),
        pytest.param((Delta, "deliver"), id="records"),
    ],
)
def test_reads_go_on_while_a_refresh_reads(root, step):
    """Those of another thread show the version before, until the tables switch."""
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=Budget(host_rows=50)) as reader:
        trainer.check(reader)
        trainer.commit()
        beside, owner, name = [], *step
        method = getattr(owner, name)

        def slow(*given, **options):
            if not beside:
                beside.append(threading.Thread(target=trainer.check, args=[reader]))
                beside[0].start()
                beside[0].join(20)
                assert not beside[0].is_alive()
            return method(*given, **options)

        with mock.patch.object(owner, name, slow), excepthook_raises():
            assert reader.refresh()
        assert beside and reader.version == trainer.store.version
        trainer.check(reader)
    trainer.store.close()


@contextmanager
def excepthook_raises():
    """Raise what a thread of the body raised."""
    raised = []
    with mock.patch("threading.excepthook", raised.append):
        yield
    for each in raised:
        raise each.exc_value


@pytest.mark.variants(1, 2)
@pairs(backend=list(BACKENDS), host_rows=[20, 100, ROWS], commits=[1, 3])
def test_rows_that_come_and_go_while_a_refresh_reads(root, backend, host_rows, commits):
    """What was read is for rows that are still there; those that came since are old, and go."""
    trainer, prepare = Trainer(root / "s", 2, **BACKENDS[backend]), Reading.prepare

    def prepared(state, version):
        opening = prepare(state, version)
        for table in reader.values():
            table.read(trainer.rng.permutation(ROWS)[:60])
        return opening

    with (
        tierstore.open(trainer.path, budget=Budget(host_rows=host_rows)) as reader,
        mock.patch.object(Reading, "prepare", prepared),
    ):
        for number in range(12):
            trainer.check(reader)
            for _ in range(commits):
                trainer.commit(tables=[number % 2] if commits == 1 else None)
            assert reader.refresh()
            trainer.check(reader)
    trainer.store.close()


def test_a_refresh_that_another_overtakes_begins_again(root):
    trainer, prepare, openings = Trainer(root / "s", 2), Reading.prepare, []

    def overtaken(state, version):
        openings.append(prepare(state, version))
        if len(openings) == 1:
            trainer.commit()
            assert reader.refresh()
        return openings[-1]

    with tierstore.open(trainer.path, budget=Budget(host_rows=50)) as reader:
        trainer.check(reader)
        trainer.commit()
        with mock.patch.object(Reading, "prepare", overtaken):
            assert not reader.refresh()  # the other did
        assert [each is None for each in openings] == [False, False, True]
        assert reader.version == trainer.store.version == 3
        trainer.check(reader)
        assert inside.state(reader).reader.held == {3}
    trainer.store.close()


def test_a_refresh_prepared_before_another_failed_begins_again(root):
    """The one that fails gives up the versions that it did not switch to."""
    trainer, prepare, openings = Trainer(root / "s"), Reading.prepare, []

    def failed_beside(state, version):
        openings.append(prepare(state, version))
        if len(openings) == 1:
            trainer.commit()
            with (
                mock.patch.object(Delta, "open", side_effect=StoreIOError("no more")),
                pytest.raises(StoreIOError, match="no more"),
            ):
                prepare(state, version)
        return openings[-1]

    with tierstore.open(trainer.path, budget=NONE) as reader:
        trainer.commit()
        with mock.patch.object(Reading, "prepare", failed_beside):
            assert reader.refresh()
        assert len(openings) == 2 and reader.version == trainer.store.version == 3
        trainer.check(reader)
    trainer.store.close()


def test_a_delta_with_rows_that_no_table_has_leaves_what_was_open(root):
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=Budget(host_rows=50)) as reader:
        trainer.check(reader)
        trainer.commit()
        with (
            mock.patch.object(Delta, "span", (0, ROWS)),
            pytest.raises(CorruptStoreError, match=f"outside the table's 0..{ROWS - 1}"),
        ):
            reader.refresh()
        trainer.check(reader)
        assert reader.version == 1 and reader.refresh()
        trainer.check(reader)
    trainer.store.close()


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_refresh_now_and_then_beside_folds_and_a_writer_that_goes_back(root, kind):
    trainer = Trainer(root / "s", **BACKENDS[kind])
    rng = np.random.default_rng(3)
    with (
        mock.patch("tierstore._store.compaction._MOST_DELTAS", 3),
        tierstore.open(trainer.path, budget=Budget(host_rows=100)) as reader,
    ):
        for _ in range(70):
            trainer.commit()
            if rng.random() < 0.3:
                reader.refresh()
            trainer.check(reader)
            if rng.random() < 0.05:
                back = min(each.version for each in trainer.store.versions())
                trainer.store.close()
                trainer.store = tierstore.open(
                    trainer.path, "r+", version=back, discard_newer=True, budget=NONE
                )
                trainer.truth = trainer.truths[back].copy()
                reader.refresh()
                trainer.check(reader)
    trainer.store.close()


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_decoded_chunks_go_where_a_fold_has_replaced_them(root, monkeypatch, protected):
    if not protected:
        monkeypatch.setattr(CompressedRecords, "forget", lambda records: None)
    trainer = Trainer(root / "s", rows=100, **BACKENDS["zstd"])
    with tierstore.open(trainer.path, budget=NONE) as reader:
        trainer.check(reader)
        trainer.commit()
        reader.refresh()
        trainer.check(reader)
        trainer.store.fold()
        reader.refresh()
        with nullcontext() if protected else pytest.raises(CorruptRowError):
            trainer.check(reader)
    trainer.store.close()


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative control"])
def test_no_fold_goes_past_a_reader(root, monkeypatch, protected):
    """A reader of an older version sees newer rows in the base where its lock does not hold."""
    if not protected:
        monkeypatch.setattr(WriterLock, "readers", lambda *given: [])
        monkeypatch.setattr(WriterLock, "without_readers_before", lambda *given: nullcontext(True))
    monkeypatch.setattr("tierstore._store.compaction._MOST_DELTAS", 2)
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=NONE) as reader:
        for _ in range(30):
            trainer.commit()
        trainer.store.close()
        with nullcontext() if protected else pytest.raises(AssertionError):
            trainer.check(reader)


def test_a_lease_does_not_outlive_a_refresh(root):
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=Budget(host_rows=50)) as reader:
        lease = reader["t0"].lease(np.arange(9))
        trainer.commit()
        reader.refresh()
        with pytest.raises(tierstore.errors.ClosedError):
            lease.read("weight")
        lease.release()
        trainer.check(reader)
    trainer.store.close()


def test_a_refresh_that_fails_leaves_what_was_open(root):
    trainer = Trainer(root / "s", 2)
    with tierstore.open(trainer.path, budget=Budget(host_rows=50)) as reader:
        trainer.check(reader)
        trainer.commit()
        with (
            mock.patch.object(Delta, "open", side_effect=StoreIOError("no more")),
            pytest.raises(StoreIOError, match="no more"),
        ):
            reader.refresh()
        trainer.check(reader)
        trainer.commit()
        reader.refresh()
        trainer.check(reader)
        assert reader.version == trainer.store.version
    trainer.store.close()


def test_one_that_breaks_off_in_the_middle_closes_the_reader(root):
    trainer = Trainer(root / "s", 2)
    with tierstore.open(trainer.path, budget=NONE) as reader:
        trainer.commit()
        with (
            mock.patch("tierstore._disk.index.Entries.point", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            reader.refresh()
        assert inside.door(reader).closed
    trainer.store.close()


# Readers that stay, and versions that are kept


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kind", BACKENDS)
def test_beside_a_reader_that_stays_deltas_stay_few(root, monkeypatch, kind):
    monkeypatch.setattr("tierstore._store.compaction._MOST_DELTAS", 16)
    trainer = Trainer(root / "s", **BACKENDS[kind])
    with tierstore.open(trainer.path, budget=NONE) as stays:
        for number in range(160):
            trainer.commit()
            assert trainer.deltas() <= 5 * 17, number
            if number % 40 == 39:
                trainer.check(stays)
                for version in trainer.store.versions():
                    with tierstore.open(trainer.path, version=version.version, budget=NONE) as one:
                        trainer.check(one)
        trainer.store.close()
        trainer.store = tierstore.open(trainer.path, "r+", budget=NONE)
        assert trainer.deltas() <= 5 * 17  # fewer once the thread that joins them has caught up
        trainer.check(trainer.store)
        assert trainer.store.verify().ok
        trainer.check(stays)
    trainer.store.fold()
    assert trainer.files() == 0
    trainer.check(trainer.store)
    trainer.store.close()


def test_without_compaction_they_pile_up(root, monkeypatch):
    """The negative control of the test before."""
    monkeypatch.setattr(Folder, "_groups", lambda *given: {})
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=NONE):
        for _ in range(160):
            trainer.commit()
        assert trainer.deltas() == 160
    trainer.store.close()


@pytest.mark.slow
def test_a_reader_that_follows_lets_folds_go_on(root):
    trainer = Trainer(root / "s")
    with tierstore.open(trainer.path, budget=NONE) as reader:
        floors = set()
        for _ in range(400):
            trainer.commit()
            reader.refresh()
            floors.add(trainer.floor())
        trainer.check(reader)
        assert len(floors) >= 3
        with counted(Folder, "_groups") as compactions:
            trainer.store.fold()
        assert trainer.files() == 0 and not compactions
        trainer.check(reader)
    trainer.store.close()


@pytest.mark.filterwarnings("ignore:more than 100 versions")  # of those unconfirmed
@pytest.mark.parametrize("options", [{"confirm": False}, {}], ids=["unconfirmed", "kept"])
@pytest.mark.parametrize(
    ("most", "count"),
    [pytest.param(16, 320, marks=pytest.mark.slow), pytest.param(64, 700, marks=pytest.mark.slow)],
)
@pytest.mark.nightly("64")
def test_versions_that_wait_cost_no_more_each(root, monkeypatch, options, most, count):
    """Many versions that can all be opened: each of their manifests is small."""
    monkeypatch.setattr("tierstore._store.compaction._MOST_DELTAS", most)
    trainer = Trainer(root / "s", rows=100, batch=1)
    if not options:
        trainer.store.close()
        trainer.store = tierstore.open(trainer.path, "r+", keep=5000, budget=NONE)
    sizes = []
    for number in range(count):
        trainer.commit(**options)
        sizes.append(len(trainer.newest_manifest()))
        assert trainer.deltas() <= 5 * (most + 1), number
    delta = sizes[1] - sizes[0]
    assert max(sizes) <= sizes[0] + 1.2 * delta * 5 * (most + 1)  # it names deltas, not versions
    assert len(trainer.store.versions()) == count + 1
    for version in [*range(1, count, 37), count, count + 1]:
        with tierstore.open(trainer.path, version=version, budget=NONE) as reader:
            trainer.check(reader)
    trainer.store.close()


@pytest.mark.parametrize("tables", [4, 400])
@pytest.mark.nightly("400")
def test_four_tables_and_four_hundred(root, tables):
    """Mappings are what runs out first: 65,530 of them are all that Linux gives a process."""
    commits = 24 if tables == 400 else 150
    trainer = Trainer(root / "s", tables, rows=20, batch=2)
    with tierstore.open(trainer.path, budget=NONE) as stays:
        opened, most = mappings(), 0
        for _ in range(commits):
            trainer.commit()
            trainer.forget_versions([1, trainer.store.version])
            most = max(most, mappings())
        assert most - opened <= min(8192, 64 * tables) * 4
        trainer.check(stays)
    trainer.check(trainer.store)
    trainer.store.close()


def mappings():
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
def test_a_commit_goes_through_no_deltas_where_nothing_is_due(root):
    """Whether to fold or compact is told from counts that each table keeps."""
    trainer = Trainer(root / "s", 30, rows=20, batch=2)
    for _ in range(30):
        trainer.commit()
    with mock.patch("tierstore._store.compaction._between", side_effect=AssertionError("looked")):
        for number in range(20):
            trainer.commit(tables=[number])
    trainer.store.close()


def test_a_table_that_is_written_whole_again_and_again(root):
    """Deltas that hold every row several times over become one, long before there are 64."""
    with mock.patch("tierstore._store.compaction._LEAST_BYTES", 1 << 10):
        trainer = Trainer(root / "s", batch=ROWS)
        base = trainer.disk_bytes()
        with tierstore.open(trainer.path, budget=NONE) as stays:
            for number in range(120):
                trainer.commit()
                assert trainer.disk_bytes() <= 24 * base, number
            trainer.check(stays)
        trainer.check(trainer.store)
        trainer.store.close()


def test_a_refresh_while_another_thread_opens_keys(root, monkeypatch):
    """What it opens are the keys of the version before, and not taken for those of the new one."""
    keys, opened = np.arange(100, 150), Generation.keys
    with tierstore.create(root / "keys", {"t": tierstore.TableSpec(50, 2)}) as store:
        store.set_keys("t", keys)
        with tierstore.open(root / "keys") as reader:

            def slow(*given):
                found = opened(*given)
                monkeypatch.undo()
                store.set_keys("t", keys[::-1])
                assert reader.refresh()
                return found

            monkeypatch.setattr(Generation, "keys", slow)
            table = reader["t"]
            assert table.lookup(keys[:3]).tolist() == [0, 1, 2]  # as it was when this began
            assert table.lookup(keys[:3]).tolist() == [49, 48, 47]
            assert table.keys is table.keys


def test_a_version_whose_manifest_is_replaced_while_all_are_read(root, monkeypatch):
    with tierstore.create(root / "kept", {"t": tierstore.TableSpec(50, 2)}) as store:
        load, names = History._load, []

        def replaced(history, seq):
            if not names:
                names.append("best")
                store.keep(store.version, "best")
            return load(history, seq)

        monkeypatch.setattr(History, "_load", replaced)
        found = History(inside.state(store).directory, store.uuid).version(store.version)
        assert list(found.names) == names == ["best"]
