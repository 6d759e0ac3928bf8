"""What does a training step over 26 tables cost on the CPU, as a collection and table by table?"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import criteo
import torch
from common import Answer, arguments, in_turn, medians, workspace

import tierstore
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import RowWiseAdagrad, TieredOptimizer

QUESTION = "A training step over 26 tables of Criteo's cardinalities, forward, backward and update"
DIM = 64
LR = 0.02
BATCHES = 8
MOST = 0.4
"""Maximum of the collection's time relative to the loop."""

Step = Callable[[Any], None]


def stepping(
    look_up: Callable[[Any], list[Any]], optimizer: torch.optim.Optimizer, joined: bool = False
) -> Step:
    """Return a training step on ids `(tables, samples)`.

    Gradients are tensors of their own, or if `joined` columns of one, as a concatenation has them.
    """
    gradients: list[Any] = []

    def run(ids: Any) -> None:
        optimizer.zero_grad()
        rows = look_up(ids)
        if not gradients:
            if len(rows) > 1:
                parts = (torch.rand(len(rows[0]), len(rows) * DIM) - 0.5).split(DIM, 1)
            else:
                parts = [torch.rand_like(rows[0]) - 0.5]
            gradients.extend(parts if joined else [each.clone() for each in parts])
        torch.autograd.backward(rows, gradients)
        optimizer.step()

    return run


def collection(store: Any, joined: bool = False, as_one: bool = False) -> Step:
    """One layer over all tables; `as_one` takes the rows of all features as one tensor."""
    emb = TieredEmbeddingCollection(store, {name: name for name in store})

    def look_up(ids: Any) -> list[Any]:
        features = dict(zip(store, ids, strict=True))
        return [emb.cat(features)] if as_one else list(emb(features).values())

    return stepping(look_up, TieredOptimizer(RowWiseAdagrad, [emb], lr=LR), joined)


def loop(store: Any, joined: bool = False) -> Step:
    """One layer a table."""
    layers = [TieredEmbedding(store[name]) for name in store]

    def look_up(ids: Any) -> list[Any]:
        return [emb(each) for emb, each in zip(layers, ids, strict=True)]

    return stepping(look_up, TieredOptimizer(RowWiseAdagrad, layers, lr=LR), joined)


def end_to_end(store: Any, rows: list[int]) -> Step:
    """One layer over one table that holds the rows of all: no id is checked against its own."""
    emb = TieredEmbedding(store["all"])
    starts = torch.tensor([0, *rows[:-1]]).cumsum(0)[:, None]

    def look_up(ids: Any) -> list[Any]:
        return [emb(ids + starts)]

    return stepping(look_up, TieredOptimizer(RowWiseAdagrad, [emb], lr=LR))


def in_torch(rows: list[int]) -> Step:
    """`torch.nn.Embedding` with sparse gradients, and torch's Adagrad."""
    layers = [torch.nn.Embedding(each, DIM, sparse=True) for each in rows]

    def look_up(ids: Any) -> list[Any]:
        return [emb(each) for emb, each in zip(layers, ids, strict=True)]

    weights = [layer.weight for layer in layers]
    return stepping(look_up, torch.optim.Adagrad(weights, lr=LR))


def main() -> None:
    parser = arguments(QUESTION, rows=1_000_000, batch=2048, threads=2)
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    sizes = criteo.sizes(options.rows)
    rows = list(sizes.values())
    batches = criteo.draw(sizes, options.batch, BATCHES, "cpu")
    distinct = sum(len(torch.unique(ids)) for ids in batches[0])
    with workspace(options) as folder, ExitStack() as stack:

        def made(name: str, tables: dict[str, int]) -> Any:
            init = tierstore.uniform(-0.1, 0.1, seed=1)
            fields = {"weight": tierstore.Field(DIM, init=init), "sum": tierstore.Field(1)}
            specs = {each: tierstore.TableSpec(n, fields=fields) for each, n in tables.items()}
            budget = tierstore.Budget(host_rows=sum(rows))
            store = stack.enter_context(tierstore.create(folder / name, specs, budget=budget))
            stack.callback(store.rollback)
            return store

        steps = {
            "tierstore, one collection": collection(made("collection", sizes)),
            "tierstore, one layer a table": loop(made("loop", sizes)),
            "tierstore, one collection, joined": collection(made("joined", sizes), joined=True),
            "tierstore, one layer a table, joined": loop(made("apart", sizes), joined=True),
            "tierstore, one collection, rows as one": collection(made("cat", sizes), as_one=True),
            "tierstore, one table end to end": end_to_end(made("all", {"all": sum(rows)}), rows),
            "torch, sparse gradients": in_torch(rows),
        }
        seconds = medians(
            in_turn(
                {name: functools.partial(train, step, batches) for name, step in steps.items()},
                options.repeat,
            )
        )
    took = {name: each / BATCHES for name, each in seconds.items()}
    ours = took["tierstore, one collection"]
    answer = Answer(
        "many_tables",
        QUESTION,
        f"{26 * options.batch:,} rows of {4 * DIM} B out, as much gradient in, {distinct:,} "
        f"distinct records of {4 * DIM + 4} B read and written",
        f"the collection in at most {MOST} of the time of one layer a table",
    )
    answer.rows = [{"way": name, "ms a step": 1e3 * each} for name, each in took.items()]
    answer.ratios = {
        f"one collection / {name}": ours / each for name, each in took.items() if each is not ours
    }
    joined = "tierstore, one collection, joined", "tierstore, one layer a table, joined"
    answer.ratios["one collection / one layer a table, both joined"] = (
        took[joined[0]] / took[joined[1]]
    )
    answer.met = answer.ratios["one collection / tierstore, one layer a table"] <= MOST
    answer.notes = [
        f"{sum(rows):,} rows, all in the host tier",
        "row-wise Adagrad; that of torch keeps a sum for each element",
        "gradients are tensors of their own; joined, columns of one, as what is concatenated has",
        f"{options.threads} threads, {BATCHES} batches in turn",
    ]
    answer.give(options)


def train(step: Step, batches: list[Any]) -> None:
    """Take a step on each batch."""
    for ids in batches:
        step(ids)


if __name__ == "__main__":
    main()
