"""How fast does a GPU find and enter keys, and does a step by key cost more than one by id?"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import Answer, arguments
from gpu import in_turn, needed_device, wait

import tierstore
from tierstore._tiers.gpu.keys import DeviceKeys
from tierstore._tiers.gpu.launcher import Launcher

QUESTION = "Keys on a GPU: finding and entering them, and an Adam step by key beside one by id"


def hashes(device: Any, start: int, count: int) -> Any:
    """Return distinct keys that look random, by their numbers."""
    numbers = device.arrays.arange(start + 1, start + 1 + count, dtype="u8")
    return numbers * np.uint64(0x9E3779B97F4A7C15)


def of_map(device: Any, resident: int, batch: int, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of finding a batch of resident keys, and of entering a new one."""
    rounds = 2 * repeat + 2
    launcher, arrays = Launcher(device), device.arrays
    keys = DeviceKeys(launcher, device, resident + rounds * batch)
    for start in range(0, resident, 1 << 24):
        count = min(1 << 24, resident - start)
        rows = arrays.arange(start, start + count, dtype="i8")
        keys.enter(hashes(device, start, count), rows)
    rng = np.random.default_rng(1)
    picked = [device.upload(rng.integers(0, resident, batch)) for _ in range(rounds)]
    known = [(each.astype("u8") + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) for each in picked]
    found = device.allocate(batch, "i8")
    fresh = [hashes(device, resident + number * batch, batch) for number in range(rounds)]
    rows = [
        arrays.arange(resident + number * batch, resident + (number + 1) * batch, dtype="i8")
        for number in range(rounds)
    ]
    for codes, expected in zip(known[:2], picked[:2], strict=True):
        if keys.find(codes, found) is not None or not bool((found == expected).all()):
            raise RuntimeError("keys were not found, or in other rows")
    times = in_turn(
        {
            "find": lambda number: keys.find(known[number], found),
            "enter": lambda number: keys.enter(fresh[number], rows[number]),
        },
        repeat,
    )
    if keys.find(fresh[1], found) is not None or not bool((found == rows[1]).all()):
        raise RuntimeError("keys were not entered")
    return times


def step(layer: Any, optimizer: Any, given: Any, gradient: Any, number: int) -> None:
    """Train one batch."""
    layer(given[number]).backward(gradient)
    optimizer.step()
    optimizer.zero_grad()


def steps(device: Any, path: Path, options: Any) -> dict[str, list[float]]:
    """Return the seconds of a training step by id and by key, every row on the GPU."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    rows, batch, dim = options.rows, options.step_batch, options.dim
    fields = {name: tierstore.Field(dim) for name in ("weight", "exp_avg", "exp_avg_sq")}
    specs = {
        "ids": tierstore.TableSpec(rows, fields=fields, sparse=True),
        "keys": tierstore.TableSpec(rows, fields=fields, sparse=True, keys="int64"),
    }
    budget = tierstore.Budget(
        host_rows=dict.fromkeys(specs, rows), gpu_rows=dict.fromkeys(specs, rows)
    )
    generator = torch.Generator().manual_seed(3)
    where = torch.device(device.torch_name)
    with tierstore.create(path, specs, budget=budget, device=device) as store:
        hashed = np.arange(1, rows + 1) * np.int64(0x1E3779B97F4A7C15)
        values = np.random.default_rng(4).random((1 << 18, dim), np.float32)
        for start in range(0, rows, 1 << 18):
            count = min(1 << 18, rows - start)
            store["keys"].write(hashed[start : start + count], values[:count])
            store["ids"].write(np.arange(start, start + count), values[:count])
        hashed = torch.from_numpy(hashed).to(where)
        ids = [  # distinct in a batch: sums of gradients in another order would differ
            torch.randperm(rows, generator=generator)[:batch].to(where)
            for _ in range(2 * options.repeat)
        ]
        gradient = torch.rand(batch, dim, generator=generator).to(where)
        contestants = {}
        for name in specs:
            layer = TieredEmbedding(store[name])
            optimizer = TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
            given = ids if name == "ids" else [hashed[each] for each in ids]
            contestants[name] = functools.partial(step, layer, optimizer, given, gradient)
        for number in range(2 * options.repeat):  # every row is on the GPU from here on
            for run in contestants.values():
                run(number)
        wait()
        times = in_turn(contestants, options.repeat)
        by_id = store["ids"].read(ids[0][:1000])
        by_key = store["keys"].read(hashed[ids[0][:1000]])
        if not torch.equal(by_id.cpu(), by_key.cpu()):
            raise RuntimeError("training by key gave other rows")
        store.rollback()
        return times


def main() -> None:
    """Measure and print the answer."""
    parser = arguments(
        QUESTION, resident=64 << 20, batch=1 << 20, rows=2_000_000, step_batch=1 << 20, dim=64
    )
    parser.add_argument("--emulated", action="store_true", help="rehearse without a GPU")
    options = parser.parse_args()
    if options.emulated:
        from tests.gpu.emulator import EmulatedDevice

        device: Any = EmulatedDevice()
    else:
        device = needed_device()
    times = of_map(device, options.resident, options.batch, options.repeat)
    rates = {name: options.batch / statistics.median(each) for name, each in times.items()}
    for name, rate in rates.items():
        print(f"{name}: {rate / 1e9:.2f} G keys/s", flush=True)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=options.directory) as folder:
        taken = {
            name: statistics.median(each)
            for name, each in steps(device, Path(folder, "s"), options).items()
        }
    ratio = taken["keys"] / taken["ids"]
    met = rates["find"] >= 1e9 and rates["enter"] >= 4e8 and ratio <= 1.15
    answer = Answer(
        name="gpu_keys",
        question=QUESTION,
        must_move=f"{options.batch:,} keys of {options.resident:,}, 16 bytes each",
        target="find 1.0 G keys/s, enter 0.4 G keys/s, a step at most 1.15 of one by id",
        met=None if options.emulated else met,
        ratios={"step by key / by id": ratio},
    )
    for what, count, seconds in (
        ("find", options.batch, statistics.median(times["find"])),
        ("enter", options.batch, statistics.median(times["enter"])),
        ("step by id", options.step_batch, taken["ids"]),
        ("step by key", options.step_batch, taken["keys"]),
    ):
        answer.rows.append({"what": what, "ms": 1e3 * seconds, "G keys/s": count / seconds / 1e9})
    answer.give(options)


if __name__ == "__main__":
    main()
