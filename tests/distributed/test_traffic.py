"""What ranks send each other in a step: distinct rows, once each way, and little beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import run, values, watch
from tests.distributed.test_ranks import share
from tierstore import distributed
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

ROWS = {"user": 500, "item": 3000, "word": 40, "wide": 700}
DIMS = {"user": 16, "item": 16, "word": 32, "wide": 64}
FEATURES = {"user": "user", "item": "item", "bought": "item", "word": "word", "wide": "wide"}
MODES = dict(zip(FEATURES, ["sum", "mean", "max", "sum", "sum"], strict=True))
KEYED = 64
"""A key, the number of its row and the answer take 24 bytes more for each row."""
WORDS = 8 * 6
"""Bytes of the message that says how many rows are asked for, by which layer and features."""


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    tables = {name: tierstore.TableSpec(ROWS[name], DIMS[name], init=init) for name in ROWS}
    return tables | {"key": tierstore.TableSpec(dim=KEYED, keys="int64", init=init)}


def batch(step: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the ids of a rank, many of them repeated; the last of three ranks has none."""
    generator = torch.Generator().manual_seed(step)
    mine = share(rank, ranks)
    return {
        name: (torch.rand(48, 30, generator=generator) ** 2 * ROWS[table]).long()[mine]
        for name, table in FEATURES.items()
    }


class Sent:
    """Counts the bytes that this rank sends to others."""

    def __init__(self) -> None:
        self.bytes = 0
        watch(self._counted)

    def _counted(self, _: str, nbytes: int) -> None:
        self.bytes += nbytes


def of_rows(store: Any, wanted: dict[str, np.ndarray]) -> int:
    """Return the bytes of rows and gradients that go from this rank to others, once each."""
    every: list[Any] = [None] * store.ranks
    dist.all_gather_object(every, wanted)
    total = 0
    for rank, each in enumerate(every):
        for name, ids in each.items():
            table = store[name]
            if name == "key":
                mine = [bool(here) for here in table.is_here(ids)]
                total += 4 * KEYED * (mine.count(False) if rank == store.rank else sum(mine))
                continue
            of = table.place.partition_of(ids) * store.ranks // table.place.partitions
            count = (of != rank).sum() if rank == store.rank else (of == store.rank).sum()
            total += 4 * DIMS[name] * int(count)
    return total


def steps_of(store: Any, kind: str, rank: int, ranks: int) -> Any:
    """Yield what a step looks up, by table, and a function that takes the step."""
    emb: Any
    if kind == "one":
        emb = TieredEmbedding(store["item"], padding_idx=3)
    elif kind == "keys":
        emb = TieredEmbedding(store["key"])
    elif kind == "rows":
        emb = TieredEmbeddingCollection(store, FEATURES, padding_idx={"item": 3, "word": 0})
    else:
        emb = TieredEmbeddingBagCollection(store, FEATURES, MODES, padding_idx={"item": 3})
    optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.05)
    for step in range(4):
        ids = batch(step, rank, ranks)
        given: Any = ids
        wanted = {name: np.empty(0, np.int64) for name in ROWS}
        if kind in ("one", "keys"):
            given = ids["item"]
            wanted = {"key" if kind == "keys" else "item": ids["item"].unique().numpy()}
        else:
            for name, table in FEATURES.items():
                own = ids[name].unique().numpy()
                if kind == "bags" and name == "item":
                    own = own[own != 3]
                wanted[table] = np.union1d(wanted[table], own)
        weights: Any = None
        if kind == "bags":
            weights = torch.rand(ids["word"].shape).requires_grad_(step % 2 == 0)
            given = ids | {
                "word": (ids["word"].reshape(-1), offsets(ids["word"]), weights.view(-1))
            }

        def take(step: int = step, given: Any = given) -> None:
            if step > 1:
                emb.prefetch(given)
            found = emb(given)
            if isinstance(found, torch.Tensor):
                found = {"": found}
            kept = [v for name, v in found.items() if (name, step % 2) != ("bought", 1)]
            sum(v.square().sum() for v in kept).backward()
            optimizer.step()

        yield wanted, take


def offsets(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(ids)) * ids.shape[1]


def counted(rank: int, path: Path) -> dict[str, list[tuple[int, int]]]:
    """Return for each kind and step the bytes this rank sent, and those of the rows alone."""
    ranks = dist.get_world_size()
    found: dict[str, list[tuple[int, int]]] = {}
    with distributed.open(path) as store:
        sent = Sent()
        for kind in ("one", "rows", "bags", "keys"):
            found[kind] = []
            store.rollback()
            for wanted, take in steps_of(store, kind, rank, ranks):
                least = of_rows(store, wanted)
                sent.bytes = 0
                take()
                found[kind].append((sent.bytes, least))
    return found


def test_ranks_send_distinct_rows_and_little_beside_them(tmp_path: Path) -> None:
    """Of rows of 64 bytes and more, by key of 256; ids that repeat, padding, weights, no samples.

    Some batches are announced, and a feature gets no gradient in some.
    """
    distributed.create(tmp_path / "store", specs(), partitions=8).close()
    for of_rank in values(run(3, counted, tmp_path / "store")):
        for kind, steps in of_rank.items():
            for step, (sent, least) in enumerate(steps):
                assert least <= sent <= 1.1 * least + 2 * 3 * WORDS, (kind, step, sent, least)
