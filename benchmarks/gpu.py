"""What the GPU benchmarks share: tables, batches, the limits of the link, and clocks that wait."""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tierstore import Budget, Field, TableSpec, _rowcopy
from tierstore._disk.generation import Generation
from tierstore._door import Door
from tierstore._memory_table import BottomTier, MemoryTable, Unversioned
from tierstore._table.backing import Backing
from tierstore._table.home import Touched
from tierstore._table.prefetch import Prefetcher
from tierstore._table.table import Table
from tierstore._tiers.gpu.device import CudaDevice, Device
from tierstore._tiers.gpu.memory import GpuMemory
from tierstore._tiers.placement import Placement
from tierstore.errors import DeviceError, MissingExtraError

# Threads of a contestant on the CPU sleep when it is done, and do not disturb the next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DIM = 128
_BLOCK = 1 << 20
_LINK_BYTES = 256 << 20


def needed_device() -> CudaDevice:
    """Return the first CUDA device; without one, print this and end the benchmark."""
    try:
        return CudaDevice(0)
    except (DeviceError, MissingExtraError) as error:
        print(f"left out: this benchmark needs a GPU ({error})")
        sys.exit(0)  # `make bench` continues with those that need none


class PinnedDevice(CudaDevice):
    """A device that prefers pinned host memory to managed."""

    def arena_kind(self, nbytes: int) -> str:
        return "pinned"


def filled(
    rows: int, gpu_rows: int, device: CudaDevice, values: Any, states: Sequence[str] = ()
) -> MemoryTable:
    """Return a table in host memory of float32 `values` `(rows, DIM)`, and states of zeros."""
    import torch

    budget = Budget(host_rows=rows, gpu_rows=gpu_rows)
    fields = {name: Field(DIM) for name in ("weight", *states)}
    scratch = MemoryTable(TableSpec(rows=rows, fields=fields), budget=budget, device=device)
    for start in range(0, rows, _BLOCK):
        ids = torch.arange(start, min(start + _BLOCK, rows), device="cuda")
        scratch.table.write(ids, values[start : start + _BLOCK], field="weight")
    return scratch


class _Noise(BottomTier):
    """Begins every row with random float32 values from 0 to 1, without making each of them."""

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec)
        rng = np.random.default_rng(1)
        self._noise = rng.random((4096, self.record_bytes // 4), np.float32).view(np.uint8)

    def read(self, rows: Any, out: Any) -> None:
        _rowcopy.gather(self._noise, rows % len(self._noise), out, 0)


class Scratch:
    """Tables of equally long records in memory alone, which share their tiers.

    The host tier has a place for every row, the GPU tier for a share of them. Looked up by name.
    """

    sync_checks = False
    store = None

    def __init__(
        self,
        rows: Mapping[str, int],
        fields: Mapping[str, int],
        share: float,
        device: Device | None,
    ) -> None:
        """Make tables of these rows, with float32 fields of these dims."""
        self.door = Door("benchmark", writable=True)
        self.prefetcher = Prefetcher(self.door)
        self.touched = Touched()
        spec = {name: Field(dim) for name, dim in fields.items()}
        specs = {name: TableSpec(rows=each, fields=spec) for name, each in rows.items()}
        every = sum(rows.values())
        width = next(iter(specs.values())).layout.record_bytes
        gpu = GpuMemory.bytes_for(every, width, max(1, int(share * every)))
        budget = Budget(host_rows=max(rows.values()), gpu=gpu)
        tiers = {name: _Noise(each) for name, each in specs.items()}
        placement = Placement(budget, None, device)
        (part,) = placement.plan(specs)
        self._space = placement.place(part, tiers)
        self._tables = {
            extent.table: Table(
                Backing(
                    self,
                    extent.table,
                    cast(
                        Generation, Unversioned(specs[extent.table], tiers[extent.table], "noise")
                    ),
                    self._space,
                    extent,
                )
            )
            for extent in self._space.extents
        }

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def close(self) -> None:
        """Give the memory back."""
        self.prefetcher.close()
        with self.door.use():
            self.door.close()
            self._space.close()


def power_law(
    rows: int, ids: int, alpha: float, count: int, seed: int = 7, device: str = "cuda"
) -> list[Any]:
    """Draw batches of ids: the k-th most used row, any one, has a share of k^-alpha."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    ranks = torch.arange(1, rows + 1, device=device, dtype=torch.float64)
    shares = torch.cumsum(ranks.pow_(-alpha), 0)
    order = torch.randperm(rows, device=device, generator=generator)

    def draw() -> Any:
        where = torch.rand(ids, device=device, dtype=torch.float64, generator=generator)
        found = torch.searchsorted(shares, where * shares[-1])
        return order[found.clamp_(max=rows - 1)]

    return [draw() for _ in range(count)]


def wait() -> None:
    """Wait until the device, if there is one, has finished its work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(run: Callable[[], object]) -> float:
    """Time a call until the device has done all its work."""
    wait()
    begin = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begin


def in_turn(
    contestants: Mapping[str, Callable[[int], object]], repeat: int
) -> dict[str, list[float]]:
    """Time every contestant `repeat` times, one after another in each round.

    Each is called twice in a row with numbers that count up, and the second call is timed, so that
    none starts with caches and address translations that another one filled.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(0, 2 * repeat, 2):
        for name, run in contestants.items():
            run(number)
            times[name].append(seconds(functools.partial(run, number + 1)))
    return times


def link() -> dict[str, float]:
    """Measure one large copy each way, in bytes a second: the limits of the link."""
    import torch

    host = torch.empty(_LINK_BYTES, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    times = in_turn(
        {
            "to": lambda _: device.copy_(host, non_blocking=True),
            "from": lambda _: host.copy_(device, non_blocking=True),
        },
        10,
    )
    return {way: _LINK_BYTES / statistics.median(each) for way, each in times.items()}


def issue_seconds(run: Callable[[], object], calls: int = 100) -> float:
    """Return the host's time to issue a call without waiting for the device."""
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - begin
    wait()
    return taken / calls
