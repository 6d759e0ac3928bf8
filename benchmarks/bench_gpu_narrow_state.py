"""How long does a training step of Adam take where the state of rows, or all of them, is narrow?"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from common import Answer, arguments
from gpu import DIM, link, needed_device, power_law, seconds
from peers import Fbgemm, have

from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import MemoryTable

QUESTION = "A step of Adam with missing rows, a tenth of the table on the GPU, by types of rows"
WAYS: dict[str, tuple[str, str | None]] = {
    "float32, state float32": ("float32", None),
    "float32, state bfloat16": ("float32", "bfloat16"),
    "bfloat16, state bfloat16": ("bfloat16", "bfloat16"),
}
MUST = {"float32, state bfloat16": 0.5, "bfloat16, state bfloat16": 0.42}
WARMING, IN_A_ROW = 40, 12
BLOCK = 1 << 20


class Tiered:
    """The public layer and optimizer over a table in host memory, a tenth of it on the GPU."""

    def __init__(self, rows: int, way: str, device: Any) -> None:
        import torch

        from tierstore.nn import TieredEmbedding
        from tierstore.optim import TieredOptimizer

        dtype, state = WAYS[way]
        self._dtype = getattr(torch, dtype)
        kinds = {"weight": dtype, "exp_avg": state or dtype, "exp_avg_sq": state or dtype}
        fields = {name: Field(DIM, kind) for name, kind in kinds.items()}
        budget = Budget(host_rows=rows, gpu_rows=rows // 10)
        self.scratch = MemoryTable(TableSpec(rows, fields=fields), budget=budget, device=device)
        self.table = self.scratch.table
        for start in range(0, rows, BLOCK):
            ids = torch.arange(start, min(start + BLOCK, rows), device="cuda")
            drawn = torch.randn(len(ids), DIM, device="cuda", dtype=self._dtype)
            self.table.write(ids, drawn)
        self._layer = TieredEmbedding(self.table)
        self._optimizer = TieredOptimizer(
            torch.optim.Adam,
            [self._layer],
            lr=1e-3,
            state_dtype=state,
            stochastic_rounding=dtype == "bfloat16",
        )

    def step(self, gradient: Any) -> Callable[[Any], None]:
        """Return a step on ids whose rows get this gradient, in the type that a model would."""
        gradient = gradient.to(self._dtype)

        def run(ids: Any) -> None:
            self._layer(ids).backward(gradient)
            self._optimizer.step()

        return run

    def moved(self) -> int:
        """Return the bytes that crossed the link so far, both ways."""
        stats = self.table.stats()["gpu"]
        return int(stats.bytes_promoted + stats.bytes_written_back)


def median_step(step: Callable[[Any], object], batches: list[Any], repeat: int) -> float:
    """Warm up, and return the median seconds of a step, of several in a row on fresh batches."""
    for ids in batches[:WARMING]:
        step(ids)
    times = []
    for turn in range(repeat):
        some = batches[WARMING + IN_A_ROW * turn :][:IN_A_ROW]

        def loop(some: list[Any] = some) -> None:
            for ids in some:
                step(ids)

        times.append(seconds(loop) / IN_A_ROW)
    return statistics.median(times)


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, rows=16_000_000, batch=1_048_576)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    import torch

    device, rates = needed_device(), link()
    batches = power_law(options.rows, options.batch, 1.05, WARMING + IN_A_ROW * options.repeat)
    gradient = torch.randn(options.batch, DIM, device="cuda")
    rows: list[dict[str, Any]] = []
    found: dict[str, float] = {}
    for way in WAYS:
        tiered = Tiered(options.rows, way, device)
        before = tiered.moved()
        found[way] = median_step(tiered.step(gradient), batches, options.repeat)
        moved = (tiered.moved() - before) / len(batches)
        record = tiered.table.spec.layout.record_bytes
        tiered.scratch.close()
        del tiered
        torch.cuda.empty_cache()
        line = {
            "step": way,
            "bytes a row": record,
            "ms": 1e3 * found[way],
            "MB a step": moved / 1e6,
        }
        rows.append(line)
    answer = Answer(
        "gpu_narrow_state",
        QUESTION,
        "records of missing rows over the link and of those that give way back, as measured",
        "; ".join(f"{way}: at most {most} of FBGEMM's LRU" for way, most in MUST.items()),
    )
    answer.rows = rows
    if have("fbgemm_gpu"):
        peer = Fbgemm(options.rows, DIM, 0.1, "ADAM").step(gradient)
        taken = median_step(peer, batches, options.repeat)
        rows.append({"step": "FBGEMM cached, float32", "ms": 1e3 * taken})
        answer.ratios = {f"{way} / FBGEMM": found[way] / taken for way in WAYS}
        answer.met = all(found[way] <= most * taken for way, most in MUST.items())
    answer.notes = [
        "link: " + ", ".join(f"{rate / 1e9:.1f} GB/s {way}" for way, rate in rates.items()),
        f"{IN_A_ROW} steps in a row are timed, one wait behind them, each way by itself",
    ]
    answer.give(options)


if __name__ == "__main__":
    main()
