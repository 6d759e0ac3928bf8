"""Read-ahead: which pages are resident, and which to prefetch when."""

from __future__ import annotations

import contextlib
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

from tierstore import _core, _io
from tierstore._io import system
from tierstore._threads import Event, Worker
from tierstore.errors import StoreIOError

PAGE = mmap.PAGESIZE
USUAL_GAP = 12 << 10
"""Bytes that a typical disk reads in the time of one more request; see `merge_gap`."""

_RANGES_PER_CALL = 512
FEW = 4
"""Rows that are read as fast without prefetching."""


@cache
def _pidfd(pid: int) -> int:
    """A descriptor for this process, or -1 if `process_madvise` is not available.

    Cached by process id, so that a forked child opens its own.
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
    """Return the name of the call that prefetches pages on this machine, for `tierstore doctor`."""
    return "process_madvise" if _pidfd(os.getpid()) >= 0 else "madvise"


@dataclass(frozen=True)
class MappedRows:
    """Mapped memory of some rows: `rows` `(n,)` of `records` `(all rows, record_bytes)`."""

    records: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]

    def prefetch(self, gap: int = USUAL_GAP) -> None:
        """Prefetch the pages of these rows; see `prefetch`."""
        prefetch(self.records, self.rows, gap)

    def let_go(self) -> None:
        """Drop the pages from the lowest of these rows to the highest; see `_io.let_go`."""
        if self.rows.size:
            _io.let_go(self.records[int(self.rows.min()) : int(self.rows.max()) + 1])


def prefetch(
    records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], gap: int = USUAL_GAP
) -> None:
    """Prefetch the pages that contain `rows` of mapped `records`.

    Pages at most `gap` bytes apart are read in one piece. The call returns without waiting for the
    pages, unless the request queue of the disk is full. If the pages are already in memory, it only
    samples the page table.
    """
    if rows.size > FEW and not looks_resident(records, rows):
        _willneed(_page_ranges(records, rows, gap))


def looks_resident(records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64]) -> bool:
    """Whether the pages of a sample of `rows` are all in memory."""
    return bool(_core.in_memory(records, np.ascontiguousarray(rows)))


def _page_ranges(
    records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], gap: int
) -> npt.NDArray[np.uint64]:
    """Return ascending (address, bytes) of the pages of `rows`, merged across small gaps."""
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
        with contextlib.suppress(OSError):  # only advice
            if fd >= 0:
                system.calls.process_madvise(fd, part, mmap.MADV_WILLNEED)
                continue
        for address, nbytes in part.tolist():
            with contextlib.suppress(OSError):
                system.calls.madvise(address, nbytes, mmap.MADV_WILLNEED)


_MAX_LEAD = 3
_POLL_SECONDS = 0.05
"""Seconds between checks whether the read-ahead thread is still alive."""
_PAUSE = 2


def paced(count: int, prefetch: Callable[[int], None]) -> Iterator[int]:
    """Yield 0 … count - 1, each after a read-ahead thread has called `prefetch` with it.

    The thread is at most three parts ahead of the caller, so that pages are not evicted before they
    are copied. `prefetch` blocks while the request queue of the disk is full, which sets the pace.
    """
    prefetched = threading.Semaphore(0)
    room = threading.Semaphore(_MAX_LEAD)
    over = Event()

    def run_ahead() -> None:
        for number in range(count):
            room.acquire()
            if over.is_set():
                return
            with contextlib.suppress(Exception):  # only advice: a read loads the page anyway
                prefetch(number)
            prefetched.release()

    try:
        worker = Worker(run_ahead, "read ahead")
    except (StoreIOError, MemoryError):  # reads work without advice, only later
        yield from range(count)
        return
    try:
        for number in range(count):
            while worker.alive and not prefetched.acquire(timeout=_POLL_SECONDS):
                pass
            yield number
            room.release()
    finally:
        over.set()
        room.release()
        worker.join()


def at_leisure(steps: Iterator[None], hurry: threading.Event) -> Iterator[None]:
    """Pass on steps of work, pausing in between until `hurry` is set.

    Each pause takes twice as long as the step before it, which leaves most of the disk to others.
    """
    begin = time.perf_counter()
    for _ in steps:
        yield
        hurry.wait(_PAUSE * (time.perf_counter() - begin))
        begin = time.perf_counter()


SPEEDS = "speeds.json"
_MOST_BYTES = 1 << 20
_GAPS = (4 << 10, 256 << 10)


def cache_path(name: str) -> Path:
    """Return the path of a file in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tierstore" / name


def disk_of(path: str | Path) -> str:
    """Return an identifier of the disk under `path` or its nearest existing parent."""
    there = Path(os.path.abspath(path))
    while not there.exists():
        there = there.parent
    device = os.stat(there).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def merge_gap(path: str | Path) -> int:
    """Return how many bytes the disk under `path` reads in the time of one request.

    Pages with smaller gaps are best read in one piece. The value is bandwidth ÷ requests per
    second, as last measured, or a typical value.
    """
    entry: Any = read_cache(SPEEDS).get(disk_of(path))
    with contextlib.suppress(TypeError, KeyError, ValueError, ZeroDivisionError, OverflowError):
        gap = int(entry["sequential_bytes"] / entry["random_reads"])
        return min(max(gap, _GAPS[0]), _GAPS[1])
    return USUAL_GAP


def read_cache(name: str) -> dict[str, Any]:
    """Return the contents of a cache file, by disk; empty if it cannot be read."""
    path = cache_path(name)
    with contextlib.suppress(Exception), _io.Directory.open(path.parent) as directory:
        content = json.loads(directory.read_file(path.name, _MOST_BYTES))
        if isinstance(content, dict):
            return content
    return {}


def write_cache(name: str, content: dict[str, Any]) -> None:
    """Store values in a cache file, if it can be written."""
    path = cache_path(name)
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")
        temporary.replace(path)
