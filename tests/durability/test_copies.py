"""Kills, power cuts and faults while a copy is brought to a newer version of its original.

Whatever they leave is the copy at its old version or at the new one, verifies as clean, and is
brought to the new version by the next attempt.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import Progress, Recording, durable, scratch, seeded, small_deltas
from tests.durability.disk import Disk, Image, Mark
from tests.durability.faults import FAULTS, Fault, Faulty
from tests.durability.judge import Failure, Judge, check_files
from tests.durability.recorder import Recorder, lay
from tests.durability.twin import State, observe
from tierstore import _io
from tierstore._disk import readahead
from tierstore.budget import Budget
from tierstore.errors import TierStoreError

KINDS = ["rows", "tables", "keys"]


def rows(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    return rng.normal(size=(count, dim)).astype("f4")


def image_of(root: Path) -> Image:
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


@cache
def prepared(kind: str) -> tuple[Image, Image]:
    """An original at version 2 or later, and a copy of its version 1."""
    rng = np.random.default_rng(5)
    with scratch() as root, small_deltas():
        specs = {
            "item": tierstore.TableSpec(40, 8, init=tierstore.normal(seed=2)),
            "word": tierstore.TableSpec(
                30, 4, backend="zarr", compression="zstd", chunk_rows=16, init=tierstore.normal()
            ),
        }
        if kind == "keys":
            specs["user"] = tierstore.TableSpec(rows=60, dim=4, keys="text")
        with tierstore.create(root / "a", specs, keep=9, budget=Budget(host=0)) as store:
            if kind == "keys":
                store["user"].write([f"u{n}" for n in range(20)], rows(rng, 20, 4))
                store.commit()
            store.save(root / "copy")
            for name in ("item", "word"):
                table = store[name]
                table.write(rng.permutation(30)[:9], rows(rng, 9, table.dim))
            if kind == "keys":
                store["user"].write([f"u{n}" for n in range(15, 33)], rows(rng, 18, 4))
                store.set_keys("word", [f"w{n}" for n in range(30)], commit=False)
            store["item"].scalars["step"] = 3
            store.commit(step=8, payload={"reader": b"7", "tree": {"w": rng.normal(size=30)}})
            if kind == "tables":
                store.grow("word", 35)
                spec = tierstore.TableSpec(9, 5, init=tierstore.normal(seed=7))
                store.create_table("new", spec)
        image = image_of(root)
    return (
        {path: data for path, data in image.items() if not path.startswith("copy")},
        {path: data for path, data in image.items() if path.startswith("copy")},
    )


@contextmanager
def laid(kind: str) -> Iterator[tuple[tierstore.Store, Path]]:
    """Yield a reader of the original, and the directory in which the copy is."""
    original, copy = prepared(kind)
    with scratch() as root, small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (root / "from").mkdir()
        (root / "to").mkdir()
        lay(original, root / "from")
        lay(copy, root / "to")
        with tierstore.open(root / "from" / "a", budget=Budget(host=0)) as store:
            yield store, root / "to"


def seen(path: Path) -> State:
    with tierstore.open(path, budget=Budget(host=0)) as reader:
        return observe(reader)


@cache
def recorded(kind: str) -> Recording:
    with laid(kind) as (store, root), seeded(3):
        shutil.rmtree(root / "copy")
        recorder = Recorder(root, durable(prepared(kind)[1]))
        start, states = len(recorder.log), [seen(root / "copy")]
        recorder.mark("begin", "copy", 0)
        recorder.mark("done", "copy", 0)
        recorder.mark("begin", "copy", 1)
        with mock.patch.object(_io.system, "calls", recorder):
            store.update_copy(root / "copy")
        recorder.mark("done", "copy", 1)
        states.append(seen(root / "copy"))
        contents = [{**each, "version": None} for each in (states[1], observe(store))]
        assert contents[0] == contents[1] != {**states[0], "version": None}
    return Recording(recorder.log, states, start)


def judged(recording: Recording, seed: int, each: int) -> int:
    judge = Judge(recording.states)
    for number, image, progress in recording.crashes(seed, each):
        try:
            judge.check(image, progress)
        except Failure as failure:
            raise Failure(f"after event {number}, {recording.log[number]!r:.200}: {failure}") from (
                failure
            )
    return judge.count


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_moment_leaves_one_of_both_versions(kind: str) -> None:
    recording = recorded(kind)
    judge, disk, progress = Judge(recording.states), Disk(), Progress()
    for number, event in enumerate(recording.log):
        disk.replay(event)
        if isinstance(event, Mark):
            progress.note(event)
        if number >= recording.start and progress.done:
            judge.check(disk.image(), progress)
    assert judge.count > 10


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_power_cut_leaves_one_of_both_versions(kind: str) -> None:
    assert judged(recorded(kind), 1, 1) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nightly("keys")
def test_many_power_cuts_leave_one_of_both_versions(kind: str) -> None:
    assert judged(recorded(kind), 2, 14) > 100


@pytest.mark.slow
def test_without_syncs_of_rows_they_do_not() -> None:
    """The negative control of the test before."""
    recording = recorded("rows").without("LiveDelta|delta|generation")
    assert len(recording.log) < len(recorded("rows").log)
    with pytest.raises(Failure):
        judged(recording, 4, 10)


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kill_leaves_is_brought_to_the_new_version(kind: str) -> None:
    recording, rng = recorded(kind), random.Random(6)
    for number in rng.sample(range(recording.start + 3, len(recording.log)), 8):
        with laid(kind) as (store, root):
            shutil.rmtree(root / "copy")
            lay(Disk(recording.log[:number]).image(), root)
            store.update_copy(root / "copy")
            state = {**seen(root / "copy"), "version": None}
            assert state == {**observe(store), "version": None}


def strike(kind: str, fault: Fault, number: int) -> bool:
    """Make an operation of an update fail; return whether an operation of that number exists."""
    before, after = recorded(kind).states
    already = len(os.listdir("/proc/self/fd"))
    with laid(kind) as (store, root):
        faulty, error = Faulty(fault, number), None
        with mock.patch.object(_io.system, "calls", faulty):
            try:
                store.update_copy(root / "copy")
            except BaseException as caught:
                error = caught
        if error is not None:
            types = TierStoreError if not fault.is_interrupt else (TierStoreError, fault.make)
            assert isinstance(error, types), repr(error)
            error.__traceback__ = None
        assert seen(root / "copy") in ([before, after] if error is not None else [after])
        if not inside.door(store).closed:
            store.update_copy(root / "copy")
            assert seen(root / "copy") == after
        with tierstore.open(root / "copy", "r+", budget=Budget(host=0)) as copy:
            assert copy.verify().ok
            check_files(root / "copy", copy)
    if fault.is_interrupt:  # all is closed at once, not when unreachable objects are collected
        assert len(os.listdir("/proc/self/fd")) <= already
    return faulty.struck > 0


def swept(kind: str, fault: Fault, share: float) -> int:
    """Make operations of an update fail, all or a random share of them; return how many did."""
    rng, count = random.Random(f"{kind} {fault.name}"), 0
    readahead.method()  # opens a descriptor that lives as long as the process
    strike(kind, fault, 1 << 30)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 3000):
        if rng.random() < share:
            if not strike(kind, fault, number):
                break
            count += 1
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    return count


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_leaves_one_of_both_versions(kind: str) -> None:
    assert swept(kind, FAULTS["EIO"], 0.015) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.nightly(
    "keys", "tables", "KeyboardInterrupt", "MemoryError", "EINTR", "EDQUOT", "ENOMEM"
)
def test_faults_leave_one_of_both_versions(kind: str, fault: Fault) -> None:
    assert swept(kind, fault, 0.15) >= 0
