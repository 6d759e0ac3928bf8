"""How long does a training step on a large table take, with all rows there and with a cache?"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from common import Answer, arguments
from gpu import DIM, filled, issue_seconds, link, needed_device, power_law, seconds
from peers import Fbgemm, have

QUESTION = "A step of Adam, gradient and update included, on a table of which a tenth is on the GPU"
WAYS: dict[str, dict[str, Any]] = {
    "in the slots": {},
    "foreach": {"in_place": False, "foreach": True},
    "fused by torch": {"in_place": False, "fused": True},
}
FEW = 1024
"""Ids of a batch whose step is the host's work and little else."""
STATES = {"Adam": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",)}
WARMING = 40
IN_A_ROW = 12
MODEL_SECONDS = 0.02
"""Longer than the link takes for the rows of a batch, both ways."""
UNTIMED, TIMED = 4, 8
"""Steps of a turn beside a model: the first let prefetches get as far ahead as they do."""

Step = Callable[[Any], object]


class Tiered:
    """The public layer and optimizer over a table in host memory, a tenth of it on the GPU."""

    def __init__(self, rows: int, optimizer: str, values: Any, device: Any) -> None:
        import torch

        from tierstore.nn import TieredEmbedding
        from tierstore.optim import TieredOptimizer

        fields = STATES[optimizer]
        slots = rows // 10 if optimizer == "Adam" else rows
        self.scratch = filled(rows, slots, device, values, states=fields)
        self._kind = getattr(torch.optim, optimizer)
        # torch has no fused Adagrad for CUDA
        ways = [way for way in WAYS if optimizer == "Adam" or "fused" not in way]
        first = TieredEmbedding(self.scratch.table)
        # copies have a parameter of their own, which gives its gradient up after one optimizer
        self.layers = {way: copy.deepcopy(first) for way in ways}
        self._optimizers = {
            way: TieredOptimizer(self._kind, [layer], lr=1e-3, **WAYS[way])
            for way, layer in self.layers.items()
        }

    def step(self, way: str, gradient: Any, model: Callable[[], object] | None = None) -> Step:
        layer, optimizer = self.layers[way], self._optimizers[way]

        def run(ids: Any) -> None:
            rows = layer(ids)
            if model is not None:
                model()
            rows.backward(gradient)
            optimizer.step()

        return run


def torch_in_memory(values: Any, gradient: Any) -> Step:
    """PyTorch's own way: a sparse gradient and SparseAdam over the whole table in HBM."""
    import torch

    layer = torch.nn.Embedding.from_pretrained(values.clone(), freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(list(layer.parameters()), lr=1e-3)

    def run(ids: Any) -> None:
        optimizer.zero_grad()
        layer(ids).backward(gradient)
        optimizer.step()

    return run


def dense_work() -> tuple[Callable[[], object], float]:
    """Return a model's dense part, longer than the link takes for the rows, and its seconds."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    once = statistics.median(seconds(lambda: left @ right) for _ in range(10))
    times = max(1, round(MODEL_SECONDS / once))

    def run() -> None:
        for _ in range(times):
            left @ right

    return run, statistics.median(seconds(run) for _ in range(5))


def timed(step: Step, batches: Any) -> float:
    """Train, and return the device's seconds for each of the last `TIMED` steps."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    for number, ids in enumerate(itertools.islice(batches, UNTIMED + TIMED)):
        if number == UNTIMED:
            begin.record()
        step(ids)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / TIMED


class Bench:
    """One size of batch in every shape."""

    def __init__(self, options: Any) -> None:
        import torch

        self.repeat = options.repeat
        self.device = needed_device()
        self.link = link()
        rows, ids = options.rows, options.batch
        self.values = torch.randn(rows, DIM, device="cuda")
        count = WARMING + IN_A_ROW * (options.repeat + 1)
        self.batches = power_law(rows, ids, 1.05, count)
        self.gradient = torch.randn(ids, DIM, device="cuda")
        self.distinct = int(torch.unique(self.batches[0]).numel())
        self.seconds: dict[str, float] = {}

    def time(self, steps: dict[str, Step], batches: list[Any]) -> None:
        """Time steps in turn, `IN_A_ROW` at a time as a loop runs them, and keep the medians."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(self.repeat + 1):
            some = batches[IN_A_ROW * number : IN_A_ROW * (number + 1)]

            def loop(step: Step, some: list[Any] = some) -> None:
                for ids in some:
                    step(ids)

            for name, step in steps.items():
                taken = seconds(lambda step=step: loop(step)) / IN_A_ROW  # type: ignore[misc]
                if number:
                    times[name].append(taken)
        self.seconds |= {name: statistics.median(each) for name, each in times.items()}

    def run(self) -> None:
        """Measure everything, a few tables at a time."""
        warming, fresh = self.batches[:WARMING], self.batches[WARMING:]
        same = [warming[-1]] * len(fresh)
        adam = Tiered(len(self.values), "Adam", self.values, self.device)
        self.adam = adam
        hits = {f"tierstore, Adam {way}": adam.step(way, self.gradient) for way in adam.layers}
        missing = {"tierstore, Adam, missing rows": hits["tierstore, Adam in the slots"]}
        if have("fbgemm_gpu"):
            cached = Fbgemm(len(self.values), DIM, 0.1, "ADAM").step(self.gradient)
            hits["FBGEMM cached, Adam"] = cached
            missing["FBGEMM cached, Adam, missing rows"] = cached
        for step in missing.values():
            for ids in warming:
                step(ids)
        before = self.moved()
        self.time(missing, fresh)
        self.bytes = (self.moved() - before) / len(fresh)
        self.look_ahead(adam, fresh)
        for step in hits.values():
            for ids in same[:3]:
                step(ids)
        self.time(hits, same)
        few, gradient = same[0][:FEW].contiguous(), self.gradient[:FEW]
        self.issued = {
            way: issue_seconds(functools.partial(adam.step(way, gradient), few))
            for way in adam.layers
        }
        del hits, missing
        self.others(same)

    def others(self, same: list[Any]) -> None:
        """Measure tables that are wholly in HBM, and another optimizer."""
        if have("fbgemm_gpu"):
            for kind in ("ADAM", "EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"):
                step = Fbgemm(len(self.values), DIM, None, kind).step(self.gradient)
                self.time({f"FBGEMM in HBM, {kind}": step}, same)
        self.time({"torch in HBM, SparseAdam": torch_in_memory(self.values, self.gradient)}, same)
        few = len(self.values) // 8
        adagrad = Tiered(few, "Adagrad", self.values[:few], self.device)
        ids = [batch % few for batch in same]
        steps = {
            f"tierstore, Adagrad {way}": adagrad.step(way, self.gradient) for way in adagrad.layers
        }
        self.time(steps, ids)

    def look_ahead(self, adam: Tiered, fresh: list[Any]) -> None:
        """Measure beside a model that computes for longer than the link takes, in turn."""
        import tierstore

        model, self.model_seconds = dense_work()
        tiered = adam.step("in the slots", self.gradient, model)
        layer = adam.layers["in the slots"]
        length = UNTIMED + TIMED
        rounds = len(fresh) // length
        more = [*fresh, *fresh]  # so that there is always something to look ahead at
        parts = [more[length * turn :][: length + 4] for turn in range(rounds)]
        ways: dict[str, tuple[Step, Callable[[list[Any]], Any]]] = {
            "tierstore beside a model, all rows there": (tiered, lambda part: part[:1] * length),
            "tierstore beside a model, looked ahead": (
                tiered,
                lambda part: tierstore.lookahead(part, {layer: lambda ids: ids}, depth=2),
            ),
            "tierstore beside a model, not looked ahead": (tiered, lambda part: part),
        }
        if have("fbgemm_gpu"):
            step = Fbgemm(len(self.values), DIM, None, "ADAM").step(self.gradient, model)
            ways["FBGEMM in HBM beside a model"] = step, lambda part: part
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds):
            for number, (name, (step, loader)) in enumerate(ways.items()):
                times[name].append(timed(step, loader(parts[(turn + number) % rounds])))
        self.seconds |= {name: statistics.median(each) for name, each in times.items()}

    def moved(self) -> int:
        """Return the bytes that crossed the link so far, both ways."""
        stats = self.adam.scratch.table.stats()["gpu"]
        return int(stats.bytes_promoted + stats.bytes_written_back)

    def judge(self, answer: Answer) -> None:
        """Write down what was found, and whether it is what was promised."""
        found = self.seconds
        answer.rows = [{"step": name, "ms": 1e3 * taken} for name, taken in found.items()]
        hit, missing = found["tierstore, Adam in the slots"], found["tierstore, Adam, missing rows"]
        ahead = found["tierstore beside a model, looked ahead"]
        limits = {
            "Adam, foreach / in the slots": (found["tierstore, Adam foreach"] / hit, 1.6),
            "Adagrad, foreach / in the slots": (
                found["tierstore, Adagrad foreach"] / found["tierstore, Adagrad in the slots"],
                1.6,
            ),
            "all hits / torch SparseAdam in HBM": (hit / found["torch in HBM, SparseAdam"], 0.1),
            "looked ahead / all rows there": (
                ahead / found["tierstore beside a model, all rows there"],
                1.1,
            ),
        }
        if have("fbgemm_gpu"):
            limits |= {
                "all hits / FBGEMM in HBM": (hit / found["FBGEMM in HBM, ADAM"], 0.95),
                "all hits / FBGEMM cached": (hit / found["FBGEMM cached, Adam"], 0.2),
                "missing / FBGEMM cached": (
                    missing / found["FBGEMM cached, Adam, missing rows"],
                    0.8,
                ),
                "looked ahead / FBGEMM in HBM": (
                    ahead / found["FBGEMM in HBM beside a model"],
                    1.1,
                ),
            }
        answer.ratios = {name: ratio for name, (ratio, _) in limits.items()}
        answer.ratios["missing / (all hits + link)"] = missing / (
            hit + self.bytes / statistics.mean(self.link.values())
        )
        answer.met = all(ratio <= most for ratio, most in limits.values())
        answer.target = "; ".join(f"{name} at most {most}" for name, (_, most) in limits.items())
        answer.notes = [
            f"{self.distinct:,} distinct rows in a batch",
            f"{self.bytes / 1e6:.0f} MB over the link a step where rows are missing, both ways",
            "link: " + ", ".join(f"{rate / 1e9:.1f} GB/s {way}" for way, rate in self.link.items()),
            f"the model computes for {1e3 * self.model_seconds:.1f} ms",
            f"the host issues a step of {FEW} ids in "
            + ", ".join(f"{1e6 * taken:.0f} us ({way})" for way, taken in self.issued.items()),
            f"{IN_A_ROW} steps in a row are timed, one wait behind them",
        ]


def main() -> None:
    parser = arguments(QUESTION, rows=16_000_000, batch=1_048_576)
    parser.set_defaults(repeat=9)
    options = parser.parse_args()
    bench = Bench(options)
    bench.run()
    answer = Answer(
        "gpu_train_step",
        QUESTION,
        f"{4 * DIM * options.batch >> 20} MiB of rows out and as much gradient in; weight and two "
        "moments of each distinct row read and written; where rows are missing, their records over "
        "the link both ways",
        "",
    )
    bench.judge(answer)
    answer.give(options)


if __name__ == "__main__":
    main()
