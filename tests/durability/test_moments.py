"""Odd moments: locks that do not hold, commits from within, kills, programs that end, clocks.

Rows 21, 27, 29, 31, 32 and 63 of docs/faults.md.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch
from tests.durability.small import EVERY, NONE, check, commit, make, script
from tests.durability.writer import DIM, ROWS, content
from tierstore import _io
from tierstore._io.system import Calls
from tierstore._store.locking import WriterLock
from tierstore.budget import Budget
from tierstore.errors import ConcurrentWriterError, InvalidInputError

fault = pytest.mark.fault


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch() as root:
        yield make(root / "s")


@contextlib.contextmanager
def locks_that_do_not_hold() -> Iterator[None]:
    with (
        mock.patch.object(_io.File, "lock", lambda self, *, exclusive: True),
        mock.patch.object(_io.File, "lock_range", lambda self, start, length, *, exclusive: True),
    ):
        yield


@fault(21)
def test_the_first_of_two_writers_sees_the_second(path: Path) -> None:
    with (
        locks_that_do_not_hold(),
        tierstore.open(path, "r+", budget=NONE) as one,
        tierstore.open(path, "r+", budget=NONE) as two,
    ):
        one["t"].write([1], np.ones((1, DIM), np.float32))
        with pytest.raises(ConcurrentWriterError, match="the locks of this file system do not"):
            one.commit()
        assert inside.door(one).closed
        commit(two)
        commit(two)
    check(path, 3)


@fault(21)
def test_two_writers_that_got_past_the_lock(path: Path) -> None:
    """Even where the note in LOCK is not looked at, the second version of a number is refused."""
    with (
        locks_that_do_not_hold(),
        mock.patch.object(WriterLock, "check", lambda self: None),
        tierstore.open(path, "r+", budget=NONE) as one,
        tierstore.open(path, "r+", budget=NONE) as two,
    ):
        commit(one)
        two["t"].write([1], np.ones((1, DIM), np.float32))
        with pytest.raises(ConcurrentWriterError, match="open it again"):
            two.commit()
        assert inside.door(two).closed
        commit(one)
    check(path, 3)


@fault(27)
def test_commits_at_once_are_one_after_another(path: Path) -> None:
    with tierstore.open(path, "r+", budget=Budget(host_rows=9)) as store:
        versions: list[int] = []

        def work(number: int) -> None:
            for _ in range(10):
                store["t"].write([number], np.full((1, DIM), number, np.float32))
                versions.append(store.commit())

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(versions) == list(range(2, 62))
        assert store["t"].read(np.arange(1, 7))[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


@fault(27)
def test_commits_from_within(path: Path) -> None:
    """From a callback of another call, and from the backward pass of a model."""
    torch = pytest.importorskip("torch")
    with tierstore.open(path, "r+", budget=NONE) as store:
        store.verify(progress=lambda *_: commit(store))
        assert store.version == 2
        spec = tierstore.TableSpec(9000, 2, init=tierstore.normal(seed=1))
        for within in (
            lambda: store.create_table("new", spec, progress=lambda *_: store.commit()),
            lambda: store.create_table("new", spec, progress=lambda *_: store.confirm(2)),
            lambda: store.replace_table(
                "t", spec, reinitialize=True, progress=lambda *_: store.fold()
            ),
            lambda: store.create_table("new", spec, progress=lambda *_: store.grow("t", ROWS + 1)),
        ):
            with pytest.raises(
                InvalidInputError, match=r"about to (create|replace) table (.new.|.t.)"
            ):
                within()
        assert (store.version, list(store)) == (2, ["t"])
        rows = store["t"].read(torch.arange(3)).requires_grad_()
        before = store.version
        rows.register_hook(lambda grad: commit(store) and None)
        rows.sum().backward()
        assert store.version == before + 1
    check(path, before + 1)


@pytest.mark.slow
@fault(29)
def test_killed_before_each_operation(path: Path) -> None:
    """A child kills itself before the n-th change of the disk, for every n there is."""
    image = path.with_name("image")
    shutil.copytree(path, image)
    number, survived = 0, False
    while not survived:
        number += 1
        shutil.rmtree(path)
        shutil.copytree(image, path)
        child = os.fork()
        if child == 0:
            _commit_or_die(path, number)
        survived = os.waitpid(child, 0)[1] == 0
        with tierstore.open(path, "r+", budget=NONE) as store:
            assert store.version in (1, 2), number
            assert np.array_equal(store["t"].read(EVERY), content(store.version)), number
            assert store.verify().ok
            assert store.version == 2 or not survived
    assert number > 15


def _commit_or_die(path: Path, number: int) -> None:
    class Deadly:
        def __getattr__(self, name: str) -> object:
            nonlocal number
            if name in ("open", "pwrite", "posix_fallocate", "ftruncate", "fsync", "link",
                        "rename", "rename_noreplace", "unlink", "close"):  # fmt: skip
                number -= 1
                if number == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return getattr(Calls, name)

    code = 1
    try:
        store = tierstore.open(path, "r+", budget=NONE)
        with mock.patch.object(_io.system, "calls", Deadly()):
            commit(store)
        code = 0
    finally:
        os._exit(code)


ENDS = {
    "error in the body": "with tierstore.open(p, 'r+') as s:\n w(s)\n raise ValueError('mine')",
    "end of the program": "s = tierstore.open(p, 'r+')\nw(s)",
    "dropped": "s = tierstore.open(p, 'r+')\nw(s)\ndel s\nimport gc; gc.collect()",
    "exit": "s = tierstore.open(p, 'r+')\nw(s)\nsys.exit(3)",
}


@pytest.mark.variants(1, 1)
@fault(31, 63)
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_committed_by_leaving(path: Path, end: str) -> None:
    start = (
        "import sys, warnings, numpy as np, tierstore\n"
        "warnings.simplefilter('always')\np = sys.argv[1]\n"
        f"def w(s): s['t'].write([1, 2], np.ones((2, {DIM}), np.float32))\n"
    )
    done = script(start + ENDS[end], path)
    assert ("ValueError: mine" in done.stderr) == (end == "error in the body")
    if end == "dropped":
        assert "UnclosedStoreWarning" in done.stderr
    else:
        assert "2 uncommitted rows" in done.stderr
    check(path, 1)


@fault(32)
def test_clocks_may_jump(path: Path) -> None:
    """Versions, what is kept and what is evicted follow no clock, and no time of a file."""
    rng = random.Random(1)
    wall, steady = time.time, time.monotonic
    jumps = mock.patch.multiple(
        time,
        time=lambda: wall() + rng.uniform(-3e8, 3e8),
        monotonic=lambda: steady() + rng.uniform(0, 1e6),
    )
    with jumps, tierstore.open(path, "r+", budget=Budget(host_rows=7), keep=2) as store:
        for version in range(2, 12):
            assert commit(store) == version
            for file in path.rglob("*"):
                os.utime(file, (rng.uniform(0, 4e9), rng.uniform(0, 4e9)))
            kept = [each.version for each in store.versions()]
            assert kept == [version - 1, version]
            assert np.array_equal(store["t"].read(EVERY), content(version))
    check(path, 11)


@pytest.mark.slow
@fault(32)
def test_nothing_that_is_stored_asks_for_the_time() -> None:
    """The clocks below the store are for timeouts, and for the log."""
    root = Path(tierstore.__file__).parent
    asked = set()
    for file in [*root.glob("*.py"), *root.glob("_store/*.py"), *root.glob("_disk/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "")]
                if {"time", "datetime"} & set(names):
                    asked.add(file.name)
    patient = {"locking.py", "readahead.py", "_threads.py", "following.py"}
    logging = {"commit.py", "write_queue.py"}
    assert asked <= patient | logging | {"reporting.py"}
