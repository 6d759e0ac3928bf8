"""Where tierstore stands on this machine: its rates beside the limits that `speeds` measures."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.budget import Budget
from tierstore.laws import uniform
from tierstore.machine.speeds import ROW_BYTES, Speeds
from tierstore.spec import TableSpec
from tierstore.store import create
from tierstore.store import open as open_store

__all__ = ["Standing", "stand"]

Progress = Callable[[int, int], None]
_BATCH = 65_536


@dataclass(frozen=True)
class Standing:
    """One rate: what the machine allows, and what tierstore reaches, in `unit` a second."""

    name: str
    unit: str
    limit: float
    reached: float

    @property
    def ratio(self) -> float:
        """What is reached of what is allowed."""
        return self.reached / self.limit if self.limit else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and their ratio."""
        return asdict(self) | {"ratio": self.ratio}


def stand(
    directory: str | Path,
    speeds: Speeds,
    *,
    store_bytes: int = 512 << 20,
    seconds: float = 1.0,
    progress: Progress | None = None,
) -> list[Standing]:
    """Measure tierstore with a store of 512-byte rows made in `directory` for the time being."""
    rows = max(1000, store_bytes // ROW_BYTES)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".tierstore-bench-") as temporary:
        path = Path(temporary) / "bench.tier"
        spec = TableSpec(rows=rows, dim=ROW_BYTES // 4, init=uniform(-1, 1, seed=0))
        create(path, {"t": spec}, budget=Budget(host=0), progress=progress).close()
        return [
            Standing("rows from memory", "rows", speeds.gather_rows, _warm(path, seconds)),
            Standing("cold rows from the disk", "rows", speeds.random_reads, _cold(path, seconds)),
            Standing(
                "changed rows committed",
                "rows",
                speeds.append_bytes / ROW_BYTES,
                _committed(path, seconds),
            ),
        ]


def _warm(path: Path, seconds: float) -> float:
    """Rows a second that the host tier gives, all of them resident."""
    with open_store(path, budget=Budget(host_rows=2**40)) as store:
        table = store["t"]
        table.warm()
        count = min(_BATCH, table.rows)
        batches = cycle(np.random.default_rng(1).integers(0, table.rows, (8, count)))
        return _rate(lambda: len(table.read(next(batches))), seconds)


def _cold(path: Path, seconds: float) -> float:
    """Rows a second that come from the disk, none of them cached before."""
    spent, done = 0.0, 0
    while spent < seconds:
        _forget(path)
        with open_store(path, budget=Budget(host=0)) as store:
            ids = np.random.default_rng(done).permutation(store["t"].rows)[: _BATCH // 2]
            begin = time.perf_counter()
            done += len(store["t"].read(ids))
            spent += time.perf_counter() - begin
    return done / spent


def _committed(path: Path, seconds: float) -> float:
    """Changed rows a second that are made durable, a hundredth of the table at a time."""
    with open_store(path, "r+", budget=Budget(host=0)) as store:
        table, rng = store["t"], np.random.default_rng(2)
        count = max(1, table.rows // 100)
        values = rng.standard_normal((count, table.dim)).astype(np.float32)

        def work() -> int:
            table.write(rng.permutation(table.rows)[:count], values)
            store.commit()
            return count

        return _rate(work, seconds)


def _rate(work: Callable[[], int], seconds: float) -> float:
    work()
    begin, done = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        done += work()
    return done / (time.perf_counter() - begin)


def _forget(path: Path) -> None:
    """Have the system drop the cached pages of a store that is closed."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
