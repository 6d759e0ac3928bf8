"""A process in which the k-th allocation of a call fails, or its k-th line: what the call leaves.

`python -m tests.durability.little_memory ACT FIRST STEP [lines]` prints what is wrong, a line each,
and the number that failed last.
"""

from __future__ import annotations

import _testcapi  # type: ignore[import-not-found]
import dis
import faulthandler
import os
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

import numpy as np

import tierstore
from tests import inside
from tierstore.budget import Budget
from tierstore.errors import TierStoreError

ROWS, DIM, FEW = 64, 4, 8
EVERY = np.arange(ROWS)
SPECS = {
    "t": tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1)),
    "u": tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=2), backend="zarr"),
}
BUDGET = Budget(host_rows=FEW)
PACKAGE = str(Path(tierstore.__file__).parent)
SPARED = {"__del__", "__exit__", "_judge", "_leave", "close", "release", "wait_for_advice"}
"""Functions that end something, in which an error from elsewhere has no one left to help."""
PATIENCE = 60
"""Seconds after which a call hangs."""


class Odd(Exception):
    """What is raised at a line: as from a signal handler of the caller's."""


ALLOWED = (TierStoreError, MemoryError, TypeError, ValueError, LookupError, Odd)
"""What a call may raise; TypeError to LookupError are Python's own errors of arguments."""

IDS = np.array([3, 60, 17, 31, 5, 9, 40, 41, 42, 43, 44])
NEW = np.random.default_rng(5).standard_normal((IDS.size, DIM)).astype(np.float32)


def write(store: tierstore.Store, path: Path) -> None:
    store["t"].write(IDS, NEW)


def read(store: tierstore.Store, path: Path) -> None:
    store["t"].read(IDS)


def lease(store: tierstore.Store, path: Path) -> None:
    with store["t"].lease(IDS) as lease:
        rows = lease.read("weight")
        lease.write("weight", rows + 1)


def commit(store: tierstore.Store, path: Path) -> None:
    store.commit(step=9, payload={"model": {"w": NEW}})


def commit_async(store: tierstore.Store, path: Path) -> None:
    store.commit_async(step=9, payload={"model": {"w": NEW}}).result()


def prefetch(store: tierstore.Store, path: Path) -> None:
    store["t"].prefetch(IDS)
    inside.state(store).prefetcher.wait()


def fold(store: tierstore.Store, path: Path) -> None:
    store.commit()
    store.fold()


def rollback(store: tierstore.Store, path: Path) -> None:
    store.rollback()


def verify(store: tierstore.Store, path: Path) -> None:
    assert store.verify().ok


def save(store: tierstore.Store, path: Path) -> None:
    store.save(path / "copy")


def close(store: tierstore.Store, path: Path) -> None:
    store.close()


def open_again(store: tierstore.Store, path: Path) -> None:
    tierstore.open(store.path).close()


def create(store: tierstore.Store, path: Path) -> None:
    tierstore.create(path / "copy", SPECS, budget=BUDGET).close()


def create_table(store: tierstore.Store, path: Path) -> None:
    store.commit()
    store.create_table("new", SPECS["t"])


ACTS: dict[str, Callable[[tierstore.Store, Path], None]] = {
    act.__name__: act
    for act in (
        write, read, lease, commit, commit_async, prefetch, fold, rollback, verify, save, close,
        open_again, create, create_table,
    )
}  # fmt: skip
WRITTEN = np.array([1, 3, 30, 50, 51, 52, 53, 54, 55, 56])
"""Rows that are not committed when an act begins."""


def prepare(path: Path) -> None:
    """Make a store of two versions, the second in deltas."""
    with tierstore.create(path / "s", SPECS, budget=BUDGET) as store:
        for table in store.values():
            table.write([2, 33], np.ones((2, DIM), np.float32))
        store._folder.fold_if_quick = lambda: None  # type: ignore[method-assign]
        store.commit(step=1)


def written(rows: dict[str, Any]) -> dict[str, Any]:
    """Return rows with what is not committed when an act begins."""
    rows = {name: each.copy() for name, each in rows.items()}
    for each in rows.values():
        each[WRITTEN] = 5
    return rows


def content(store: tierstore.Store) -> dict[str, Any]:
    return {name: store[name].read(EVERY) for name in SPECS}


class Judge:
    """What a store may hold before and after an act."""

    def __init__(self, image: Path) -> None:
        with tierstore.open(image / "s") as reader:
            self.committed = content(reader)
        self.before = written(self.committed)
        self.after = {name: rows.copy() for name, rows in self.before.items()}
        self.wrong: list[str] = []
        self.killed = 0

    def whole(self, act: str, found: dict[str, Any]) -> bool:
        """Whether rows are those before or after an act, batch by batch."""
        for name in SPECS:
            base = self.committed if act == "rollback" else self.before
            other = self.before[name].copy()
            if act == "write" and name == "t":
                other[IDS] = NEW
            if act == "lease" and name == "t":
                other[IDS] += 1
            if not (np.array_equal(found[name], base[name]) or np.array_equal(found[name], other)):
                return False
        return True

    def on_disk(self, found: dict[str, Any], version: int) -> bool:
        """Whether rows are those of a version."""
        rows = self.committed if version <= 2 else self.before
        return all(np.array_equal(found[name], rows[name]) for name in SPECS)


def leaves(frame: FrameType) -> bool:
    """Whether a frame is between the body of a `with` and the call of `__exit__`.

    A tracer can raise there, and what was entered is never left; no handler of a signal can: the
    interpreter looks for signals after calls, at the start of functions and when it jumps back.
    """
    entered = _entries(frame.f_code).get(frame.f_lineno)
    return entered is not None and frame.f_lasti > entered


@cache
def _entries(code: CodeType) -> dict[int, int]:
    """Return by line the offset of the last instruction that enters a `with`."""
    return {
        each.positions.lineno: each.offset
        for each in dis.get_instructions(code)
        if (each.opname == "BEFORE_WITH" or each.argrepr == "__exit__")
        and each.positions is not None
        and each.positions.lineno is not None
    }


@contextmanager
def failing(number: int, many: int, *, lines: bool) -> Iterator[None]:
    """Make a number of allocations in the body fail, or raise Odd at a line of the library."""
    left = number

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if PACKAGE not in frame.f_code.co_filename or frame.f_code.co_name in SPARED:
            return None
        if event == "line" and not leaves(frame):
            left -= 1
            if left == 0:
                raise Odd(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    if lines:
        sys.settrace(trace)
    else:
        _testcapi.set_nomemory(number, number + many)
    try:
        yield
    finally:
        sys.settrace(None)
        _testcapi.remove_mem_hooks()


def strike(
    act: str, number: int, image: Path, place: Path, judge: Judge, *, many: int, lines: bool
) -> bool:
    """Make a number of allocations of an act fail, in a child; return whether the act raised.

    For ever would not do: where there is no memory to say at which instruction, the interpreter
    unwinds without an end. NumPy does not bear every failure: a child that it kills is a kill.
    """
    shutil.copytree(image, place)
    told = place / "told"
    child = os.fork()
    if not child:
        with open(told, "w") as out:
            faulthandler.dump_traceback_later(PATIENCE, exit=True, file=out)
            _strike_here(act, number, place, judge, many, lines, out)
            out.flush()
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    where = f"{act} {number}+{many}"
    lines = told.read_text().splitlines()
    told.unlink()
    if status and os.WTERMSIG(status) != signal.SIGSEGV:
        judge.wrong.append(f"{where}: it hangs, or ended with {status}")
    judge.wrong += [line for line in lines if not line.startswith("raised ")]
    raised = any(line.startswith("raised ") for line in lines)
    killed = os.WIFSIGNALED(status)
    judge.killed += killed
    with tierstore.open(place / "s", "r+", budget=BUDGET) as again:
        if act not in ("write", "lease", "rollback") and not judge.on_disk(
            content(again), again.version
        ):
            judge.wrong.append(f"{where}: version {again.version} has other rows")
        if not again.verify().ok:
            judge.wrong.append(f"{where}: verify finds damage")
    left = {entry.name for entry in place.iterdir()} - {"s"}
    if killed:  # nobody was left to remove what was begun, which `doctor` lists
        left = {name for name in left if not name.endswith(".partial")}
    if left - {"copy"}:
        judge.wrong.append(f"{where}: left {left}")
    elif left:  # what fails after it was made, such as closing it, leaves it whole
        with tierstore.open(place / "copy") as copy:
            if not copy.verify().ok:
                judge.wrong.append(f"{where}: left a copy that is not whole")
    shutil.rmtree(place)
    return raised or killed


def _strike_here(
    act: str, number: int, place: Path, judge: Judge, many: int, lines: bool, out: IO[str]
) -> None:
    """Make an act fail in this process; describe inconsistencies that it leaves in memory."""
    store = tierstore.open(place / "s", "r+", budget=BUDGET)
    for name in SPECS:
        store[name].write(WRITTEN, np.full((WRITTEN.size, DIM), 5, np.float32))
    raised: BaseException | None = None
    work = ACTS[act]
    try:
        with failing(number, many, lines=lines):
            work(store, place)
    except BaseException as error:
        raised = error
    where = f"{act} {number}+{many}: {raised!r}"
    if raised is not None:
        print("raised", raised, file=out)
        if not isinstance(raised, ALLOWED):
            frames = " < ".join(
                f"{frame.name}:{frame.lineno}"
                for frame in traceback.extract_tb(raised.__traceback__)
            )
            print(f"{where} left the call at {frames}", file=out)
    raised = None
    if not inside.door(store).closed:
        if not judge.whole(act, content(store)):
            print(f"{where}: the store is open with wrong rows", file=out)
        if act not in ("write", "lease", "rollback") and store.version == 2:
            store.commit()
    store.close()


def main(act: str, first: int, step: int, *, lines: bool = False) -> None:
    """Make every `step`-th allocation, or line, from `first` on fail, and report errors."""
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda _: None
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    root = Path(tempfile.mkdtemp(prefix="tierstore-", dir=memory))
    image = root / "image"
    image.mkdir()
    prepare(image)
    judge = Judge(image)
    (root / "once").mkdir()
    shutil.copytree(image, root / "once", dirs_exist_ok=True)
    with tierstore.open(root / "once" / "s", "r+") as store:  # so that all is imported
        ACTS[act](store, root / "once")
    number, quiet = first, 0
    while quiet < 6:  # an allocation may fail without anything being raised
        many = (1, 1, 2)[number % 3]
        raised = strike(act, number, image, root / "place", judge, many=many, lines=lines)
        quiet = 0 if raised else quiet + 1
        number += step
    shutil.rmtree(root)
    print(*judge.wrong, sep="\n")
    print("struck", number - first, "killed", judge.killed)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), lines=sys.argv[4:] == ["lines"])
