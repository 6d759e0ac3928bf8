"""What does a step with rows on disk, in host memory and, if there is one, on a GPU cost?"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import Answer, arguments, in_child, medians, workspace
from gpu import power_law, wait

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

QUESTION = "A step of Adam whose rows lie in three tiers, and with all in memory on 1 to 4 cores"
SKEW, BATCHES = 1.05, 24
THREADS = (1, 2, 4)
STATES = 3
"""A row of Adam has the weight and two states, all float32."""
FASTER = 2.2
"""How many times as fast four cores take a step as one, at least."""
MOST_MS = {"cuda": 9.0}
"""Maximum time of a step in three tiers on a GPU machine."""
MOST_AHEAD = 1.15
"""Maximum of a step with ids given ahead, relative to the model alone."""
AHEAD = 2
"""Batches that stay, as `tierstore.lookahead` announces them one step ahead."""
FULL_HOST, FULL_GPU, FILLING = 1 / 20, 3 / 100, 60
"""Parts of the bytes in tiers that are full, so that each row that comes drives out a changed one,
and the steps until they are."""
LEAST_HOST = 16
"""Bytes a row, of which a small host tier has its maps and some records."""


class Run(NamedTuple):
    """One way to take steps.

    Attributes:
        host, gpu: bytes of the tiers; None for all rows in host memory.
        threads: cores, or None for all.
        ahead: whether ids are given a step ahead.
        model_ms: the time of the model during a step.
        settling: steps before those that are measured.
    """

    name: str
    host: int | None
    gpu: int = 0
    threads: int | None = None
    ahead: bool = False
    model_ms: float = 0
    settling: int = BATCHES


def model(device: str, seconds: float) -> None:
    """Take as long as a model, on the device if there is one."""
    if device == "cuda" and seconds:
        torch.cuda._sleep(int(seconds * 1.7e9))
    elif seconds:
        time.sleep(seconds)


def measure(path: Path, run: Run, device: str, ids: int, repeat: int) -> dict[str, float]:
    """Return median seconds of a step, and of the processor's time for it."""
    if run.threads is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: run.threads])
        torch.set_num_threads(run.threads)
    budget = tierstore.Budget(host=run.host, gpu=run.gpu if device == "cuda" else None)
    if run.host is None:
        budget = tierstore.Budget(host_rows=2**40, gpu=0 if device == "cuda" else None)
    place = device if run.gpu or device == "cpu" else "cpu"
    with tierstore.open(path, "r+", budget=budget, device=place) as store:
        layer = TieredEmbedding(store["t"])
        optimizer = TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
        if run.host is None:
            for start in range(0, layer.num_embeddings, 1 << 16):
                layer.table.read(np.arange(start, min(start + (1 << 16), layer.num_embeddings)))
        count = run.settling + repeat + 1  # all different: otherwise all rows soon are nearest
        batches = iter(power_law(layer.num_embeddings, ids, SKEW, count, device=place))
        gradient = torch.randn(ids, layer.embedding_dim, device=place)
        seconds, used = zip(*steps(layer, optimizer, batches, gradient, run, repeat), strict=True)
        store.rollback()
    times = {"wall": seconds, "used": used, "model": alone(place, run.model_ms / 1e3)}
    return medians({name: list(each) for name, each in times.items()})


def alone(device: str, seconds: float) -> list[float]:
    """Return the time of the model without a step."""
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        model(device, seconds)
        wait()
        found.append(time.perf_counter() - begin)
    return found


def steps(
    layer: Any, optimizer: Any, batches: Iterator[Any], gradient: Any, run: Run, repeat: int
) -> Iterator[tuple[float, float]]:
    """Take steps; yield the seconds of each once the tiers have settled, and processor's time."""
    following = next(batches)
    for number in range(run.settling + repeat):
        batch, following = following, next(batches)
        if run.ahead:
            layer.prefetch(following, window=AHEAD)
        wait()
        begin, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        rows = layer(batch)
        model(gradient.device.type, run.model_ms / 1e3)
        rows.backward(gradient)
        optimizer.step()
        wait()
        if number >= run.settling:
            yield time.perf_counter() - begin, time.process_time() - used


def created(path: Path, options: argparse.Namespace) -> int:
    """Create the table with Adam's state, its pages in the page cache; return its bytes."""
    weight = tierstore.Field(options.dim, init=tierstore.uniform(-0.1, 0.1))
    states = dict.fromkeys(("exp_avg", "exp_avg_sq"), tierstore.Field(options.dim))
    specs = {"t": tierstore.TableSpec(options.rows, fields={"weight": weight, **states})}
    with tierstore.create(path, specs, budget=tierstore.Budget(host=0)) as store:
        TieredOptimizer(torch.optim.Adam, [TieredEmbedding(store["t"])], lr=0.01)
        for start in range(0, options.rows, 1 << 18):
            store["t"].read(np.arange(start, min(start + (1 << 18), options.rows)))
    return int(options.rows * 4 * options.dim * STATES)


def main() -> None:
    parser = arguments(QUESTION, rows=1_000_000, dim=64, ids=131_072, model_ms=10)
    parser.add_argument("--host", type=float, default=1 / 3, help="the host tier's part of bytes")
    parser.add_argument("--gpu", type=float, default=1 / 12, help="part of the bytes on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=list(THREADS))
    parser.add_argument(
        "--processes", type=int, default=5, help="of each in tiers: they differ more than steps"
    )
    options = parser.parse_args()
    answer = Answer(
        "three_tiers",
        QUESTION,
        "of each distinct row its record read and written once in each tier that it passes",
        f"{FASTER} times as fast on four cores as on one; with a GPU {MOST_MS['cuda']:.0f} ms, and "
        f"beside a model with ids given ahead {MOST_AHEAD} of the model alone",
    )
    with workspace(options) as directory:
        path = directory / "bench.tier"
        nbytes = created(path, options)
        host = int(options.host * nbytes)
        gpu = int(options.gpu * nbytes) if options.device == "cuda" else 0
        runs = [
            *(Run(f"in memory, {k} cores", None, threads=k) for k in options.threads),
            Run("tiers", host, gpu),
            Run("tiers, ids ahead", host, gpu, ahead=True),
            Run("tiers, beside a model", host, gpu, ahead=True, model_ms=options.model_ms),
        ]
        on_gpu = options.device == "cuda"
        least = LEAST_HOST * options.rows
        full = max(least, int(FULL_HOST * nbytes)), int(FULL_GPU * nbytes) if on_gpu else 0
        runs += [
            Run("full tiers", *full, settling=FILLING),
            Run(
                "full tiers, beside a model",
                *full,
                ahead=True,
                model_ms=options.model_ms,
                settling=FILLING,
            ),
        ]
        found = {}
        for run in runs:
            args = path, run, options.device, options.ids, options.repeat
            times = 1 if run.host is None else options.processes
            each = [in_child(measure, *args) for _ in range(times)]
            took = found[run.name] = medians(
                {name: [one[name] for one in each] for name in each[0]}
            )
            answer.rows.append(
                {"step": run.name, "ms": 1e3 * took["wall"], "processor ms": 1e3 * took["used"]}
            )
    judge(answer, found, options)
    answer.give(options)


def judge(answer: Answer, found: dict[str, Any], options: argparse.Namespace) -> None:
    """Compare the figures with the targets."""
    first, last = (f"in memory, {k} cores" for k in (options.threads[0], options.threads[-1]))
    faster = found[first]["wall"] / found[last]["wall"]
    answer.ratios[f"{options.threads[0]} to {options.threads[-1]} cores, times as fast"] = faster
    modelled = found["tiers, beside a model"]
    beside = modelled["wall"] / modelled["model"]
    answer.ratios["beside a model, ids ahead, of the model alone"] = beside
    full = found["full tiers, beside a model"]
    of_full = full["wall"] / full["model"]
    answer.ratios["full tiers, beside a model, of the model alone"] = of_full
    answer.notes.append("full tiers: each row that comes drives out one that has changed")
    met = options.threads[-1] != 4 or faster >= FASTER
    if options.device in MOST_MS:
        met &= 1e3 * found["tiers"]["wall"] <= MOST_MS[options.device] and beside <= MOST_AHEAD
    else:
        answer.notes.append("no GPU: the tiers are the disk and host memory, the model is a sleep")
    answer.met = met


if __name__ == "__main__":
    main()
