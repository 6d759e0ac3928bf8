"""Measures the speed of the machine, and what tierstore achieves on it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore import _rowcopy
from tierstore._disk import readahead
from tierstore._store.opening import create
from tierstore._store.opening import open as open_store
from tierstore.budget import Budget
from tierstore.errors import InvalidInputError, StoreIOError
from tierstore.initializers import uniform
from tierstore.spec import TableSpec

__all__ = ["DEPTH", "Speeds", "Standing", "available", "known_speeds", "measure", "read", "stand"]


DEPTH = 256
"""Concurrent reads, enough to saturate a physical or virtual disk."""

_MIN_COMPLETED = 32
_SETUP, _DESTROY, _EVENTS, _SUBMIT = 206, 207, 208, 209
_REQUEST = np.dtype(
    {
        "names": ["opcode", "fd", "address", "nbytes", "offset"],
        "formats": ["<u2", "<i4", "<u8", "<u8", "<i8"],
        "offsets": [16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])


def _call(number: int, *given: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    result = int(libc.syscall(ctypes.c_long(number), *given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def available() -> bool:
    """Whether this machine's system call numbers are known and the calls are permitted."""
    if os.uname().machine != "x86_64":
        return False
    try:
        read(-1, np.empty(0, np.int64), mmap.PAGESIZE)
    except OSError:
        return False
    return True


def read(fd: int, offsets: npt.NDArray[np.int64], nbytes: int) -> None:
    """Read `nbytes` at each of `offsets` `(n,)` of a file, and discard them.

    Open the file with O_DIRECT, otherwise reads are serialized; offsets and `nbytes` must then be
    multiples of the block size. Raises OSError if a read fails or is short.
    """
    context = ctypes.c_ulong(0)
    _call(_SETUP, ctypes.c_uint(DEPTH), ctypes.byref(context))
    # Reads share their memory.
    buffer = np.frombuffer(mmap.mmap(-1, DEPTH * nbytes), np.uint8)
    requests = np.zeros(offsets.size, _REQUEST)
    requests["fd"] = fd
    requests["address"] = buffer.ctypes.data + np.arange(offsets.size) % DEPTH * nbytes
    requests["nbytes"] = nbytes
    requests["offset"] = offsets
    pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(offsets.size, dtype=np.uint64)
    events = np.zeros(DEPTH, _EVENT)
    started = done = 0
    try:
        while done < offsets.size:
            count = min(DEPTH - (started - done), offsets.size - started)
            first = ctypes.c_void_p(pointers.ctypes.data + pointers.itemsize * started)
            started += _call(_SUBMIT, context, ctypes.c_long(count), first) if count else 0
            least = ctypes.c_long(min(_MIN_COMPLETED, started - done))
            into = ctypes.c_void_p(events.ctypes.data)
            came = _call(_EVENTS, context, least, ctypes.c_long(DEPTH), into, None)
            done += came
            if (events["result"][:came] != nbytes).any():
                raise OSError(f"a read of {nbytes} bytes gave {events['result'][:came].min()}")
    finally:
        _call(_DESTROY, context)  # waits for reads in progress


MIB = 1 << 20
ROW_BYTES = 512
"""Bytes of a gathered row: 128 float32 elements."""

_BLOCK = 4096
_THREADS = 64


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
        warm_rows: rows of 512 bytes that tierstore reads from its host tier; see `stand`.
        cached_rows: those it reads from its files while they are in the page cache.
        cold_rows: those it reads from the disk.
        hot_rows: those it reads from its host tier if they are few enough for the CPU's caches.
        leased_rows: those it leases, reads and writes in its host tier, as a training step does.
        hot_leased_rows: the same, few enough for the CPU's caches.
        miss_seconds: what a read that misses takes besides the time of its rows.
        committed_rows: those it commits once they changed, a hundredth of a table at a time.
    """

    copy_bytes: float
    gather_rows: float
    sequential_bytes: float
    random_reads: float
    append_bytes: float
    syncs: float
    link_bytes: float | None
    warm_rows: float | None = None
    cached_rows: float | None = None
    cold_rows: float | None = None
    hot_rows: float | None = None
    leased_rows: float | None = None
    hot_leased_rows: float | None = None
    miss_seconds: float | None = None
    committed_rows: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """Return the figures by name."""
        return asdict(self)


def measure(
    directory: str | os.PathLike[str] = ".",
    *,
    file_bytes: int = 512 * MIB,
    seconds: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> Speeds:
    """Measure this machine with a temporary file in `directory`, and save the result.

    Takes about `seconds` per figure, plus the time to write `file_bytes`. The machine should be
    otherwise idle. Raises StoreIOError if the file cannot be written.
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


def known_speeds(directory: str | os.PathLike[str] = ".") -> Speeds | None:
    """Return the last measurement for the disk under `directory`, or None."""
    entry = readahead.read_cache(readahead.SPEEDS).get(readahead.disk_of(Path(directory)), {})
    with contextlib.suppress(TypeError, ValueError):
        values = {field.name: entry[field.name] for field in fields(Speeds) if field.name in entry}
        found = Speeds(**values)
        if all(value is None or float(value) > 0 for value in values.values()):
            return found
    return None


def _keep(directory: str | os.PathLike[str], found: Speeds) -> None:
    entry = readahead.read_cache(readahead.SPEEDS) | {
        readahead.disk_of(Path(directory)): found.to_dict()
    }
    readahead.write_cache(readahead.SPEEDS, entry)


@contextlib.contextmanager
def _file(directory: str | os.PathLike[str], nbytes: int) -> Iterator[str]:
    """Create a synced file of random bytes, which is removed at the end."""
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
    with _opened(path) as (fd, size):
        count = 4096

        def offsets() -> npt.NDArray[np.int64]:
            return rng.integers(0, size // _BLOCK, count) * _BLOCK

        if available():
            return _rate(lambda: _in_flight(fd, offsets()), seconds)
        with ThreadPoolExecutor(_THREADS) as pool:
            return _rate(lambda: _by_threads(pool, fd, offsets()), seconds)


def _in_flight(fd: int, offsets: npt.NDArray[np.int64]) -> float:
    read(fd, offsets, _BLOCK)
    return offsets.size


def _by_threads(pool: ThreadPoolExecutor, fd: int, offsets: npt.NDArray[np.int64]) -> float:
    def read(part: npt.NDArray[np.int64]) -> None:
        buffer = [mmap.mmap(-1, _BLOCK)]
        for offset in part.tolist():
            os.preadv(fd, buffer, offset)

    list(pool.map(read, np.array_split(offsets, _THREADS)))
    return offsets.size


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


Progress = Callable[[int, int], None]
_BATCH = 65_536


@dataclass(frozen=True)
class Standing:
    """A rate in `unit` per second: the limit of the machine, and what tierstore achieves.

    Attributes:
        name: what is measured.
        unit: what is counted.
        limit: of the machine.
        reached: the median of tierstore's calls.
        slow, fast: the rates that a tenth of the calls fell short of, or exceeded.
    """

    name: str
    unit: str
    limit: float
    reached: float
    slow: float
    fast: float

    @classmethod
    def of(cls, name: str, limit: float, rates: Sequence[float]) -> Standing:
        """Sum up the rates of rows of single calls."""
        slow, reached, fast = np.quantile(rates, [0.1, 0.5, 0.9]).tolist()
        return cls(name, "rows", limit, reached, slow, fast)

    @property
    def ratio(self) -> float:
        """The fraction of the limit that is achieved."""
        return self.reached / self.limit if self.limit else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and their ratio."""
        return asdict(self) | {"ratio": self.ratio}


_SMALL_BATCH = 8192
"""Rows whose copies the caches hold too."""
_FEW = 1024
"""Rows that are read in little more time than one."""
HOT_BYTES = 16 << 20
"""Bytes of rows that the caches of a CPU are taken to hold."""


def stand(
    directory: str | os.PathLike[str],
    speeds: Speeds,
    *,
    store_bytes: int = 512 << 20,
    seconds: float = 1.0,
    progress: Progress | None = None,
) -> list[Standing]:
    """Measure tierstore with a temporary store of 512-byte rows in `directory`.

    The rates are saved with `speeds`, which `tierstore.sizing.plan` then uses.
    """
    rows = max(1000, store_bytes // ROW_BYTES)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tierstore-bench-") as temporary:
        path = Path(temporary) / "bench.tier"
        spec = TableSpec(rows=rows, dim=ROW_BYTES // 4, init=uniform(-1, 1, seed=0))
        create(path, {"t": spec}, budget=Budget(host=0), progress=progress).close()
        warm, cold = _warm(path, seconds), _cold(path, seconds)
        cached, committed = _cached(path, seconds), _committed(path, seconds)
        few = HOT_BYTES // ROW_BYTES
        miss = _FEW / median(_cached(path, seconds, _FEW)) - _FEW / median(cached)
        found = replace(
            speeds,
            warm_rows=median(warm),
            cached_rows=median(cached),
            cold_rows=median(cold),
            hot_rows=median(_warm(path, seconds, among=few)),
            leased_rows=median(_leased(path, seconds)),
            hot_leased_rows=median(_leased(path, seconds, among=few)),
            miss_seconds=max(1e-6, miss),
            committed_rows=median(committed),
        )
        _keep(directory, found)
        return [
            Standing.of("rows from memory", speeds.gather_rows, warm),
            Standing.of("rows from the page cache", speeds.gather_rows, cached),
            Standing.of("cold rows from the disk", speeds.random_reads, cold),
            Standing.of("changed rows committed", speeds.append_bytes / ROW_BYTES, committed),
        ]


def _warm(path: Path, seconds: float, among: int | None = None) -> list[float]:
    """Return the rows per second read from the host tier, all resident, or `among` a few."""
    with open_store(path, budget=Budget(host_rows=2**40)) as store:
        table = store["t"]
        table.warm()
        count = min(_SMALL_BATCH, table.rows)
        rows = min(table.rows, among or table.rows)
        batches = cycle(np.random.default_rng(1).integers(0, rows, (8, count)))
        return _rates(lambda: len(table.read(next(batches))), seconds)


def _leased(path: Path, seconds: float, among: int | None = None) -> list[float]:
    """Return the rows per second leased, read and written in the host tier, of all or a few."""
    with open_store(path, "r+", budget=Budget(host_rows=2**40)) as store:
        table = store["t"]
        table.warm()
        count = min(_SMALL_BATCH, table.rows)
        rows = min(table.rows, among or table.rows)
        batches = cycle(np.random.default_rng(3).integers(0, rows, (8, count)))

        def work() -> int:
            with table.lease(next(batches)) as lease:
                lease.write("weight", lease.read("weight"))
            return count

        rates = _rates(work, seconds)
        store.rollback()
        return rates


def _cached(path: Path, seconds: float, batch: int = _BATCH) -> list[float]:
    """Return the rows per second read without a host tier, from files in the page cache."""
    with open_store(path, budget=Budget(host=0)) as store:
        table = store["t"]
        for _ in table.scan():
            pass
        count = min(batch, table.rows)
        batches = cycle(np.random.default_rng(2).integers(0, table.rows, (8, count)))
        return _rates(lambda: len(table.read(next(batches))), seconds)


def _cold(path: Path, seconds: float) -> list[float]:
    """Return the rows per second read from the disk, none cached, and few of them neighbours."""
    rates: list[float] = []
    spent = 0.0
    while spent < seconds:
        _forget(path)
        with open_store(path, budget=Budget(host=0)) as store:
            rng = np.random.default_rng(len(rates))
            ids = rng.permutation(store["t"].rows)[:_SMALL_BATCH]
            begin = time.perf_counter()
            count = len(store["t"].read(ids))
            took = time.perf_counter() - begin
        rates.append(count / took)
        spent += took
    return rates


def _committed(path: Path, seconds: float) -> list[float]:
    """Return the changed rows per second committed, one hundredth of the table at a time."""
    with open_store(path, "r+", budget=Budget(host=0)) as store:
        table, rng = store["t"], np.random.default_rng(2)
        count = max(1, table.rows // 100)
        values = rng.standard_normal((count, table.dim)).astype(np.float32)

        def work() -> int:
            table.write(rng.permutation(table.rows)[:count], values)
            store.commit()
            return count

        return _rates(work, seconds)


def _rates(work: Callable[[], int], seconds: float) -> list[float]:
    """Return the rate of each call; other work on the machine delays some of them."""
    work()
    rates: list[float] = []
    end = time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        begin = time.perf_counter()
        done = work()
        rates.append(done / (time.perf_counter() - begin))
    return rates


def _forget(path: Path) -> None:
    """Drop the cached pages of a closed store."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
