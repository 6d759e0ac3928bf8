"""Stores in partitions, every call that makes a version of one, and what must hold afterwards."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierstore
from tierstore import distributed
from tierstore._io.system import Calls
from tierstore._store.versions import History, open_directory, read_identity
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM, PARTITIONS = 41, 3, 4
SPECS = {
    "item": tierstore.TableSpec(
        ROWS,
        fields={
            "weight": tierstore.Field(DIM, init=tierstore.normal(seed=3)),
            "age": tierstore.Field(1, init=tierstore.normal(seed=4)),
        },
    ),
    "word": tierstore.TableSpec(dim=2, keys="text"),
}
NEW = tierstore.TableSpec(57, 8, init=tierstore.normal(seed=5))
VERSION = 5
"""The version at which a store starts."""

Seen = dict[str, Any]


def rows_of(seed: int, count: int, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def write(store: Any, seed: int) -> None:
    """Write rows of all partitions, whatever fields the tables have."""
    for name in sorted(store.keys() & {"item", "other"}):
        table = store[name]
        ids = np.random.default_rng(seed).permutation(ROWS)[:23]
        for at, (field, each) in enumerate(table.fields.items()):
            table.write(ids, rows_of(seed + at, 23, each.dim), field)
    for name in sorted(store.keys() & {"word", "text"}):
        store[name].write([f"{seed} {n}" for n in range(7)], rows_of(seed, 7, 2))


def make(path: Path, keep: int) -> None:
    """Make a store of five versions: rows, then keys, then rows again."""
    with distributed.create(path, SPECS, partitions=PARTITIONS, keep=keep) as store:
        for step in (1, 2):
            write(store, step)
            store.commit(step)
        store.set_keys("item", [f"key {each * 7 % ROWS}" for each in range(ROWS)])
        write(store, 3)
        assert store.commit(3) == VERSION


def make_patch(place: Path) -> None:
    """Write a patch that follows the store `place/new`, as `place/patch`."""
    shutil.copytree(place / "new", place / "ahead")
    with distributed.open(place / "ahead") as store:
        store.keep(VERSION, "base")
        store["item"].write(np.arange(9), rows_of(5, 9))
        store.commit(7)
    with tierstore.open(place / "ahead") as reader:
        reader.write_patch(place / "patch", "base")
    shutil.rmtree(place / "ahead")


def make_files(place: Path, name: str) -> None:
    """Write what a call loads: a patch or an array."""
    if name == "apply_patch":
        make_patch(place)
    elif name in BY_PATH:
        np.save(place / "rows.npy", rows_of(11, ROWS, 6))


def adam(store: Any, place: Path) -> None:
    TieredOptimizer(torch.optim.Adam, [TieredEmbedding(store["item"])], lr=0.1)


def commit(store: Any, place: Path) -> None:
    write(store, 8)
    store.commit(8)


def get_or_add(store: Any, place: Path) -> None:
    store["word"].get_or_add(["1 0", "new", "newer", "newest", "last"])
    store.commit(8)


def keys(count: int) -> list[str]:
    return [f"further {each}" for each in range(count)]


def altered(store: Any, place: Path) -> None:
    store.alter_tables({"item": {"add": {"q": tierstore.Field(4)}, "drop": ["age"]}})


def records() -> np.ndarray:
    return np.ascontiguousarray(rows_of(6, 57, 8)).view(np.uint8)


CALLS: dict[str, Callable[[Any, Path], object]] = {
    "commit": commit,
    "create_table": lambda store, place: store.create_table("user", NEW),
    "add_fields": lambda store, place: store.add_fields("item", {"q": tierstore.Field(9)}),
    "drop_fields": lambda store, place: store.drop_fields("item", ["age"]),
    "alter_tables": altered,
    "grow": lambda store, place: store.grow("item", 60, keys=keys(19)),
    "append": lambda store, place: store.append("item", rows_of(4, 9), keys=keys(9)),
    "rename": lambda store, place: store.rename("item", "other"),
    "drop": lambda store, place: store.drop("item"),
    "set_keys": lambda store, place: store.set_keys("item", keys(ROWS)),
    "get_or_add": get_or_add,
    "restore": lambda store, place: store.restore("first"),
    "apply_patch": lambda store, place: store.apply_patch(place / "patch"),
    "optimizer": adam,
    "keep": lambda store, place: store.keep(VERSION, "best"),
}
"""What makes a version, on one rank or on several."""

ALONE: dict[str, Callable[[Any, Path], object]] = {
    "replace_table": lambda store, place: store.replace_table("item", NEW, blocks=[records()]),
    "create_from_rows": lambda store, place: store.create_table("user", NEW, blocks=[records()]),
}
"""What one process does alone."""

BY_PATH: dict[str, Callable[[Path, Path], object]] = {
    "import_table": lambda path, place: tierstore.import_table(
        path, place / "rows.npy", table="user"
    ),
}
"""What opens the store itself; see also the command line."""


def prepare(path: Path, keep: int, name: str) -> None:
    """Make a store on which a call can be made."""
    make(path, keep)
    if name == "restore":
        with distributed.open(path) as store:
            store.keep(VERSION, "first")
            write(store, 4)
            store.commit(4)


def contents(path: Path) -> Seen:
    """Return the version, the step, and of all tables fields, keys, rows and scalars."""
    with tierstore.open(path) as store:
        return seen(store)


def seen(store: Any) -> Seen:
    """Return what an open store shows."""
    found: Seen = {"version": store.version, "step": store.step}
    for name in sorted(store):
        table = store[name]
        by_key = sorted(table.keys) if table.spec.keys is not None else None
        ids = np.arange(table.rows) if by_key is None else by_key
        known = None if table.keys is None or by_key is not None else table.keys[:].tolist()
        found[name] = (
            known,
            by_key,
            {field: table.read(ids, field).tolist() for field in table.fields},
            dict(table.scalars),
        )
    return found


def layout(path: Path) -> tuple[Any, ...]:
    """Return which versions of the root and of each partition there are, and what they hold."""
    found = []
    for place in (path, *sorted((path / "partitions").iterdir())):
        with open_directory(place) as directory:
            history = History(directory, read_identity(directory).uuid)
            marks = [each.mark for each in history.versions().values()]
            found.append((tuple(history.versions()), marks))
    known: dict[str, int] = {}
    return tuple(
        (versions, tuple(known.setdefault(mark, len(known)) for mark in marks))
        for versions, marks in found
    )


def opens(path: Path, expected: list[Seen], ranks: int = 1) -> Seen:
    """Check that the store opens, for readers and writers, at one of these states, and goes on.

    Nothing but the word of an earlier program is warned of.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = contents(path)
        assert found in expected, (found["version"], [each["version"] for each in expected])
        with distributed.open(path) as store:
            assert seen(store) == found
        assert contents(path) == found
        assert tierstore.verify(path).ok
    return found


def goes_on(path: Path) -> None:
    """Check that a writer goes on: rows are written, committed and found again."""
    with distributed.open(path) as store:
        write(store, 9)
        store.commit(9)
        now = seen(store)
    assert contents(path) == now


class NoManifest(Calls):
    """A disk that has no room for a manifest in a directory whose path ends so."""

    def __init__(self, end: str) -> None:
        self._end = end

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        is_new = flags & os.O_CREAT and str(path).startswith("manifest-")
        if is_new and os.readlink(f"/proc/self/fd/{options['dir_fd']}").endswith(self._end):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return Calls.open(path, flags, *args, **options)


class Full(Calls):
    """A disk that holds no more of some partitions: whatever takes space there fails."""

    def __init__(self, *partitions: int) -> None:
        self._within = [f"/partitions/{number:05}/" for number in partitions]
        self.struck = 0

    def _check(self, path: str) -> None:
        if any(each in f"{path}/" for each in self._within):
            self.struck += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _of(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            fd = options.get("dir_fd")
            self._check(os.fspath(path) if fd is None else f"{self._of(fd)}/{path}")
        return Calls.open(path, flags, *args, **options)

    def mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        fd = options.get("dir_fd")
        self._check(os.fspath(path) if fd is None else f"{self._of(fd)}/{path}")
        Calls.mkdir(path, *args, **options)

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        self._check(self._of(fd))
        return Calls.pwrite(fd, data, offset)

    def posix_fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._check(self._of(fd))
        Calls.posix_fallocate(fd, offset, nbytes)
