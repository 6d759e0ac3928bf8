"""SpeedTorch's own table of memory, measured again, and with tierstore.

SpeedTorch published, for a Tesla K80, what holding 10,000,000 rows of 128 float32 takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Answer, arguments, in_child, private_bytes, workspace
from peers import have

import tierstore.speedtorch as facade
from tierstore import Budget
from tierstore.speedtorch.base import Held

QUESTION = "Memory of the host and of the GPU for holding a table of random rows"
PUBLISHED = {
    "SpeedTorch(PinnedCPU)": (9.93, 0.06),
    "PyTorch(PinnedCPU)": (6.59, 0.32),
    "SpeedTorch(cuda)": (0.39, 9.61),
    "PyTorch(cuda)": (1.82, 5.09),
}
"""Gigabytes on the host and on the GPU."""
GB = 10**9
MAP = 4
"""Bytes a row that the GPU may hold in addition to its budget."""
STEPS = 24


def available() -> int:
    """Return the memory of the machine that is free or can be freed."""
    line = next(
        each for each in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in each
    )
    return 1024 * int(line.split()[1])


def free_on_gpu() -> int:
    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def make(kind: str, rows: int, dim: int, cache: int, path: str) -> Any:
    """Hold a table of random rows; return what holds it."""
    shape = rows, dim
    library, _, place = kind.rstrip(")").partition("(")
    if library == "PyTorch":
        if place == "PinnedCPU":
            return torch.empty(shape, pin_memory=True).uniform_()
        return torch.rand(shape, device=place.lower())
    module = torch.nn.Embedding(1, dim)
    if library == "SpeedTorch":
        import SpeedTorch

        held = SpeedTorch.ModelFactory(module.cuda(), rows, dim, CPUPinn=place == "PinnedCPU")
    elif place == "disk":
        budget = Budget(host=cache, gpu=cache)
        held = facade.ModelFactoryMM(module, rows, dim, path, budget=budget)
    else:
        pinned = place == "PinnedCPU"
        budget = Budget(gpu=cache) if pinned else None
        held = facade.ModelFactory(module, rows, dim, CPUPinn=pinned, budget=budget)
    held.uniformDistributionInit(0, 1)
    return held


def use(held: Any, rows: int, batch: int) -> None:
    """Read and write batches of random rows to fill the caches."""
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        ids = rng.choice(rows, batch, replace=False, shuffle=False)
        held.beforeForwardPass(ids)
        held.afterOptimizerStep(ids)


def measure(kind: str, rows: int, dim: int, batch: int, cache: int, path: str) -> dict[str, Any]:
    """Return bytes that holding a table takes; in a process of its own."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # what the driver takes is not counted
    before = available(), private_bytes(), free_on_gpu()
    held = make(kind, rows, dim, cache, path)
    if isinstance(held, Held):
        use(held, rows, batch)
        held.model_variable.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    host = max(before[0] - available(), private_bytes() - before[1])
    gpu = before[2] - free_on_gpu()
    if isinstance(held, Held):
        held.close()
    return {"host": host, "gpu": gpu}


def kinds() -> list[str]:
    """Return the contestants that can run on this machine."""
    if not (torch.cuda.is_available() and have("cupy")):
        return ["PyTorch(CPU)", "tierstore(CPU)", "tierstore(disk)"]
    libraries = (
        ["SpeedTorch", "PyTorch", "tierstore"] if have("SpeedTorch") else ["PyTorch", "tierstore"]
    )
    places = ("PinnedCPU", "cuda")
    return [f"{each}({place})" for each in libraries for place in places] + ["tierstore(disk)"]


def main() -> None:
    parser = arguments(QUESTION, rows=10_000_000, dim=128, batch=131_072, cache=512 << 20)
    options = parser.parse_args()
    table = 4 * options.rows * options.dim
    batch = 4 * options.batch * options.dim
    answer = Answer(
        "speedtorch_memory",
        QUESTION,
        f"{options.rows:,} rows of {4 * options.dim} B, {table / GB:.2f} GB, in one place",
        "host memory as budgeted; on the GPU at most its budget, 4 bytes a row and 5 %; on disk at "
        "most 1 GB of host memory",
        notes=[
            f"tierstore(PinnedCPU) and (disk) have {options.cache / GB:.2f} GB of cache each",
            f"after {STEPS} batches of {options.batch:,} rows",
            "host: what the machine has available less, or private memory more, whichever is more",
            "published: by SpeedTorch, on a Tesla K80",
        ],
    )
    most_host, most_gpu = {}, {}
    met = True
    with workspace(options) as directory:
        for kind in kinds():
            sizes = options.rows, options.dim, options.batch, options.cache
            found = in_child(measure, kind, *sizes, str(directory / "table.tier"))
            published = PUBLISHED.get(kind, (None, None))
            answer.rows.append(
                {
                    "table": kind,
                    "host GB": found["host"] / GB,
                    "GPU GB": found["gpu"] / GB if torch.cuda.is_available() else None,
                    "published host": published[0],
                    "published GPU": published[1],
                }
            )
            most_host[kind], most_gpu[kind] = found["host"], found["gpu"]
            answer.ratios[f"host memory of {kind} / table"] = max(found["host"], 1) / table
    maps = MAP * options.rows + 3 * batch
    limit = 1.05 * (options.cache + maps)
    met &= most_host["tierstore(disk)"] <= 1 * GB
    if "tierstore(PinnedCPU)" in most_host:
        met &= most_host["tierstore(PinnedCPU)"] <= 1.05 * (table + 2 * options.rows) + GB / 4
        met &= max(most_gpu["tierstore(PinnedCPU)"], most_gpu["tierstore(disk)"]) <= limit
        answer.met = met
    answer.give(options)


if __name__ == "__main__":
    main()
