"""What the GPU benchmarks share: tables, batches, the limits of the link, and clocks that wait."""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import MemoryTable
from tierstore._tiers.gpu.device import CudaDevice
from tierstore.errors import DeviceError, MissingExtraError

# Threads of a contestant on the CPU sleep when it is done, and do not disturb the next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DIM = 128
_BLOCK = 1 << 20
_LINK_BYTES = 256 << 20


def needed_device() -> CudaDevice:
    """Return the first CUDA device; without one, say so and end the benchmark."""
    try:
        return CudaDevice(0)
    except (DeviceError, MissingExtraError) as error:
        print(f"left out: this benchmark needs a GPU ({error})")
        sys.exit(0)  # `make bench` goes on with those that need none


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


def seconds(run: Callable[[], object]) -> float:
    """Time a call until the device has done all it asked for."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def in_turn(
    contestants: Mapping[str, Callable[[int], object]], repeat: int
) -> dict[str, list[float]]:
    """Time every contestant `repeat` times, one after another in each round.

    Each is called twice in a row with numbers that count up, and the second call is timed: so
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
    """Return the host's time to issue a call, when the device is not waited for."""
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / calls
