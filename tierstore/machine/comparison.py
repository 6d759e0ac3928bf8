"""Measures what tierstore achieves on a machine, compared with the speed of the machine."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tierstore._progress import Shown
from tierstore._store.opening import create
from tierstore._store.opening import open as open_store
from tierstore._table.table import Table
from tierstore.budget import Budget
from tierstore.initializers import uniform
from tierstore.machine.speeds import (
    BENCH_PREFIX,
    HOT_BYTES,
    ROW_BYTES,
    BatchTimes,
    Speeds,
    save_speeds,
)
from tierstore.spec import TableSpec

Ids = npt.NDArray[np.int64]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Comparison:
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
    def of(cls, name: str, limit: float, rates: Sequence[float]) -> Comparison:
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


_SIZES = (64, 1024, 8192, 65_536)
"""Rows of the measured batches, from a small evaluation to a large training step."""
_LARGE = 1 << 20
"""Rows of the largest batches on a GPU, where a step has that many."""
_USUAL = 8192
"""Rows of the batches whose rate is shown."""


def compare(
    directory: str | os.PathLike[str],
    speeds: Speeds,
    *,
    store_bytes: int = 512 << 20,
    seconds: float = 1.0,
    progress: Shown = None,
) -> list[Comparison]:
    """Measure tierstore with a temporary store of 512-byte rows in `directory`.

    The rates are saved with `speeds`, which `tierstore.sizing.plan` then uses.
    """
    rows = max(1000, store_bytes // ROW_BYTES)
    with tempfile.TemporaryDirectory(dir=directory, prefix=BENCH_PREFIX) as temporary:
        path = Path(temporary) / "bench.tier"
        spec = TableSpec(rows=rows, dim=ROW_BYTES // 4, init=uniform(-1, 1, seed=0))
        create(path, {"t": spec}, budget=Budget(host=0), progress=progress).close()
        _forget(path)  # files are cached in smaller pieces after a read than after a write
        few, none = HOT_BYTES // ROW_BYTES, Budget(host=0)
        every = Budget(host_rows=2**40)
        warm = _batches(path, every, _read, seconds)
        hot = _batches(path, every, _read, seconds, among=few)
        leased = _batches(path, every, _lease, seconds)
        hot_leased = _batches(path, every, _lease, seconds, among=few)
        cached = _batches(path, none, _read, seconds)
        missed = _batches(path, Budget(host_rows=rows // 4), _read, seconds, fresh=True)
        cold = _cold(path, seconds)
        on_gpu = _on_gpu(path, rows, seconds)
        committed = _committed(path, seconds)  # leaves deltas, which slow down reads
        gpu: Mapping[str, Any] = {name: _times(took) for name, took in on_gpu.items()}
        found = replace(
            speeds,
            warm=_times(warm),
            hot=_times(hot),
            leased=_times(leased),
            hot_leased=_times(hot_leased),
            cached=_times(cached),
            missed=_times(missed),
            cold=_times(cold),
            committed_rows=median(committed),
            **gpu,
        )
        save_speeds(directory, found)
        return [
            Comparison.of("rows from memory", speeds.gather_rows, _of_usual(warm)),
            Comparison.of("rows from the page cache", speeds.gather_rows, _of_usual(cached)),
            Comparison.of("cold rows from the disk", speeds.random_reads, _of_usual(cold)),
            Comparison.of("changed rows committed", speeds.append_bytes / ROW_BYTES, committed),
        ]


Took = dict[int, list[float]]
"""The seconds of each call, by the size of its batch."""


def _times(took: Took) -> BatchTimes:
    return BatchTimes(tuple(took), tuple(median(each) for each in took.values()))


def _of_usual(took: Took) -> list[float]:
    """Return the rate of each call with the usual batch, or the largest one."""
    count = max((count for count in took if count <= _USUAL), default=max(took))
    return [count / each for each in took[count]]


def _batches(
    path: Path,
    budget: Budget,
    work: Callable[[Table, Ids], object],
    seconds: float,
    among: int | None = None,
    fresh: bool = False,
) -> Took:
    """Time batches of distinct rows, of all rows or `among` a few, after each is in its tier.

    With `fresh`, no row repeats before all others, so that a smaller tier has none of a batch.
    Sizes share the `seconds`.
    """
    took: Took = {}
    with open_store(path, "r+" if work is _lease else "r", budget=budget) as store:
        table, rng = store["t"], np.random.default_rng(1)
        for first in range(0, table.rows, _SIZES[-1]):  # also maps the pages of the file
            table.read(np.arange(first, min(first + _SIZES[-1], table.rows)))
        rows = min(table.rows, among or table.rows)
        for size in sorted({min(size, rows // 8) for size in _SIZES}):
            order = rng.permutation(rows)
            count = rows // size if fresh else 8
            batches = cycle([order[at : at + size] for at in range(0, count * size, size)])
            call = partial(_on_next, batches, partial(work, table))
            took[size] = _calls(call, seconds / len(_SIZES))
        if work is _lease:
            store.rollback()
    return took


def _on_gpu(path: Path, rows: int, seconds: float) -> dict[str, Took]:
    """Return the times of batches in a GPU tier with all rows, or with none of a batch.

    Empty without a GPU. As in training, ids are on the GPU; a call ends when its kernels end.
    """
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no device or no driver
        return {}
    times: dict[str, Took] = {}
    whole, part = (Budget(host_rows=2**40, gpu_rows=count) for count in (rows, rows // 4))
    times["gpu_warm"] = _gpu_batches(cupy, path, whole, _read, seconds)
    times["gpu_leased"] = _gpu_batches(cupy, path, whole, _lease, seconds)
    times["gpu_missed"] = _gpu_batches(cupy, path, part, _read, seconds)
    times["gpu_lease_missed"] = _gpu_batches(cupy, path, part, _lease, seconds)
    return times


def _gpu_batches(
    cupy: Any, path: Path, budget: Budget, work: Callable[[Table, Ids], object], seconds: float
) -> Took:
    """Return the times of batches of distinct rows, each repeated after all others."""
    took: Took = {}
    mode: Literal["r", "r+"] = "r+" if work is _lease else "r"
    with open_store(path, mode, budget=budget, device="cuda") as store:
        table, wait = store["t"], cupy.cuda.get_current_stream().synchronize
        order = cupy.asarray(np.random.default_rng(1).permutation(table.rows))
        for size in sorted({min(size, table.rows // 8) for size in (*_SIZES, _LARGE)}):
            parts = [order[at : at + size] for at in range(0, table.rows - size + 1, size)]
            for each in parts:  # afterwards the tier holds the rows that stay
                work(table, each)
            wait()
            batches = cycle(parts)

            def call(batches: Iterator[Any] = batches) -> None:
                work(table, next(batches))
                wait()

            took[size] = _calls(call, seconds / len(_SIZES))
        if work is _lease:
            store.rollback()
    return took


def _on_next(batches: Iterator[Ids], work: Callable[[Ids], object]) -> None:
    work(next(batches))


def _read(table: Table, rows: Ids) -> object:
    return table.read(rows)


def _lease(table: Table, rows: Ids) -> None:
    with table.lease(rows) as lease:
        lease.write("weight", lease.read("weight"))


def _cold(path: Path, seconds: float) -> Took:
    """Time batches read from the disk, by the distinct pages of their rows."""
    took: Took = {}
    for size in _SIZES[:-1]:
        calls: list[float] = []
        pages = 0
        while not calls or sum(calls) < seconds / len(_SIZES[:-1]):
            _forget(path)
            with open_store(path, budget=Budget(host=0)) as store:
                ids = np.random.default_rng(len(calls)).permutation(store["t"].rows)[:size]
                begin = time.perf_counter()
                store["t"].read(ids)
                calls.append(time.perf_counter() - begin)
            pages = pages or np.unique(ids * ROW_BYTES // mmap.PAGESIZE).size
        if pages > max(took, default=0):
            took[pages] = calls
    return took


def _committed(path: Path, seconds: float) -> list[float]:
    """Return the changed rows per second committed, one hundredth of the table at a time."""
    with open_store(path, "r+", budget=Budget(host=0)) as store:
        table, rng = store["t"], np.random.default_rng(2)
        count = max(1, table.rows // 100)
        values = rng.standard_normal((count, table.dim)).astype(np.float32)

        def work() -> None:
            table.write(rng.permutation(table.rows)[:count], values)
            store.commit()

        return [count / took for took in _calls(work, seconds)]


def _calls(work: Callable[[], object], seconds: float) -> list[float]:
    """Return the seconds of each call; other work on the machine delays some of them."""
    work()
    calls: list[float] = []
    end = time.perf_counter() + seconds
    while not calls or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        calls.append(time.perf_counter() - begin)
    return calls


def _forget(path: Path) -> None:
    """Drop the cached pages of a closed store."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
