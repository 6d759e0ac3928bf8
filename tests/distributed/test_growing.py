"""Tables that grow while several ranks share them, against a plain store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import run, values
from tests.distributed.test_ranks import assert_same, contents
from tierstore import distributed
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

ROWS = 37
STEPS = [(41, None), (44, tierstore.constant(0.25)), (1000, tierstore.normal(std=0.1, seed=9))]


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    return {
        "item": tierstore.TableSpec(ROWS, 4, init=init),
        "user": tierstore.TableSpec(20, 4, init=init),
    }


def grow(store: Any, rank: int, ranks: int) -> None:
    one, other = TieredEmbedding(store["item"]), TieredEmbedding(store["user"])
    optimizer = TieredOptimizer(torch.optim.Adam, [one, other], lr=0.05)
    many = TieredEmbeddingCollection(store, {"user": "user", "item": "item"})
    for step, (rows, init) in enumerate(STEPS):
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * step + number)
            ids = torch.randint(0, one.num_embeddings, (48,), generator=generator)[rank::ranks]
            (one(ids) * torch.arange(-2, 2)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                found = many({"item": ids, "user": ids % 20})
                assert torch.equal(found["item"], one(ids))
        store.commit()
        store.grow("item", rows, init=init)
        assert store["item"].rows == one.num_embeddings == rows
        assert len(store["item"].read(np.arange(rows))) == rows


def grow_in_parts(rank: int, path: Path) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path, average=False) as store:
        grow(store, rank, ranks)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_are_those_of_a_plain_store_that_grew(tmp_path: Path, ranks: int) -> None:
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        grow(plain, 0, 1)
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=5).close()
    values([grow_in_parts(0, path)] if ranks == 1 else run(ranks, grow_in_parts, path))
    assert_same(contents(path), contents(tmp_path / "plain"), exact=ranks == 1)
    assert tierstore.verify(path).ok


def refused(rank: int, path: Path) -> list[str]:
    told = []
    with distributed.open(path) as store:
        for rows in (ROWS - 1, 50 + rank, 60):
            if rows == 60:
                store["item"].write([1] if rank else [], np.ones((rank, 4), np.float32))
            with pytest.raises(InvalidInputError) as caught:
                store.grow("item", rows)
            told.append(str(caught.value))
        store.rollback()
        store.grow("item", 60)
    return told


@pytest.mark.slow
def test_what_cannot_grow_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=4).close()
    for told in values(run(2, refused, path)):
        assert "cannot shrink" in told[0]
        assert "disagree on rows" in told[1]
        assert "not committed" in told[2]
    with tierstore.open(path) as store:
        assert store["item"].rows == 60
