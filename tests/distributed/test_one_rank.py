"""One rank is a plain store: the same calls of the file system in the same order, the same bytes.

A random program runs on a plain store, on one whose coordinator is that of a process group of one,
and on a store in one partition. The first two do the same in their whole directory. The third has
its rows in `partitions/00000`, where its tables have the same files with the same bytes. What
differs there are manifests, which confirm nothing in a partition; the footers of deltas and the
digests, which bind these to their store; and how far a fold at closing goes, since a partition has
only those versions that changed it. The root has a manifest of its own, and the keys that
`set_keys` gives.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import tierstore
from tests import inside
from tierstore import _io, distributed
from tierstore._disk.footer import FOOTER_BYTES
from tierstore._io.system import Calls
from tierstore.distributed.ranks import Ranks

ROWS, DIM = 30, 3
CHANGING = (
    *("mkdir", "rmdir", "link", "unlink", "rename", "rename_noreplace", "rename_exchange"),
    *("pwrite", "ftruncate", "posix_fallocate", "fsync", "sync_file_range"),
)
"""Calls that change files, or make that durable."""
Program = list[tuple[str, int]]
OF_ROWS = ("write", "commit", "payload", "rollback", "word", "keep", "restore", "scalars")
EVERY = (
    *OF_ROWS,
    "reopen",
    "create",
    "fields",
    "grow",
    "append",
    "rename",
    "drop",
    "keys",
    "fold",
    "release",
    "patch",
)


class Log:
    """Does what the system does, and keeps what changes the files of a directory."""

    def __init__(self, root: Path) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._root = f"{root}/"

    def __getattr__(self, name: str) -> Any:
        call = getattr(Calls, name)
        if name not in CHANGING and name != "open":
            return call

        def logged(*args: Any, **options: Any) -> Any:
            fds = {key: self._path(each) for key, each in options.items() if key.endswith("dir_fd")}
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **options)
            told = [self._told(at, each) for at, each in enumerate(args)]
            self.calls.append((name, *told, *sorted(fds.items())))
            return call(*args, **options)

        return logged

    def _path(self, fd: Any) -> str:
        return (
            "" if fd is None else f"{os.readlink(f'/proc/self/fd/{fd}')}/".removeprefix(self._root)
        )

    def _told(self, at: int, given: Any) -> object:
        if isinstance(given, int):
            return given if at else self._path(given)
        if isinstance(given, str | bytes | os.PathLike):
            return os.fsdecode(given).removeprefix(self._root)
        return zlib.crc32(memoryview(given).cast("B"))


@contextlib.contextmanager
def drawn(log: Log) -> Iterator[None]:
    """Log calls; names, marks and uuids are those of every other run."""
    numbers = np.random.default_rng(1)
    with (
        mock.patch.object(_io.system, "calls", log),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(bytes=numbers.bytes(16), version=4)),
    ):
        yield


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(seed=3)
    return {
        "item": tierstore.TableSpec(ROWS, DIM, init=init),
        "word": tierstore.TableSpec(dim=2, keys="text", init=tierstore.normal(seed=5)),
    }


def program(seed: int, names: tuple[str, ...], length: int = 40) -> Program:
    random = np.random.default_rng(seed)
    chosen = random.choice(names, length).tolist()
    return list(zip(chosen, random.integers(1 << 30, size=length).tolist(), strict=True))


class Session:
    """Runs a program on a store that `opened` opens in a directory.

    Attributes:
        seen: what its steps returned.
        files: the files before the store was closed.
    """

    files: dict[str, bytes | None]

    def __init__(self, opened: Callable[[], Any], root: Path) -> None:
        self.seen: list[object] = []
        self._opened, self._root = opened, root
        self.store = opened()

    def run(self, steps: Program) -> None:
        for kind, seed in steps:
            try:
                found = getattr(self, f"do_{kind}")(np.random.default_rng(seed))
            except tierstore.TierStoreError as error:
                found = f"{type(error).__name__}: {error}"
            self.seen.append((kind, found, self.store.version))
        self.store.rollback()
        self.files = files(self._root)
        self.store.close()

    def tables(self) -> list[str]:
        return sorted(name for name in self.store if name != "word")

    def do_write(self, random: np.random.Generator) -> None:
        for name in self.tables():
            table = self.store[name]
            ids = random.integers(table.rows, size=7)
            for field, each in table.fields.items():
                table.write(ids, random.standard_normal((7, each.dim), np.float32), field)

    def do_word(self, random: np.random.Generator) -> int:
        words, word = [f"word {n}" for n in random.integers(50, size=5)], self.store["word"]
        if random.random() < 0.3:
            return int(word.remove(words[:2]))
        word.write(words, random.standard_normal((5, 2), np.float32))
        return int(word.rows)

    def do_scalars(self, random: np.random.Generator) -> None:
        self.store[self.tables()[0]].scalars["at"] = int(random.integers(3))

    def do_commit(self, random: np.random.Generator) -> int:
        return int(self.store.commit(int(random.integers(4))))

    def do_payload(self, random: np.random.Generator) -> int:
        return int(self.store.commit(payload={"model": random.bytes(20)}, keep="last"))

    def do_rollback(self, random: np.random.Generator) -> None:
        self.store.rollback()

    def do_keep(self, random: np.random.Generator) -> int:
        return int(self.store.keep(self.store.version, f"kept {random.integers(2)}"))

    def do_release(self, random: np.random.Generator) -> None:
        self.store.release(f"kept {random.integers(2)}")

    def do_restore(self, random: np.random.Generator) -> int:
        kept = [each.version for each in self.store.versions()]
        return int(self.store.restore(int(random.choice(kept))))

    def do_reopen(self, random: np.random.Generator) -> None:
        self.store.rollback()
        self.store.close()
        self.store = self._opened()

    def do_create(self, random: np.random.Generator) -> None:
        name = f"table {random.integers(3)}".replace(" ", "_")
        self.store.create_table(name, tierstore.TableSpec(12, 2, init=tierstore.normal(seed=7)))

    def do_fields(self, random: np.random.Generator) -> None:
        name, field = str(random.choice(self.tables())), f"f{random.integers(2)}"
        if field in self.store[name].fields:
            self.store.drop_fields(name, [field])
        else:
            self.store.add_fields(name, {field: tierstore.Field(1, init=tierstore.constant(2.0))})

    def do_grow(self, random: np.random.Generator) -> None:
        name = str(random.choice(self.tables()))
        rows = self.store[name].rows + 5
        keyed = self.store[name].keys is not None
        keys = [f"key {n}" for n in range(rows - 5, rows)] if keyed else None
        self.store.grow(name, rows, keys=keys)

    def do_append(self, random: np.random.Generator) -> str:
        name = str(random.choice(self.tables()))
        table = self.store[name]
        rows = random.standard_normal((4, table.dim), np.float32)
        keys = [f"key {table.rows + n}" for n in range(4)] if table.keys is not None else None
        return str(self.store.append(name, rows, keys=keys))

    def do_rename(self, random: np.random.Generator) -> None:
        self.store.rename(str(random.choice(self.tables())), f"table_{random.integers(3)}")

    def do_drop(self, random: np.random.Generator) -> None:
        names = self.tables()
        if len(names) > 1:
            self.store.drop(str(random.choice(names)))

    def do_keys(self, random: np.random.Generator) -> None:
        name = str(random.choice(self.tables()))
        self.store.set_keys(name, [f"key {n}" for n in range(self.store[name].rows)])

    def do_fold(self, random: np.random.Generator) -> list[int]:
        return list(self.store.fold())

    def do_patch(self, random: np.random.Generator) -> str:
        kept = [each.version for each in self.store.versions()]
        path = self._root.parent / "patch"
        self.store.write_patch(path, kept[0], kept[-1], force=True)
        info = self.store.apply_patch(path)
        return f"{info.from_version} {info.to_version} {info.rows}"


def contents(store: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"version": store.version, "step": store.step}
    for name in sorted(store):
        table = store[name]
        ids = sorted(table.keys) if name == "word" else np.arange(table.rows)
        rows = {field: table.read(ids, field).tolist() for field in table.fields}
        known = None if name == "word" or table.keys is None else list(table.keys)
        found[name] = list(ids), rows, dict(table.scalars), known
    return found


def files(root: Path) -> dict[str, bytes | None]:
    return {
        str(each.relative_to(root)): each.read_bytes() if each.is_file() else None
        for each in sorted(root.rglob("*"))
        if each.name != "writer.lock"
    }


def plain_run(
    place: Path, steps: Program, ranks: Ranks | None
) -> tuple[Session, list[Any], dict[str, Any], dict[str, bytes | None]]:
    """Return how a program went on a plain store, its calls, the contents and the files."""
    path, log = place / "s", Log(place / "s")

    def opened() -> Any:
        store = tierstore.open(path, "r+", keep=2)
        if ranks is not None:
            inside.state(store).ranks = ranks
        return store

    with drawn(log):
        tierstore.create(path, specs(), keep=2).close()
        session = Session(opened, path)
        session.run(steps)
    with tierstore.open(path) as reader:
        return session, log.calls, contents(reader), files(path)


def ranks_of_one(place: Path) -> Ranks:
    """Return the coordinator of a real process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{place}/one", rank=0, world_size=1)
    try:
        ranks = Ranks()
        ranks.find_leaders(place)
    finally:
        dist.destroy_process_group()
    assert ranks.count == 1 and ranks.leads and not ranks.several
    return ranks


def compare_with_a_group_of_one(tmp_path: Path, seed: int) -> None:
    steps = program(seed, EVERY)
    found = []
    for number, ranks in enumerate((None, ranks_of_one(tmp_path))):
        place = tmp_path / "place"
        place.mkdir()
        found.append(plain_run(place, steps, ranks))
        place.rename(tmp_path / str(number))
    (session, calls, rows, made), other = found
    assert len(calls) > 100
    assert session.seen == other[0].seen
    assert calls == other[1]
    assert rows == other[2]
    assert made == other[3]
    for number in range(2):
        shutil.rmtree(tmp_path / str(number))


def compare_with_a_partition(tmp_path: Path, seed: int) -> None:
    steps, path = program(seed, OF_ROWS), tmp_path / "parts"
    with drawn(Log(path)):
        distributed.create(path, specs(), partitions=1, keep=2).close()
        session = Session(lambda: distributed.open(path, keep=2), path)
        session.run(steps)
    place = tmp_path / "plain"
    place.mkdir()
    plain, _, rows, _ = plain_run(place, steps, None)
    assert session.seen == plain.seen
    with tierstore.open(path) as reader:
        assert contents(reader) == rows
    prefix = "partitions/00000/"
    inner = {
        name.removeprefix(prefix): data
        for name, data in session.files.items()
        if name.startswith(prefix)
    }
    found = tables_of(inner)
    assert found and found == tables_of(plain.files)
    shutil.rmtree(place)
    shutil.rmtree(path)


def tables_of(found: dict[str, bytes | None]) -> dict[str, list[bytes]]:
    """Return the files of tables, without the numbers in names and what binds them to a store."""
    kept: dict[str, list[bytes]] = {}
    for path, data in found.items():
        table, _, name = path.partition("/")
        name = name.rpartition("/")[2]
        if name and data is not None and not name.startswith("digest-"):
            bound = FOOTER_BYTES if name.startswith("delta-") else 0
            name = re.sub(r"\b[0-9a-f]{8,20}\b", "", name)
            kept.setdefault(f"{table}/{name}", []).append(data[: len(data) - bound])
    return {name: sorted(each) for name, each in kept.items()}


@pytest.mark.variants(2, 12)
@pytest.mark.parametrize("seed", range(12))
def test_a_group_of_one_does_what_a_plain_store_does(tmp_path: Path, seed: int) -> None:
    compare_with_a_group_of_one(tmp_path, seed)


@pytest.mark.variants(2, 12)
@pytest.mark.parametrize("seed", range(12))
def test_a_partition_has_the_bytes_of_a_plain_store(tmp_path: Path, seed: int) -> None:
    compare_with_a_partition(tmp_path, seed)
