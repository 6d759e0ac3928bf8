"""How long does a step of a GPT with an n-gram memory take, a tenth of which is on the GPU?"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
from common import Answer, arguments
from gpu import needed_device, seconds
from ngrams import CONTEXT, DIM, Model, rows_of, tokens_of_text

import tierstore
from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import MemoryTable

QUESTION = "A step of a GPT of 30 M parameters with a memory of n-grams, against all of it in HBM"
MUST = 1.05
WARMING, IN_A_ROW = 30, 12
_CHUNK = 1 << 20
STATES = ("exp_avg", "exp_avg_sq")
WHOLE, AHEAD, PLAIN = "all rows in HBM", "a tenth, looked ahead", "a tenth, not looked ahead"
SHARES = ((WHOLE, 1.0), (AHEAD, 0.1), (PLAIN, 0.1))
DEPTHS = {AHEAD: 2}


class Run:
    """A model and a memory of which so many rows are on the GPU."""

    def __init__(self, rows: int, gpu_rows: int, device: Any) -> None:
        from tierstore.nn import TieredEmbedding
        from tierstore.optim import TieredOptimizer

        fields = {name: Field(DIM) for name in ("weight", *STATES)}
        budget = Budget(host_rows=rows, gpu_rows=gpu_rows)
        self.scratch = MemoryTable(TableSpec(rows, fields=fields), budget=budget, device=device)
        torch.manual_seed(3)
        self.layer = TieredEmbedding(self.scratch.table)
        self.model = Model().cuda()
        groups = [{"params": self.layer, "lr": 1e-2}, {"params": list(self.model.parameters())}]
        self._optimizer = TieredOptimizer(torch.optim.Adam, groups, lr=1e-3)
        self.parameters = sum(each.numel() for each in self.model.parameters())

    def step(self, batch: tuple[Any, Any, Any]) -> None:
        """Train on tokens, those that follow, and the rows of their n-grams."""
        tokens, following, rows = batch
        with torch.autocast("cuda", torch.bfloat16):
            scores = self.model(tokens, self.layer(rows))
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def preload(self, rows: int) -> None:
        """Promote all rows, so that none is ever missed where the GPU has room for them."""
        for start in range(0, rows, _CHUNK):
            ids = torch.arange(start, min(start + _CHUNK, rows), device="cuda")
            self.scratch.table.prefetch(ids)

    def promoted(self) -> int:
        """Return the bytes of rows copied to the GPU so far."""
        return int(self.scratch.table.stats()["gpu"].bytes_promoted)

    def loop(self, batches: list[Any], depth: int | None) -> None:
        """Train on batches, the rows of the next `depth` announced."""
        given = batches
        if depth is not None:
            given = tierstore.lookahead(batches, {self.layer: lambda batch: batch[2]}, depth=depth)
        for batch in given:
            self.step(batch)


def rotated(names: list[str], turn: int) -> list[str]:
    """Return names in another order at each turn, so that none always follows the same one."""
    first = turn % len(names)
    return names[first:] + names[:first]


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, rows=30_000_000, batch=32)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    device = needed_device()
    count = WARMING + IN_A_ROW * (options.repeat + 1)
    length = options.batch * CONTEXT
    tokens = tokens_of_text(count * length + 1).cuda()
    if len(tokens) <= length * 4:
        raise SystemExit("this Python has too little source text")
    rows = rows_of(tokens, options.rows)
    steps = (len(tokens) - 1) // length
    shape = options.batch, CONTEXT

    def batch_of(number: int) -> tuple[Any, Any, Any]:
        start = number % steps * length
        part = slice(start, start + length)
        following = tokens[start + 1 : start + length + 1]
        return tokens[part].view(shape), following.view(shape), rows[part].view(*shape, -1)

    batches = [batch_of(number) for number in range(count)]
    distinct = int(torch.unique(batches[-1][2]).numel())
    runs = {name: Run(options.rows, int(share * options.rows), device) for name, share in SHARES}
    runs[WHOLE].preload(options.rows)
    for name, run in runs.items():
        run.loop(batches[:WARMING], DEPTHS.get(name))
    before = {name: run.promoted() for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.repeat + 1):
        some = batches[WARMING + IN_A_ROW * turn :][:IN_A_ROW]
        for name in rotated(list(runs), turn):
            loop = functools.partial(runs[name].loop, some, DEPTHS.get(name))
            taken = seconds(loop) / IN_A_ROW
            if turn:
                times[name].append(taken)
    steps_timed = IN_A_ROW * (options.repeat + 1)
    moved = {name: (run.promoted() - before[name]) / steps_timed for name, run in runs.items()}
    found = {name: statistics.median(each) for name, each in times.items()}
    ratio = found[AHEAD] / found[WHOLE]
    answer = Answer(
        "gpu_ngram_step",
        QUESTION,
        "the rows that are missed, with the moments of Adam, over the link, and as many back",
        f"at most {MUST} times the step with all rows in HBM, looked ahead",
        ratio <= MUST,
    )
    answer.rows = [
        {"step": name, "ms": 1e3 * each, "MB to the GPU": moved[name] / 1e6}
        for name, each in found.items()
    ]
    answer.ratios = {
        "looked ahead / all in HBM": ratio,
        "not looked ahead / all in HBM": found[PLAIN] / found[WHOLE],
    }
    answer.notes = [
        f"{runs[WHOLE].parameters:,} dense parameters, in bfloat16 by autocast",
        f"{len(tokens):,} words of text, {steps} batches",
        f"{batches[-1][2].numel():,} ids, {distinct:,} distinct rows in a batch, {12 * DIM} B each",
        f"each way has a model and a table of its own; their order turns every {IN_A_ROW} steps",
    ]
    answer.give(options)
    for run in runs.values():
        run.scratch.close()


if __name__ == "__main__":
    main()
