"""How long does a training step on a large table take: all rows there, a cache, narrow state?"""

from __future__ import annotations

import copy
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from common import Answer, arguments
from gpu import DIM, filled, issue_seconds, link, needed_device, power_law, seconds
from narrow_steps import NarrowTable
from peers import Fbgemm, have

QUESTION = "A step of Adam, gradient and update included, on a table of which a tenth is on the GPU"
WAYS: dict[str, dict[str, Any]] = {
    "in the slots": {},
    "foreach": {"in_place": False, "foreach": True},
    "fused by torch": {"in_place": False, "fused": True},
}
FEW = 1024
"""Ids of a batch whose step is mostly work of the host."""
STATES = {"Adam": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",)}
WARMING = 40
IN_A_ROW = 12
MODEL_SECONDS = 0.02
"""Longer than the link takes for the rows of a batch, both ways."""
NARROW = {
    "state in bfloat16": 0.5,
    "state in float8": 0.5,
    "rows and state in bfloat16": 0.42,
}
"""Maximum relative to FBGEMM's cache, whose rows and state are float32."""
ALONE = "torch, Adam foreach on those rows alone"
AROUND = 1.25
"""Maximum relative to a step in the slots: lookup, gradient, copies of rows and state."""
PARTS = ("missing", "narrow", "ahead", "hits", "others")
UNTIMED, TIMED = 4, 8
"""Steps of a turn next to a model: during the first, prefetches get as far ahead as possible."""

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
        # copies have their own parameter, which drops its gradient after one optimizer
        self.layers = {way: copy.deepcopy(first) for way in ways}
        self._optimizers = {
            way: TieredOptimizer(self._kind, [layer], lr=1e-3, **WAYS[way])
            for way, layer in self.layers.items()
        }

    def moved(self) -> int:
        """Return the bytes that crossed the link so far, both ways."""
        stats = self.scratch.table.stats()["gpu"]
        return int(stats.bytes_promoted + stats.bytes_written_back)

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


def torch_on_copies(values: Any, count: int) -> Step:
    """Return a step of torch's Adam, with foreach, on plain tensors of so many rows."""
    import torch

    rows = torch.nn.Parameter(values[:count].clone())
    rows.grad = torch.randn_like(rows)
    optimizer = torch.optim.Adam([rows], lr=1e-3, foreach=True)
    return lambda _: optimizer.step()


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

        self.repeat, self.parts = options.repeat, set(options.parts)
        self.device = needed_device()
        self.link = link()
        rows, ids = options.rows, options.batch
        self.values = torch.randn(rows, DIM, device="cuda")
        count = WARMING + IN_A_ROW * (options.repeat + 1)
        self.batches = power_law(rows, ids, 1.05, count)
        self.gradient = torch.randn(ids, DIM, device="cuda")
        self.distinct = int(torch.unique(self.batches[0]).numel())
        self.seconds: dict[str, float] = {}
        self.moved: dict[str, float] = {}
        self.record_bytes: dict[str, int] = {}

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
        """Measure the requested parts, a few tables at a time."""
        warming, fresh = self.batches[:WARMING], self.batches[WARMING:]
        same = [warming[-1]] * len(fresh)
        cached: dict[str, Step] = {}
        if have("fbgemm_gpu") and self.parts & {"missing", "narrow", "hits"}:
            step = Fbgemm(len(self.values), DIM, 0.1, "ADAM").step(self.gradient)
            cached = {"FBGEMM cached, Adam": step}
            self.warm(step, warming)
        if self.parts & {"missing", "ahead", "hits"}:
            adam = Tiered(len(self.values), "Adam", self.values, self.device)
            self.warm(adam.step("in the slots", self.gradient), warming)
            if "missing" in self.parts:
                self.miss(adam, cached, fresh)
            if "ahead" in self.parts:
                self.look_ahead(adam, fresh)
            if "hits" in self.parts:
                self.hit(adam, cached, same)
            adam.scratch.close()
            del adam
        if "narrow" in self.parts:
            self.narrow(cached, warming, fresh)
        del cached
        if "others" in self.parts:
            self.others(same)

    def warm(self, step: Step, batches: list[Any]) -> None:
        """Train, untimed."""
        for ids in batches:
            step(ids)

    def miss(self, adam: Tiered, cached: dict[str, Step], fresh: list[Any]) -> None:
        """Measure batches with missing rows, and the bytes they move."""
        before = adam.moved()
        steps = {"tierstore, Adam": adam.step("in the slots", self.gradient), **cached}
        self.time({f"{name}, missing rows": step for name, step in steps.items()}, fresh)
        self.moved["tierstore, Adam, missing rows"] = (adam.moved() - before) / len(fresh)

    def hit(self, adam: Tiered, cached: dict[str, Step], same: list[Any]) -> None:
        """Measure batches without missing rows, and the host's part of a small one."""
        steps = {f"tierstore, Adam {way}": adam.step(way, self.gradient) for way in adam.layers}
        steps |= cached
        for step in steps.values():
            self.warm(step, same[:3])
        self.time(steps, same)
        self.time({ALONE: torch_on_copies(self.values, self.distinct)}, same)
        few, gradient = same[0][:FEW].contiguous(), self.gradient[:FEW]
        self.issued = {
            way: issue_seconds(functools.partial(adam.step(way, gradient), few))
            for way in adam.layers
        }

    def narrow(self, cached: dict[str, Step], warming: list[Any], fresh: list[Any]) -> None:
        """Measure missing rows of tables that are narrow, one table at a time."""
        peer = {f"{name}, missing rows": step for name, step in cached.items()}
        if not peer.keys() <= self.seconds.keys():
            self.time(peer, fresh)
        for way in NARROW:
            table = NarrowTable(way, len(self.values), self.device)
            step = table.step(self.gradient)
            self.warm(step, warming)
            before, name = table.moved(), f"tierstore, Adam, missing rows, {way}"
            self.time({name: step}, fresh)
            self.moved[name] = (table.moved() - before) / len(fresh)
            self.record_bytes[name] = table.record_bytes
            table.close()

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
        """Measure next to a model that computes for longer than the link takes, in turn."""
        import tierstore

        model, self.model_seconds = dense_work()
        tiered = adam.step("in the slots", self.gradient, model)
        layer = adam.layers["in the slots"]
        length = UNTIMED + TIMED
        rounds = len(fresh) // length
        more = [*fresh, *fresh]  # so that there always is a batch to look ahead at
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

    def limits(self) -> dict[str, tuple[float, float]]:
        """Return each measured ratio with a target, and its maximum."""
        found = self.seconds
        hit, ahead = "tierstore, Adam in the slots", "tierstore beside a model, looked ahead"
        peer = "FBGEMM cached, Adam, missing rows"
        promised = {
            "Adagrad, foreach / in the slots": (
                "tierstore, Adagrad foreach",
                "tierstore, Adagrad in the slots",
                1.6,
            ),
            "all hits / torch SparseAdam in HBM": (hit, "torch in HBM, SparseAdam", 0.1),
            "looked ahead / all rows there": (
                ahead,
                "tierstore beside a model, all rows there",
                1.1,
            ),
            "all hits / FBGEMM in HBM": (hit, "FBGEMM in HBM, ADAM", 0.95),
            "all hits / FBGEMM cached": (hit, "FBGEMM cached, Adam", 0.2),
            "missing / FBGEMM cached": ("tierstore, Adam, missing rows", peer, 0.8),
            "looked ahead / FBGEMM in HBM": (ahead, "FBGEMM in HBM beside a model", 1.1),
            **{
                f"missing, {way} / FBGEMM cached": (
                    f"tierstore, Adam, missing rows, {way}",
                    peer,
                    most,
                )
                for way, most in NARROW.items()
            },
        }
        limits = {
            name: (found[ours] / found[theirs], most)
            for name, (ours, theirs, most) in promised.items()
            if ours in found and theirs in found
        }
        if ALONE in found:
            around = found["tierstore, Adam foreach"] - found[ALONE]
            limits["Adam, foreach without torch's own part / in the slots"] = (
                around / found[hit],
                AROUND,
            )
        return limits

    def judge(self, answer: Answer) -> None:
        """Record the figures, and whether they reach the target."""
        found, limits = self.seconds, self.limits()
        answer.rows = [
            {"step": name, "ms": 1e3 * taken}
            | ({"MB a step": self.moved[name] / 1e6} if name in self.moved else {})
            | ({"bytes a row": self.record_bytes[name]} if name in self.record_bytes else {})
            for name, taken in found.items()
        ]
        answer.ratios = {name: ratio for name, (ratio, _) in limits.items()}
        hit, missing = "tierstore, Adam in the slots", "tierstore, Adam, missing rows"
        if hit in found:
            answer.ratios["Adam, foreach / in the slots"] = (
                found["tierstore, Adam foreach"] / found[hit]
            )
        if hit in found and missing in found:
            rate = statistics.mean(self.link.values())
            answer.ratios["missing / (all hits + link)"] = found[missing] / (
                found[hit] + self.moved[missing] / rate
            )
        answer.met = all(ratio <= most for ratio, most in limits.values())
        if not have("fbgemm_gpu") and answer.met:
            answer.met = None  # the peer of most of them was missing
            answer.notes.append("fbgemm_gpu is not installed: nothing was measured beside it")
        answer.target = "; ".join(f"{name} at most {most}" for name, (_, most) in limits.items())
        answer.notes += [
            f"{self.distinct:,} distinct rows in a batch",
            "MB over the link a step, both ways",
            "link: " + ", ".join(f"{rate / 1e9:.1f} GB/s {way}" for way, rate in self.link.items()),
            f"{IN_A_ROW} steps in a row are timed, one wait behind them",
        ]
        if "ahead" in self.parts:
            answer.notes.append(f"the model computes for {1e3 * self.model_seconds:.1f} ms")
        if "hits" in self.parts:
            answer.notes += [
                f"the host issues a step of {FEW} ids in "
                + ", ".join(f"{1e6 * each:.0f} us ({way})" for way, each in self.issued.items()),
                f"{ALONE}: torch's own part; what is left is lookup, gradient and copies",
            ]


def main() -> None:
    parser = arguments(QUESTION, rows=16_000_000, batch=1_048_576)
    parser.set_defaults(repeat=9)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
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
