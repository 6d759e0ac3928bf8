"""Stores with damage: intact data can be read, written, saved and repaired."""

from __future__ import annotations

import copy
import csv
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.sample import Sample, sample
from tests.durability.test_corruption import damaged, flipped
from tests.oracle import values
from tierstore import _io
from tierstore._disk.generation import initial_records
from tierstore._io.file import File
from tierstore._store.repair import RepairReport
from tierstore._store.state import State
from tierstore.budget import Budget
from tierstore.errors import (
    CorruptRowError,
    CorruptStoreError,
    ExistsError,
    FormatError,
    InvalidInputError,
    ReadOnlyError,
    StoreIOError,
    TierStoreError,
    VersionError,
)
from tierstore.exporting import export_table

pytestmark = pytest.mark.filterwarnings("ignore::tierstore.errors.FilledRowsWarning")

ROWS, DIM = 300, 4
_NONE = Budget(host=0)


class Two:
    """A store of two tables with five versions, and each version of them in NumPy."""

    def __init__(self, path: Path, seed: int = 1, *, keep: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self.path = path
        state = {name: values(rng, (ROWS, DIM)) for name in ("sound", "hurt")}
        specs = {
            name: tierstore.TableSpec(ROWS, DIM, init=tierstore.from_array(rows))
            for name, rows in state.items()
        }
        self.versions = {1: {name: rows.copy() for name, rows in state.items()}}
        with tierstore.create(path, specs, budget=_NONE, keep=keep) as store:
            for _ in range(4):
                for name, rows in state.items():
                    ids = rng.choice(ROWS, 20, replace=False)
                    rows[ids] = values(rng, (20, DIM))
                    store[name].write(ids, rows[ids])
                version = store.commit(step=7, payload={"model": b"m" * 50})
                self.versions[version] = {name: rows.copy() for name, rows in state.items()}
        self.newest = max(self.versions)
        self.rng = rng

    def delta(self, table: str = "hurt", number: int = -1) -> Path:
        return sorted((self.path / table).rglob("delta-*"))[number]

    def base(self, table: str = "hurt") -> Path:
        return next((self.path / table).rglob("rows.npy"))

    def files(self, under: str = "") -> dict[Path, bytes]:
        found = sorted((self.path / under).rglob("*"))
        return {path: path.read_bytes() for path in found if path.is_file()}

    def only_in_base(self, table: str = "hurt") -> list[int]:
        """Rows that no delta holds."""
        same = (self.versions[1][table] == self.versions[self.newest][table]).all(axis=1)
        return np.flatnonzero(same).tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Two:
    return Two(tmp_path_factory.mktemp("made") / "s")


@pytest.fixture
def two(made: Two, tmp_path: Path) -> Two:
    own = copy.deepcopy(made)
    own.path = shutil.copytree(made.path, tmp_path / "s")
    return own


@pytest.fixture(scope="module")
def every_kind() -> Iterator[Sample]:
    with sample() as made:
        yield made


def contents(store: Sample) -> list[Path]:
    """All files that hold anything."""
    return [path for path in store.files() if path.stat().st_size]


def flip(path: Path, offset: int) -> None:
    path.write_bytes(flipped(8 * offset + 2)(path.read_bytes()))


def hurt_footer(two: Two) -> None:
    flip(two.delta(), -4 + two.delta().stat().st_size)


def hurt_row(two: Two, row: int, table: str = "hurt") -> None:
    flip(two.base(table), 4096 + row * 4 * DIM + 5)


def everything(path: Path, version: int | None = None) -> dict[str, np.ndarray]:
    with tierstore.open(path, version=version, budget=_NONE) as store:
        return {name: table.read(np.arange(table.rows)) for name, table in store.items()}


def listed(path: Path) -> dict[str, dict[int, str]]:
    """What the list says of each row, by table; under -1 how many are unknown."""
    found: dict[str, dict[int, str]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            rows = found.setdefault(line["table"], {})
            if line["outcome"] == "unknown":
                rows[-1] = line["rows"]
                continue
            first, last = int(line["first"]), int(line["last"])
            assert int(line["rows"]) == last + 1 - first > 0
            for row in range(first, last + 1):
                assert row not in rows
                rows[row] = line["outcome"] + line["version"]
    return found


# -- verify


def test_verify_of_a_directory_lists_all_damage(two: Two) -> None:
    """Manifests, deltas, rows, payload and missing files, in one report (F10b)."""
    row = two.only_in_base("sound")[0]
    hurt_footer(two)
    hurt_row(two, row, "sound")
    (two.path / "STORE.json").write_bytes(b"{}")
    payload = max(two.path.glob("payload-*"))
    payload.unlink()
    before = two.files()
    report = tierstore.verify(two.path)
    assert report.version == two.newest and not report.ok
    assert report.rows_checked == 2 * ROWS and report.bad_rows == {"sound": [row]}
    for name in ("STORE.json", two.delta().name, payload.name):
        assert sum(name in each for each in report.bad_files) == 1, name
    assert report.whole == [] and two.files() == before
    named = rf"^version {two.newest} is damaged: 1 row of table 'sound', such as row {row}; "
    with pytest.raises(CorruptStoreError, match=named + r".*; and \d more; .*mend=True"):
        report.raise_if_damaged()


def test_a_report_without_damage_raises_nothing(two: Two) -> None:
    tierstore.verify(two.path).raise_if_damaged()


def test_verify_names_the_versions_that_are_whole(two: Two) -> None:
    assert tierstore.verify(two.path).whole == [two.newest - 1, two.newest]
    hurt_footer(two)
    assert tierstore.verify(two.path).whole == [two.newest - 1]
    assert tierstore.verify(two.path, version=two.newest - 1).ok
    assert not tierstore.verify(two.path, version=two.newest).ok
    with pytest.raises(VersionError, match="there are: 4, 5"):
        tierstore.verify(two.path, version=77)


def test_a_version_that_does_not_show_the_damage_is_whole(two: Two) -> None:
    """A base row that a delta holds too can be read; it still counts as damage."""
    row = next(iter(set(range(ROWS)) - set(two.only_in_base())))
    hurt_row(two, row)
    report = tierstore.verify(two.path)
    assert report.bad_rows["hurt"] == [row] and two.newest in report.whole
    assert everything(two.path)["hurt"].tobytes() == two.versions[two.newest]["hurt"].tobytes()


def test_verify_goes_on_below_a_damaged_manifest(two: Two) -> None:
    newest = max(two.path.glob("manifest-*.json"))
    flip(newest, 100)
    report = tierstore.verify(two.path)
    assert report.version == two.newest - 1 and report.whole == [two.newest - 1]
    assert [newest.name in each for each in report.bad_files] == [True]
    with pytest.raises(FormatError, match=rf"path, version=N\): {two.newest - 1};"):
        tierstore.open(two.path)


@pytest.mark.slow
def test_both_ways_to_verify_agree(every_kind: Sample) -> None:
    rng = random.Random(3)
    for path in contents(every_kind):
        if path.name.startswith(("manifest", "STORE")):
            continue
        with damaged(path, flipped(rng.randrange(8 * path.stat().st_size))):
            found = tierstore.verify(every_kind.path)
            with tierstore.open(every_kind.path, budget=_NONE) as store:
                same = store.verify()
                unopened = set(store.damaged) - set(same.bad_rows)
            bad = {name: rows for name, rows in found.bad_rows.items() if name not in unopened}
            assert (same.ok, same.whole, same.bad_rows) == (found.ok, found.whole, bad), path


# -- one damaged table beside others


def test_a_damaged_table_does_not_close_the_others(two: Two) -> None:
    hurt_footer(two)
    with tierstore.open(two.path, budget=_NONE) as store:
        sound = store["sound"].read(np.arange(ROWS))
        assert sound.tobytes() == two.versions[two.newest]["sound"].tobytes()
        assert store.payload["model"].read() == b"m" * 50
        assert list(store.damaged) == ["hurt"] and list(store) == ["sound", "hurt"]
        with pytest.raises(CorruptStoreError) as caught:
            store["hurt"]
        for part in ("'hurt'", two.delta().name, "tierstore verify", "tierstore repair", "4"):
            assert part in str(caught.value)
        with pytest.raises(CorruptStoreError):
            dict(store)
        with pytest.raises(CorruptStoreError):
            store.save(two.path.with_name("copy"))
        assert not two.path.with_name("copy").exists()


def test_a_store_with_no_whole_table_does_not_open(two: Two) -> None:
    for table in ("sound", "hurt"):
        two.delta(table).unlink()
    with pytest.raises(CorruptStoreError, match="tierstore repair"):
        tierstore.open(two.path)


def test_a_missing_payload_does_not_close_the_tables(two: Two) -> None:
    max(two.path.glob("payload-*")).unlink()
    with tierstore.open(two.path, budget=_NONE) as store:
        assert store["hurt"].read([3]).tobytes() == two.versions[two.newest]["hurt"][3].tobytes()
        with pytest.raises(CorruptStoreError):
            store.payload["model"].read()


def write_on(two: Two) -> None:
    """Commit to the intact table, often enough to remove versions and to fold."""
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        state = two.versions[two.newest]["sound"].copy()
        for step in range(70):
            ids = two.rng.choice(ROWS, 5, replace=False)
            state[ids] = values(two.rng, (5, DIM))
            store["sound"].write(ids, state[ids])
            store.commit(step=step)
    with tierstore.open(two.path, budget=_NONE) as store:
        assert store["sound"].read(np.arange(ROWS)).tobytes() == state.tobytes()


def test_a_writer_keeps_what_a_damaged_table_may_need(two: Two) -> None:
    """Files, older versions, and what the newest manifest says of the table."""
    whole, before = two.delta().read_bytes(), two.files("hurt")
    older = two.versions[two.newest - 1]["hurt"]
    delta = two.delta()
    hurt_footer(two)
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        with pytest.raises(CorruptStoreError, match="tierstore repair"):
            store.fold()
        with pytest.raises(ExistsError):
            store.create_table("hurt", tierstore.TableSpec(3, 4))
    write_on(two)
    assert {**two.files("hurt"), delta: whole} == before
    assert everything(two.path, two.newest - 1)["hurt"].tobytes() == older.tobytes()
    delta.write_bytes(whole)
    truth = two.versions[two.newest]["hurt"]
    assert everything(two.path)["hurt"].tobytes() == truth.tobytes()


def test_without_that_care_older_versions_go(two: Two) -> None:
    """A negative control."""
    hurt_footer(two)
    sweep = State.sweep

    def careless(self: State, keep: int) -> None:
        damaged, self.damaged = self.damaged, {}
        sweep(self, keep)
        self.damaged = damaged

    with mock.patch.object(State, "sweep", careless):
        write_on(two)
    with pytest.raises(VersionError):
        tierstore.open(two.path, version=two.newest - 1)


def test_a_damaged_table_can_be_replaced(two: Two) -> None:
    hurt_footer(two)
    rows = values(two.rng, (ROWS, DIM))
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        spec = tierstore.TableSpec(ROWS, DIM)
        table = store.replace_table("hurt", spec, blocks=iter([rows.view(np.uint8)]))
        assert not store.damaged and store["hurt"] is table
        table.write([1], rows[2:3])
        store.commit()
        store.fold()
        assert store.verify().ok
    rows[1] = rows[2]
    assert everything(two.path)["hurt"].tobytes() == rows.tobytes()


def test_newer_versions_do_not_go_for_one_that_is_damaged(two: Two) -> None:
    flip(two.delta(number=-2), two.delta(number=-2).stat().st_size - 20)
    before = two.files()
    with pytest.raises(CorruptStoreError, match="newer ones were kept"):
        tierstore.open(two.path, "r+", version=two.newest - 1, discard_newer=True)
    after = {path: data for path, data in two.files().items() if path.name != "LOCK"}
    assert after == {path: data for path, data in before.items() if path.name != "LOCK"}


def test_a_store_is_not_restored_to_a_version_that_is_damaged(two: Two) -> None:
    flip(two.delta(number=-2), two.delta(number=-2).stat().st_size - 20)
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        with pytest.raises(
            CorruptStoreError, match=f"version {two.newest - 1} is damaged, nothing"
        ):
            store.restore(two.newest - 1)
        assert store.version == two.newest
    truth = two.versions[two.newest]["hurt"]
    assert everything(two.path)["hurt"].tobytes() == truth.tobytes()


def test_a_reader_stays_where_the_newest_version_is_damaged(two: Two) -> None:
    with tierstore.open(two.path, budget=_NONE) as reader:
        with tierstore.open(two.path, "r+", budget=_NONE) as store:
            store["hurt"].write([5], values(two.rng, (1, DIM)))
            store.commit()
        hurt_footer(two)
        with pytest.raises(CorruptStoreError, match="'hurt' is damaged"):
            reader.refresh()
        assert reader.version == two.newest and not reader.damaged
        seen = reader["hurt"].read(np.arange(ROWS))
        assert seen.tobytes() == two.versions[two.newest]["hurt"].tobytes()


# -- messages, save and export


def test_errors_name_the_cure(two: Two) -> None:
    row = two.only_in_base()[0]
    hurt_row(two, row)
    with (
        tierstore.open(two.path, budget=_NONE) as store,
        pytest.raises(CorruptRowError, match=r"write all fields.*commit.*tierstore repair"),
    ):
        store["hurt"].read([row])


def test_save_skips_damage_when_asked(two: Two, tmp_path: Path) -> None:
    row = two.only_in_base("sound")[3]
    hurt_row(two, row, "sound")
    hurt_footer(two)
    max(two.path.glob("payload-*")).unlink()
    with tierstore.open(two.path, budget=_NONE) as store:
        with pytest.raises(InvalidInputError, match="'skip'"):
            store.save(tmp_path / "copy", damaged="both")
        skipped = store.save(tmp_path / "copy", damaged="skip")
    assert (skipped.rows, skipped.tables) == ({"sound": [row]}, ["hurt"])
    assert (skipped.keys, skipped.payload) == ([], ["model"])
    expected = two.versions[two.newest]["sound"].copy()
    expected[row] = 0
    copied = everything(tmp_path / "copy")
    assert list(copied) == ["sound"] and copied["sound"].tobytes() == expected.tobytes()
    assert tierstore.verify(tmp_path / "copy").ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_skips_damage_when_asked(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(4)
    rows = values(rng, (100, 8), dtype)
    spec = tierstore.TableSpec(100, 8, dtype, init=tierstore.from_array(rows))
    tierstore.create(tmp_path / "s", {"t": spec}).close()
    base = next((tmp_path / "s").rglob("rows.npy"))
    for row in (0, 13, 99):
        flip(base, 4096 + row * spec.layout.record_bytes)
    with tierstore.open(tmp_path / "s", budget=_NONE) as store:
        with pytest.raises(CorruptRowError):
            export_table(store["t"], tmp_path / "rows.npy", dtype="float32")
        done = export_table(
            store["t"], tmp_path / "rows.npy", dtype="float32", rows=(5, 100), damaged="skip"
        )
    rows = rows.astype("f4")
    rows[[0, 13, 99]] = np.nan
    assert done.skipped == [13, 99]
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows[5:])


# -- mending


@pytest.mark.parametrize("where", ["base", "delta"])
@pytest.mark.parametrize("slots", [ROWS, 100], ids=["direct", "cached"])
def test_a_row_is_mended_from_the_host_tier(two: Two, slots: int, where: str) -> None:
    with tierstore.open(two.path, "r+", budget=Budget(host_rows=slots)) as store:
        row = two.only_in_base()[0]
        if where == "delta":
            row = int(inside.disk(store["hurt"]).deltas[-1].ids[2])
        store["hurt"].read([row])
        hurt_row(two, row) if where == "base" else flip(two.delta(), 2 * 4 * DIM)
        assert store.verify().bad_rows["hurt"] == [row]
        report = store.verify(mend=True)
        assert report.mended == {"hurt": [row]} and store.uncommitted_rows() == 1
        store.commit()
        store.fold()
        assert store.verify().ok
    truth = two.versions[two.newest]["hurt"]
    assert everything(two.path)["hurt"].tobytes() == truth.tobytes()


def test_without_mending_a_fold_leaves_the_damage(two: Two) -> None:
    """A negative control."""
    row = two.only_in_base()[0]
    with tierstore.open(two.path, "r+", budget=Budget(host_rows=ROWS)) as store:
        store["hurt"].read([row])
        hurt_row(two, row)
        store.commit()
        store.fold()
        assert store.verify().bad_rows["hurt"] == [row]


def folded_with_a_delta_left(two: Two) -> int:
    """Fold behind an older version that is kept; return a row of its newest delta."""
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        store._folder.fold(two.newest - 1)
        ids = inside.state(store).history.versions()[two.newest - 1].tables["hurt"].deltas
        assert ids and not inside.disk(store["hurt"]).deltas[:-1]
    before, after = two.versions[two.newest - 2]["hurt"], two.versions[two.newest - 1]["hurt"]
    newest = two.versions[two.newest]["hurt"]
    changed = (before != after).any(axis=1) & (after == newest).all(axis=1)
    return int(np.flatnonzero(changed)[0])


def test_a_row_is_mended_from_a_delta_that_an_older_version_names(two: Two) -> None:
    row = folded_with_a_delta_left(two)
    hurt_row(two, row)
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        report = store.verify(mend=True)
        assert report.bad_rows["hurt"] == [row] and report.mended == {"hurt": [row]}
        store.commit()
        store.fold()
        assert store.verify().ok
    truth = two.versions[two.newest]["hurt"]
    assert everything(two.path)["hurt"].tobytes() == truth.tobytes()


def test_mending_never_takes_an_older_image_or_hides_a_newer_one(two: Two) -> None:
    rows = two.only_in_base()[:2]
    written = values(two.rng, (1, DIM))
    for row in rows:
        hurt_row(two, row)
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        store["hurt"].write(rows[:1], written)
        report = store.verify(mend=True)
        assert report.mended == {"hurt": rows[:1]}
        store.commit()
        assert store["hurt"].read(rows[:1]).tobytes() == written.tobytes()
        with pytest.raises(CorruptRowError):
            store["hurt"].read(rows[1:])
    with tierstore.open(two.path) as reader, pytest.raises(ReadOnlyError):
        reader.verify(mend=True)


# -- repair


def store_of(path: Path, rows: Any) -> tierstore.Store:
    spec = tierstore.TableSpec(*rows.shape, init=tierstore.from_array(rows))
    return tierstore.create(path, {"t": spec}, budget=_NONE, keep=9)


def test_an_older_image_is_of_a_version_that_the_copied_one_descends_from(tmp_path: Path) -> None:
    """What was committed after a version to which the store went back is not its past."""
    rows = values(np.random.default_rng(5), (50, DIM))
    with store_of(tmp_path / "s", rows) as store:
        store["t"].write([7], rows[8:9])
        second = store.commit()
        store["t"].write([7], rows[9:10])
        store.commit()
        store.restore(second)
        names = {each.name for each in (tmp_path / "s").rglob("delta-*")}
    first, *_ = sorted((tmp_path / "s").rglob("delta-*"))
    assert len(names) == 2
    flip(first, 2)  # of the row, in the delta of the second version
    report = tierstore.repair(tmp_path / "s", tmp_path / "copy")
    assert (report.tables["t"].older, report.tables["t"].filled) == (1, 0)
    assert everything(tmp_path / "copy")["t"].tobytes() == rows.tobytes()


def test_rows_that_a_table_grew_by_have_no_older_image(tmp_path: Path) -> None:
    rows = values(np.random.default_rng(5), (50, DIM))
    with store_of(tmp_path / "s", rows) as store:
        store.grow("t", 60, init=tierstore.normal(seed=1))
        grown = store["t"].read(np.arange(60))
    newest = max((tmp_path / "s").glob("t/*/rows.npy"), key=lambda path: path.stat().st_size)
    for row in (3, 55):
        flip(newest, 4096 + row * 4 * DIM)
    report = tierstore.repair(tmp_path / "s", tmp_path / "copy")
    assert (report.tables["t"].older, report.tables["t"].filled) == (1, 1)
    grown[55] = 0
    assert everything(tmp_path / "copy")["t"].tobytes() == grown.tobytes()


def test_an_initializer_fills_a_row_of_any_block(tmp_path: Path) -> None:
    rows = values(np.random.default_rng(5), (9000, DIM))
    with store_of(tmp_path / "s", rows):
        pass
    (base,) = (tmp_path / "s").glob("t/*/rows.npy")
    lost = [1, 4097, 8999]
    for row in lost:
        flip(base, 4096 + row * 4 * DIM)
    report = tierstore.repair(tmp_path / "s", tmp_path / "copy", fill=tierstore.normal(seed=5))
    assert report.tables["t"].filled == 3
    found = everything(tmp_path / "copy")["t"]
    assert np.unique(np.abs(found[lost])).size == 3 * DIM and np.abs(found[lost]).max() < 9
    found[lost] = rows[lost]
    assert found.tobytes() == rows.tobytes()


def test_what_is_left_out_is_not_complete(tmp_path: Path) -> None:
    rows = values(np.random.default_rng(5), (50, DIM))
    with store_of(tmp_path / "s", rows) as store:
        store.commit(payload={"model": b"m" * 99})
    assert tierstore.repair(tmp_path / "s", tmp_path / "whole").complete
    (payload,) = (tmp_path / "s").glob("payload-*")
    flip(payload, 3)
    report = tierstore.repair(tmp_path / "s", tmp_path / "copy")
    assert [each.partition(":")[0] for each in report.left_out] == ["payload model"]
    assert not report.complete
    assert everything(tmp_path / "copy")["t"].tobytes() == rows.tobytes()


def test_an_identity_of_another_store_is_damage(tmp_path: Path) -> None:
    rows = values(np.random.default_rng(5), (50, DIM))
    for name in ("s", "other"):
        store_of(tmp_path / name, rows).close()
    shutil.copy(tmp_path / "other/STORE.json", tmp_path / "s/STORE.json")
    report = tierstore.repair(tmp_path / "s", tmp_path / "copy")
    assert any("belongs to another store" in each for each in report.left_out)
    assert not report.complete and not tierstore.verify(tmp_path / "s").ok
    assert everything(tmp_path / "copy")["t"].tobytes() == rows.tobytes()


def test_mending_does_not_take_the_row_of_the_version_before(tmp_path: Path) -> None:
    rows = values(np.random.default_rng(5), (50, DIM))
    with store_of(tmp_path / "s", rows) as store:
        store["t"].write([7], rows[8:9])
        store.commit()
    (delta,) = (tmp_path / "s").rglob("delta-*")
    flip(delta, 2)
    with tierstore.open(tmp_path / "s", "r+", budget=_NONE) as store:
        report = store.verify(mend=True)
        assert report.bad_rows == {"t": [7]} and report.mended in ({}, {"t": []})
        with pytest.raises(CorruptRowError):
            store["t"].read([7])


def check_repaired(report: RepairReport, dest: Path, versions: dict[int, dict]) -> None:
    """Each row is that of the version, or listed: filled, or as it was in the version named."""
    assert tierstore.verify(dest).ok
    found, told = everything(dest), listed(report.listed)
    for name, truth in versions[report.version].items():
        rows, said = found[name], dict(told.get(name, {}))
        unknown = int(said.pop(-1, 0))
        counts = report.tables[name]
        outcomes = [outcome[:5] for outcome in said.values()]
        assert (counts.older, counts.filled) == (outcomes.count("older"), outcomes.count("fille"))
        assert counts.unknown == unknown
        other = {row for row in range(len(truth)) if rows[row].tobytes() != truth[row].tobytes()}
        assert len(other - set(said)) <= unknown
        for row, outcome in said.items():
            version = int(outcome[5:]) if outcome.startswith("older") else 0
            if version in versions:
                assert rows[row].tobytes() == versions[version][name][row].tobytes()


def test_repair_of_a_row_in_the_base(two: Two, tmp_path: Path) -> None:
    row = two.only_in_base()[0]
    hurt_row(two, row)
    before = two.files()
    report = tierstore.repair(two.path, tmp_path / "whole")
    assert two.files() == before
    check_repaired(report, tmp_path / "whole", two.versions)
    assert listed(report.listed) == {"hurt": {row: "filled"}} and not report.complete
    assert not everything(tmp_path / "whole")["hurt"][row].any()
    with tierstore.open(tmp_path / "whole") as store, tierstore.open(two.path) as source:
        assert store.parent == (source.uuid, two.newest) and store.step == 7
        assert store.payload["model"].read() == b"m" * 50


def test_repair_of_a_whole_store(two: Two, tmp_path: Path) -> None:
    report = tierstore.repair(two.path, tmp_path / "whole")
    assert report.complete and listed(report.listed) == {}
    check_repaired(report, tmp_path / "whole", two.versions)


@pytest.mark.variants(3)
@pytest.mark.parametrize(
    "cut", ["footer", "version in footer", "id", "sum", "record", "half", "gone"]
)
def test_repair_searches_damaged_deltas(two: Two, tmp_path: Path, cut: str) -> None:
    delta, size, width = two.delta(), two.delta().stat().st_size, 4 * DIM
    offsets = {
        "footer": size - 3,
        "version in footer": size - 40,
        "id": 20 * width + 8 * 4,
        "sum": 20 * (width + 8) + 4 * 4,
        "record": 4 * width,
    }
    if cut == "half":
        delta.write_bytes(delta.read_bytes()[: size // 2])
    elif cut == "gone":
        delta.unlink()
    else:
        flip(delta, offsets[cut])
    report = tierstore.repair(two.path, tmp_path / "whole")
    check_repaired(report, tmp_path / "whole", two.versions)
    counts = report.tables["hurt"]
    assert report.tables["sound"].older == report.tables["sound"].unknown == 0
    if "footer" in cut:
        assert report.complete
    elif cut == "record":
        assert (counts.older, counts.unknown) == (1, 0)
    elif cut in ("half", "gone"):
        assert counts.unknown == 20
    else:
        assert counts.unknown == 1 and counts.older <= 1


@pytest.mark.parametrize("cut", ["footer", "id", "sum"])
def test_repair_searches_damaged_runs(
    two: Two, tmp_path: Path, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that ascend by one, whose ids nothing but a check reads."""
    monkeypatch.setattr("tierstore._disk.footer._RUN_ROWS", 2)
    rows = np.arange(70, 90)
    with tierstore.open(two.path, mode="r+", budget=_NONE) as store:
        store["hurt"].write(rows, values(two.rng, (20, DIM)))
        changed = store["hurt"].read(range(ROWS))
        version = store.commit(step=7, payload={"model": b"m" * 50})
    two.versions[version] = {**two.versions[version - 1], "hurt": changed}
    delta, size, width = two.delta(), two.delta().stat().st_size, 4 * DIM
    flip(delta, {"footer": size - 3, "id": 20 * width + 32, "sum": 20 * (width + 8) + 16}[cut])
    report = tierstore.verify(two.path)
    assert any(delta.name in each for each in report.bad_files)
    fixed = tierstore.repair(two.path, tmp_path / "whole")
    check_repaired(fixed, tmp_path / "whole", two.versions)
    counts = fixed.tables["hurt"]
    assert (counts.unknown, fixed.complete) == (0 if cut == "footer" else 1, cut == "footer")


def test_repair_takes_the_newest_image_that_is_whole(two: Two, tmp_path: Path) -> None:
    """Row by row: whole, the same from a folded delta, older, filled."""
    row = folded_with_a_delta_left(two)
    other = two.only_in_base()[0]
    hurt_row(two, row)
    hurt_row(two, other)
    flip(two.delta(), 3 * 4 * DIM)  # a record of the newest version
    newest = two.versions[two.newest]["hurt"]
    report = tierstore.repair(two.path, tmp_path / "whole")
    check_repaired(report, tmp_path / "whole", two.versions)
    told = listed(report.listed)["hurt"]
    assert told.pop(other) == "filled" and row not in told
    assert set(told.values()) == {f"older{two.newest - 1}"} and len(told) == 1
    assert everything(tmp_path / "whole")["hurt"][row].tobytes() == newest[row].tobytes()


def test_repair_looks_into_older_generations(two: Two, tmp_path: Path) -> None:
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        store.grow("hurt", ROWS + 10, init=tierstore.normal(seed=4))
        grown = store["hurt"].read(np.arange(ROWS + 10))
    base = max((two.path / "hurt").glob("g*")) / "rows.npy"
    for row in (3, ROWS + 2):
        flip(base, 4096 + row * 4 * DIM)
    report = tierstore.repair(two.path, tmp_path / "whole")
    said = listed(report.listed)["hurt"]
    assert said[3].startswith("older") and said[ROWS + 2] == "filled"
    grown[ROWS + 2] = 0
    assert everything(tmp_path / "whole")["hurt"].tobytes() == grown.tobytes()


@pytest.mark.variants(2)
@pytest.mark.parametrize("fill", ["zeros", "nan", "initializer", "version"])
def test_repair_fills_as_asked(two: Two, tmp_path: Path, fill: str) -> None:
    lost = two.only_in_base()[0]
    hurt_row(two, lost)
    flip(two.delta(), 3 * 4 * DIM)
    way = tierstore.normal(mean=2.0, std=0.5, seed=9) if fill == "initializer" else fill
    report = tierstore.repair(two.path, tmp_path / "whole", fill=way)
    check_repaired(report, tmp_path / "whole", two.versions)
    told = listed(report.listed)["hurt"]
    assert len(told) == 2
    made = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(mean=2.0, std=0.5, seed=9))
    (records,) = initial_records(made)
    for row, outcome in told.items():
        found = everything(tmp_path / "whole")["hurt"][row]
        if outcome == "filled":
            expected = {
                "zeros": np.zeros(DIM),
                "version": np.zeros(DIM),
                "nan": np.full(DIM, np.nan),
                "initializer": made.layout.view(records, "weight")[row],
            }[fill]
            np.testing.assert_array_equal(found, expected)
    assert sum(outcome == "filled" for outcome in told.values()) == (1 if fill == "version" else 2)


def test_repair_refuses(two: Two, tmp_path: Path) -> None:
    before = two.files()
    (tmp_path / "there").mkdir()
    for dest, error in [
        (tmp_path / "there", ExistsError),
        (two.path / "inside", InvalidInputError),
        ("memory://somewhere", InvalidInputError),
    ]:
        with pytest.raises(error):
            tierstore.repair(two.path, dest)
    with pytest.raises(InvalidInputError, match="not a fill value"):
        tierstore.repair(two.path, tmp_path / "whole", fill="ones")
    with pytest.raises(InvalidInputError):
        tierstore.repair(two.path, tmp_path / "whole", listed=two.path / "list.csv")
    with pytest.raises(VersionError):
        tierstore.repair(two.path, tmp_path / "whole", version=77)
    for manifest in two.path.glob("manifest-*.json"):
        flip(manifest, 50)
    with pytest.raises(FormatError, match="none of the 2 manifests"):
        tierstore.repair(two.path, tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "there"]
    assert two.files().keys() == before.keys()


@pytest.mark.variants(3)
@pytest.mark.parametrize("gone", ["STORE.json", "LOCK", "newest manifest", "table", "crc"])
def test_repair_needs_no_store_that_opens(two: Two, tmp_path: Path, gone: str) -> None:
    if gone == "newest manifest":
        max(two.path.glob("manifest-*.json")).write_bytes(b"\0" * 700)
    elif gone == "table":
        (two.path / "hurt").rename(tmp_path / "elsewhere")
    elif gone == "crc":
        next((two.path / "hurt").rglob("rows.crc")).unlink()
    else:
        (two.path / gone).unlink()
    report = tierstore.repair(two.path, tmp_path / "whole", listed=tmp_path / "list.csv")
    assert report.version == two.newest - (gone == "newest manifest")
    assert report.listed == tmp_path / "list.csv"
    check_repaired(report, tmp_path / "whole", two.versions)
    if gone == "table":
        assert report.tables["hurt"].filled == ROWS
    elif gone == "LOCK":
        assert report.complete


@pytest.mark.variants(1, 2)
@pytest.mark.fault(28)
@pytest.mark.parametrize("call", ["fsync", "link", "rename_noreplace", "unlink"])
def test_a_repair_that_is_interrupted_leaves_no_list_without_its_store(
    two: Two, tmp_path: Path, call: str
) -> None:
    """At each of these calls, before and after it."""
    hurt_row(two, two.only_in_base()[0])
    place = tmp_path / "place"
    place.mkdir()
    own, number, after = getattr(_io.system.calls, call), 0, False

    def press(*given: Any, **named: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not after:
            raise KeyboardInterrupt
        found = own(*given, **named)
        if left == 0:
            raise KeyboardInterrupt
        return found

    for after in (False, True):
        for number in itertools.count(1):
            left = number
            try:
                with mock.patch.object(_io.system.calls, call, press):
                    tierstore.repair(two.path, place / "whole")
            except KeyboardInterrupt:
                found = sorted(each.name for each in place.iterdir())
                assert found in ([], ["whole", "whole.rows.csv"]), (number, after)
            shutil.rmtree(place)
            place.mkdir()
            if left > 0:
                break  # that was one without an interrupt
    assert number > 1


def test_the_list_of_another_repair_stays(two: Two, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(ExistsError):
        tierstore.repair(two.path, tmp_path / "whole", listed=tmp_path / "list.csv")
    assert (tmp_path / "list.csv").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "whole").exists()


def test_repair_beside_a_writer(two: Two, tmp_path: Path) -> None:
    hurt_row(two, two.only_in_base()[0])
    with tierstore.open(two.path, "r+", budget=_NONE) as store:
        store["hurt"].write([1], values(two.rng, (1, DIM)))
        report = tierstore.repair(two.path, tmp_path / "whole")
        store.rollback()
    check_repaired(report, tmp_path / "whole", two.versions)


def test_a_repair_that_fails_leaves_nothing(two: Two, tmp_path: Path) -> None:
    failing = mock.Mock(side_effect=StoreIOError("no"))
    for place in ("tierstore._store.copy.write_skeleton", "tierstore._io.atomic._sync_tree"):
        with mock.patch(place, failing), pytest.raises(StoreIOError):
            tierstore.repair(two.path, tmp_path / "whole")
        assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_repair_passes_over_what_the_disk_cannot_read(two: Two, tmp_path: Path) -> None:
    """A sector that fails costs the rows in it."""
    base, read = str(two.base()), File.read

    def failing(self: File, nbytes: int, offset: int = 0) -> bytes:
        if self.path == base and offset < 4096 + 512 and offset + nbytes > 4096:
            raise StoreIOError("cannot read")
        return read(self, nbytes, offset)

    with mock.patch.object(File, "read", failing):
        report = tierstore.repair(two.path, tmp_path / "whole")
    check_repaired(report, tmp_path / "whole", two.versions)
    assert 0 < report.tables["hurt"].filled <= 4096 // (4 * DIM)


def test_repair_goes_out_of_core(two: Two, tmp_path: Path) -> None:
    """Small windows and blocks give the same store and the same list."""
    for row in two.only_in_base()[::7]:
        hurt_row(two, row)
    flip(two.delta(), 100)
    tierstore.repair(two.path, tmp_path / "one")
    with (
        mock.patch("tierstore._disk.images._WINDOW_ROWS", 16),
        mock.patch("tierstore._disk.images._BLOCK_BYTES", 96),
        mock.patch("tierstore._disk.images._MOST_WINDOWS", 1000),
    ):
        tierstore.repair(two.path, tmp_path / "other")
    assert everything(tmp_path / "one")["hurt"].tobytes() == (
        everything(tmp_path / "other")["hurt"].tobytes()
    )
    lists = [(tmp_path / f"{name}.rows.csv").read_text() for name in ("one", "other")]
    assert lists[0] == lists[1]


# -- fuzzing


def repaired_right(store: Sample, dest: Path) -> str:
    """Repair; return what was done, or the sentence that says why not."""
    try:
        report = tierstore.repair(store.path, dest)
    except TierStoreError as error:
        assert not dest.exists() and len(str(error)) > 20
        return str(error)
    state, told = store.versions[report.version], listed(report.listed)
    assert tierstore.verify(dest).ok
    with tierstore.open(dest, budget=_NONE) as copy:
        for name, table in copy.items():
            wanted, said = state["tables"][name], told.get(name, {})
            wrong: set[int] = set()
            for field, data in wanted["fields"].items():
                rows = table.read(np.arange(table.rows), field)
                truth = np.frombuffer(data, rows.dtype).reshape(rows.shape)
                for row in range(table.rows):
                    if rows[row].tobytes() != truth[row].tobytes():
                        wrong.add(row)
            assert len(wrong - set(said)) <= int(said.get(-1, 0)), (name, wrong, said)
            keys = None if table.keys is None else list(table.keys[:])
            assert keys == wanted["keys"] or any("keys" in each for each in report.left_out)
            assert dict(table.scalars) == wanted["scalars"]
        for name, data in state["payload"].items():
            if name in copy.payload:
                assert copy.payload[name].read() == data
            else:
                assert any(f"payload {name}" in each for each in report.left_out)
    return "complete" if report.complete else "in part"


def fuzz(store: Sample, root: Path, changes: list[tuple[Path, Callable[[bytes], bytes]]]) -> None:
    outcomes: dict[str, int] = {}
    for number, (path, change) in enumerate(changes):
        with damaged(path, change):
            outcome = repaired_right(store, root / f"r{number}")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes["complete"] and outcomes["in part"]
    assert set(outcomes) == {"complete", "in part"}, outcomes


@pytest.mark.nightly
@pytest.mark.fault(37)
@pytest.mark.slow
def test_any_flipped_byte_is_repaired_around(every_kind: Sample, tmp_path: Path) -> None:
    """In each file one byte at random, and more in those that are not mostly a header."""
    rng = random.Random(11)
    changes = []
    for path in contents(every_kind):
        size = path.stat().st_size
        first = 4000 if path.name == "rows.npy" else 0
        changes += [(path, flipped(rng.randrange(8 * first, 8 * size))) for _ in range(3)]
    fuzz(every_kind, tmp_path, changes)


@pytest.mark.torture
@pytest.mark.parametrize("part", range(8))
def test_every_flipped_byte_is_repaired_around(
    every_kind: Sample, tmp_path: Path, part: int
) -> None:
    rng = random.Random(part)
    bits = [
        (path, 8 * byte + rng.randrange(8))
        for path in contents(every_kind)
        for byte in range(path.stat().st_size)
    ]
    fuzz(every_kind, tmp_path, [(path, flipped(bit)) for path, bit in bits[part::8]])


@pytest.mark.nightly
@pytest.mark.slow
def test_any_cut_file_is_repaired_around(every_kind: Sample, tmp_path: Path) -> None:
    rng = random.Random(12)
    changes: list[tuple[Path, Callable[[bytes], bytes]]] = []
    for path in contents(every_kind):
        size = rng.randrange(path.stat().st_size)
        changes.append((path, lambda data, size=size: data[:size]))
        changes.append((path, lambda data: data + b"more"))
        changes.append((path, lambda data: bytes(len(data))))
    fuzz(every_kind, tmp_path, changes)


def test_without_checksums_a_repair_copies_wrong_rows(every_kind: Sample, tmp_path: Path) -> None:
    """A negative control."""
    base = next((every_kind.path / "plain").rglob("rows.npy"))
    whole = mock.patch(
        "tierstore._disk.images._good", lambda rows, records, sums, sparse: np.ones(rows.size, bool)
    )
    with damaged(base, flipped(8 * (4096 + 3 * 16) + 5)):
        assert repaired_right(every_kind, tmp_path / "right") == "in part"
        with whole, pytest.raises(AssertionError):
            repaired_right(every_kind, tmp_path / "wrong")
