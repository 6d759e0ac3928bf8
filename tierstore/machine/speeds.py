"""Measures the speed of the machine."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._disk import readahead
from tierstore._progress import Shown, shown
from tierstore.errors import InvalidInputError, StoreIOError

MIB = 1 << 20
HOT_BYTES = 16 << 20
"""Assumed bytes of rows that the caches of a CPU hold."""
ROW_BYTES = 512
"""Bytes of a gathered row: 128 float32 elements."""

BENCH_PREFIX = ".tierstore-bench-"
"""Of the names of temporary files and directories."""

_PAGE = mmap.PAGESIZE
_THREADS = 64
"""That read at once, as many as a disk works on at a time."""


@dataclass(frozen=True)
class BatchTimes:
    """How long batches of several sizes take.

    A batch has a fixed cost; a large one is copied by several threads, and leaves the caches of the
    CPU. The time of a size between two measured ones is therefore interpolated, and that of a
    larger one extrapolated from the last two.

    Attributes:
        counts: rows of a batch, ascending; for reads from the disk, distinct pages of 4 KiB.
        seconds: the median time of each.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise InvalidInputError for impossible times."""
        rising = all(low < high for low, high in pairwise((0, *self.counts)))
        positive = all(0 < each < math.inf for each in self.seconds)
        if not self.counts or len(self.counts) != len(self.seconds) or not (rising and positive):
            raise InvalidInputError(f"no times of batches: {self.counts} took {self.seconds}")

    def of(self, count: float, wide: float = 1.0) -> float:
        """Return the seconds of a batch of `count`, whose rows take `wide` times as long.

        The smallest measured batch counts as fixed cost alone; a `count` below 1 is the share of
        batches that have a row.
        """
        fixed, last = self.seconds[0], self.counts[-1]
        took = float(np.interp(count, self.counts, self.seconds))
        if count > last and len(self.counts) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (last - self.counts[-2])
            took += (count - last) * max(slope, 0.0)
        elif count > last:
            took *= count / last
        return min(1.0, count) * (fixed + (took - fixed) * wide)


@dataclass(frozen=True)
class Speeds:
    """Limits of a machine, per second; None if not available.

    Attributes:
        copy_bytes: bytes copied in memory by one thread.
        gather_rows: random rows of 512 bytes gathered from memory by all threads.
        sequential_bytes: bytes read sequentially from the disk, bypassing the page cache.
        random_reads: random blocks of 4 KiB read from the disk, bypassing the page cache, with
            enough reads in flight.
        append_bytes: bytes appended to a file and synced, 8 MiB at a time.
        syncs: appends of 4 KiB, each synced.
        link_bytes: bytes copied from pinned memory to the GPU.
        warm: the time in which tierstore reads rows of 512 bytes from its host tier; see `compare`.
        hot: the same for rows that are few enough for the caches of the CPU.
        leased: to lease, read and write them in its host tier, as a training step does.
        hot_leased: the same, few enough for the caches of the CPU.
        cached: to read them from its files while those are in the page cache.
        missed: to read them through a host tier that has none of them, from those files.
        cold: to read them from the disk, by distinct pages.
        committed_rows: changed rows it commits, a hundredth of a table at a time.
        gpu_warm, gpu_leased: the time in which it reads rows of 512 bytes from its GPU tier, and
            leases, reads and writes them there; None without a GPU.
        gpu_missed, gpu_lease_missed: the same through a GPU tier that has none of them, from a host
            tier that has every row.
    """

    copy_bytes: float
    gather_rows: float
    sequential_bytes: float
    random_reads: float
    append_bytes: float
    syncs: float
    link_bytes: float | None
    warm: BatchTimes | None = None
    hot: BatchTimes | None = None
    leased: BatchTimes | None = None
    hot_leased: BatchTimes | None = None
    cached: BatchTimes | None = None
    missed: BatchTimes | None = None
    cold: BatchTimes | None = None
    committed_rows: float | None = None
    gpu_warm: BatchTimes | None = None
    gpu_leased: BatchTimes | None = None
    gpu_missed: BatchTimes | None = None
    gpu_lease_missed: BatchTimes | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_dict`, also of an earlier release, which may lack some figures.

        Raises TypeError, ValueError or KeyError for anything else.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"speeds are figures by name, not {data!r}")
        given: dict[str, Any] = {}
        for field in fields(cls):
            value = data.get(field.name)
            if field.name in _BATCHES and value is not None:
                counts, seconds = (tuple(value[name]) for name in ("counts", "seconds"))
                given[field.name] = BatchTimes(counts, seconds)
            elif field.name in data:
                if value is not None and not float(value) > 0:
                    raise ValueError(f"{field.name} is {value}")
                given[field.name] = value
        return cls(**given)


_BATCHES = frozenset(
    {"warm", "hot", "leased", "hot_leased", "cached", "missed", "cold"}
    | {"gpu_warm", "gpu_leased", "gpu_missed", "gpu_lease_missed"}
)


def measure(
    directory: str | os.PathLike[str] = ".",
    *,
    file_bytes: int = 512 * MIB,
    seconds: float = 0.5,
    progress: Shown = None,
) -> Speeds:
    """Measure this machine with a temporary file in `directory`, and save the result.

    Takes about `seconds` per figure, plus the time to write `file_bytes`. The machine should be
    otherwise idle. Raises StoreIOError if the file cannot be written.
    """
    progress = shown(progress)
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
            speeds = Speeds(
                copy_bytes=step(_copy(size, seconds)),
                gather_rows=step(_gather(size, seconds)),
                sequential_bytes=step(_sequential(path, seconds)),
                random_reads=step(_random(path, seconds)),
                append_bytes=step(_append(path, 8 * MIB, seconds) * 8 * MIB),
                syncs=step(_append(path, _PAGE, seconds)),
                link_bytes=_link(size),
            )
    except OSError as error:
        raise StoreIOError(f"cannot measure the disk under {directory}: {error}") from error
    step(0)
    save_speeds(directory, speeds)
    return speeds


def known_speeds(directory: str | os.PathLike[str] = ".") -> Speeds | None:
    """Return the last measurement for the disk under `directory`, or None."""
    entry = readahead.read_cache(readahead.SPEEDS).get(readahead.disk_of(Path(directory)), {})
    with contextlib.suppress(TypeError, ValueError, KeyError):
        return Speeds.from_dict(entry)
    return None


def save_speeds(directory: str | os.PathLike[str], found: Speeds) -> None:
    """Save a measurement for the disk under `directory`, in place of an earlier one."""
    entry = readahead.read_cache(readahead.SPEEDS) | {
        readahead.disk_of(Path(directory)): found.to_dict()
    }
    readahead.write_cache(readahead.SPEEDS, entry)


@contextlib.contextmanager
def _file(directory: str | os.PathLike[str], nbytes: int) -> Iterator[str]:
    """Create a synced file of random bytes, which is removed at the end."""
    block = np.random.default_rng(0).integers(0, 256, 4 * MIB, np.uint8)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=BENCH_PREFIX) as file:
        for number in range(-(-nbytes // block.size)):
            block[:8].view(np.int64)[0] = number
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file.name


def _rate(work: Callable[[], float], seconds: float) -> float:
    """Call `work` until `seconds` have passed; return the rate of the amounts that it returns."""
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
        _rowcopy.gather(records, rows, out)
        return count

    return _rate(work, seconds)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[int, int]]:
    """Open a file for direct I/O, or if that is not supported, drop it from the page cache."""
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
    with _opened(path) as (fd, size), ThreadPoolExecutor(_THREADS) as pool:

        def work() -> float:
            offsets = rng.integers(0, size // _PAGE, 64 * _THREADS) * _PAGE
            list(pool.map(lambda part: _read(fd, part), np.array_split(offsets, _THREADS)))
            return offsets.size

        return _rate(work, seconds)


def _read(fd: int, offsets: npt.NDArray[np.int64]) -> None:
    buffer = [mmap.mmap(-1, _PAGE)]
    for offset in offsets.tolist():
        os.preadv(fd, buffer, offset)


def _append(path: str, nbytes: int, seconds: float) -> float:
    """Return the number of blocks that can be appended and synced per second."""
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
    """Return the bytes per second from pinned memory to the GPU; None without CuPy or a GPU."""
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
    except Exception:  # no CuPy, no device or no driver: no speed to report
        return None
