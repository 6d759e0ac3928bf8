"""How long does a step of a GPT with an n-gram memory take, a tenth of which is on the GPU?"""

from __future__ import annotations

import functools
import itertools
import statistics
import sysconfig
import zlib
from pathlib import Path
from typing import Any

from common import Answer, arguments
from gpu import needed_device, seconds

import tierstore
from tierstore import Budget, Field, TableSpec
from tierstore._memory_table import MemoryTable

QUESTION = "A step of a GPT of 30 M parameters with a memory of n-grams, against all of it in HBM"
DIM, ORDERS, HEADS = 64, (2, 3), 4
WIDTH, LAYERS, CONTEXT, WORDS = 512, 7, 512, 1 << 14
MUST = 1.05
WARMING, IN_A_ROW = 30, 12
STATES = ("exp_avg", "exp_avg_sq")


def tokens_of_text(most: int) -> Any:
    """Return the words of the standard library's source as numbers below WORDS."""
    import torch

    found: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        found += (zlib.crc32(word) % WORDS for word in path.read_bytes().split())
        if len(found) >= most:
            break
    return torch.tensor(found[:most])


def rows_of(tokens: Any, rows: int) -> Any:
    """Return the rows of the n-grams that end at each token `(n, orders * heads)`."""
    import torch

    found = []
    for order, head in itertools.product(ORDERS, range(HEADS)):
        mixed = torch.full_like(tokens, 1 + order * 8 + head)
        for back in range(order):
            mixed = (mixed ^ tokens.roll(back)) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
            mixed = mixed ^ (mixed >> 29 & 0x7FFFFFFFF)
        found.append((mixed & 0x7FFFFFFFFFFFFFFF) % rows)
    return torch.stack(found, 1)


def model() -> Any:
    """Return the dense part: a GPT over words, and what takes the memory's rows in."""
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word = torch.nn.Embedding(WORDS, WIDTH)
            layer = torch.nn.TransformerEncoderLayer(
                WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
            )
            self.blocks = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.recall = torch.nn.Linear(len(ORDERS) * HEADS * DIM, WIDTH, bias=False)

        def forward(self, tokens: Any, rows: Any) -> Any:
            x = self.word(tokens) + self.recall(rows.flatten(2))
            mask = torch.nn.Transformer.generate_square_subsequent_mask(
                tokens.shape[1], device=x.device
            )
            return self.blocks(x, mask=mask, is_causal=True) @ self.word.weight.T

    return Model().cuda()


class Run:
    """A model and a memory of which so many rows are on the GPU."""

    def __init__(self, rows: int, gpu_rows: int, device: Any) -> None:
        import torch

        from tierstore.nn import TieredEmbedding
        from tierstore.optim import TieredOptimizer

        fields = {name: Field(DIM) for name in ("weight", *STATES)}
        budget = Budget(host_rows=rows, gpu_rows=gpu_rows)
        self.scratch = MemoryTable(TableSpec(rows, fields=fields), budget=budget, device=device)
        torch.manual_seed(3)
        self.layer = TieredEmbedding(self.scratch.table)
        self.model = model()
        groups = [{"params": self.layer, "lr": 1e-2}, {"params": list(self.model.parameters())}]
        self._optimizer = TieredOptimizer(torch.optim.Adam, groups, lr=1e-3)
        self.parameters = sum(each.numel() for each in self.model.parameters())

    def step(self, batch: tuple[Any, Any, Any]) -> None:
        """Train on tokens, those that follow, and the rows of their n-grams."""
        import torch

        tokens, following, rows = batch
        with torch.autocast("cuda", torch.bfloat16):
            scores = self.model(tokens, self.layer(rows))
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def loop(self, batches: list[Any], depth: int | None) -> None:
        """Train on batches, the rows of the next `depth` announced."""
        given = batches
        if depth is not None:
            given = tierstore.lookahead(batches, {self.layer: lambda batch: batch[2]}, depth=depth)
        for batch in given:
            self.step(batch)


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, rows=30_000_000, batch=32)
    parser.set_defaults(repeat=5)
    options = parser.parse_args()
    import torch

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
    runs = {
        "all rows in HBM": (Run(options.rows, options.rows, device), None),
        "a tenth, looked ahead": (Run(options.rows, options.rows // 10, device), 2),
    }
    runs["a tenth, not looked ahead"] = runs["a tenth, looked ahead"][0], None
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, (run, depth) in runs.items():
        if name != "a tenth, not looked ahead":
            run.loop(batches[:WARMING], depth)
    stats = runs["a tenth, looked ahead"][0].scratch.table.stats
    before = stats()["gpu"].bytes_promoted
    for turn in range(options.repeat + 1):
        some = batches[WARMING + IN_A_ROW * turn :][:IN_A_ROW]
        for name, (run, depth) in runs.items():
            taken = seconds(functools.partial(run.loop, some, depth)) / IN_A_ROW
            if turn:
                times[name].append(taken)
    moved = (stats()["gpu"].bytes_promoted - before) / (IN_A_ROW * (options.repeat + 1))
    found = {name: statistics.median(each) for name, each in times.items()}
    ratio = found["a tenth, looked ahead"] / found["all rows in HBM"]
    answer = Answer(
        "gpu_ngram_step",
        QUESTION,
        "the rows that are missed, with the moments of Adam, over the link, and as many back",
        f"at most {MUST} times the step with all rows in HBM, looked ahead",
        ratio <= MUST,
    )
    answer.rows = [{"step": name, "ms": 1e3 * each} for name, each in found.items()]
    answer.ratios = {"looked ahead / all in HBM": ratio}
    answer.notes = [
        f"{runs['all rows in HBM'][0].parameters:,} dense parameters, in bfloat16 by autocast",
        f"{len(tokens):,} words of text",
        f"{batches[-1][2].numel():,} ids, {distinct:,} distinct rows in a batch, {12 * DIM} B each",
        f"{moved / 1e6:.1f} MB a step to the GPU; the first of the ways that share a table misses",
    ]
    answer.give(options)
    for run, _ in list(runs.values())[:2]:
        run.scratch.close()


if __name__ == "__main__":
    main()
