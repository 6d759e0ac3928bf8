"""Ways to bring rows of a table in host memory to the GPU, alone and during work.

Each way is a generator of batches that are on the GPU; the work is a product of matrices on what it
yields. docs/transfer.md describes which to use when.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from common import Answer, arguments
from peers import have, speedtorch

from tierstore import Budget, TableSpec
from tierstore._memory_table import MemoryTable

QUESTION = "Bringing batches of rows of a host table to the GPU, alone and beside work there"
BLOCK = 1 << 18
Batches = Iterator[torch.Tensor]


@dataclass
class Task:
    """A table of random rows in host memory, and the ids of the batches that are wanted."""

    values: torch.Tensor
    ids: list[torch.Tensor]
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def buffer(self) -> torch.Tensor:
        """Return host memory for a batch, pinned where there is a GPU."""
        shape = len(self.ids[0]), self.values.shape[1]
        return torch.empty(shape, pin_memory=self.on_gpu)


def copied_each_time(task: Task) -> Batches:
    for ids in task.ids:
        yield task.values[ids].to(task.device)


def copied_once(task: Task) -> Iterator[torch.Tensor]:
    whole = task.values.to(task.device)
    there = [ids.to(task.device) for ids in task.ids]
    for ids in there:
        yield whole[ids]


def without_waiting(task: Task) -> Batches:
    """Pin the gathered rows, and copy them while the work runs."""
    for ids in task.ids:
        rows = task.values[ids]
        yield (rows.pin_memory() if task.on_gpu else rows).to(task.device, non_blocking=True)


def buffers_made_before(task: Task) -> Batches:
    host = task.buffer()
    there = torch.empty_like(host, device=task.device)
    for ids in task.ids:
        if task.on_gpu:
            torch.cuda.current_stream().synchronize()  # the last copy out of the buffer is over
        torch.index_select(task.values, 0, ids, out=host)
        there.copy_(host, non_blocking=True)
        yield there


def stream_of_its_own(task: Task) -> Batches:
    """Two buffers and a second stream: the next batch is gathered and copied during the work."""
    if not task.on_gpu:
        yield from buffers_made_before(task)
        return
    beside = torch.cuda.Stream()
    host = [task.buffer() for _ in range(2)]
    there = [torch.empty_like(each, device=task.device) for each in host]
    copied = [torch.cuda.Event() for _ in range(2)]
    used = [torch.cuda.Event() for _ in range(2)]

    def start(number: int) -> None:
        if number < len(task.ids):
            at = number % 2
            copied[at].synchronize()
            torch.index_select(task.values, 0, task.ids[number], out=host[at])
            beside.wait_event(used[at])
            with torch.cuda.stream(beside):
                there[at].copy_(host[at], non_blocking=True)
                copied[at].record()

    start(0)
    for number in range(len(task.ids)):
        at = number % 2
        torch.cuda.current_stream().wait_event(copied[at])
        yield there[at]
        used[at].record()
        start(number + 1)


class _Gathering(torch.utils.data.Dataset[torch.Tensor]):
    """Batches that a worker process gathers from memory it shares."""

    def __init__(self, task: Task) -> None:
        self._values, self._ids = task.values, task.ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._values[self._ids[number]]


def loader_workers(task: Task, workers: int) -> Batches:
    loader = torch.utils.data.DataLoader(
        _Gathering(task), batch_size=None, num_workers=workers, pin_memory=task.on_gpu
    )
    for rows in loader:
        yield rows.to(task.device, non_blocking=True)


def kernels_over_host_memory(task: Task, gadget: Any) -> Batches:
    """SpeedTorch: a kernel on the GPU indexes pinned memory of the host."""
    import cupy

    for ids in task.ids:
        yield gadget.getData(cupy.asarray(ids.numpy()))


def tierstore_once(task: Task, scratch: MemoryTable) -> Batches:
    """Rows that are not kept on the GPU."""
    for ids in task.ids:
        yield scratch.table.read(ids, cache=False)


def tierstore_cache(task: Task, scratch: MemoryTable) -> Batches:
    for ids in task.ids:
        yield scratch.table.read(ids)


def tierstore_ahead(task: Task, scratch: MemoryTable) -> Batches:
    """With a cache, and the ids of the next batch given ahead."""
    for ids, coming in zip(task.ids, [*task.ids[1:], task.ids[0]], strict=True):
        scratch.table.prefetch(coming)
        yield scratch.table.read(ids)


def table_of(task: Task, cache: int) -> MemoryTable:
    """Return the rows in a table, of which the GPU keeps `cache`."""
    rows, dim = task.values.shape
    budget = Budget(host_rows=rows, gpu_rows=cache)
    scratch = MemoryTable(
        TableSpec(rows, dim), budget=budget, device="cuda" if task.on_gpu else "cpu"
    )
    for start in range(0, rows, BLOCK):
        block = task.values[start : start + BLOCK]
        scratch.table.write(torch.arange(start, start + len(block)), block)
    return scratch


def ways(task: Task, cache: int, workers: int) -> dict[str, Callable[[Task], Batches]]:
    """Return every way this machine has."""
    scratch = table_of(task, cache)
    found: dict[str, Callable[[Task], Batches]] = {
        "copied each time": copied_each_time,
        "copied once, all on the GPU": copied_once,
        "pinned, copied without waiting": without_waiting,
        "buffers made before": buffers_made_before,
        "two buffers, a stream of its own": stream_of_its_own,
        f"DataLoader, {workers} workers, pinned": partial(loader_workers, workers=workers),
    }
    if task.on_gpu and have("SpeedTorch"):
        gadget = speedtorch(task.values)
        found["SpeedTorch, kernels over host memory"] = partial(
            kernels_over_host_memory, gadget=gadget
        )
    found["tierstore, rows not kept"] = partial(tierstore_once, scratch=scratch)
    found["tierstore, a cache"] = partial(tierstore_cache, scratch=scratch)
    found["tierstore, a cache and lookahead"] = partial(tierstore_ahead, scratch=scratch)
    return found


def step_seconds(task: Task, way: Callable[[Task], Batches], work: int) -> float:
    """Return the median time of a step: get the next batch, and work on it."""
    size = 4096 if task.on_gpu else 64
    left = torch.rand(size, size, device=task.device)
    times = []
    batches = way(task)
    begin = time.perf_counter()
    for number, rows in enumerate(batches):
        used = rows[:1].sum()
        for _ in range(work):
            used = used + (left @ left)[0, 0]
        # A step ends when the host continues; the device may be one step late, as in training.
        if task.on_gpu and number % 8 == 7:
            torch.cuda.synchronize()
        if number % 8 == 7:
            times.append((time.perf_counter() - begin) / 8)
            begin = time.perf_counter()
    return statistics.median(times[1:] or times)


def check(task: Task, found: dict[str, Callable[[Task], Batches]]) -> None:
    """Raise RuntimeError unless every way returns the requested rows."""
    short = Task(task.values, task.ids[:3], task.device)
    for name, way in found.items():
        for ids, rows in zip(short.ids, way(short), strict=True):
            if not torch.equal(rows.cpu(), task.values[ids]):
                raise RuntimeError(f"{name}: other rows than those that were asked for")


def draw(rows: int, batch: int, count: int) -> list[torch.Tensor]:
    """Draw batches, log-uniformly by popularity; popular rows are scattered."""
    rng = np.random.default_rng(7)
    order = rng.permutation(rows)
    made = []
    for _ in range(count):
        ranks = np.exp(rng.random(batch) * np.log(rows)).astype(np.int64) - 1
        made.append(torch.from_numpy(order[ranks]))
    return made


def main(options: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available() and have("cupy")
    count = 8 * (options.repeat + 1)
    task = Task(
        torch.rand(options.rows, options.dim),
        draw(options.rows, options.batch, count),
        torch.device("cuda" if on_gpu else "cpu"),
    )
    nbytes = 4 * options.batch * options.dim
    answer = Answer(
        "transfer_techniques",
        QUESTION,
        f"{options.batch:,} rows of {4 * options.dim} B, {nbytes >> 20} MiB, over the link, "
        "unless they are there",
        "none: which to use when",
        notes=[
            f"ids drawn log-uniformly from {options.rows:,} rows",
            "tierstore's cache holds a tenth of them",
        ],
    )
    found = ways(task, options.rows // 10, options.workers)
    check(task, found)
    for name, way in found.items():
        alone, beside = (step_seconds(task, way, work) for work in (0, options.work))
        answer.rows.append({"way": name, "alone ms": 1e3 * alone, "with work ms": 1e3 * beside})
    nothing = [torch.zeros(1, 1, device=task.device)] * count
    only_work = step_seconds(task, lambda _: iter(nothing), options.work)
    answer.rows.append({"way": "work alone", "with work ms": 1e3 * only_work})
    times = {row["way"]: row for row in answer.rows}
    ours = times["tierstore, a cache"]
    for name in list(found)[: len(found) - 3]:
        answer.ratios[f"{name} / tierstore, a cache"] = times[name]["alone ms"] / ours["alone ms"]
    answer.give(options)


if __name__ == "__main__":
    main(
        arguments(QUESTION, rows=8_000_000, dim=128, batch=131_072, workers=4, work=3).parse_args()
    )
