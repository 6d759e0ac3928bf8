"""SpeedTorch's own tables of transfer times, measured again, and with tierstore.

SpeedTorch published them for a Tesla K80 and two cores: what a batch of an embedding, and of an
optimizer's state, takes to and from a variable on the GPU.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Answer, arguments, in_child, in_turn, medians
from peers import have

import tierstore.speedtorch as facade
from tierstore import Budget
from tierstore.speedtorch.base import Held

QUESTION = "Random rows of a table to and from a variable on the GPU, at 1, 2, 4 and all cores"
PUBLISHED = {
    "SpeedTorch(cuda)": (8.7, 3.5),
    "SpeedTorch(PinnedCPU)": (15.4, 6.5),
    "PyTorch(cuda)": (1.4, 34.1),
    "PyTorch(PinnedCPU)": (47.8, 2664.1),
}
"""Milliseconds for 131,072 rows of 128 float32: to the variable, and from it."""
OURS = "tierstore(PinnedCPU)"
IDS_THERE = "tierstore(PinnedCPU), ids on the GPU"
CACHED = "tierstore(PinnedCPU), a cache of a batch"
FACTORS = {"SpeedTorch(PinnedCPU)": (2.5, 2.2), "PyTorch(PinnedCPU)": (10.0, 25.0)}
"""Minimum of a peer's time relative to ours."""
IN_HOST_MEMORY = ("PinnedCPU", "index_select")
BLOCK = 1 << 18


class Plain:
    """A tensor of all rows; those of a batch go in and out as one writes it in torch."""

    def __init__(self, values: torch.Tensor, put: Callable[[Any], None], get: Callable[[], Any]):
        self.values, self._put, self._get = values, put, get

    def beforeForwardPass(self, ids: Any) -> None:  # noqa: N802
        self._put(self.values[torch.from_numpy(ids)])

    def afterOptimizerStep(self, ids: Any) -> None:  # noqa: N802
        self.values[torch.from_numpy(ids)] = self._get().to(self.values.device)


class Selected(Plain):
    """The same with torch's faster calls, through a pinned buffer."""

    def __init__(self, *given: Any, batch: int) -> None:
        super().__init__(*given)
        self._stage = torch.empty(batch, self.values.shape[1], pin_memory=True)

    def beforeForwardPass(self, ids: Any) -> None:  # noqa: N802
        torch.index_select(self.values, 0, torch.from_numpy(ids), out=self._stage)
        self._put(self._stage)

    def afterOptimizerStep(self, ids: Any) -> None:  # noqa: N802
        self._stage.copy_(self._get())
        self.values.index_copy_(0, torch.from_numpy(ids), self._stage)


class Subject:
    """What is moved: the weight of an embedding, or the sums that Adagrad keeps for it."""

    def __init__(self, kind: str, values: torch.Tensor, pinned: torch.Tensor, batch: int) -> None:
        self.kind, self._values, self._batch = kind, values, batch
        self._pinned = pinned.copy_(values)
        self.rows, self.dim = values.shape
        self._device = values.device

    def _model(self) -> Any:
        return torch.nn.ModuleDict({"u": torch.nn.Embedding(1, self.dim, device=self._device)})

    def plain(self, kind: type[Plain], values: torch.Tensor, **options: Any) -> Plain:
        """Make a peer of plain torch over a copy of all rows."""
        model = self._model()
        weight = model["u"].weight
        if self.kind == "variable":

            def put(rows: Any) -> None:
                weight.data = rows.to(self._device)

            return kind(values, put, lambda: weight.data, **options)
        state: dict[str, Any] = torch.optim.Adagrad(model.parameters()).state[weight]

        def put_state(rows: Any) -> None:
            state["sum"] = rows.to(self._device)

        return kind(values, put_state, lambda: state["sum"], **options)

    def factory(self, library: Any, **options: Any) -> Any:
        """Make a factory of SpeedTorch's, or of this library's of the same name."""
        model = self._model()
        if self.kind == "variable":
            made = library.ModelFactory(model["u"], self.rows, self.dim, **options)
            made.zerosInit()
        else:
            optimizer = torch.optim.Adagrad(model.parameters())
            made = library.OptimizerFactory(optimizer, self.rows, self.dim, model, "u", **options)
            made.optInit()
        return made

    def contestants(self) -> dict[str, Any]:
        """Return the contestants that can run on this machine, over the same rows."""
        alone, batch = Budget(gpu_rows=1), Budget(gpu_rows=self._batch)
        if self._device.type == "cpu":
            return {
                "PyTorch(CPU)": self.plain(Plain, self._pinned),
                "tierstore(CPU)": self._filled(self.factory(facade)),
            }
        made = {
            "PyTorch(cuda)": self.plain(Plain, self._values.clone()),
            "PyTorch(PinnedCPU)": self.plain(Plain, self._pinned),
            "PyTorch(index_select)": self.plain(Selected, self._pinned, batch=self._batch),
            "tierstore(cuda)": self._filled(self.factory(facade)),
            OURS: self._filled(self.factory(facade, CPUPinn=True, budget=alone)),
            CACHED: self._filled(self.factory(facade, CPUPinn=True, budget=batch)),
        }
        if have("SpeedTorch"):
            made["SpeedTorch(cuda)"] = self._speedtorch(CPUPinn=False)
            made["SpeedTorch(PinnedCPU)"] = self._speedtorch(CPUPinn=True)
        return made

    def forget(self) -> None:
        """Free the memory that libraries keep for reuse."""
        if self._device.type == "cuda":
            import cupy

            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()

    def _filled(self, made: Any) -> Any:
        for start in range(0, self.rows, BLOCK):
            ids = torch.arange(start, min(start + BLOCK, self.rows), device=self._device)
            made.table.write(ids, self._values[start : start + BLOCK])
        return made

    def _speedtorch(self, **options: Any) -> Any:
        import cupy
        import SpeedTorch

        made = self.factory(SpeedTorch, **options)
        # SpeedTorch disables the memory pool of CuPy; it is faster with the pool.
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
        corpus = made.CUPYcorpus if self.kind == "variable" else made.CUPYcorpi[0]
        for start in range(0, self.rows, BLOCK):
            corpus[start : start + BLOCK] = cupy.from_dlpack(self._values[start : start + BLOCK])
        return made


def check(contestants: dict[str, Any], ids: Any, values: torch.Tensor) -> None:
    """Raise RuntimeError unless the ids' rows of every contestant are those of `values`."""
    for name, made in contestants.items():
        made.beforeForwardPass(ids)
        if isinstance(made, Plain):
            found = made._get()
        elif hasattr(made, "model_variable"):
            found = made.model_variable.weight.data
        else:
            found = next(iter(made.given_optimizer.state.values()))["sum"]
        if not torch.equal(found, values[torch.from_numpy(ids)]):
            raise RuntimeError(f"{name} moved other rows than those that were asked for")


def measure(
    counts: list[int], rows: int, dim: int, batch: int, repeat: int
) -> list[dict[str, Any]]:
    """Return the rows of the answer, for each number of cores; in a process of its own."""
    device = "cuda" if torch.cuda.is_available() and have("cupy") else "cpu"
    values = torch.rand(rows, dim, device=device)
    pinned = torch.empty(rows, dim, pin_memory=device == "cuda")
    every = sorted(os.sched_getaffinity(0))
    found = []
    for kind in ("variable", "Adagrad sum"):
        subject = Subject(kind, values, pinned, batch)
        contestants = subject.contestants()
        check(contestants, np.random.default_rng(3).permutation(rows)[:batch], values)
        for cores in counts:
            run_on(every[:cores])
            timed = times(subject, contestants, values, batch, repeat)
            found += [
                {"table": row["table"], "moves": kind, "cores": cores, **row} for row in timed
            ]
        run_on(every)
        for made in contestants.values():
            if isinstance(made, Held):
                made.close()
        contestants.clear()
        subject.forget()
    return found


def run_on(cores: list[int]) -> None:
    """Restrict every thread of the process to these cores, and torch to as many threads."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))


def times(
    subject: Subject, contestants: dict[str, Any], values: torch.Tensor, batch: int, repeat: int
) -> list[dict[str, Any]]:
    """Return the times of all contestants, each way."""
    rng = np.random.default_rng(7)
    ids = np.empty(batch, np.int64)
    moves: dict[str, Callable[[Any], None]] = {}
    there: Any = None

    def wait() -> None:
        if values.is_cuda:
            torch.cuda.synchronize()

    def draw() -> None:
        nonlocal there
        # Distinct: where an id repeats, the ways differ in which of its rows stays.
        ids[:] = rng.choice(len(values), batch, replace=False, shuffle=False)
        there = torch.from_numpy(ids).to(values.device)
        wait()

    def run(name: str) -> None:
        moves[name](there if name == IDS_THERE else ids)
        wait()

    def warm(name: str) -> None:
        # No contestant starts with caches and address translations that another one filled.
        draw()
        run(name)
        draw()

    both = {**contestants}
    if OURS in both:
        both[IDS_THERE] = both[OURS]
    found = []
    for way in ("beforeForwardPass", "afterOptimizerStep"):
        moves = {name: getattr(made, way) for name, made in both.items()}
        found.append(medians(in_turn({name: partial(run, name) for name in both}, repeat, warm)))
    published = PUBLISHED if subject.kind == "variable" else {}
    return [
        {
            "table": name,
            "to ms": 1e3 * found[0][name],
            "from ms": 1e3 * found[1][name],
            "published to": published.get(name, (None, None))[0],
            "published from": published.get(name, (None, None))[1],
        }
        for name in sorted(both)
    ]


def judge(answer: Answer) -> None:
    """Compare every peer with tierstore, row by row."""
    for row in answer.rows:
        same = [each for each in answer.rows if each["cores"] == row["cores"]]
        same = [each for each in same if each["moves"] == row["moves"]]
        ours = next(each for each in same if each["table"] in (OURS, "tierstore(CPU)"))
        if row["table"].startswith("tierstore"):
            continue
        for way, column in enumerate(("to ms", "from ms")):
            ratio = row[column] / ours[column]
            case = f"{row['table']} / tierstore, {row['moves']} {column[:-3]}, {row['cores']} cores"
            answer.ratios[case] = ratio
            if any(word in row["table"] for word in IN_HOST_MEMORY):
                least = FACTORS.get(row["table"], (1.0, 1.0))[way]
                answer.met = answer.met is not False and ratio >= least


def main(options: argparse.Namespace) -> None:
    nbytes = 4 * options.dim * options.batch
    answer = Answer(
        "speedtorch_tables",
        QUESTION,
        f"{options.batch:,} rows of {4 * options.dim} B, {nbytes >> 20} MiB, over the link where "
        "the table is in host memory, and back",
        "where the table is in host memory: SpeedTorch takes at least 2.5 and 2.2 times as long to "
        "and from the GPU, torch's pinned indexing 10 and 25 times, and nobody less",
        notes=[
            f"a table of {options.rows:,} rows",
            "tierstore(PinnedCPU): all rows cross the link, the GPU holds one, or the cache named",
            "ids are NumPy's, as SpeedTorch takes them, but where it says that they are on the GPU",
            "published: by SpeedTorch, on a Tesla K80 with 2 cores",
        ],
    )
    every = len(os.sched_getaffinity(0))
    counts = sorted({min(cores, every) for cores in (1, 2, 4, every)})
    given = counts, options.rows, options.dim, options.batch, options.repeat
    answer.rows += in_child(measure, *given)
    judge(answer)
    answer.give(options)


if __name__ == "__main__":
    main(arguments(QUESTION, rows=16_000_000, dim=128, batch=131_072).parse_args())
