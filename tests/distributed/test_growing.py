"""Tables that grow while several ranks share them, against a plain store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import Killed, in_turn, run, values
from tests.distributed.test_commit import kill_at
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
    added = np.random.default_rng(5).standard_normal((23, 4)).astype(np.float32)
    assert store.append("user", added) == range(20, 43)
    assert np.array_equal(store["user"].read(np.arange(20, 43)), added)
    state = next(name for name in store["user"].fields if name != "weight")
    store.append("user", {"weight": added[:2], state: added[2:4]})


def grow_in_parts(rank: int, path: Path) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path, average=False) as store:
        grow(store, rank, ranks)


@pytest.mark.variants(0, 1)
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
        for shape in ((2, 4 + rank), (2 + rank, 4)):
            with pytest.raises(InvalidInputError) as caught:
                store.append("item", np.ones(shape, np.float32))
            told.append(str(caught.value))
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
        assert "(2, 4)" in told[3]
        assert "every rank gives the same" in told[4]
    with tierstore.open(path) as store:
        assert store["item"].rows == 60


def killed_as_it_grows(rank: int, path: Path, victim: int, moment: tuple[str, str]) -> None:
    with distributed.open(path) as store:
        if rank == victim:
            kill_at(moment)
        store.grow("item", 100)


def grow_again(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        store.grow("item", 120)


MOMENTS = [
    (f"{what} its {of}", when)
    for what, of in (
        ("check that it can change", "tables"),
        ("write", "tables"),
        ("change", "partitions"),
    )
    for when in ("before", "done", "told")
] + [
    ("confirm the version", "before"),
    ("confirm the version", "done"),
    ("place its tables", "done"),
]


@pytest.mark.slow
def test_a_rank_is_killed_at_each_moment_of_growing(tmp_path: Path) -> None:
    before = tmp_path / "before"
    distributed.create(before, specs(), partitions=4).close()
    expected: dict[int, Any] = {}
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        for rows in (ROWS, 100, 120):
            plain.grow("item", rows)
            expected[rows] = plain["item"].read(np.arange(rows))
    seen = set()
    for victim, moment in in_turn(MOMENTS):
        path = tmp_path / " ".join(moment).replace(" ", "-")
        shutil.copytree(before, path)
        found = run(2, killed_as_it_grows, path, victim, moment)
        assert isinstance(found[victim], Killed), (moment, found)
        with tierstore.open(path) as store:
            rows = store["item"].rows
            assert np.array_equal(store["item"].read(np.arange(rows)), expected[rows]), moment
        seen.add(rows)
        assert tierstore.verify(path).ok
        values(run(2, grow_again, path))
        with tierstore.open(path) as store:
            assert np.array_equal(store["item"].read(np.arange(120)), expected[120]), moment
    assert seen == {ROWS, 100}
