"""How fast do random rows go between a host table and the GPU, each way?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bare import BareCopy
from common import Answer, arguments
from gpu import DIM, PinnedDevice, filled, in_turn, link, needed_device
from peers import have, speedtorch

QUESTION = "Moving random rows between a table in host memory and the GPU, each way"
ENOUGH = 0.85
"""The minimum share of the link."""
LIMITS = {"as the ids come": False, "ids sorted before": True}
"""Copies of the same rows and nothing else: the limit of the machine for random rows."""
PEERS = {
    "SpeedTorch": (2.5, 2.2),
    "torch, pinned[ids].cuda()": (10.0, 25.0),
}
"""Minimum of a peer's time relative to ours, to and from the GPU."""

Way = Callable[[int], object]


def tierstore_ways(table: Any, ids: list[Any], data: Any) -> tuple[Way, Way]:
    """Reads and writes of a table whose GPU tier has one slot: all rows pass over the link."""
    return (
        lambda i: table.read(ids[i], cache=False),
        lambda i: table.write(ids[i], data),
    )


def bare_ways(table: Any, ids: list[Any], data: Any, *, in_order: bool) -> tuple[Way, Way]:
    """A kernel that copies the same rows of the same memory; without a map, a cache or marks."""
    import torch

    host = table._backing.space.host
    bare = BareCopy(table._backing.space.gpu.device.host_pointer(host.arena, host.records), 4 * DIM)
    given = [each.sort().values for each in ids] if in_order else ids
    out = torch.empty_like(data)
    return (
        lambda i: bare(given[i], out, to_host=False),
        lambda i: bare(given[i], data, to_host=True),
    )


def torch_ways(pinned: Any, ids: list[Any], data: Any) -> dict[str, tuple[Way, Way]]:
    """The two ways torch has of moving rows of a pinned tensor."""
    import torch

    host_ids = [each.cpu() for each in ids]
    stage = torch.empty(data.shape).pin_memory()

    def select(i: int) -> Any:
        torch.index_select(pinned, 0, host_ids[i], out=stage)
        return stage.to("cuda", non_blocking=True)

    def insert(i: int) -> None:
        stage.copy_(data)
        pinned.index_copy_(0, host_ids[i], stage)

    def assign(i: int) -> None:
        pinned[host_ids[i]] = data.cpu()

    return {
        "torch, pinned[ids].cuda()": (lambda i: pinned[host_ids[i]].cuda(), assign),
        "torch, index_select(out=) and copy": (select, insert),
    }


def speedtorch_ways(gadget: Any, ids: list[Any], data: Any) -> tuple[Way, Way]:
    """SpeedTorch's getData and insertData."""
    import cupy

    device_ids = [cupy.asarray(each) for each in ids]
    return (
        lambda i: gadget.getData(device_ids[i]),
        lambda i: gadget.insertData(data, device_ids[i]),
    )


def main() -> None:
    import torch

    parser = arguments(QUESTION, rows=16_000_000, batch=131_072)
    options = parser.parse_args()
    device = needed_device()
    values = torch.rand(options.rows, DIM, device="cuda")
    count = 2 * options.repeat
    # Distinct ids: where one repeats, the ways differ in which of its rows stays.
    order = torch.randperm(options.rows, device="cuda")
    ids = [each.clone() for each in order[: count * options.batch].split(options.batch)]
    data = torch.rand(options.batch, DIM, device="cuda")
    limits = link()
    managed = filled(options.rows, 1, device, values)
    pinned = filled(options.rows, 1, PinnedDevice(0), values)
    if not torch.equal(managed.table.read(ids[0]), values[ids[0]]):
        raise RuntimeError("tierstore read other rows than those that were written")
    ways = {
        "tierstore": tierstore_ways(managed.table, ids, data),
        "tierstore, pinned": tierstore_ways(pinned.table, ids, data),
        **torch_ways(values.cpu().pin_memory(), ids, data),
        **{
            f"a bare copy, {name}": bare_ways(managed.table, ids, data, in_order=in_order)
            for name, in_order in LIMITS.items()
        },
    }
    if have("SpeedTorch"):
        ways["SpeedTorch"] = speedtorch_ways(speedtorch(values), ids, data)
    nbytes = options.batch * DIM * 4
    answer = Answer(
        "gpu_transfer",
        QUESTION,
        f"{options.batch:,} rows of {4 * DIM} B, {nbytes >> 20} MiB, over the link",
        f"at least {ENOUGH} of the link both ways; SpeedTorch takes at least 2.5 and 2.2 times as "
        "long to and from the GPU, torch's pinned indexing 10 and 25 times",
        met=True,
    )
    to = in_turn({name: way[0] for name, way in ways.items()}, options.repeat)
    back = in_turn({name: way[1] for name, way in ways.items()}, options.repeat)
    managed.table.write(ids[0], data)  # bare copies wrote the rows in another order
    if not torch.equal(managed.table.read(ids[0]), data):
        raise RuntimeError("tierstore read other rows than those that were written")
    medians = {n: (statistics.median(to[n]), statistics.median(back[n])) for n in ways}
    best = nbytes / limits["to"], nbytes / limits["from"]
    for name, taken in {"link limit, one copy": best, **medians}.items():
        answer.rows.append(
            {
                "way": name,
                "to the GPU ms": 1e3 * taken[0],
                "from the GPU ms": 1e3 * taken[1],
                "GB/s to": nbytes / taken[0] / 1e9,
                "GB/s from": nbytes / taken[1] / 1e9,
            }
        )
    ours = medians["tierstore"]
    for way, direction in enumerate(("to", "from")):
        answer.ratios[f"of the link, {direction} the GPU"] = best[way] / ours[way]
        answer.met &= best[way] / ours[way] >= ENOUGH
        for name in LIMITS:
            bare = medians[f"a bare copy, {name}"][way]
            answer.ratios[f"of a bare copy, {name}, {direction} the GPU"] = bare / ours[way]
        for peer, factors in PEERS.items():
            if peer in medians:
                ratio = medians[peer][way] / ours[way]
                answer.ratios[f"{peer} / tierstore, {direction} the GPU"] = ratio
                answer.met &= ratio >= factors[way]
    answer.give(options)


if __name__ == "__main__":
    main()
