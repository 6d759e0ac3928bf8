"""How fast this machine is: memory, the disk under a path, and the link to a GPU, measured.

What was measured last is kept in a file of the user's cache directory, for `tierstore plan` and for
the way cold rows are read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore import rowcopy
from tierstore.disk import inflight, tuning
from tierstore.errors import InvalidInputError, StoreIOError

__all__ = ["Speeds", "known", "measure"]

MIB = 1 << 20
ROW_BYTES = 512
"""Rows that are gathered have this many bytes, which is 128 float32 elements."""

_BLOCK = 4096
_THREADS = 64


@dataclass(frozen=True)
class Speeds:
    """Limits of a machine, per second; None for what is not there.

    Attributes:
        copy_bytes: memory copied, by one thread.
        gather_rows: rows of 512 bytes gathered at random from memory, by all threads.
        sequential_bytes: bytes read from the disk in order, past the page cache.
        random_reads: blocks of 4 KiB read from the disk at random, past the page cache, with enough
            in flight.
        append_bytes: bytes appended to a file and synced, 8 MiB at a time.
        syncs: appends of 4 KiB that are synced one by one.
        link_bytes: bytes copied from pinned memory to the GPU.
    """

    copy_bytes: float
    gather_rows: float
    sequential_bytes: float
    random_reads: float
    append_bytes: float
    syncs: float
    link_bytes: float | None

    def to_dict(self) -> dict[str, float | None]:
        """Return the figures under their names."""
        return asdict(self)


def measure(
    directory: str | Path = ".",
    *,
    file_bytes: int = 512 * MIB,
    seconds: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> Speeds:
    """Measure this machine with a temporary file in `directory`, and keep the answer.

    Takes about `seconds` for each figure, and the time to write `file_bytes`. Nothing else should
    run meanwhile. Raises StoreIOError if the file cannot be written.
    """
    if file_bytes < MIB:
        raise InvalidInputError(f"the file has at least {MIB} bytes, not {file_bytes}")
    done = 0

    def step(value: float) -> float:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 7)
        return value

    size = min(file_bytes, 256 * MIB)
    try:
        with _file(directory, file_bytes) as path:
            found = Speeds(
                copy_bytes=step(_copy(size, seconds)),
                gather_rows=step(_gather(size, seconds)),
                sequential_bytes=step(_sequential(path, seconds)),
                random_reads=step(_random(path, seconds)),
                append_bytes=step(_append(path, 8 * MIB, seconds) * 8 * MIB),
                syncs=step(_append(path, _BLOCK, seconds)),
                link_bytes=_link(size),
            )
    except OSError as error:
        raise StoreIOError(f"cannot measure the disk under {directory}: {error}") from error
    step(0)
    _keep(directory, found)
    return found


def known(directory: str | Path = ".") -> Speeds | None:
    """Return what was measured last on the disk under `directory`, or None."""
    entry = tuning.read_cache(tuning.SPEEDS).get(tuning.disk_of(directory), {})
    with contextlib.suppress(TypeError, ValueError):
        values = {field.name: entry[field.name] for field in fields(Speeds) if field.name in entry}
        found = Speeds(**values)
        if all(value is None or float(value) > 0 for value in values.values()):
            return found
    return None


def _keep(directory: str | Path, found: Speeds) -> None:
    entry = tuning.read_cache(tuning.SPEEDS) | {tuning.disk_of(directory): found.to_dict()}
    tuning.write_cache(tuning.SPEEDS, entry)


@contextlib.contextmanager
def _file(directory: str | Path, nbytes: int) -> Iterator[str]:
    """Make a file of random bytes, written and synced, that goes at the end."""
    block = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tierstore-bench-") as file:
        for number in range(-(-nbytes // block.size)):
            block[:8].view(np.int64)[0] = number
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file.name


def _rate(work: Callable[[], float], seconds: float) -> float:
    """Call `work`, which returns how much it did, until `seconds` are over; return the rate."""
    work()
    begin, total = time.perf_counter(), 0.0
    while time.perf_counter() - begin < seconds:
        total += work()
    return total / (time.perf_counter() - begin)


def _copy(nbytes: int, seconds: float) -> float:
    source, target = np.ones(nbytes // 2, np.uint8), np.zeros(nbytes // 2, np.uint8)

    def work() -> float:
        np.copyto(target, source)
        return source.nbytes

    return _rate(work, seconds)


def _gather(nbytes: int, seconds: float) -> float:
    records = np.ones((nbytes // ROW_BYTES, ROW_BYTES), np.uint8)
    count = min(65_536, len(records))
    rows = np.random.default_rng(1).integers(0, len(records), count)
    out = np.zeros((count, ROW_BYTES), np.uint8)

    def work() -> float:
        rowcopy.gather(records, rows, out)
        return count

    return _rate(work, seconds)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Open a file past the page cache, or, where that cannot be, with nothing of it cached."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def _sequential(path: str, seconds: float) -> float:
    buffer = mmap.mmap(-1, 4 * MIB)
    with _opened(path) as (fd, size):
        at = 0

        def work() -> float:
            nonlocal at
            at = at if at + len(buffer) <= size else 0
            done = os.preadv(fd, [buffer], at)
            at += len(buffer)
            return done

        return _rate(work, seconds)


def _random(path: str, seconds: float) -> float:
    rng = np.random.default_rng()
    with _opened(path) as (fd, size):
        count = 4096

        def offsets() -> npt.NDArray[np.int64]:
            return rng.integers(0, size // _BLOCK, count) * _BLOCK

        if inflight.available():
            return _rate(lambda: _in_flight(fd, offsets()), seconds)
        with ThreadPoolExecutor(_THREADS) as pool:
            return _rate(lambda: _by_threads(pool, fd, offsets()), seconds)


def _in_flight(fd: int, offsets: npt.NDArray[np.int64]) -> float:
    inflight.read(fd, offsets, _BLOCK)
    return offsets.size


def _by_threads(pool: ThreadPoolExecutor, fd: int, offsets: npt.NDArray[np.int64]) -> float:
    def read(part: npt.NDArray[np.int64]) -> None:
        buffer = [mmap.mmap(-1, _BLOCK)]
        for offset in part.tolist():
            os.preadv(fd, buffer, offset)

    list(pool.map(read, np.array_split(offsets, _THREADS)))
    return offsets.size


def _append(path: str, nbytes: int, seconds: float) -> float:
    """Return how many blocks can be appended and synced in a second."""
    block = np.random.default_rng(2).integers(0, 256, nbytes, np.uint8)
    with open(path, "r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)

        def work() -> float:
            file.write(block.data)
            os.fdatasync(file.fileno())
            return 1

        rate = _rate(work, seconds)
        file.truncate(end)
    return rate


def _link(nbytes: int) -> float | None:
    """Return the bytes a second from pinned memory to the GPU; None without CuPy or a GPU."""
    try:
        import cupy

        host = cupy.cuda.alloc_pinned_memory(nbytes)
        device = cupy.cuda.alloc(nbytes)
        stream = cupy.cuda.get_current_stream()
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            device.copy_from_host_async(host.ptr, nbytes, stream)
            stream.synchronize()
            seconds.append(time.perf_counter() - begin)
        return float(nbytes / min(seconds))
    except Exception:  # no CuPy, no device, no driver: all the same here
        return None
