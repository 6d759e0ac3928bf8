"""File systems that were tested, those that were not, and what a store needs of one.

Rows 34, 47 and 51 of docs/faults.md, and what was once wrong.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.small import script
from tests.durability.test_environment import need_root, tmpfs
from tests.durability.test_power import mounted, run, unmount
from tierstore import _io
from tierstore._io.system import Calls
from tierstore.budget import Budget
from tierstore.errors import StoreIOError

NONE = Budget(host=0)
SPEC = tierstore.TableSpec(500, 8, init=tierstore.uniform(-1, 1, seed=4))


def train(path: Path, **options: object) -> None:
    """Open a store for writing, commit and fold, and compare with NumPy."""
    rng = np.random.default_rng(5)
    with tierstore.open(path, "r+", budget=NONE, **options) as store:
        oracle = store["t"].read(np.arange(500))
        for _ in range(3):
            rows = rng.permutation(500)[:60]
            oracle[rows] = rng.standard_normal((60, 8)).astype(np.float32)
            store["t"].write(rows, oracle[rows])
            store.commit(payload={"model": rng.bytes(100)})
            assert store.payload["model"].read()
        store.fold()
    with tierstore.open(path, budget=NONE) as reader:
        assert np.array_equal(reader["t"].read(np.arange(500)), oracle)
        assert reader.verify().ok


@contextmanager
def loop(tmp_path: Path, kind: str, *command: str) -> Iterator[Path]:
    need_root("mount", command[0])
    if not os.path.exists("/dev/loop0"):
        pytest.skip("needs loop devices")
    image, place = tmp_path / "image", tmp_path / kind
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(320 << 20)
    try:
        run(*command, image)
        with mounted(image, place):
            yield place
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no {kind} here: {error.stderr.decode()[:200]}")


MAKERS = {
    "ext4": ["mkfs.ext4", "-qF"],
    "ext2": ["mkfs.ext2", "-qF"],
    "xfs": ["mkfs.xfs", "-qf"],
    "btrfs": ["mkfs.btrfs", "-qf"],
}


@pytest.mark.parametrize("kind", MAKERS)
def test_file_systems_that_were_tested(tmp_path: Path, kind: str) -> None:
    with loop(tmp_path, kind, *MAKERS[kind]) as place:
        assert _io.filesystem(place) == kind
        tierstore.create(place / "s", {"t": SPEC}, budget=NONE).close()
        train(place / "s")


def test_subvolumes_are_of_the_file_system_they_are_in(tmp_path: Path) -> None:
    with loop(tmp_path, "btrfs", *MAKERS["btrfs"]) as place:
        run("btrfs", "subvolume", "create", place / "sub")
        assert os.stat(place / "sub").st_dev != os.stat(place).st_dev
        assert _io.filesystem(place / "sub") == "btrfs"


def test_file_systems_in_memory_and_in_layers(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "m", "64m") as memory:
        assert _io.filesystem(memory) == "tmpfs"
        for name in ("lower", "upper", "work", "merged"):
            (memory / name).mkdir()
        tierstore.create(memory / "lower/s", {"t": SPEC}, budget=NONE).close()
        layers = ",".join(f"{each}dir={memory / each}" for each in ("lower", "upper", "work"))
        try:
            run("mount", "-t", "overlay", "-o", layers, "overlay", memory / "merged")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no overlay here: {error.stderr.decode()[:200]}")
        try:
            assert _io.filesystem(memory / "merged") == "overlay"
            train(memory / "merged/s")
        finally:
            unmount(memory / "merged")


def test_a_mount_whose_locks_are_its_own_is_refused(tmp_path: Path) -> None:
    """Through FUSE and beside it, two writers would both have the lock."""
    need_root("bindfs")
    (tmp_path / "real").mkdir()
    (tmp_path / "fuse").mkdir()
    tierstore.create(tmp_path / "real/s", {"t": SPEC}, budget=NONE).close()
    try:
        run("bindfs", tmp_path / "real", tmp_path / "fuse")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no FUSE here: {error.stderr.decode()[:200]}")
    try:
        assert _io.filesystem(tmp_path / "fuse").startswith("fuse")
        with pytest.raises(StoreIOError, match=r"is on fuse.*allow_untested=True"):
            tierstore.open(tmp_path / "fuse/s", "r+")
        with pytest.raises(StoreIOError, match="allow_untested"):
            tierstore.create(tmp_path / "fuse/new", {"t": SPEC})
        assert os.listdir(tmp_path / "real") == ["s"]
        with tierstore.open(tmp_path / "fuse/s", budget=NONE) as reader:
            assert reader.verify().ok
        train(tmp_path / "fuse/s", allow_untested=True)
    finally:
        unmount(tmp_path / "fuse")


@pytest.mark.parametrize("kind", ["nfs4", "virtiofs", "fuse.s3fs", "zfs", ""])
def test_only_what_was_tested_is_written(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be told is not taken for local."""
    tierstore.create(tmp_path / "s", {"t": SPEC}, budget=NONE).close()
    monkeypatch.setattr(_io.directory, "filesystem_of", lambda fd: kind)
    for attempt in (
        lambda: tierstore.open(tmp_path / "s", "r+"),
        lambda: tierstore.create(tmp_path / "new", {"t": SPEC}),
    ):
        with pytest.raises(StoreIOError, match=kind or "an unknown file system"):
            attempt()
    assert os.listdir(tmp_path) == ["s"]
    tierstore.create(tmp_path / "new", {"t": SPEC}, budget=NONE, allow_untested=True).close()
    train(tmp_path / "s", allow_untested=True)


def test_a_file_system_that_cannot_map_is_told_before_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unmapped(Calls):
        written = 0

        def map_file(self, *given: int) -> None:
            raise OSError(19, "No such device")

        def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
            self.written += nbytes
            os.posix_fallocate(fd, offset, nbytes)

    calls = Unmapped()
    monkeypatch.setattr(_io.system, "calls", calls)
    spec = tierstore.TableSpec(5000, 64)
    with pytest.raises(StoreIOError, match="cannot map files; keep the store on another disk"):
        tierstore.create(tmp_path / "s", {"t": spec})
    assert calls.written < spec.nbytes
    assert list(tmp_path.iterdir()) == []


MANY_CHUNKS = """
import resource, sys, numpy as np, tierstore
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
path, rows, chunk = sys.argv[1], int(sys.argv[2]), 512
specs = {
    "raw": tierstore.TableSpec(rows, 32, backend="zarr", chunk_rows=chunk),
    "sparse": tierstore.TableSpec(rows, 32, backend="zarr", chunk_rows=chunk, sparse=True),
    "packed": tierstore.TableSpec(rows, 32, backend="zarr", chunk_rows=chunk, compression="lz4"),
}
none = tierstore.Budget(host=0)
rng = np.random.default_rng(3)
with tierstore.create(path, specs, budget=none) as store:
    oracle = {name: table.read(np.arange(rows)) for name, table in store.items()}
    for _ in range(2):
        for name, table in store.items():
            chosen = rng.permutation(rows)[: rows // chunk * 2]
            oracle[name][chosen] = rng.standard_normal((chosen.size, 32)).astype(np.float32)
            table.write(chosen, oracle[name][chosen])
        store.commit()
        store.fold()
    store.save(path + ".copy")
    with tierstore.open(path, budget=none) as reader:
        assert reader.verify().ok
for each in (path, path + ".copy"):
    with tierstore.open(each, budget=none) as store:
        for name, table in store.items():
            assert np.array_equal(table.read(np.arange(rows)), oracle[name])
print("done")
"""


@pytest.mark.fault(34)
@pytest.mark.slow
@pytest.mark.nightly
def test_a_table_of_many_chunks_needs_few_descriptors(tmp_path: Path) -> None:
    done = script(textwrap.dedent(MANY_CHUNKS), tmp_path / "s", 512 * 700)
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.fault(34)
def test_too_few_descriptors_leave_nothing_half_made(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = tierstore.TableSpec(512 * 4, 32, backend="zarr", chunk_rows=512)
    tierstore.create(tmp_path / "warm", {"t": spec}).close()
    shutil.rmtree(tmp_path / "warm")
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]  # no gaps in the numbers below
    opened, told = max(held), 0
    for spare in range(1, 12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + spare, before[1]))
        try:
            tierstore.create(tmp_path / "s", {"t": spec}, budget=NONE).close()
        except StoreIOError as error:
            assert "ulimit -n" in str(error)
            told += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        left = [path.name for path in tmp_path.iterdir()]
        assert left in ([], ["s"]), (spare, left)
        if left == ["s"]:
            shutil.rmtree(tmp_path / "s")
    for fd in held:
        os.close(fd)
    assert told > 2
