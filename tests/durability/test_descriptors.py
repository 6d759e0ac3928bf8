"""A store of many tables is used with few descriptors, and what is closed meanwhile is not lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import Recording
from tests.durability.faults import ThinDisk
from tests.durability.small import script
from tests.durability.test_crash import survive
from tests.durability.test_mutants import is_caught
from tierstore import _io
from tierstore._io import held, system
from tierstore._io.system import Calls
from tierstore.budget import Budget
from tierstore.errors import CommitFailedError, ConcurrentWriterError, TierStoreError

NONE = Budget(host=0)
ROWS, DIM = 6, 4

COMMON = """
import os, resource, subprocess, sys
import numpy as np, tierstore
limit, path, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
NONE, ROWS, DIM, most = tierstore.Budget(host=0), 6, 4, 0
CLI = "import sys; from tierstore_cli.main import cli; cli(sys.argv[1:])"
KINDS = [
    {}, {"sparse": True}, {"backend": "zarr"}, {"backend": "zarr", "compression": "zstd"},
]

def values(number, version):
    rng = np.random.default_rng((number, version))
    return rng.permutation(ROWS)[:3], rng.standard_normal((3, DIM)).astype(np.float32)

def expected(number, versions):
    table = np.zeros((ROWS, DIM), np.float32)
    for version in range(versions):
        rows, written = values(number, version)
        table[rows] = written
    return table

def check(store, versions):
    global most
    for number in range(count):
        found = store[f"t{number}"].read(np.arange(ROWS))
        assert np.array_equal(found, expected(number, versions)), (number, versions)
    most = max(most, len(os.listdir("/proc/self/fd")))

def write(store, version):
    global most
    for number in range(count):
        store[f"t{number}"].write(*values(number, version))
    most = max(most, len(os.listdir("/proc/self/fd")))
"""

READER = """
with tierstore.open(path, budget=NONE) as store:
    check(store, 1)
    print(most, flush=True)
    for line in sys.stdin:
        store.refresh()
        check(store, int(line))
        assert list(store["t0"].keys) == list(range(7, 7 + ROWS))
        print(most, flush=True)
    assert store.verify().ok
"""

WRITER = """
specs = {f"t{n}": tierstore.TableSpec(ROWS, DIM, **KINDS[n % len(KINDS)]) for n in range(count)}
with tierstore.create(path, specs, budget=NONE) as store:
    store.set_keys("t0", range(7, 7 + ROWS))
    write(store, 0)
    store.commit()
    command = [sys.executable, "-c", sys.argv[4], *sys.argv[1:4]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as reader:
        print(int(reader.stdout.readline()))
        for version in range(1, 3):
            write(store, version)
            check(store, version + 1)
            store.commit()
            check(store, version + 1)
            reader.stdin.write(f"{version + 1}\\n")
            reader.stdin.flush()
            print(int(reader.stdout.readline()))
        write(store, 3)
        store.rollback()
        check(store, 3)
        reader.stdin.close()
    assert reader.returncode == 0
    store.fold()
    check(store, 3)
    write(store, 3)
    store.commit()
    assert store.verify().ok
    store.save(path + ".copy")
with tierstore.open(path, "r+", budget=NONE) as store:
    check(store, 4)
with tierstore.open(path + ".copy", budget=NONE) as store:
    check(store, 4)
ran = subprocess.run([sys.executable, "-c", CLI, "inspect", path], capture_output=True, text=True)
assert ran.returncode == 0, ran.stderr
print(most)
"""


@pytest.mark.parametrize(
    ("tables", "limit"), [(24, 36), pytest.param(1500, 1024, marks=pytest.mark.torture)]
)
@pytest.mark.fault(34)
@pytest.mark.slow
def test_a_store_of_many_tables_needs_few_descriptors(
    tmp_path: Path, tables: int, limit: int
) -> None:
    done = script(COMMON + WRITER, limit, tmp_path / "s", tables, COMMON + READER)
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < limit // 4 + 20


# Write-back


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow only few descriptors to stay open."""
    monkeypatch.setattr(held, "_budget", lambda: 2)


@pytest.fixture
def store(tmp_path: Path, few: None) -> Iterator[tierstore.Store]:
    specs = {f"t{number}": tierstore.TableSpec(ROWS, DIM) for number in range(4)}
    with tierstore.create(tmp_path / "s", specs, budget=NONE) as opened:
        yield opened


def values(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, DIM)).astype(np.float32)


def write(store: tierstore.Store, seed: int) -> None:
    for number, name in enumerate(store):
        store[name].write(np.arange(ROWS), values(seed + number))


def check(path: Path, seed: int) -> None:
    with tierstore.open(path, budget=NONE) as store:
        for number, name in enumerate(store):
            assert np.array_equal(store[name].read(np.arange(ROWS)), values(seed + number))


def fails_to_commit(store: tierstore.Store, disk: object) -> bool:
    """Write to all tables and commit, on a disk; return whether that is said to have failed."""
    with mock.patch.object(system, "calls", disk):
        try:
            write(store, 50)
            store.commit()
        except CommitFailedError:
            return True
    return False


class Bad(ThinDisk):
    """Cannot write back what is written to the live delta of the first table.

    It can be read until the system drops its pages.
    """

    def open(self, path: Any, *args: Any, **options: Any) -> int:
        fd = super().open(path, *args, **options)
        if "/t0/" not in os.readlink(f"/proc/self/fd/{fd}"):
            self._told.pop(fd, None)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        super().pwrite(fd, data, offset)
        return Calls.pwrite(fd, data, offset)

    def close(self, fd: int) -> None:
        super().close(fd)
        if not self._told:  # the system forgets the file, and errors with it
            self._seen = self._errors


def close_unsynced(one: held.Held[_io.File]) -> None:
    """Close what is held without syncing it: the negative control."""
    one._identity = one._opened.identity
    one._resting = True
    one._opened.discard()
    held._pool.forget(one)


@pytest.mark.parametrize("synced", [True, False], ids=["", "closed unsynced"])
def test_no_error_of_writing_is_lost_by_closing(
    store: tierstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    """A disk tells each open description, and where there is none, no program."""
    write(store, 10)
    store.commit()
    if not synced:
        monkeypatch.setattr(held.Held, "_close_for_now", close_unsynced)
    disk = Bad(".bin")
    assert fails_to_commit(store, disk) == synced
    assert disk.lost
    if synced:
        with pytest.raises(TierStoreError):
            store.commit()
        store.close()
        check(tmp_path / "s", 10)


def test_a_failure_is_told_to_the_store_that_it_is_of(
    store: tierstore.Store, tmp_path: Path
) -> None:
    """What one store opens may close what another holds, whose error is not the first one's."""
    write(store, 10)
    store.commit()
    with (
        tierstore.create(tmp_path / "other", {"t": tierstore.TableSpec(ROWS, DIM)}) as other,
        mock.patch.object(system, "calls", Bad(".bin")),
    ):
        store["t0"].write(np.arange(ROWS), values(20))
        for seed in range(3):
            other["t"].write(np.arange(ROWS), values(seed))
            other.commit()
        with pytest.raises(CommitFailedError):
            store.commit()
    check(tmp_path / "s", 10)
    with tierstore.open(tmp_path / "other") as other:
        assert np.array_equal(other["t"].read(np.arange(ROWS)), values(2))


def test_names_are_durable_before_their_directory_is_closed(
    tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = system.calls.fsync
    monkeypatch.setattr(
        system.calls,
        "fsync",
        lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)),
        raising=False,
    )
    with _io.Directory.make(tmp_path / "root") as root:
        every = [_io.hold_directory(root.make_directory(name)) for name in "abcd"]
        with every[3].use() as directory:
            _io.hold_file(directory, "made", create=True).close()
        synced.clear()
        for one in every[:3]:
            with one.use():
                pass
        every[3].rest()
        assert synced == [str(tmp_path / "root" / "d")]
        every[3].sync()
        assert len(synced) == 1
        for one in every:
            one.close()


# What was closed is the same when it is opened again


def test_what_is_in_use_stays_open(tmp_path: Path, few: None) -> None:
    with _io.Directory.make(tmp_path / "root") as root:
        every = [_io.hold_file(root, name, create=True) for name in "abcdef"]
        with every[0].use() as first, every[0].use():
            for one in every:
                with one.use() as file:
                    file.write(one.path.encode(), 0)
            first.write(b"first", 0)
        assert sum(one._opened.fd >= 0 for one in every) <= 3
        with every[0].use() as file:
            assert file.read(5) == b"first"
        for one in every[1:]:
            with one.use() as file:
                assert file.read(1000) == one.path.encode()
            one.close()


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "replaced"])
def test_what_another_program_replaced_is_not_taken_for_the_same(
    store: tierstore.Store, tmp_path: Path, removed: bool
) -> None:
    write(store, 10)
    store.commit()
    write(store, 20)
    committed = {delta.name for delta in inside.generation(store["t0"]).info.deltas}
    every = (tmp_path / "s" / "t0").glob("*/delta-*")
    (delta,) = (path for path in every if path.name not in committed)
    kept = delta.read_bytes()
    delta.rename(tmp_path / "aside")  # so that its inode is not given to another
    if not removed:
        delta.write_bytes(kept)
    with pytest.raises(ConcurrentWriterError, match="another"):
        store.commit()
    store.close()
    check(tmp_path / "s", 10)


def test_a_store_that_is_moved_stays_the_same(store: tierstore.Store, tmp_path: Path) -> None:
    write(store, 10)
    (tmp_path / "s").rename(tmp_path / "moved")
    write(store, 20)
    store.commit()
    store.fold()
    store.close()
    check(tmp_path / "moved", 20)


def test_the_budget_is_a_share_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, budget in ((1024, 204), (8, 8), (1 << 20, 512), (-1, 512)):
        monkeypatch.setattr(held.resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert held._budget() == budget


# Power cuts


@cache
def recording(backend: str) -> Recording:
    """Return a workload in which nothing stays open that is not in use."""
    use = held.Held.use

    @contextmanager
    def used_alone(one: held.Held[Any]) -> Iterator[Any]:
        with use(one) as opened:
            yield opened
        one.rest()

    with mock.patch.object(held.Held, "use", used_alone):
        steps = "write write commit write rollback write commit fold write commit"
        return Recording.of(21, steps.split(), backend=backend)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["memmap", pytest.param("zstd", marks=pytest.mark.slow)])
@pytest.mark.slow
@pytest.mark.nightly("zstd")
def test_a_power_cut_leaves_what_was_closed(backend: str) -> None:
    assert survive(recording(backend), 21, 1) > 50


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("site", ["File.sync", "Directory.sync"])
def test_no_sync_before_closing_can_be_left_out(site: str) -> None:
    assert is_caught(rf"_close_for_now > {site}$", lambda: [recording("memmap")])
