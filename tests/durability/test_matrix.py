"""The matrix of file systems: its cheap half, and that its judge sees what is lost.

`python -m tests.durability.matrix` runs all of it, as root; it needs namespaces, since a test that
is killed must leave no mount behind.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.durability.crash import scratch
from tests.durability.matrix import work
from tests.durability.matrix.cells import CELLS, Outcome
from tests.durability.matrix.children import Child, Say, in_child
from tests.durability.matrix.disks import FILE_SYSTEMS, why_no_mounts
from tests.durability.matrix.report import Result, table
from tests.durability.matrix.work import Lost
from tierstore.errors import StoreIOError

CHEAP = ("ext4", "tmpfs", "overlay")


@pytest.mark.variants(0, 1)
@pytest.mark.thorough
@pytest.mark.parametrize("name", CHEAP)
def test_nothing_is_lost(name: str, tmp_path: Path) -> None:
    reason = why_no_mounts() or FILE_SYSTEMS[name].why_not()
    if reason:
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.durability.matrix", "--on", name, "--rounds", "2"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "json").read_text())["results"]
    assert [each["cell"] for each in found] == [cell.name for cell in CELLS]


def store_at(path: Path, step: int) -> Path:
    work.make(path)
    work.train(path, lambda step: None, 3, steps=step)
    return path


def test_a_store_that_has_everything_holds() -> None:
    with scratch() as root:
        work.check(store_at(root / "s", 12), 12)


def test_the_step_under_way_may_be_there() -> None:
    with scratch() as root:
        work.check(store_at(root / "s", 10), 9)


@pytest.mark.variants(1)
@pytest.mark.parametrize("acknowledged", [8, 11])
def test_a_step_that_is_missing_or_was_never_made_is_seen(acknowledged: int) -> None:
    with scratch() as root, pytest.raises(Lost, match="the store is at 10"):
        work.check(store_at(root / "s", 10), acknowledged)


@pytest.mark.variants(2)
@pytest.mark.parametrize("name", work.TABLES)
def test_a_row_that_was_never_written_is_seen(name: str) -> None:
    import tierstore

    with scratch() as root:
        path = store_at(root / "s", 4)
        with tierstore.open(path, "r+") as store:
            store[name].write([3], store[name].read([5]))
            store.commit(step=4)
        with pytest.raises(Lost, match=f"1 rows of {name}"):
            work.check(path, 4)


def test_an_older_store_in_its_place_is_seen() -> None:
    with scratch() as root:
        store_at(root / "s", 4)
        shutil.copytree(root / "s", root / "older")
        work.train(root / "s", lambda step: None, 3, steps=4)
        with pytest.raises(Lost, match="step 8 was acknowledged, the store is at 4"):
            work.check(root / "older", 8)


def test_tables_grow_in_turn() -> None:
    assert [work.rows_at("plain", step) for step in (0, 9, 29, 30, 59, 60)] == [
        400, 400, 400, 408, 408, 416,
    ]  # fmt: skip


def test_a_child_that_is_killed_has_said_what_it_said() -> None:
    def count(say: Say) -> None:
        for number in range(1 << 30):
            say(number)
            time.sleep(0.001)  # or it might say more than can be listened to

    with Child(count) as child:
        for _ in range(5):
            assert child.listen()
        child.stop()
        so_far = len(child.said)
        child.resume()
        assert child.listen() and len(child.said) > so_far
        child.kill()
        assert child.said == list(range(len(child.said)))


def _fail(error: BaseException, say: Say) -> None:
    raise error


def test_what_a_child_meets_reaches_the_parent() -> None:
    with pytest.raises(StoreIOError, match="the disk is away"):
        in_child(partial(_fail, StoreIOError("the disk is away")))
    with pytest.raises(RuntimeError, match="KeyError: 'plain'"):
        in_child(partial(_fail, KeyError("plain")))


def test_the_table_says_what_was_not_tried() -> None:
    held, lost = Outcome("held"), Outcome("lost", "a row", "kill 1")
    results = [
        Result("ext4", "kills", [held, held, lost]),
        Result("ext4", "cuts", [held]),
        Result("tmpfs", "kills", [held]),
        Result("tmpfs", "cuts", reason="no disk lies below"),
        Result("f2fs", "kills", reason="no f2fs"),
        Result("f2fs", "cuts", reason="no f2fs"),
    ]
    assert table(results).splitlines() == [
        "| | ext4 | tmpfs |",
        "|---|---|---|",
        "| kills | 2, 1 lost | 1 |",
        "| cuts | 1 | – |",
        "",
        "Not tried: f2fs (no f2fs).",
    ]
