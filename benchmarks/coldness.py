"""Makes files cold, proves it, and measures the limit of the disk under them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK = 4096


def files_of(path: Path) -> list[Path]:
    """Return the files at or below a path."""
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]


def forget(path: Path) -> None:
    """Drop the pages of files that no process has mapped."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def resident_bytes(path: Path) -> int:
    """Return how much of the files is in memory, according to mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    found = 0
    for file in files_of(path):
        size = file.stat().st_size
        if not size:
            continue
        with open(file, "rb") as opened:
            pages = np.frombuffer(mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ), np.uint8)
            state = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            if libc.mincore(pages.ctypes.data, size, state.ctypes.data):
                raise OSError(ctypes.get_errno(), "mincore")
            found += int((state & 1).sum()) * mmap.PAGESIZE
    return found


def make_cold(path: Path) -> float:
    """Drop the pages of files, and return the share that is still in memory."""
    forget(path)
    total = sum(file.stat().st_size for file in files_of(path))
    return resident_bytes(path) / max(1, total)


def random_reads(file: Path, count: int) -> float:
    """Return the random 4 KiB reads a second that the disk gives, past the page cache."""
    offsets = np.random.default_rng().integers(0, file.stat().st_size // BLOCK, count) * BLOCK
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        begin = time.perf_counter()
        _by_threads(fd, np.array_split(offsets, 64))
        return count / (time.perf_counter() - begin)
    finally:
        os.close(fd)


def _by_threads(fd: int, parts: Iterable[np.ndarray]) -> None:
    def read(part: np.ndarray) -> None:
        buffer = [mmap.mmap(-1, BLOCK)]
        for offset in part.tolist():
            os.preadv(fd, buffer, offset)

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(read, parts))
