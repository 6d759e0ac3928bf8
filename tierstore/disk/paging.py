"""Getting the pages of scattered records off the disk before a copy touches them.

A page fault reads one page and waits for it: 11,000 a second where the same device serves 141,000
when every page is announced first. `madvise(WILLNEED)` announces pages without waiting, so one
thread keeps the device's queue full. `process_madvise` takes 512 page ranges a call; a kernel
without it is served range by range.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tierstore.io import system

__all__ = ["Place", "announce", "looks_resident", "method"]

PAGE = mmap.PAGESIZE
USUAL_GAP = 12 << 10
"""Bytes that most disks read in the time of one more request; `tuning.merge_gap` knows better."""

_RANGES_PER_CALL = 512
_SAMPLES = 64
_ROWS_PER_SAMPLE = 16
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
class Place:
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
    """Whether the pages of a sample of `rows` are all in memory."""
    samples = min(_SAMPLES, rows.size // _ROWS_PER_SAMPLE + 1)
    sample = rows[:: max(1, rows.size // samples)]
    start, width = records.ctypes.data, records.shape[1]
    state = ctypes.create_string_buffer(width // PAGE + 2)
    for row in sample.tolist():
        first = (start + row * width) // PAGE * PAGE
        nbytes = start + (row + 1) * width - first
        try:
            system.calls.mincore(first, nbytes, state)
        except OSError:
            return False
        if not all(byte & 1 for byte in state.raw[: -(-nbytes // PAGE)]):
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
