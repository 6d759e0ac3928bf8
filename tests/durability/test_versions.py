"""Versions: nothing is removed because a listing does not show it, and no number is given twice."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tierstore import _io
from tierstore._io.system import Calls
from tierstore._store.locking import WriterLock
from tierstore._store.versions import History
from tierstore.budget import Budget
from tierstore.errors import (
    ClosedError,
    ConcurrentWriterError,
    InvalidInputError,
    NotAStoreError,
    StoreFullError,
    StoreIOError,
)

ROWS, DIM = 200, 4
EVERY = np.arange(ROWS)
NONE = Budget(host=0)

Rows = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    initializer = tierstore.from_array(
        np.random.default_rng(1).standard_normal((ROWS, DIM), np.float32)
    )
    tierstore.create(
        tmp_path / "s", {"t": tierstore.TableSpec(ROWS, DIM, init=initializer)}
    ).close()
    return tmp_path / "s"


def opened(path: Path, mode: str = "r+", **options: Any) -> tierstore.Store:
    return tierstore.open(path, mode, budget=NONE, **options)


def change(store: tierstore.Store, seed: int) -> Rows:
    """Write random rows; return all rows as they are then."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(ROWS, 20, replace=False)
    store["t"].write(rows, rng.standard_normal((20, DIM)).astype(np.float32))
    return rows_of(store)


def rows_of(store: tierstore.Store) -> Rows:
    found: Rows = store["t"].read(EVERY)
    return found


class Lagging(Calls):
    """Lists each directory as it was when it was listed last."""

    def __init__(self) -> None:
        self._seen: dict[int, list[str]] = {}

    def listdir(self, where: Any) -> list[str]:
        node = os.stat(where).st_ino
        now = os.listdir(where)
        shown, self._seen[node] = self._seen.get(node, now), now
        return shown


class Hiding(Calls):
    """Never lists some names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def listdir(self, where: Any) -> list[str]:
        return [name for name in os.listdir(where) if name not in self._names]


class Counting(Calls):
    """Counts the calls."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if hasattr(Calls, name) and not name.startswith("_"):
            self.count[name] += 1
        return super().__getattribute__(name)


# -- listings


@pytest.mark.parametrize("keep", [1, 3])
def test_a_listing_that_lags_costs_no_version(
    path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    monkeypatch.setattr(_io.system, "calls", Lagging())
    rows = {}
    with opened(path, keep=keep) as store, opened(path, "r") as reader:
        for seed in range(12):
            rows[seed] = change(store, seed)
            version = store.commit(payload={"model": rows[seed].tobytes()})
            assert store.payload["model"].read() == rows[seed].tobytes()
            assert store.verify().ok
            if seed % 5 == 4:
                reader.refresh()
                reader.refresh()
                store.fold()
    monkeypatch.undo()
    with opened(path) as store:
        assert store.version == version
        assert np.array_equal(rows_of(store), rows[11])
        assert store.payload["model"].read() == rows[11].tobytes()


def newest(path: Path) -> str:
    return max(file.name for file in path.glob("manifest-*.json"))


def test_a_listing_cannot_hide_the_newest_version(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as store:
        rows = change(store, 1)
        store.commit()
    monkeypatch.setattr(_io.system, "calls", Hiding(newest(path)))
    for mode in ("r", "r+"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with opened(path, mode) as store:
                assert store.version == 2
                assert np.array_equal(rows_of(store), rows)


def test_without_asking_by_name_the_hidden_version_is_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test before."""
    with opened(path) as store:
        change(store, 1)
        store.commit()
    name = newest(path)
    numbers = History._numbers
    monkeypatch.setattr(History, "_numbers", lambda self: numbers(self)[:-1])
    monkeypatch.setattr(_io.system, "calls", Hiding(name))
    with opened(path) as store:
        assert store.version == 1
    monkeypatch.undo()
    with pytest.raises(tierstore.errors.CorruptStoreError):
        opened(path, "r")


@pytest.mark.parametrize("what", ["delta", "digest", "payload", "manifest"])
def test_a_listing_that_contradicts_the_manifests_stops_the_sweep(
    path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with opened(path) as store:
        rows = change(store, 1)
        store.commit(payload={"model": b"model"})
    stray = path / "payload-00000000000000000001-00000000"
    stray.write_bytes(b"left by a crash")
    names = [file.name for file in path.rglob(f"{what}-*") if file != stray]
    monkeypatch.setattr(_io.system, "calls", Hiding(max(names)))
    with pytest.warns(RuntimeWarning, match="nothing was removed"):
        opened(path).close()
    monkeypatch.undo()
    assert stray.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened(path) as store:
            assert np.array_equal(rows_of(store), rows)
    assert not stray.exists()


@pytest.mark.parametrize("number", [2, 3])
def test_a_file_that_only_a_later_manifest_can_name_stops_the_sweep(
    path: Path, number: int
) -> None:
    """The next manifest's is what a crash leaves; any later one's is no leftover."""
    generation = next((path / "t").glob("g*"))
    stray = generation / f"delta-{number:020d}-00000000.bin"
    stray.write_bytes(b"x")
    with pytest.warns(RuntimeWarning) if number > 2 else contextlib.nullcontext():
        opened(path).close()
    assert stray.exists() == (number > 2)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_stray_entry_with_the_name_of_a_generation_is_left_alone(path: Path, kind: str) -> None:
    stray = path / "t" / "g00000000000000000001-deadbeef"
    if kind == "file":
        stray.write_bytes(b"what ext2 leaves of a directory")
    else:
        stray.symlink_to(path)
    with pytest.warns(RuntimeWarning, match="it is not removed"):
        store = opened(path)
    with warnings.catch_warnings(), store:
        warnings.simplefilter("error")
        for seed in range(3):
            rows = change(store, seed)
            store.commit()
        store.fold()
    assert stray.exists() or stray.is_symlink()
    with opened(path, "r") as reader:
        assert np.array_equal(rows_of(reader), rows)


def test_what_a_commit_costs_does_not_grow_with_kept_versions(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System calls of a commit: no manifest is read again, no directory listed."""
    with opened(path, keep=5000) as store:
        costs = []
        for seed in range(60):
            store["t"].write([seed], np.full((1, DIM), seed + 1, np.float32))
            calls = Counting()
            monkeypatch.setattr(_io.system, "calls", calls)
            store.commit()
            monkeypatch.undo()
            costs.append(calls.count)
    assert costs[20] == costs[58]
    assert costs[58]["listdir"] == 0


def test_many_versions_that_wait_to_be_confirmed_warn_once(path: Path) -> None:
    with opened(path) as store, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for seed in range(104):
            store["t"].write([seed], np.ones((1, DIM), np.float32))
            store.commit(confirm=False)
        store.confirm(store.version)
        store.commit()
    texts = [str(each.message) for each in found]
    assert len(texts) == 1, texts
    assert "are not confirmed" in texts[0]


# -- writers that do not know of each other


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the lock, so that two writers can open a store."""
    free = lambda *_, **__: True  # noqa: E731
    monkeypatch.setattr(_io.File, "lock", free)
    monkeypatch.setattr(_io.File, "lock_range", free)
    monkeypatch.setattr(WriterLock, "check", lambda self: None)


@pytest.mark.fault(21)
@pytest.mark.usefixtures("no_locks")
def test_a_number_that_another_writer_has_swept_is_seen(path: Path) -> None:
    with opened(path) as one:
        change(one, 1)
        one.commit()
        with opened(path) as two:
            rows = rows_of(two)
            two.fold()
        with pytest.raises(ConcurrentWriterError, match="may be lost"):
            one.commit()
        assert inside.door(one).closed
    with opened(path) as again:
        assert np.array_equal(rows_of(again), rows)


@pytest.mark.fault(21)
@pytest.mark.usefixtures("no_locks")
def test_a_live_delta_that_another_writer_has_swept_is_seen(path: Path) -> None:
    with opened(path) as one:
        change(one, 1)
        opened(path).close()
        with pytest.raises(ConcurrentWriterError, match="was removed before it was committed"):
            one.commit()
        assert inside.door(one).closed


# -- numbers


def test_numbers_of_versions_are_not_given_twice(path: Path) -> None:
    with opened(path, keep=10) as store:
        for seed in range(3):
            change(store, seed)
            store.commit()
        discarded = store.state_dict()
    assert discarded["version"] == 4
    with opened(path, version=2, discard_newer=True) as store:
        second = store.state_dict()
        assert store.version == 2
        with pytest.raises(InvalidInputError, match=r"version 4 .* no longer kept"):
            store.load_state_dict(discarded)
        assert store.commit() == 5
        with pytest.raises(InvalidInputError, match=r"version 4 .* no longer kept"):
            store.load_state_dict(discarded)
        store.load_state_dict(store.state_dict())
        assert store.version == 5
        store.load_state_dict(second)
        assert store.version == 6
        with pytest.raises(InvalidInputError):
            store.confirm(4)
        assert store.commit() == 7
        store.fold()
        assert store.commit() == 8
    with opened(path, version=8, discard_newer=True) as store:
        assert store.commit() == 9


def test_what_goes_on_from_an_older_version_has_new_numbers_too(path: Path) -> None:
    """In the manifest that housekeeping publishes before the next commit, and in its deltas."""
    with opened(path, keep=10) as store:
        for seed in range(3):
            change(store, seed)
            store.commit()
    with opened(path, version=2, discard_newer=True, keep=1) as store:
        store.fold()
        assert store.version == 2
    with opened(path) as store:
        rows = change(store, 3)
        assert store.commit() == 5
        assert [delta.version for delta in inside.manifest(store).tables["t"].deltas] == [5]
        assert np.array_equal(rows_of(store), rows)


def test_a_commit_whose_answer_was_lost_is_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Calls):
        @staticmethod
        def link(*args: Any, **options: Any) -> None:
            Calls.link(*args, **options)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(path) as store:
        rows = change(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(_io.system, "calls", Late())
            assert store.commit() == 2
        assert store.commit() == 3
    with opened(path, "r") as store:
        assert store.version == 3
        assert np.array_equal(rows_of(store), rows)


def test_a_damaged_newest_manifest_keeps_its_number(path: Path) -> None:
    with opened(path, keep=10) as store:
        for seed in range(3):
            change(store, seed)
            store.commit()
    file = path / newest(path)
    file.write_bytes(file.read_bytes()[:-9])
    with opened(path, version=3, discard_newer=True) as store:
        assert store.commit() == 5
        assert store.verify().ok


def test_a_version_of_the_same_number_in_a_copy_is_another(path: Path, tmp_path: Path) -> None:
    with opened(path) as store:
        change(store, 1)
        store.commit()
    shutil.copytree(path, tmp_path / "copy")
    pointers = []
    for where, seed in ((path, 2), (tmp_path / "copy", 3)):
        with opened(where) as store:
            change(store, seed)
            store.commit()
            pointers.append(store.state_dict())
    with opened(path, "r") as reader:
        reader.load_state_dict(pointers[0])
        with pytest.raises(InvalidInputError, match="version 3 of another copy"):
            reader.load_state_dict(pointers[1])


# -- the directory that is open, whatever lies at its path


def test_saving_copies_what_is_open(path: Path, tmp_path: Path) -> None:
    with opened(path) as store:
        change(store, 1)
        store.commit()
        os.rename(path, tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", path)
        (path / "LOCK").unlink()
        with opened(path) as restored:
            change(restored, 2)
            restored.commit()
        rows = change(store, 3)
        store.commit()
        store.save(tmp_path / "copy")
        store.save(tmp_path / "older", version=2)
    with opened(tmp_path / "copy", "r") as copy:
        assert np.array_equal(rows_of(copy), rows)


def test_a_pickled_reader_does_not_take_a_copy_for_its_version(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    for where, seed in ((path, 1), (tmp_path / "copy", 2)):
        with opened(where) as store:
            change(store, seed)
            store.commit()
    with opened(path, "r") as reader:
        data = pickle.dumps(reader)
    pickle.loads(data).close()
    shutil.rmtree(path)
    os.rename(tmp_path / "copy", path)
    with pytest.raises(StoreIOError, match="is not the expected one"):
        pickle.loads(data)


def test_a_store_whose_directory_was_removed_says_so_and_closes(path: Path) -> None:
    with opened(path) as store:
        change(store, 1)
        store.commit()
        shutil.rmtree(path)
        with pytest.raises(NotAStoreError, match="removed while the store was open"):
            store["t"].write([1], np.ones((1, DIM), np.float32))
        with pytest.raises(ClosedError, match="removed while"):
            store.commit()
    assert not path.exists()


# -- what was prepared and not published


class Full(Calls):
    """Has no room for another manifest."""

    def link(self, source: str, target: str, **options: Any) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("change_of", ["spec", "new table", "keys"])
def test_a_change_that_is_not_published_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, change_of: str
) -> None:
    def files() -> set[Path]:
        return {file for file in path.rglob("*") if file.is_file()}

    spec = tierstore.TableSpec(ROWS, 2 * DIM, init=tierstore.uniform(-1, 1, seed=2))
    with opened(path) as store:
        before = files()
        monkeypatch.setattr(_io.system, "calls", Full())
        with pytest.raises(StoreFullError):
            if change_of == "spec":
                store.replace_table("t", spec, reinitialize=True)
            elif change_of == "keys":
                store.set_keys("t", list(range(ROWS)))
            else:
                store.create_table("u", spec)
        monkeypatch.undo()
        assert files() == before
        assert store.commit() == 2
        assert store.verify().ok
