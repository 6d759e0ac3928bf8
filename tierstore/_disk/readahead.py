"""Read ahead of use: which pages are resident, what to announce to the disk, and when."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _io
from tierstore._io import system
from tierstore._threads import Event, Worker
from tierstore.errors import StoreIOError

__all__ = [
    "SPEEDS",
    "MappedRows",
    "announce",
    "at_leisure",
    "cache_path",
    "disk_of",
    "looks_resident",
    "merge_gap",
    "method",
    "paced",
    "read_cache",
    "write_cache",
]


PAGE = mmap.PAGESIZE
USUAL_GAP = 12 << 10
"""Bytes that most disks read in the time of one more request; `merge_gap` measures it."""

_RANGES_PER_CALL = 512
_SAMPLES = 64
_ROWS_PER_SAMPLE = 16
_CLOSE = 4 * PAGE
_FEW = 4


@cache
def _pidfd(pid: int) -> int:
    """A descriptor for this process, or -1 where `process_madvise` is not to be had.

    Keyed by the process id, so that a forked child opens its own.
    """
    probe = mmap.mmap(-1, PAGE)
    page = np.array([[np.frombuffer(probe, np.uint8).ctypes.data, PAGE]], np.uint64)
    fd = -1
    try:
        fd = int(system.calls.pidfd_open(pid))
        system.calls.process_madvise(fd, page, mmap.MADV_WILLNEED)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return -1
    return fd


def method() -> str:
    """Name the way pages are announced on this machine, for `tierstore doctor`."""
    return "process_madvise" if _pidfd(os.getpid()) >= 0 else "madvise"


@dataclass(frozen=True)
class MappedRows:
    """Where rows lie: `rows` `(n,)` of mapped `records` `(all rows, record_bytes)`."""

    records: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]

    def announce(self, gap: int = USUAL_GAP) -> None:
        """Have the disk read the pages of these rows; see `announce`."""
        announce(self.records, self.rows, gap)


def announce(
    records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], gap: int = USUAL_GAP
) -> None:
    """Have the disk read the pages that hold `rows` of mapped `records`.

    Pages at most `gap` bytes apart are read in one piece.
    Waits for none of them, but for as long as the disk has more requests than it takes at a time.
    Costs nothing but a sample of the page table where the pages are in memory already.
    """
    if rows.size > _FEW and not looks_resident(records, rows):
        _willneed(_page_ranges(records, rows, gap))


def looks_resident(records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64]) -> bool:
    """Whether the pages of a sample of `rows` are all in memory.

    Those between samples that lie close together count too: most of them hold rows of the batch.
    """
    if not rows.size:
        return True
    samples = min(_SAMPLES, rows.size // _ROWS_PER_SAMPLE + 1)
    sample = rows[:: max(1, rows.size // samples)]
    for first, nbytes in _page_ranges(records, sample, _CLOSE).tolist():
        state = ctypes.create_string_buffer(nbytes // PAGE)
        try:
            system.calls.mincore(first, nbytes, state)
        except OSError:
            return False
        if not (np.frombuffer(state.raw, np.uint8) & 1).all():
            return False
    return True


def _page_ranges(
    records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], gap: int
) -> npt.NDArray[np.uint64]:
    """Return (address, bytes) of the pages of `rows`, merged across small gaps, ascending."""
    width = records.shape[1]
    starts = np.sort(rows) * width + records.ctypes.data
    first = starts // PAGE * PAGE
    last = -(-(starts + width) // PAGE) * PAGE
    opens = np.ones(first.size, bool)
    opens[1:] = first[1:] > last[:-1] + gap
    closes = np.append(opens[1:], True)
    begin = first[opens]
    return np.stack([begin, last[closes] - begin], axis=1).astype(np.uint64)


def _willneed(ranges: npt.NDArray[np.uint64]) -> None:
    fd = _pidfd(os.getpid())
    for start in range(0, len(ranges), _RANGES_PER_CALL):
        part = np.ascontiguousarray(ranges[start : start + _RANGES_PER_CALL])
        with contextlib.suppress(OSError):  # it is advice
            if fd >= 0:
                system.calls.process_madvise(fd, part, mmap.MADV_WILLNEED)
                continue
        for address, nbytes in part.tolist():
            with contextlib.suppress(OSError):
                system.calls.madvise(address, nbytes, mmap.MADV_WILLNEED)


_LEAD = 3
_PATIENCE = 0.05
"""Seconds after which what waits for the thread that runs ahead looks whether it is alive."""
_REST = 2


def paced(count: int, announce: Callable[[int], None]) -> Iterator[int]:
    """Yield 0 … count - 1, each when `announce` was called with it, in a thread that runs ahead.

    The thread is at most three parts ahead of what the caller has taken, so that pages are not lost
    again before they are copied. Announcing waits for the disk wherever its queue is full; that is
    what sets the pace.
    """
    announced = threading.Semaphore(0)
    room = threading.Semaphore(_LEAD)
    over = Event()

    def run_ahead() -> None:
        for number in range(count):
            room.acquire()
            if over.is_set():
                return
            with contextlib.suppress(Exception):  # it is advice: a read finds the page anyway
                announce(number)
            announced.release()

    try:
        worker = Worker(run_ahead, "read ahead")
    except (StoreIOError, MemoryError):  # all is found without advice, but later
        yield from range(count)
        return
    try:
        for number in range(count):
            while worker.alive and not announced.acquire(timeout=_PATIENCE):
                pass
            yield number
            room.release()
    finally:
        over.set()
        room.release()
        worker.join()


def at_leisure(steps: Iterator[None], hurry: threading.Event) -> Iterator[None]:
    """Pass on steps of work, with rests in between until `hurry` is set.

    A rest takes twice as long as the step before it, so that others have most of the disk.
    """
    begin = time.perf_counter()
    for _ in steps:
        yield
        hurry.wait(_REST * (time.perf_counter() - begin))
        begin = time.perf_counter()


SPEEDS = "speeds.json"
_MOST_BYTES = 1 << 20
_GAPS = (4 << 10, 256 << 10)


def cache_path(name: str) -> Path:
    """Return where a file of this name is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tierstore" / name


def disk_of(path: str | Path) -> str:
    """Return what tells the disk under `path`, or its nearest parent there is, from others."""
    there = Path(os.path.abspath(path))
    while not there.exists():
        there = there.parent
    device = os.stat(there).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def merge_gap(path: str | Path) -> int:
    """Return the bytes that the disk under `path` reads in the time of one more request.

    Pages that lie less than this apart are best read in one piece: bandwidth ÷ requests a second,
    as measured last, or what is usual.
    """
    entry: Any = read_cache(SPEEDS).get(disk_of(path))
    with contextlib.suppress(TypeError, KeyError, ValueError, ZeroDivisionError, OverflowError):
        gap = int(entry["sequential_bytes"] / entry["random_reads"])
        return min(max(gap, _GAPS[0]), _GAPS[1])
    return USUAL_GAP


def read_cache(name: str) -> dict[str, Any]:
    """Return what is kept in a file of the cache, by disk; empty where nothing can be read."""
    path = cache_path(name)
    with contextlib.suppress(Exception), _io.Directory.open(path.parent) as directory:
        content = json.loads(directory.read_file(path.name, _MOST_BYTES))
        if isinstance(content, dict):
            return content
    return {}


def write_cache(name: str, content: dict[str, Any]) -> None:
    """Keep something in a file of the cache, where that can be written."""
    path = cache_path(name)
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
