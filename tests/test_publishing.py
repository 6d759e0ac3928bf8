"""Versions that are published for servers: complete, under a name that never changes."""

import contextlib
import json
import os
import shutil
import threading

import numpy as np
import pytest

import tierstore
from tierstore import _io, publishing
from tierstore._io import allocated_bytes
from tierstore.budget import format_bytes
from tierstore.errors import (
    CommitFailedError,
    ExistsError,
    InvalidInputError,
    InvalidTypeError,
    LockedError,
    StoreIOError,
    UpkeepWarning,
)
from tierstore.publishing import publish_tables


@pytest.fixture
def store(tmp_path):
    specs = {
        "item": tierstore.TableSpec(300, 8, init=tierstore.normal(seed=1)),
        "user": tierstore.TableSpec(20, 4, init=tierstore.normal(seed=2)),
    }
    with tierstore.create(tmp_path / "s.tier", specs, keep=20) as store:
        store.set_keys("user", [f"u{n}" for n in range(20)])
        yield store


def train(store, seed):
    rows = np.random.default_rng(seed).normal(size=(300, 8)).astype("f4")
    store["item"].write(np.arange(300), rows)
    return store.commit(step=seed)


def served(place):
    return np.load(place / "current" / "item.npy")


def test_a_name_for_the_newest_version(store, tmp_path):
    place, gone = tmp_path / "serving", []
    for seed in range(4):
        version = train(store, seed)
        done = publish_tables(store, place, keep=3)
        gone += done.removed
        assert (done.version, done.changed) == (version, True)
        assert done.path == place / f"version-{version}" == (place / "current").resolve()
        assert np.array_equal(served(place), store["item"][:])
        assert list(np.load(place / "current" / "user.keys.npy")) == list(store["user"].keys[:])
        note = json.loads((place / "current" / "version.json").read_text())
        assert (note["store"], note["version"], note["step"]) == (store.uuid, version, seed)
    assert gone == [3]
    assert sorted(os.listdir(place)) == ["current", *(f"version-{n}" for n in (4, 5, 6))]
    before = os.stat(place / "version-6")
    assert not publish_tables(store, place, keep=3).changed
    assert os.stat(place / "version-6") == before


def test_an_older_version_and_some_tables(store, tmp_path):
    place = tmp_path / "serving"
    old = train(store, 1)
    train(store, 2)
    publish_tables(store, place, tables=["item"], format=".safetensors", keep=1)
    with tierstore.open(store.path, version=old) as reader:
        done = publish_tables(reader, place, tables=["item"], format=".safetensors", keep=1)
    assert done.removed == [store.version]
    assert sorted(os.listdir(place / "current")) == ["item.safetensors", "version.json"]


@pytest.mark.slow
def test_readers_see_one_whole_version_all_the_time(store, tmp_path):
    place, done, seen = tmp_path / "serving", threading.Event(), set()
    turns = threading.Lock()  # Python 3.11 parses no two heads of .npy at once: SystemError
    store["item"].write(np.arange(300), np.full((300, 8), 1, "f4"))
    store.commit()
    publish_tables(store, place)

    def read():
        while True:
            last = done.is_set()
            with turns:
                values = np.unique(served(place))
            assert values.size == 1
            seen.add(int(values[0]))
            if last:
                return

    failures = []
    threads = [threading.Thread(target=lambda: _collect(read, failures)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(2, 20):
        store["item"].write(np.arange(300), np.full((300, 8), value, "f4"))
        store.commit()
        publish_tables(store, place)
    done.set()
    for thread in threads:
        thread.join()
    assert not failures and 19 in seen


def _collect(work, failures):
    try:
        work()
    except BaseException as error:
        failures.append(error)


class Killed(BaseException):
    """Stands for a kill: nothing is tidied up after it."""


CALLS = ["open", "mkdir", "pwrite", "rename", "rename_noreplace", "link", "fsync", "unlink"]


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kills", [True, False], ids=["kill", "fault"])
def test_a_kill_or_fault_at_any_call_leaves_the_old_or_the_new(store, tmp_path, monkeypatch, kills):
    place = tmp_path / "serving"
    before = train(store, 1)
    publish_tables(store, place)
    old = served(place)
    train(store, 2)
    new = store["item"].read(np.arange(300))
    calls, number, outcomes = _io.system.calls, 0, []
    while True:
        number += 1
        struck = _Striking(calls, number, kills)
        with monkeypatch.context() as patch:
            patch.setattr(_io.system, "calls", struck)
            if kills:
                patch.setattr("tierstore._io.atomic._clean_up", lambda path: None)
            with contextlib.suppress(Killed, StoreIOError, CommitFailedError):
                publish_tables(store, place, keep=9)
            if not struck.done:
                break
        found = served(place)
        outcomes.append(np.array_equal(found, new))
        assert outcomes[-1] or np.array_equal(found, old)
        publish_tables(store, place, keep=9)
        assert np.array_equal(served(place), new)
        _io.relink(place / "current", f"version-{before}")  # and once more
        assert not (place / f"version-{store.version}").is_symlink()
        _remove(place / f"version-{store.version}")
        for left in place.glob(".*.partial"):
            _remove(left)
    assert number > 8 and True in outcomes and False in outcomes


def test_what_killed_processes_left_is_mentioned(store, tmp_path):
    """Whatever version they were publishing or removing; others may be at work."""
    place = tmp_path / "serving"
    publish_tables(store, place)
    old = place / ".version-1.0123abcd.partial"
    shutil.copytree(place / f"version-{store.version}", old)
    new, link = place / ".version-77.0123abcd.partial", place / ".current.0123abcd.partial"
    new.mkdir()
    link.symlink_to(f"version-{store.version}")
    (place / ".notes.0123abcd.partial").write_bytes(b"of another program")
    for each in (old, *old.iterdir(), link, place / ".notes.0123abcd.partial"):
        os.utime(each, (1, 1), follow_symlinks=False)
    store.commit(step=1)
    with pytest.warns(UpkeepWarning) as seen:
        publish_tables(store, place)
    said = sorted(str(each.message) for each in seen)
    assert len(said) == 2
    assert f"{link}, 0 B, " in said[0]
    assert f"{old}, {format_bytes(allocated_bytes(old))}, " in said[1]
    assert f"rm -r {old}" in said[1]
    assert new.exists() and old.exists()


def _remove(path):
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        for each in path.iterdir():
            _remove(each)
        path.rmdir()


class _Striking:
    """Fails the n-th call, as the disk does or as a kill would."""

    def __init__(self, calls, number, kills):
        self._calls, self._left, self._kills, self.done = calls, number, kills, False

    def __getattr__(self, name):
        call = getattr(self._calls, name)
        if name not in CALLS:
            return call

        def striking(*given, **options):
            self._left -= 1
            if self._left == 0 or (self._kills and self.done):
                self.done = True
                raise Killed if self._kills else OSError(5, "Input/output error")
            return call(*given, **options)

        return striking


def test_a_version_that_a_kill_left_without_a_link_is_taken(store, tmp_path, monkeypatch):
    place = tmp_path / "serving"
    with monkeypatch.context() as patch:
        patch.setattr(_io, "relink", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            publish_tables(store, place)
    monkeypatch.setattr(publishing, "export_table", None)
    assert publish_tables(store, place).changed
    assert np.array_equal(served(place), store["item"][:])


def test_what_is_refused(store, tmp_path):
    place = tmp_path / "serving"
    publish_tables(store, place)
    with pytest.raises(ExistsError, match="other tables"):
        publish_tables(store, place, tables=["user"])
    spec = tierstore.TableSpec(300, 8)
    with tierstore.create(tmp_path / "other.tier", {"item": spec}) as other:
        with pytest.raises(ExistsError, match="versions of the store"):
            publish_tables(other, place)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "current").mkdir()
        with pytest.raises(ExistsError, match="no link"):
            publish_tables(other, tmp_path / "mine")
    with pytest.raises(InvalidInputError):
        publish_tables(store, place, keep=0)
    for inside in (store.path, store.path / "serving"):
        with pytest.raises(InvalidInputError, match=rf"^{inside}/version-2 is inside the store"):
            publish_tables(store, inside)
    assert not (store.path / "serving").exists()
    store["item"].write([1], np.ones((1, 8), "f4"))
    with pytest.raises(InvalidInputError, match="uncommitted"):
        publish_tables(store, place)
    store.rollback()


def test_the_command(tmp_path, store):
    from click.testing import CliRunner

    from tierstore_cli.main import cli

    def run(*given):
        return CliRunner().invoke(cli, ["publish", str(store.path), *map(str, given)])

    place = tmp_path / "serving"
    result = run(place, "--format", "npy", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["version"] == store.version
    assert np.array_equal(served(place), store["item"][:])
    assert run(place).exit_code == 10
    train(store, 1)
    assert "version-3" in run(place, "--last", 1).stdout
    assert sorted(os.listdir(place)) == ["current", "version-3"]
    assert run(place, "--table", "nope", "--version", 2).exit_code == 1


def test_a_directory_that_was_made_for_nothing_is_removed(store, tmp_path):
    with pytest.raises(InvalidInputError, match="cannot be written"):
        publish_tables(store, tmp_path / "serving", format=".none")
    assert not (tmp_path / "serving").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidInputError, match="cannot be written"):
        publish_tables(store, tmp_path / "there", format=".none")
    assert (tmp_path / "there").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(StoreIOError, match="cannot create"):
        publish_tables(store, tmp_path / "file")


def test_two_that_publish_at_once_and_what_is_no_store(store, tmp_path):
    place = tmp_path / "serving"

    def publish_too(done, total):
        if done < total:
            with pytest.raises(LockedError, match="another process is publishing to"):
                publish_tables(store, place)
            seen.append(done)

    seen = []
    assert publish_tables(store, place, progress=publish_too).changed
    assert seen
    assert not publish_tables(store, place).changed
    with pytest.raises(InvalidTypeError, match="publish_tables needs a store"):
        publish_tables(store.path, place)


def test_a_path_that_is_too_long_is_an_error_of_the_tree(tmp_path):
    long = tmp_path / "/".join(["x" * 200] * 25)
    for call in (tierstore.open, tierstore.is_store, lambda path: tierstore.create(path, {})):
        with pytest.raises(InvalidInputError, match="at most 4,095 bytes"):
            call(long)
