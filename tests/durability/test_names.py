"""Foreign entries under a name: links, pipes, devices, directories, and files of other programs.

Rows 40, 41 and 52 of the list of faults.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.durability.crash import small_deltas
from tests.durability.sample import Sample, sample
from tierstore.budget import Budget
from tierstore.errors import TierStoreError


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """An open that waits for a pipe's other end fails the test."""

    def fail(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def store() -> Iterator[Sample]:
    with sample() as made:
        yield made


def link(path: Path, moved: Path) -> None:
    path.symlink_to(moved)


def relative_link(path: Path, moved: Path) -> None:
    path.symlink_to(os.path.relpath(moved, path.parent))


def dangling(path: Path, _: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path, _: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def directory(path: Path, _: Path) -> None:
    path.mkdir()


def unix_socket(path: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device node needs root")


def use(store: Sample) -> None:
    """Read everything there is, as a reader and as a writer."""
    with tierstore.open(store.path, budget=Budget(host=0)) as reader:
        for table in reader.values():
            table.read(np.arange(table.rows))
            if table.keys is not None:
                assert table.lookup(table.keys[:]).tolist() == list(range(table.rows))
        for value in reader.payload.values():
            value.read()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with tierstore.open(store.path, "r+", budget=Budget(host=0)) as writer:
            writer["plain"].write([0], np.ones((1, 3), np.float32))
            writer.commit()
            writer.fold()


def kinds(store: Sample) -> list[Path]:
    """One file of every kind that the newest version needs, and each directory of a table."""
    found: dict[str, Path] = {}
    for path in sorted(store.path.rglob("*")):
        name = path.name.split(".")[0] if path.name.startswith("c.") else path.name
        found[name.rstrip("0123456789abcdef-")[:9] + path.suffix[:5]] = path
    return list(found.values())


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(
    "make", [link, relative_link, dangling, loop, pipe, directory, unix_socket, device]
)
@pytest.mark.fault(40)
def test_only_files_and_directories_of_the_store_are_opened(
    store: Sample, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    for path in kinds(store):
        moved = tmp_path / "moved"
        os.rename(path, moved) if _same_device(path, tmp_path) else shutil.move(path, moved)
        before = sorted((p, p.stat().st_mtime_ns) for p in [moved, *moved.rglob("*")])
        make(path, moved)
        try:
            if make is directory and moved.is_dir():
                continue
            # An index is derived from the keys: without it, they are found too. What cannot be a
            # manifest, nor lead to one, is named.
            expected = (TierStoreError, tierstore.errors.UpkeepWarning)
            with pytest.raises(expected) if path.suffix != ".index" else nullcontext():
                use(store)
            assert sorted((p, p.stat().st_mtime_ns) for p in [moved, *moved.rglob("*")]) == before
        finally:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            shutil.move(moved, path)
    use(store)


def _same_device(one: Path, other: Path) -> bool:
    return one.lstat().st_dev == other.stat().st_dev


@pytest.mark.slow
@pytest.mark.fault(41)
def test_a_link_put_in_place_of_a_file_is_never_followed(store: Sample, tmp_path: Path) -> None:
    """Row 41: the file is swapped for a link again and again while it is opened."""
    with tierstore.open(store.path) as reader:
        truth = reader.payload["model"].read()
    path = max(p for p in store.path.glob("payload-*") if p.stat().st_size == len(truth))
    secret, spare = tmp_path / "secret", store.path / ".spare"
    secret.write_bytes(b"s" * len(truth))
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            os.symlink(secret, spare)
            os.replace(spare, path)
            spare.write_bytes(truth)
            os.replace(spare, path)

    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        for _ in range(120):
            try:
                with tierstore.open(store.path, budget=Budget(host=0)) as reader:
                    assert reader.payload["model"].read() == truth
                    seen.add("file")
            except TierStoreError as error:
                assert "is not a regular file" in str(error)
                seen.add("link")
    finally:
        done.set()
        thread.join()
    assert seen == {"file", "link"}


FOREIGN = [
    ".DS_Store", ".nfs000000000001", "notes.txt", "delta-foo", "payload-", "manifest-1.json",
    "manifest-00000000000000000002.json.bak", "manifest-00000000000000000002.json.tmp",
    "LOCK.bak", "plain/notes.txt", "plain/g1/rows.npy", "photos/a.jpg",
    "photos/g00000000000000000001/rows.npy", "photos/g00000000000000000001-zzzzzzzz/rows.npy",
    "plain/GEN/delta-foo", "plain/GEN/rows.npy.bak", "plain/GEN/.hidden", "plain/GEN/keys.txt",
    "packed/GEN/rows.zarr/c.0.0.bak", "packed/GEN/rows.zarr/.zattrs", "pair/GEN/notes/x",
]  # fmt: skip


@pytest.mark.fault(52)
def test_foreign_files_are_never_touched(store: Sample) -> None:
    written = {}
    for name in FOREIGN:
        table = store.path / name.split("/")[0]
        generation = next(table.glob("g*-????????")).name if "GEN" in name else ""
        path = store.path / name.replace("GEN", generation)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        written[path] = path.stat().st_mtime_ns
    (store.path / "empty").mkdir()
    (store.path / "plain" / "empty").mkdir()
    with small_deltas(), tierstore.open(store.path, "r+", budget=Budget(host=0)) as writer:
        for _ in range(3):
            writer["plain"].write([1], np.full((1, 3), random.random(), np.float32))
            writer.commit(payload={"model": b"x"})
        for name in ("plain", "packed", "pair"):
            writer.replace_table(name, tierstore.TableSpec(4, 4), reinitialize=True)
        writer.commit()
        writer.fold()
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert (store.path / "empty").is_dir()
    assert (store.path / "plain" / "empty").is_dir()
    with tierstore.open(store.path) as reader:
        assert reader.verify().ok
