"""What does training cost when the table is far larger than memory, and is it as good?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Answer, arguments, workspace

QUESTION = "Training a table 10 times the GPU's budget and 3 times the host's, on a disk"
DIM = 64
PLANTED = 8
LOOKS = 8
"""How often the held-out loss is measured in a run."""
LR = 0.02

Loss = Callable[[Any, Any, Any], Any]


class Task:
    """Pairs of a user and an item, by a power law, and likes, by planted vectors."""

    def __init__(self, rows: int, batch: int, steps: int) -> None:
        import torch

        self.rows = rows // 2
        generator = torch.Generator().manual_seed(1)
        users, items = (torch.randn(self.rows, PLANTED, generator=generator) for _ in range(2))
        shares = torch.arange(1, self.rows + 1, dtype=torch.float64).pow_(-0.9).cumsum_(0)
        orders = [torch.randperm(self.rows, generator=generator) for _ in range(2)]

        def draw(count: int) -> tuple[Any, Any, Any]:
            where = torch.rand(2, count, dtype=torch.float64, generator=generator) * shares[-1]
            ranks = torch.searchsorted(shares, where).clamp_(max=self.rows - 1)
            user, item = orders[0][ranks[0]], orders[1][ranks[1]]
            liking = (users[user] * items[item]).sum(1)
            chance = torch.rand(count, generator=generator)
            return user, item, (torch.sigmoid(2 * liking) > chance).float()

        self.batches = [draw(batch) for _ in range(steps)]
        self.held_out = draw(min(batch, 16_384))


class InTorch:
    """Embedding tables of PyTorch with sparse gradients and SparseAdam, in memory."""

    def __init__(self, task: Task, device: str) -> None:
        import torch

        self.layers = [
            torch.nn.Embedding(task.rows, DIM, sparse=True, device=device) for _ in range(2)
        ]
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=0.1)
        parameters = [layer.weight for layer in self.layers]
        self.optimizer = torch.optim.SparseAdam(parameters, lr=LR)
        self.ids = lambda ids: ids.to(device)


class InTiers:
    """The same in a store whose budgets are shares of its tables."""

    def __init__(self, store: Any) -> None:
        import torch

        from tierstore.nn import TieredEmbedding
        from tierstore.optim import TieredOptimizer

        self.layers = [TieredEmbedding(store[name]) for name in ("user", "item")]
        self.optimizer = TieredOptimizer(torch.optim.Adam, self.layers, lr=LR)
        self.ids = lambda ids: ids


@contextmanager
def stored(path: Path, task: Task, device: str, host: float, gpu: float) -> Iterator[Any]:
    """Make a store with room for a share of its rows in each tier."""
    import tierstore

    init = tierstore.normal(std=0.1, seed=3)
    fields = {
        "weight": tierstore.Field(DIM, init=init),
        **{name: tierstore.Field(DIM) for name in ("exp_avg", "exp_avg_sq")},
    }
    specs = {name: tierstore.TableSpec(task.rows, fields=fields) for name in ("user", "item")}
    rows = {"host_rows": max(1, int(host * task.rows)), "gpu_rows": max(1, int(gpu * task.rows))}
    budget = tierstore.Budget(**rows)
    with tierstore.create(path, specs, budget=budget, device=device) as store:
        yield store
        store.rollback()


def train(task: Task, model: Any, depth: int | None, device: str) -> tuple[float, list[Any]]:
    """Train; return the seconds it took, and the held-out loss after some of them."""
    import torch

    import tierstore

    criterion = torch.nn.functional.binary_cross_entropy_with_logits

    def loss(user: Any, item: Any, liked: Any) -> Any:
        left, right = (
            layer(model.ids(ids)) for layer, ids in zip(model.layers, (user, item), strict=True)
        )
        return criterion((left * right).sum(1), liked.to(left.device))

    loader: Any = task.batches
    if depth is not None:
        ids = dict(zip(model.layers, (0, 1), strict=True))
        loader = tierstore.lookahead(task.batches, ids, depth=depth)
    taken, curve = 0.0, []
    every = max(1, len(task.batches) // LOOKS)
    begin = time.perf_counter()
    for number, batch in enumerate(loader, start=1):
        model.optimizer.zero_grad()
        loss(*batch).backward()
        model.optimizer.step()
        if number % every == 0:
            wait(device)
            taken += time.perf_counter() - begin
            with torch.no_grad():
                curve.append((taken, float(loss(*task.held_out))))
            begin = time.perf_counter()
    wait(device)
    return taken + time.perf_counter() - begin, curve


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def main() -> None:
    import torch

    parser = arguments(QUESTION, rows=4_000_000, batch=65_536, steps=160)
    options = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    task = Task(options.rows, options.batch, options.steps)
    warming = Task(options.rows, options.batch, 3)
    ways = {
        "torch, in memory": None,
        "tierstore, in memory": (1, 1, None),
        "tierstore, 1/3 host and 1/10 GPU": (1 / 3, 0.1, None),
        "tierstore, the same, looked ahead": (1 / 3, 0.1, 4),
    }
    answer = Answer(
        "train_end_to_end",
        QUESTION,
        f"{2 * options.batch:,} rows a step of {4 * DIM} B out and their gradient in; weight and "
        "two moments of the distinct ones read and written; those missing from the disk and back",
        "the held-out loss at the end within 0.1 % of training in memory",
    )
    losses: dict[str, float] = {}
    with workspace(options) as folder:
        for name, shares in ways.items():
            torch.manual_seed(0)
            if shares is None:
                model: Any = InTorch(task, device)
                train(warming, model, None, device)
                model = InTorch(task, device)
                found = train(task, model, None, device)
                del model
            else:
                host, gpu, depth = shares
                path = folder / f"{len(losses)}.tier"
                with stored(path, task, device, host, gpu) as store:
                    train(warming, InTiers(store), depth, device)
                    store.rollback()
                    found = train(task, InTiers(store), depth, device)
            taken, curve = found
            losses[name] = curve[-1][1]
            answer.rows.append(
                {
                    "way": name,
                    "rows/s": 2 * options.batch * options.steps / taken,
                    "seconds": taken,
                    "held-out loss": curve[-1][1],
                }
            )
            answer.notes.append(
                f"{name}: " + ", ".join(f"{loss:.4f} at {at:.1f} s" for at, loss in curve)
            )
    of_memory = losses["tierstore, in memory"]
    speed = {row["way"]: row["rows/s"] for row in answer.rows}
    for name, value in losses.items():
        if name.startswith("tierstore"):
            answer.ratios[f"loss, {name} / in memory"] = value / of_memory
            answer.ratios[f"rows/s, {name} / in memory"] = (
                speed[name] / speed["tierstore, in memory"]
            )
    answer.met = all(
        abs(ratio - 1) <= 1e-3 for name, ratio in answer.ratios.items() if name.startswith("loss")
    )
    answer.notes.append(f"on {device}")
    answer.give(options)


if __name__ == "__main__":
    main()
