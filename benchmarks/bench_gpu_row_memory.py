"""How fast does the GPU read rows of 8-bit elements with scales from host memory?"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from bench_gpu_graph_read import replayed
from bench_gpu_graph_read import seconds as replay_seconds
from common import Answer, arguments, workspace
from gpu import in_turn, link, needed_device, wait

import tierstore

QUESTION = "Read a prefill's rows, 256 elements of 8 bits and 8 bytes of scales, from host memory"
DIM, BLOCKS = 256, 2
BYTES = DIM + 4 * BLOCKS
DECODED = 1536
OF_LINK, OF_PINNED, GRAPH = 0.75, 4.0, 40e-6
BLOCK = 1 << 18
TAKE = r"""
extern "C" __global__ void take(const uint2 *from, const long long *ids, uint2 *to, int n, int w) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < (long long)n * w;
         i += (long long)gridDim.x * blockDim.x)
        to[i] = from[ids[i / w] * w + i % w];
}
"""


def written(path: Path, rows: int) -> tuple[str, str]:
    """Write random elements and scales as safetensors; return what to attach."""
    import torch

    shapes = {"elements": ("F8_E4M3", DIM, 1), "scales": ("F32", BLOCKS, 4)}
    header, end = {}, 0
    for name, (kind, dim, size) in shapes.items():
        offsets = [end, end + rows * dim * size]
        header[name] = {"dtype": kind, "shape": [rows, dim], "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    generator = torch.Generator("cuda").manual_seed(5)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, rows, BLOCK):
            shape = min(BLOCK, rows - start), DIM
            drawn = torch.randint(0, 256, shape, device="cuda", generator=generator)
            drawn[(drawn & 127) == 127] = 0  # NaN
            file.write(drawn.byte().cpu().numpy().data)
        for start in range(0, rows, BLOCK):
            shape = min(BLOCK, rows - start), BLOCKS
            file.write(torch.rand(shape, device="cuda", generator=generator).cpu().numpy().data)
    return f"{path}::elements", f"{path}::scales"


def in_one_piece(path: Path, rows: int) -> tuple[Any, Any, Any]:
    """Return the elements and scales, and records of both in pinned memory."""
    import torch

    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    begin = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
    elements = data[begin : begin + rows * DIM].view(rows, DIM)
    scales = data[begin + rows * DIM :].view(rows, 4 * BLOCKS)
    records = torch.empty(rows, BYTES, dtype=torch.uint8, pin_memory=True)
    records[:, :DIM] = elements
    records[:, DIM:] = scales
    return elements, scales, records


class Bench:
    """A table of random rows, in host memory in each of the ways."""

    def __init__(self, options: Any, place: Path) -> None:
        import cupy
        import torch

        self.options, rows = options, options.rows
        self.device = needed_device()
        given = written(place, rows)
        self.elements, self.scales, self.records = in_one_piece(place, rows)
        budget = tierstore.Budget(host_rows=rows, gpu_rows=max(1, rows // 1000))
        budgets = {"in one piece": budget}
        if "gpu_whole" in {each.name for each in dataclasses.fields(budget)}:
            apart = dataclasses.replace(budget, gpu_whole=["weight.scale"])
            budgets["scales on the GPU"] = apart
        self.attached = {
            name: tierstore.attach({"t": given}, budget=each, device=self.device)
            for name, each in budgets.items()
        }
        self.tables = {name: each["t"] for name, each in self.attached.items()}
        for table in self.tables.values():
            table.warm()
        self._take = cupy.RawKernel(TAKE, "take")
        self._read = torch.empty(max(options.batch, DECODED), BYTES, dtype=torch.uint8).cuda()

    def pinned(self, ids: Any) -> Any:
        """Read pinned memory as inference engines do, by index through its address."""
        import cupy
        import numpy as np
        import torch

        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        pointers = (each.data_ptr() for each in (self.records, ids, self._read))
        counts = np.int32(len(ids)), np.int32(BYTES // 8)
        self._take((1056,), (256,), (*map(np.uint64, pointers), *counts), stream=stream)
        return self._read[: len(ids)]

    def expected(self, ids: Any) -> Any:
        """Return rows as torch computes them."""
        import torch

        there = ids.cpu()
        elements = self.elements[there].view(torch.float8_e4m3fn).float()
        scales = self.scales[there].view(torch.float32).repeat_interleave(DIM // BLOCKS, 1)
        return (elements * scales).bfloat16().cuda()

    def prefill(self) -> dict[str, float]:
        """Return the median seconds of a prefill's rows, read into bfloat16."""
        import torch

        batch, repeat = self.options.batch, self.options.repeat
        drawn = [torch.randint(0, self.options.rows, (batch,)).cuda() for _ in range(2 * repeat)]
        out = torch.empty(batch, DIM, dtype=torch.bfloat16, device="cuda")
        for name, table in self.tables.items():
            table.read(drawn[0], cache=False, out=out)
            if not torch.equal(out, self.expected(drawn[0])):
                raise RuntimeError(f"other rows were read {name}")
        ways: dict[str, Any] = {"pinned": lambda i: self.pinned(drawn[i])}
        for name, table in self.tables.items():
            ways[f"tierstore, {name}"] = lambda i, table=table: table.read(
                drawn[i], cache=False, out=out
            )
        return {name: statistics.median(each) for name, each in in_turn(ways, repeat).items()}

    def decode(self) -> dict[str, float]:
        """Return the median seconds of a decoding step's rows in a CUDA graph."""
        import torch

        ids = torch.zeros(DECODED, dtype=torch.int64, device="cuda")
        out = torch.empty(DECODED, DIM, dtype=torch.bfloat16, device="cuda")
        graphs = {"pinned": replayed(lambda: self.pinned(ids))}
        for name, table in self.tables.items():
            graphs[f"tierstore, {name}"] = replayed(
                lambda table=table: table.read_into(ids, out)  # type: ignore[misc]
            )
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(6 * self.options.repeat):
            drawn = torch.randint(0, self.options.rows, (DECODED,), device="cuda")
            for name, run in graphs.items():
                times[name].append(replay_seconds(run, lambda drawn=drawn: ids.copy_(drawn)))
                if name != "pinned" and not torch.equal(out, self.expected(ids)):
                    raise RuntimeError(f"a replay read other rows, {name}")
        return {name: statistics.median(each) for name, each in times.items()}

    def close(self) -> None:
        """Give the memory back."""
        wait()
        for each in self.attached.values():
            each.close()


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, rows=40_000_000, batch=786_432)
    options = parser.parse_args()
    needed_device()
    rate = link()["to"]
    with workspace(options) as directory:
        bench = Bench(options, directory / "rows.safetensors")
        prefill, decode = bench.prefill(), bench.decode()
        bench.close()
    least = options.batch * BYTES / rate
    best = min((name for name in prefill if name != "pinned"), key=prefill.__getitem__)
    of_link, of_pinned = least / prefill[best], prefill["pinned"] / prefill[best]
    answer = Answer(
        "gpu_row_memory",
        QUESTION,
        f"{options.batch:,} rows of {BYTES} B over the link, {options.batch * BYTES >> 20} MiB",
        f"{OF_LINK} of the link, {OF_PINNED} times as fast as pinned memory; {DECODED} rows in a "
        f"CUDA graph within {GRAPH * 1e6:.0f} us",
    )
    answer.rows = [
        {"rows": count, "read": name, "ms": 1e3 * taken, "GB/s": count * BYTES / taken / 1e9}
        for count, found in ((options.batch, prefill), (DECODED, decode))
        for name, taken in found.items()
    ]
    answer.ratios = {"of the link": of_link, "times as fast as pinned": of_pinned}
    answer.met = of_link >= OF_LINK and of_pinned >= OF_PINNED and decode[best] <= GRAPH
    answer.notes = [
        f"link: {rate / 1e9:.1f} GB/s to the GPU",
        f"{options.rows:,} random rows in host memory, a thousandth of them on the GPU",
        "pinned memory is read as bytes, tierstore's rows as bfloat16, scaled and to the bit",
    ]
    answer.give(options)


if __name__ == "__main__":
    main()
