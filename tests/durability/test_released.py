"""What a store has open ends when it does, even while an error or a frame of it is kept.

Python frees a frame when nothing refers to it; an error that someone keeps refers to all frames
that it passed, and one that refers to itself lives until a search for garbage: here is none.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch, small_deltas
from tests.durability.faults import FAULTS, Fault, Faulty
from tests.durability.recorder import lay
from tests.durability.small import NONE, commit, make
from tests.durability.test_faults import ACTS, _prepared
from tierstore import _io


@contextmanager
def no_search() -> Iterator[None]:
    """Let Python search for no cyclic garbage in the body."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def left_open(root: Path) -> list[str]:
    """Return the descriptors and mappings of this process that lie in a directory."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(root) in line]
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith(str(root)):
                found.append(f"{fd} -> {name}")
    return found


def cycles() -> list[str]:
    """Return where the errors were raised that only a search for garbage finds.

    Left out are those of the standard library: a contextlib.ExitStack whose callback raises, and
    from Python 3.12 on, where frames of generators refer to their callers, an error that another
    one replaced in the body of a contextlib.contextmanager.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = [each for each in gc.garbage if issubclass(type(each), BaseException)]
        errors = [each for each in found if not _passed_contextlib(each)]
        return ["".join(traceback.format_exception(each)) for each in errors]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def _passed_contextlib(error: BaseException) -> bool:
    if sys.version_info >= (3, 12):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code is ExitStack.__exit__.__code__ for frame in frames)


@pytest.mark.fault(21)
def test_a_lock_that_is_removed_is_made_again(tmp_path: Path) -> None:
    path = make(tmp_path / "s")
    with no_search(), tierstore.open(path, "r+", budget=NONE) as store:
        for version in range(2, 12):
            (path / "LOCK").unlink()
            assert commit(store) == version
            if version % 3 == 0:
                (path / "LOCK").unlink()
                store.fold()


def strike(name: str, fault: Fault, number: int) -> tuple[bool, list[str]]:
    """Fail an operation of an act, keep the error, go on and close; return what is left open."""
    with scratch() as root, small_deltas(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lay(_prepared("plain"), root)
        store = tierstore.open(root / "s", "r+", budget=tierstore.Budget(host_rows=2))
        faulty, kept = Faulty(fault, number), list[BaseException]()
        with mock.patch.object(_io.system, "calls", faulty):
            try:
                ACTS[name](store)
            except BaseException as error:
                kept.append(error)
        for _ in range(2):
            if not inside.door(store).closed:
                with suppress(tierstore.errors.StoreIOError):  # rows that were written in part
                    ACTS["commit"](store)
        store.close()
        left = left_open(root)
        with tierstore.open(root / "s", "r+", budget=tierstore.Budget(host_rows=2)) as again:
            ACTS["commit"](again)
        left += left_open(root)
        del store, again
        kept.clear()
        return faulty.struck > 0, left


KINDS = ["ENOSPC", "EIO", "EIO although done", "EMFILE for ever", "ENOMEM", "KeyboardInterrupt"]


@pytest.mark.variants(1, 3)
@pytest.mark.fault(33, 34, 43, 45)
@pytest.mark.parametrize("name", ACTS)
def test_an_error_that_is_kept_keeps_nothing_open(name: str) -> None:
    rng = random.Random(name)
    with no_search():
        for kind in rng.sample(KINDS, 2):
            _, left = strike(name, FAULTS[kind], 1 + rng.randrange(30))
            assert not left, kind
        assert not cycles()


SOME = 3
"""`make test-all` tries one in so many pairs of act and kind: each act with two, each kind."""


@pytest.mark.variants(1, 2)
@pytest.mark.fault(33, 34, 43, 45)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.nightly] * ((act + number) % SOME > 0))
        for act, name in enumerate(ACTS)
        for number, kind in enumerate(KINDS)
    ],
)
def test_no_error_that_is_kept_keeps_anything_open(name: str, kind: str) -> None:
    rng, number, struck = random.Random(f"{name} {kind}"), 0, True
    with no_search():
        while struck:
            number += 1 + rng.randrange(16)
            struck, left = strike(name, FAULTS[kind], number)
            assert not left, number
            assert not cycles(), number
