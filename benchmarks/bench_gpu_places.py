"""What do reads and steps cost where the GPU maps its resident rows alone, not every row?"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import Answer, arguments
from gpu import in_turn, needed_device, wait

import tierstore
from tierstore._tiers.gpu import memory

QUESTION = "A GPU tier that maps its resident rows alone, beside one with an entry for every row"
KINDS = {"an entry a row": 1 << 62, "resident rows": 0}
"""The most bytes that a map over all rows may take for each kind of map."""


def work(device: Any, path: Path, options: Any) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of reads and steps by kind of map, and its bytes on the device."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    fields = {name: tierstore.Field(options.dim) for name in ("weight", "exp_avg", "exp_avg_sq")}
    spec = tierstore.TableSpec(options.rows, fields=fields, sparse=True)
    budget = tierstore.Budget(host_rows=options.resident + 1, gpu_rows=options.resident)
    where, rng = torch.device(device.torch_name), np.random.default_rng(1)
    universe = np.unique(rng.integers(0, options.rows, options.resident * 3 // 4))
    batches = [
        torch.from_numpy(rng.choice(universe, options.batch, replace=False)).to(where)
        for _ in range(2 * options.repeat)
    ]
    gradient = torch.from_numpy(rng.random((options.batch, options.dim), np.float32)).to(where)
    stores, contestants, nbytes, shown = [], {}, {}, []
    for name, most in KINDS.items():
        with mock.patch.multiple(memory, _DIRECT_BYTES=most):
            store = tierstore.create(path / name, {"t": spec}, budget=budget, device=device)
        stores.append(store)
        table = store["t"]
        gpu = table._backing.space.gpu
        if (gpu.memory.places is None) != (most > 0):
            raise RuntimeError("the tier has the other kind of map")
        layer = TieredEmbedding(table)
        optimizer = TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
        for start in range(0, universe.size, options.batch):
            table.read(torch.from_numpy(universe[start : start + options.batch]).to(where))

        def step(layer: Any, optimizer: Any, number: int) -> None:
            layer(batches[number]).backward(gradient)
            optimizer.step()
            optimizer.zero_grad()

        def read(table: Any, number: int) -> None:
            table.read(batches[number])

        contestants[f"read, {name}"] = functools.partial(read, table)
        contestants[f"step, {name}"] = functools.partial(step, layer, optimizer)
        nbytes[name] = gpu.memory.nbytes - options.resident * memory.GpuMemory._slot_bytes(
            spec.layout.record_bytes
        )
    for run in contestants.values():
        run(0)
    wait()
    times = in_turn(contestants, options.repeat)
    shown = [store["t"].read(batches[0]).cpu() for store in stores]
    if not torch.equal(*shown) or not bool(shown[0].any()):
        raise RuntimeError("the kinds of map gave other rows")
    for store in stores:
        store.rollback()
        store.close()
    return times, nbytes


def main() -> None:
    """Measure and print the answer."""
    parser = arguments(QUESTION, rows=200_000_000, resident=1_000_000, batch=1 << 18, dim=32)
    parser.add_argument("--emulated", action="store_true", help="rehearse without a GPU")
    options = parser.parse_args()
    if options.emulated:
        from tests.gpu.emulator import EmulatedDevice

        device: Any = EmulatedDevice()
    else:
        device = needed_device()
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.directory) as folder:
        times, nbytes = work(device, Path(folder), options)
    taken = {name: statistics.median(each) for name, each in times.items()}
    answer = Answer(
        name="gpu_places",
        question=QUESTION,
        must_move=f"{options.batch:,} resident rows of {options.rows:,}",
        target="no more than 1.25 of the time of a map with an entry for every row",
    )
    every, resident = KINDS
    for what in ("read", "step"):
        answer.ratios[f"{what}: resident rows / an entry a row"] = (
            taken[f"{what}, {resident}"] / taken[f"{what}, {every}"]
        )
    if not options.emulated:
        answer.met = max(answer.ratios.values()) <= 1.25
    for name in KINDS:
        answer.rows.append(
            {
                "map": name,
                "map and marks, MB": nbytes[name] / 1e6,
                "read, ms": 1e3 * taken[f"read, {name}"],
                "step, ms": 1e3 * taken[f"step, {name}"],
            }
        )
    answer.give(options)


if __name__ == "__main__":
    main()
