"""How often does the host wait for the GPU in a batch?"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from common import Answer, arguments, workspace
from gpu import DIM, filled, needed_device, power_law
from peers import Fbgemm, TorchCache, have

import tierstore
from tierstore import Budget, TableSpec

QUESTION = "Waits of the host for the GPU in a batch, as the driver is asked for them"
BATCHES = 20
AHEAD = 4
MODEL_SECONDS = 0.03
"""Minimum time of a model for a step: the disk is read for a later batch meanwhile."""
WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy")


def waits(run: Callable[[int], object]) -> float:
    """Count, in the profiler's trace, the calls that wait for the device, for each batch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for number in range(BATCHES):
        run(number)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for number in range(BATCHES):
            run(number)
    # Leaving the profiler waits once itself.
    count = sum(
        event.count
        for event in trace.key_averages()
        if event.key.startswith("cu") and any(name in event.key for name in WAITS)
        if not event.key.endswith("Async")
    )
    return max(0, count - 1) / BATCHES


def step(table: Any) -> Callable[[Any], None]:
    """A training step: lease the rows, read them, write them."""

    def run(ids: Any) -> None:
        with table.lease(ids) as lease:
            lease.write("weight", lease.read("weight") * 0.5)

    return run


def layers(table: Any, batches: list[Any]) -> dict[str, Callable[[int], object]]:
    """Return training steps through the layer and its optimizer."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    gradient = torch.rand(len(batches[0]), DIM, device="cuda")

    def train(ahead: bool, **options: Any) -> Callable[[int], object]:
        layer = TieredEmbedding(table)
        optimizer = TieredOptimizer(torch.optim.SGD, [layer], lr=0.1, **options)

        def run(number: int) -> None:
            if ahead:
                layer.prefetch(batches[(number + 2) % BATCHES])
            layer(batches[number]).backward(gradient)
            optimizer.step()

        return run

    return {
        "tierstore: layer and optimizer": train(False),
        "tierstore: layer and optimizer, looked ahead": train(True),
        "layer and optimizer of copies, looked ahead": train(True, in_place=False),
    }


def main() -> None:
    import torch

    parser = arguments(QUESTION, rows=1_000_000, batch=8192)
    options = parser.parse_args()
    device = needed_device()
    stack = ExitStack()
    directory = stack.enter_context(workspace(options))
    rows, slots = options.rows, options.rows // 10
    values = torch.rand(rows, DIM, device="cuda")
    table = filled(rows, slots, device, values).table
    spec = TableSpec(rows=rows, dim=DIM, init=tierstore.uniform(-1, 1, seed=3))
    tierstore.create(directory / "small.tier", {"small": spec}).close()
    budget = Budget(host_rows=rows // 2, gpu_rows=slots)
    opened = tierstore.open(directory / "small.tier", "r+", budget=budget, device=device)
    small = stack.enter_context(opened)["small"]
    batches = power_law(rows, options.batch, 1.05, BATCHES)
    on_host = [ids.cpu() for ids in batches]  # as a loader returns them
    same = [batches[0]] * BATCHES

    def ahead(number: int) -> None:
        table.prefetch(batches[(number + 2) % BATCHES])
        step(table)(batches[number])

    def ahead_of_disk(number: int) -> None:
        small.prefetch(on_host[(number + AHEAD) % BATCHES])
        step(small)(on_host[number])
        time.sleep(MODEL_SECONDS)

    cases: dict[str, Callable[[int], object]] = {
        "tierstore: read, all hits": lambda i: table.read(same[i]),
        "tierstore: read, missing rows": lambda i: table.read(batches[i]),
        "tierstore: write": lambda i: table.write(batches[i], values[: options.batch]),
        "tierstore: training step": lambda i: step(table)(batches[i]),
        "tierstore: training step, looked ahead": ahead,
        "tierstore: read, host tier a cache over the disk": lambda i: small.read(batches[i]),
        "tierstore: training step, looked ahead, host tier a cache over the disk": ahead_of_disk,
        "F.embedding": lambda i: torch.nn.functional.embedding(batches[i], values),
    }
    if have("fbgemm_gpu"):
        fbgemm = Fbgemm(rows, DIM, 0.1)
        cases["FBGEMM LRU: read, missing rows"] = lambda i: fbgemm.read(batches[i])
    cache = TorchCache(values.cpu(), slots)
    cases["torch, LFU as ColossalAI: read"] = lambda i: cache.read(batches[i])
    cases |= layers(table, batches)
    answer = Answer(
        "gpu_step_syncs",
        QUESTION,
        "nothing: a wait moves no bytes, it keeps the host from issuing the next batch",
        "0 where the host tier holds every row, or looked ahead; at most 1 where it is a cache",
        met=True,
    )
    for name, run in cases.items():
        found = waits(run)
        answer.rows.append({"batch": name, "waits": found})
        if name.startswith("tierstore"):
            answer.met &= found <= (1 if "cache" in name and "ahead" not in name else 0)
    answer.give(options)
    stack.close()


if __name__ == "__main__":
    main()
