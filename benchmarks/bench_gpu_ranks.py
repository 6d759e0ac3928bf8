"""What does a training step over 26 tables cost on several GPUs, compared with one?"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import criteo
from common import Answer, arguments, workspace
from gpu import needed_device, seconds, wait

QUESTION = "A training step over 26 tables that several ranks share, beside one rank's"
SHARE = 0.1
"""The share of the rows of a rank that its GPU tier holds."""
IN_A_ROW = 10
AHEAD = 2
"""Steps ahead of which ids are given: rows of the host tier then come next to the model."""
WARMING = 20
LR = 1e-3
BESIDE = 1.08
"""Maximum of the step of several ranks relative to one rank's, next to a dense model."""


class Loop:
    """Steps of one rank: rows of all tables, a dense model of some length, gradients, update."""

    def __init__(self, store: Any, rows: dict[str, int], options: Namespace, device: str) -> None:
        import torch

        from tierstore.nn import TieredEmbeddingCollection
        from tierstore.optim import RowWiseAdagrad, TieredOptimizer

        self.layer = TieredEmbeddingCollection(store, {name: name for name in rows})
        self.optimizer = TieredOptimizer(RowWiseAdagrad, [self.layer], lr=LR)
        self.names, self.gradients = list(rows), {}
        side = 64 if device == "cpu" else 2048
        self.matrix = torch.rand(side, side, device=device)
        self.products: int = options.products
        if options.dense_ms and not self.products:
            many = [seconds(lambda: [self.multiply() for _ in range(50)]) for _ in range(5)]
            self.products = max(1, round(options.dense_ms / 1e3 / min(many) * 50))

    def multiply(self) -> None:
        self.matrix @ self.matrix

    def __call__(self, batch: Any, dense: int = 0) -> None:
        """Take a step on ids `(tables, samples)`."""
        import torch

        found = list(self.layer(dict(zip(self.names, batch, strict=True))).values())
        for _ in range(dense):
            self.multiply()
        size = len(found[0])
        if size not in self.gradients:
            self.gradients[size] = [torch.rand_like(each) - 0.5 for each in found]
        torch.autograd.backward(found, self.gradients[size])
        self.optimizer.step()

    def ahead(self, batches: list[Any], products: int = 0) -> None:
        """Take steps next to a dense model, with the ids of each given ahead."""
        import tierstore

        def named(batch: Any) -> dict[str, Any]:
            return dict(zip(self.names, batch, strict=True))

        for batch in tierstore.lookahead(batches, {self.layer: named}, depth=AHEAD):
            self(batch, products)


def exchanges(batch: Any, rows: dict[str, int], dim: int, ranks: int) -> Callable[[], None]:
    """Return a function that sends what a step sends, nothing else: ids, rows and gradients."""
    import torch
    import torch.distributed as dist

    distinct = sum(len(each.unique()) for each in batch)
    most = torch.tensor([distinct], device=batch.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    count = -(-int(most) // ranks) * ranks
    ids = torch.zeros(count, dtype=torch.int64, device=batch.device)
    values = torch.zeros(count, dim, device=batch.device)
    counts = torch.zeros(ranks * 5, dtype=torch.int64, device=batch.device)

    def run() -> None:
        for each in (counts, ids, values, values):
            dist.all_to_all_single(torch.empty_like(each), each)

    return run


def work(rank: int, ranks: int, path: str, meeting: str, options: Namespace, out: Any) -> None:
    """Measure the steps of one rank; the first rank reports the times."""
    import torch
    import torch.distributed as dist

    import tierstore

    warnings.simplefilter("ignore", tierstore.errors.ZeroRowsWarning)
    on_gpu = options.device != "cpu"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if ranks > 1:
        method = f"file://{meeting}"
        kind = "nccl" if on_gpu else "gloo"
        more = {"device_id": torch.device(device)} if on_gpu else {}
        dist.init_process_group(
            kind,
            init_method=method,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=300),
            **more,
        )
    rows = criteo.sizes(options.rows)
    record = 4 * (options.dim + 1)
    own = sum(rows.values()) // ranks
    gpu = int(SHARE * own) * record if on_gpu else 0
    budget = tierstore.Budget(host=2 * own * (record + 64) + (16 << 20), gpu=gpu + (16 << 20))
    found = []
    with tierstore.distributed.open(path, budget=budget, device=device) as store:
        loop = Loop(store, rows, options, device)
        drawn = draw(rows, max(options.samples), options, rank, "cuda" if on_gpu else "cpu")
        for ids in drawn[:WARMING]:
            loop(ids)
        for samples in options.samples:
            batches = [ids[:, :samples].contiguous() for ids in drawn[WARMING:]]
            line = {"ranks": ranks, "samples a rank": samples, "products": loop.products}
            line["step, ms"] = timed(lambda some: [loop(each) for each in some], batches, options)
            line["announced, ms"] = timed(loop.ahead, batches, options)
            line["issued, ms"] = issued(loop, batches)
            if options.dense_ms:
                beside = functools.partial(loop.ahead, products=loop.products)
                line["beside a dense model, ms"] = timed(beside, batches, options)
            if ranks > 1:
                send = exchanges(batches[0], rows, options.dim, ranks)
                line["all_to_all alone, ms"] = timed(
                    lambda some, send=send: [send() for _ in some], batches, options
                )
            found.append(line)
        store.rollback()
    if ranks > 1:
        dist.destroy_process_group()
    if rank == 0:
        out.put(found)


def draw(rows: dict[str, int], samples: int, options: Namespace, rank: int, device: str) -> Any:
    """Return batches of ids `(tables, samples)`, others for each rank."""
    count = WARMING + IN_A_ROW * (options.repeat + 1)
    drawn = criteo.draw(rows, samples * (rank + 1), count, device)
    return [ids[:, samples * rank :].contiguous() for ids in drawn]


def timed(step: Callable[[list[Any]], object], batches: list[Any], options: Namespace) -> float:
    """Return the median milliseconds of a step, of the slowest rank."""
    import torch
    import torch.distributed as dist

    times = []
    for turn in range(options.repeat + 1):
        some = batches[IN_A_ROW * turn : IN_A_ROW * (turn + 1)]
        taken = torch.tensor([seconds(functools.partial(step, some))], device=some[0].device)
        if dist.is_initialized():
            dist.all_reduce(taken, dist.ReduceOp.MAX)
        if turn:
            times.append(float(taken) / len(some))
    return 1e3 * statistics.median(times)


def issued(loop: Loop, batches: list[Any]) -> float:
    """Return the milliseconds for which the host is busy with a step that was announced.

    The device has earlier work, so that the host waits only for data that it needs.
    """
    import time

    wait()
    for _ in range(loop.products):
        loop.multiply()
    begin = time.perf_counter()
    loop.ahead(batches[:IN_A_ROW])
    taken = time.perf_counter() - begin
    wait()
    return 1e3 * taken / IN_A_ROW


def made(path: Path, options: Namespace) -> None:
    """Make the store; rows are zeros, which a file with holes has for nothing."""
    import tierstore

    specs = {
        name: tierstore.TableSpec(rows, options.dim, sparse=True)
        for name, rows in criteo.sizes(options.rows).items()
    }
    tierstore.distributed.create(path, specs, partitions=options.partitions).close()


def measured(ranks: int, path: Path, options: Namespace) -> list[dict[str, Any]]:
    """Run the ranks, each a process, and return what they measured."""
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        meeting = os.path.join(place, "meeting")
        started = [
            context.Process(target=work, args=(rank, ranks, str(path), meeting, options, out))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
    if any(process.exitcode for process in started):
        raise SystemExit(f"a rank of {ranks} failed: {[each.exitcode for each in started]}")
    lines: list[dict[str, Any]] = out.get()
    return lines


def main() -> None:
    parser = arguments(QUESTION, rows=4_000_000, dim=64, ranks=2, partitions=16, dense_ms=20)
    parser.add_argument("--samples", type=int, nargs="*", default=[256, 2048, 16384, 65536])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    options.products = 0
    if options.device != "cpu":
        needed_device()
    answer = Answer(
        "gpu_ranks",
        QUESTION,
        must_move="the distinct rows that a rank does not have, and their gradients",
        target=f"beside a dense model of {options.dense_ms} ms at most {BESIDE} of one rank's step",
    )
    with workspace(options) as place:
        made(place / "store", options)
        one = measured(1, place / "store", options)
        options.products = one[0]["products"]  # one model for all
        many = measured(options.ranks, place / "store", options)
    answer.rows = [*one, *many]
    for before, after in zip(one, many, strict=True):
        where = f"{before['samples a rank']} samples a rank"
        answer.ratios[f"step of {options.ranks} ranks / of 1, {where}"] = (
            after["step, ms"] / before["step, ms"]
        )
        if options.dense_ms:
            key = "beside a dense model, ms"
            answer.ratios[f"beside a dense model, {where}"] = after[key] / before[key]
    beside = [each for name, each in answer.ratios.items() if name.startswith("beside")]
    if options.device != "cpu" and beside:
        answer.met = max(beside) <= BESIDE
    answer.notes = [
        f"each rank has fresh batches of its own, and a GPU tier for {SHARE:.0%} of its rows",
        f"{IN_A_ROW} steps in a row are timed on the slowest rank, one wait behind them",
        "issued is the host's time for steps that were announced, what it waits for included",
        "all_to_all alone sends the distinct rows of a batch in equal parts, nothing else",
    ]
    answer.give(options)


if __name__ == "__main__":
    main()
