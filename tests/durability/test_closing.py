"""`closed` says that the lock is free: whatever interrupts closing, the next `close` does the rest.

A second writer asks for the lock, after each way to fail at each operation and line of closing.
"""

from __future__ import annotations

import dataclasses
import gc
import linecache
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.distributed.confirming import make as make_partitions
from tests.distributed.confirming import write as write_partitions
from tests.durability.faults import FAULTS, Faulty
from tests.durability.small import NONE, commit, make
from tests.durability.writer import DIM
from tierstore import _io, distributed
from tierstore._door import Door
from tierstore._io.file import File
from tierstore._table.prefetch import Prefetcher
from tierstore.errors import (
    ClosedError,
    CommitFailedError,
    LockedError,
    UnclosedStoreWarning,
)

KINDS = ["ENOSPC for ever", "EIO", "EIO for ever", "EIO although done", "EMFILE for ever"]
KINDS += ["ENOMEM", "MemoryError", "KeyboardInterrupt", "KeyboardInterrupt although done"]
_LIBRARY = str(Path(tierstore.__file__).parent)
_MOST = 4000


def left(store: Any) -> None:
    """Leave a store as `with` does after an error."""
    store.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


ENDS: dict[str, Callable[[Any], None]] = {
    "close": lambda store: store.close(),
    "with": lambda store: store.__exit__(None, None, None),
    "with error": left,
}


def opened(path: Path) -> Any:
    """Open a store that has rows to drop and deltas to fold."""
    store = tierstore.open(path, "r+", budget=NONE)
    commit(store)
    store["t"].write([1], np.ones((1, DIM), np.float32))
    return store


def opened_in_parts(path: Path) -> Any:
    store = distributed.open(path)
    write_partitions(store, 8)
    return store


def is_free(path: Path) -> bool:
    """Ask for the lock as a second writer does."""
    try:
        open_again(path).close()
    except LockedError:
        return False
    return True


def open_again(path: Path) -> Any:
    return (distributed if (path / "partitions").exists() else tierstore).open(path, "r+")


def _takes_no_signal(frame: FrameType) -> bool:
    """Whether the line enters or leaves a context, or is the empty body of one.

    Signals come after calls: none comes between a body and its end, nor within a `pass`, which
    Python 3.11 does not count among what the context protects.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line.startswith("with ") or line == "pass"


class Struck:
    """Lets SIGINT come at the n-th line of the library that runs: what handles it is called."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.struck = 0

    def __call__(self, frame: FrameType, what: str, given: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_LIBRARY):
            return None
        if what == "line" and not _takes_no_signal(frame):
            self._left -= 1
            if self._left == 0:
                self.struck += 1
                sys.settrace(None)
                signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)
        return self


@contextmanager
def interrupted(number: int) -> Iterator[Struck]:
    struck, before = Struck(number), sys.gettrace()
    sys.settrace(struck)
    try:
        yield struck
    finally:
        sys.settrace(before)


@contextmanager
def failing(kind: str, number: int) -> Iterator[Faulty]:
    fault = FAULTS[kind]
    if fault.operations & {"flock"}:  # the other kind of lock too
        fault = dataclasses.replace(fault, operations=fault.operations | {"fcntl"})
    with mock.patch.object(_io.system, "calls", faulty := Faulty(fault, number)):
        yield faulty


def closes(path: Path, open_it: Callable[[Path], Any], end: str, failure: Any) -> tuple[bool, bool]:
    """Close a store while something fails; return whether it did, and whether it was closed."""
    store, error = open_it(path), None
    with failure as faulty:
        try:
            ENDS[end](store)
        except (Exception, KeyboardInterrupt) as each:
            error = each
    closed = store.closed
    assert closed == is_free(path), repr(error)
    store.close()
    assert store.closed and is_free(path), repr(error)
    with pytest.raises(ClosedError):
        store.commit()
    return bool(faulty.struck), closed


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows that are dropped, and of what is put off
        yield


def in_every(path: Path, open_it: Callable[[Path], Any], ends: Any, step: int, failing: Any) -> int:
    """Fail at every `step`-th moment of closing; return how often the lock was still held."""
    held = 0
    for end in ends:
        for number in range(1, _MOST, step):
            struck, closed = closes(path, open_it, end, failing(number))
            held += not closed
            if not struck:
                break
        else:
            pytest.fail("closing does not end")
    return held


@pytest.mark.variants(1, 1)
@pytest.mark.fault(33, 34)
@pytest.mark.parametrize(
    ("step", "ends", "kinds"),
    [
        (9, ["close"], ["EIO", "KeyboardInterrupt"]),
        pytest.param(1, ENDS, KINDS, marks=pytest.mark.slow),
    ],
)
def test_closed_means_free_whichever_operation_fails(
    tmp_path: Path, step: int, ends: Any, kinds: list[str]
) -> None:
    path = make(tmp_path / "s")
    for kind in kinds:
        in_every(path, opened, ends, step, lambda number: failing(kind, number))  # noqa: B023


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("step", "ends"),
    [(151, ["close"]), pytest.param(1, ENDS, marks=[pytest.mark.slow, pytest.mark.torture])],
)
def test_closed_means_free_wherever_an_interrupt_comes(
    tmp_path: Path, step: int, ends: Any
) -> None:
    assert in_every(make(tmp_path / "s"), opened, ends, step, interrupted)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.fault(33, 77)
def test_a_store_in_partitions_is_closed_when_all_locks_are_free(tmp_path: Path) -> None:
    make_partitions(tmp_path / "s", 2)
    for kind in ("KeyboardInterrupt", "EIO"):
        in_every(tmp_path / "s", opened_in_parts, ["close"], 5, lambda n: failing(kind, n))  # noqa: B023
    in_every(tmp_path / "s", opened_in_parts, ["close"], 37, interrupted)


@pytest.mark.fault(33, 44)
def test_a_failure_that_ends_a_store_leaves_its_lock_to_close(tmp_path: Path) -> None:
    path = make(tmp_path / "s")
    lost = dataclasses.replace(FAULTS["EIO for ever"], operations=frozenset({"fsync"}))
    with tierstore.open(path, "r+", budget=NONE) as store:
        faulty = mock.patch.object(_io.system, "calls", Faulty(lost, 1))
        with faulty, pytest.raises(CommitFailedError):
            commit(store)
        assert not store.closed and not is_free(path)
        with pytest.raises(ClosedError, match="close it and open it again"):
            store.rollback()
    assert store.closed and is_free(path)


@pytest.mark.fault(33)
def test_a_store_is_not_closed_while_either_lock_is_held(tmp_path: Path) -> None:
    store, closed, close = opened(make(tmp_path / "s")), [], File.close

    def once(file: File) -> None:
        if closed:
            raise KeyboardInterrupt
        closed.append(file)
        close(file)

    writer = inside.state(store).writer
    with mock.patch.object(File, "close", once), pytest.raises(KeyboardInterrupt):
        writer.close()
    assert closed and writer.locked
    store.close()
    assert store.closed and is_free(tmp_path / "s")


@pytest.mark.fault(33)
def test_an_interrupt_while_closing_waits_for_advice_lets_the_next_wait() -> None:
    prefetcher = Prefetcher(Door("s", writable=False))
    for number in range(1, 4):
        with interrupted(number), suppress(KeyboardInterrupt):
            prefetcher.wait_for_advice()
        again = threading.Thread(target=prefetcher.wait_for_advice, daemon=True)
        again.start()
        again.join(30)
        assert not again.is_alive(), number


@pytest.mark.fault(33)
def test_a_reader_is_closed_when_it_holds_no_version(tmp_path: Path) -> None:
    with tierstore.open(make(tmp_path / "s"), "r+", budget=NONE) as writer:
        for number in range(1, _MOST, 5):
            reader = tierstore.open(tmp_path / "s", budget=NONE)
            with interrupted(number) as struck, suppress(KeyboardInterrupt):
                reader.close()
            for _ in range(2):
                seen = inside.state(writer).writer.readers(writer.version + 1)
                assert not (reader.closed and seen), number
                reader.close()
            assert reader.closed
            if not struck.struck:
                return


@pytest.mark.fault(33)
def test_a_store_that_is_dropped_while_locked_is_told_of_and_unlocked(tmp_path: Path) -> None:
    path, told = make(tmp_path / "s"), set()
    for number in range(1, _MOST, 500):
        store = opened(path)
        with interrupted(number) as struck, suppress(KeyboardInterrupt):
            store.close()
        closed = store.closed
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del store
            gc.collect()
        categories = [each.category for each in caught]
        assert (UnclosedStoreWarning in categories) == (not closed)
        assert is_free(path)
        told.add(closed)
        if not struck.struck:
            break
    assert told == {False, True}


def in_a_child(ask: Callable[[], bool]) -> bool:
    """Ask in a forked child."""
    if not (child := os.fork()):
        os._exit(ask())
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.fault(24)
def test_a_child_cannot_close_what_its_parent_has_open(tmp_path: Path) -> None:
    path = make(tmp_path / "s")
    stores = [opened(path), tierstore.open(path)]

    def ask() -> bool:
        for store in stores:
            store.close()
        return stores[0].closed

    assert not in_a_child(ask)
    assert not stores[0].closed and not is_free(path)
    for store in stores:
        store.close()
    assert is_free(path)
    assert in_a_child(ask)
