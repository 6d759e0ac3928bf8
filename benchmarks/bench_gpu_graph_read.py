"""How long does a decoding step's read of rows in host memory take within a CUDA graph?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from common import Answer, arguments
from gpu import needed_device, wait

from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import MemoryTable

QUESTION = "How long does a read of rows in host memory take that a CUDA graph replays?"
BYTES = 272
MUST = 40e-6
GRAPHS = 100


def replayed(read: Callable[[], object]) -> Callable[[], None]:
    """Capture a read, after a call outside of the capture."""
    import torch

    read()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    return graph.replay


def seconds(run: Callable[[], object], before: Callable[[], object]) -> float:
    """Time one call on the device, after `before`."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    begin.record()
    run()
    end.record()
    wait()
    return float(begin.elapsed_time(end)) / 1000


def pinned_reader(values: Any, ids: Any, out: Any) -> Callable[[], object]:
    """Return what reads pinned memory as inference engines do: by index, through its address."""
    import cupy
    import torch

    kernel = cupy.RawKernel(
        r"""
extern "C" __global__ void take(const uint4 *from, const long long *ids, uint4 *to, int n, int w) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n * w; i += gridDim.x * blockDim.x)
        to[i] = from[ids[i / w] * w + i % w];
}
""",
        "take",
    )
    units = BYTES // 16
    blocks = -(-len(ids) * units // 256)

    def read() -> None:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        given = (values.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), units)
        kernel((blocks,), (256,), tuple(map(_number, given)), stream=stream)

    return read


def _number(value: int) -> Any:
    import numpy as np

    return np.uint64(value) if value > 1 << 31 else np.int32(value)


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, rows=4_000_000, batch=1536)
    options = parser.parse_args()
    import torch

    device = needed_device()
    rows, batch = options.rows, options.batch
    values = torch.randint(0, 255, (rows, BYTES), dtype=torch.uint8).view(torch.float32)
    budget = Budget(host_rows=rows, gpu_rows=max(1, rows // 1000))
    spec = TableSpec(rows=rows, fields={"weight": Field(BYTES // 4)})
    scratch = MemoryTable(spec, budget=budget, device=device)
    table = scratch.table
    for start in range(0, rows, 1 << 18):
        ids = torch.arange(start, min(start + (1 << 18), rows), device="cuda")
        table.write(ids, values[start : start + (1 << 18)])
    pinned = values.pin_memory()
    ids = torch.zeros(batch, dtype=torch.int64, device="cuda")
    outs = {name: torch.zeros(batch, BYTES // 4, device="cuda") for name in ("tierstore", "pinned")}
    readers = {
        "tierstore": replayed(lambda: table.read_into(ids, outs["tierstore"])),
        "pinned": replayed(pinned_reader(pinned, ids, outs["pinned"])),
    }
    times: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(GRAPHS):
        drawn = torch.randint(0, rows, (batch,), device="cuda")
        for name, run in readers.items():
            times[name].append(seconds(run, lambda drawn=drawn: ids.copy_(drawn)))
        same = [torch.equal(out.view(torch.int32), _expected(values, ids)) for out in outs.values()]
        if not all(same):
            raise RuntimeError("a replay read other rows than those that were written")
    found = {name: statistics.median(each) for name, each in times.items()}
    lines = [{"read": name, "us": round(each * 1e6, 1)} for name, each in found.items()]
    Answer(
        name="gpu_graph_read",
        question=QUESTION,
        must_move=f"{batch} rows of {BYTES} B over the link, {batch * BYTES >> 10} KiB",
        target=f"at most {MUST * 1e6:.0f} us for {batch} rows of {BYTES} bytes",
        met=found["tierstore"] <= MUST,
        rows=lines,
        ratios={"of pinned memory": found["tierstore"] / found["pinned"]},
        notes=[f"{rows} random rows, nearly all in host memory; a graph of one read"],
    ).give(options)
    del scratch


def _expected(values: Any, ids: Any) -> Any:
    import torch

    return values.view(torch.int32)[ids.cpu()].cuda()


if __name__ == "__main__":
    main()
