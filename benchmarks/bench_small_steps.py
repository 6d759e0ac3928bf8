"""Does a small step, or a small read, of rows in memory cost what it costs in torch?"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Answer, arguments, in_child, in_turn, medians, workspace
from figures import Figure, give, processor
from figures import device as on_device

import tierstore

QUESTION = "Small steps of Adam, and small reads, of rows that are all in memory, against torch's"
PEER = "nn.Embedding and SparseAdam"
FLOOR = "the same operators alone"
STEPS = {  # times the peer that a step may take, by dimension and ids
    16: {32: 1.1, 256: 0.85, 2048: 0.5, 32768: 0.3},
    128: {32: 1.0, 256: 0.65, 2048: 0.4, 32768: 0.36},
}
READS = {1: 4.5, 64: 4.5, 1024: None}
"""Microseconds that a read of so many ids may take."""
SKEW = 1.05
BATCHES = 32
SECONDS = 0.02
"""Each measurement repeats its call for about as long."""


def drawn(rows: int, ids: int, seed: int) -> list[torch.Tensor]:
    """Return batches of ids by a power law, the popular rows anywhere in the table."""
    rng = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, rows + 1) ** -SKEW)
    places = rng.permutation(rows)
    found = np.searchsorted(shares, rng.random((BATCHES, ids)) * shares[-1])
    return list(torch.from_numpy(places[found]))


def floor_of_a_step(weight: torch.Tensor, gradient: torch.Tensor) -> Any:
    """Return a call that does what a step of Adam has to do with records, and nothing else.

    Sort the ids, gather a row for each, sum gradients by row, gather records, update and scatter.
    """
    from tierstore import _rowcopy

    dim = weight.shape[1]
    records = np.zeros((len(weight), 3 * dim), np.float32)
    records[:, :dim] = weight
    rows = records.view(f"V{4 * dim}")[:, 0]
    whole = records.view(f"V{12 * dim}")[:, 0]
    part = max(1, (256 << 10) // whole.itemsize)
    block = np.empty(part, whole.dtype)

    def step(ids: torch.Tensor) -> None:
        batch = ids.numpy()
        rows[batch]
        groups = _rowcopy.Groups(batch)
        distinct = groups.rows
        of_rows = map(torch.from_numpy, (groups.order, groups.starts))
        summed = torch.embedding_bag(gradient, *of_rows, False, 0, False, None, True)[0]
        for at in range(0, distinct.size, part):
            here = distinct[at : at + part]
            items = block[: here.size]
            whole.take(here, out=items, mode="clip")
            values = torch.from_numpy(items.view(np.float32).reshape(-1, 3 * dim))
            row, mean, square = values.chunk(3, 1)
            change = summed[at : at + part]
            mean.lerp_(change, 0.1)
            square.mul_(0.999).addcmul_(change, change, value=0.001)
            deviation = square.clone(memory_format=torch.contiguous_format).sqrt_()
            row.addcdiv_(mean, deviation.div_(0.9).add_(1e-8), value=-0.01)
            whole[here] = items

    return step


class Repeated:
    """A call for each batch in turn, repeated for a while."""

    def __init__(self, call: Any, batches: list[torch.Tensor]) -> None:
        self._call, self._batches = call, batches
        for _ in range(2):
            begin = time.perf_counter()
            for batch in batches[:4]:
                call(batch)
            seconds = (time.perf_counter() - begin) / 4
        self.times = max(4, int(SECONDS / seconds))

    def __call__(self) -> None:
        call, batches = self._call, self._batches
        for number in range(self.times):
            call(batches[number % BATCHES])


def median_of(calls: dict[str, Repeated], repeat: int) -> dict[str, float]:
    """Return the median seconds of one call."""
    found = medians(in_turn(calls, repeat))
    return {name: seconds / calls[name].times for name, seconds in found.items()}


def steps(path: Path, rows: int, dim: int, ids: int, repeat: int) -> dict[str, float]:
    """Return median seconds of a step of Adam, each way, on one core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    with tierstore.open(path, "r+", budget=tierstore.Budget(host_rows=rows), device="cpu") as store:
        tiered = tierstore.nn.TieredEmbedding(store[f"dim{dim}"])
        ours = tierstore.optim.TieredOptimizer(torch.optim.Adam, [tiered], lr=0.01)
        for start in range(0, rows, 1 << 16):
            tiered.table.read(np.arange(start, min(start + (1 << 16), rows)))
        weight = torch.from_numpy(tiered.table.read(np.arange(rows)))
        plain = torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        theirs = torch.optim.SparseAdam(plain.parameters(), lr=0.01)
        gradient = torch.randn(ids, dim, generator=torch.Generator().manual_seed(1))

        def step(layer: Any, optimizer: Any, batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            layer(batch).backward(gradient)
            optimizer.step()

        batches = drawn(rows, ids, seed=ids)
        step(plain, theirs, batches[0])
        step(tiered, ours, batches[0])
        apart = (tiered(batches[0]) - plain(batches[0])).abs().mean()
        if apart > 1e-5:  # SparseAdam adds its epsilon elsewhere
            raise RuntimeError(f"tierstore and torch trained other rows: {apart} apart")
        found = median_of(
            {
                PEER: Repeated(lambda batch: step(plain, theirs, batch), batches),
                "tierstore": Repeated(lambda batch: step(tiered, ours, batch), batches),
                FLOOR: Repeated(floor_of_a_step(weight, gradient), batches),
            },
            repeat,
        )
        store.rollback()
        return found


def reads(path: Path, rows: int, dim: int, ids: int, repeat: int) -> dict[str, float]:
    """Return median seconds of a read, each way, on one core."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    with tierstore.open(path, budget=tierstore.Budget(host_rows=rows), device="cpu") as store:
        table = store[f"dim{dim}"]
        weight = table.read(np.arange(rows))
        tensor = torch.from_numpy(weight)
        batches = drawn(rows, ids, seed=ids)
        arrays: Any = [batch.numpy() for batch in batches]
        embedding = torch.nn.functional.embedding
        return median_of(
            {
                "np.take": Repeated(lambda batch: weight.take(batch, axis=0), arrays),
                "F.embedding": Repeated(lambda batch: embedding(batch, tensor), batches),
                "tierstore, of arrays": Repeated(table.read, arrays),
                "tierstore, of tensors": Repeated(table.read, batches),
            },
            repeat,
        )


def compared(path: Path, options: argparse.Namespace, dim: int) -> dict[str, Figure]:
    """Return what reads and steps of these numbers of ids take: of one processor, or of a GPU."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    torch.set_num_threads(1)
    found = {}
    on_gpu, rows = options.device != "cpu", options.rows
    measured = on_device if on_gpu else processor
    budget = tierstore.Budget(host_rows=rows, gpu_rows=rows if on_gpu else None)
    with tierstore.open(path, "r+", budget=budget, device=options.device) as store:
        table = store[f"dim{dim}"]
        tiered = tierstore.nn.TieredEmbedding(table)
        optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [tiered], lr=0.01)
        table.read(np.arange(rows))

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            tiered(batch).backward(gradient)
            optimizer.step()

        def measure(what: str, call: Any, batches: Any) -> None:
            repeated = Repeated(call, batches)
            seconds, clock = measured(repeated, options.repeat)
            found[f"{what}, dim {dim}"] = Figure(seconds / repeated.times, clock)

        for ids in READS:
            batches = [batch.to(options.device) for batch in drawn(rows, ids, seed=ids)]
            measure(f"read of {ids} ids, tensors", table.read, batches)
            if not on_gpu:
                arrays = [batch.numpy() for batch in batches]
                measure(f"read of {ids} ids, arrays", table.read, arrays)
        for ids in (each for each in options.ids if each <= 4096):
            gradient = torch.randn(ids, dim, generator=torch.Generator().manual_seed(1))
            gradient = gradient.to(options.device)
            batches = [batch.to(options.device) for batch in drawn(rows, ids, seed=ids)]
            measure(f"step of {ids} ids", step, batches)
        store.rollback()
    return found


def main() -> None:
    parser = arguments(QUESTION, rows=200_000)
    parser.add_argument("--dims", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--ids", type=int, nargs="+", default=list(STEPS[16]))
    parser.add_argument("--device", default="cpu", help="of --figures: cuda for those of a GPU")
    options = parser.parse_args()
    answer = Answer(
        "small_steps",
        QUESTION,
        "of a step, each distinct row and its two states read and written once, a row for each id "
        "and its gradient read once: 40 B to 5 MB; of a read, the rows",
        "; ".join(
            [
                f"steps of dim {dim} at most " + ", ".join(map(str, STEPS[dim].values()))
                for dim in STEPS
            ]
        )
        + f" of {PEER}, reads of 1 and 64 rows at most 4.5 us",
    )
    missed = False
    with workspace(options) as directory:
        path = directory / "bench.tier"
        specs = {
            f"dim{dim}": tierstore.TableSpec(
                options.rows, dim, init=tierstore.normal(std=0.1, seed=dim)
            )
            for dim in options.dims
        }
        tierstore.create(path, specs).close()
        if options.figures:
            figures: dict[str, Figure] = {}
            for dim in options.dims:
                figures |= compared(path, options, dim)
            give(options, figures)
            return
        for ids, most in READS.items():
            dim = options.dims[0]
            found = in_child(reads, path, options.rows, dim, ids, options.repeat)
            for name, seconds in found.items():
                answer.rows.append(_row(f"read, {name}", dim, ids, seconds))
            ours = 1e6 * found["tierstore, of arrays"]
            answer.ratios[f"read of {ids}, of np.take"] = ours / (1e6 * found["np.take"])
            missed |= most is not None and ours > most
        for dim in options.dims:
            for ids in options.ids:
                found = in_child(steps, path, options.rows, dim, ids, options.repeat)
                for name, seconds in found.items():
                    answer.rows.append(_row(f"step, {name}", dim, ids, seconds))
                ratio = found["tierstore"] / found[PEER]
                answer.ratios[f"step of {ids}, dim {dim}, of the peer"] = ratio
                floor = found[FLOOR] / found[PEER]
                answer.ratios[f"step of {ids}, dim {dim}, floor, of the peer"] = floor
                missed |= ratio > STEPS.get(dim, {}).get(ids, ratio)
    answer.met = not missed
    answer.give(options)


def _row(what: str, dim: int, ids: int, seconds: float) -> dict[str, Any]:
    return {"what": what, "dim": dim, "ids": ids, "us": 1e6 * seconds}


if __name__ == "__main__":
    main()
