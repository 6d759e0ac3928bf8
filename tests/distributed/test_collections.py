"""Collections whose tables several ranks share, against those of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import CONTROL, no_warnings, run, values, watch
from tests.distributed.test_ranks import assert_same, contents, share
from tierstore import distributed
from tierstore.errors import InvalidInputError, RanksError, RowIndexError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

ROWS = {"user": 40, "item": 300, "word": 2, "wide": 60}
FEATURES = {"user": "user", "item": "item", "bought": "item", "word": "word", "wide": "wide"}
BATCH = 48


def specs() -> dict[str, tierstore.TableSpec]:
    init = tierstore.normal(std=0.5, seed=3)
    return {
        name: tierstore.TableSpec(rows, 6 if name == "wide" else 4, init=init)
        for name, rows in ROWS.items()
    }


def batch(step: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return the ids of a rank; in one step no rank has words, and in one the last has nothing."""
    generator = torch.Generator().manual_seed(step)
    ids = {
        name: (torch.rand(BATCH, 2, generator=generator) ** 2 * ROWS[table]).long()
        for name, table in FEATURES.items()
    }
    mine = share(rank, ranks)
    found = {name: each[mine] for name, each in ids.items()}
    if step == 1:
        found["word"] = found["word"][:0]
    return found


def weights(like: torch.Tensor, step: int) -> torch.Tensor:
    """Return whole numbers that depend on the value alone, so that no order of a sum matters."""
    return (like.detach() * 8).round() + step


def loss_of(rows: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    """Return a loss without the feature "bought" in one step."""
    return torch.stack(
        [
            (each * weights(each, step)).sum()
            for name, each in rows.items()
            if (name, step) != ("bought", 2)
        ]
    ).sum()


def train(store: Any, rank: int, ranks: int, kind: str) -> None:
    emb: Any
    if kind == "rows":
        emb = TieredEmbeddingCollection(store, FEATURES, padding_idx={"item": 3, "word": 0})
    else:
        modes = dict(zip(FEATURES, ["sum", "mean", "max", "sum", "mean"], strict=True))
        emb = TieredEmbeddingBagCollection(store, FEATURES, modes)
    groups = [{"params": [emb]}, {"params": [emb.rows_of("word")], "lr": 0.01}]
    optimizer = TieredOptimizer(torch.optim.Adam, groups, lr=0.05)
    for step in range(4):
        ids = batch(step, rank, ranks)
        emb.prefetch(ids)
        if kind == "bags":
            ids["word"] = batch(0, rank, ranks)["word"] if step == 1 else ids["word"]
        loss_of(emb(ids), step).backward()
        optimizer.step()
    with torch.no_grad():
        again = emb(batch(0, rank, ranks))
    assert set(again) == set(FEATURES)


def train_and_commit(rank: int, path: Path, kind: str) -> list[int]:
    no_warnings()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    calls = [0]

    def counted(kind: str, _: int) -> None:
        calls[0] += kind != CONTROL

    watch(counted)
    with distributed.open(path, average=False, budget=tierstore.Budget(host_rows=90)) as store:
        train(store, rank, ranks, kind)
        store.commit(4)
    return calls


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", ["rows", "bags"])
def test_ranks_train_what_one_process_trains(tmp_path: Path, kind: str) -> None:
    with tierstore.create(tmp_path / "plain", specs()) as plain:
        train(plain, 0, 1, kind)
        plain.commit(4)
    expected = contents(tmp_path / "plain")
    for ranks in (1, 2, 3):
        path = tmp_path / f"parts{ranks}"
        distributed.create(path, specs(), partitions=8).close()
        calls = values(run(ranks, train_and_commit, path, kind))
        assert_same(contents(path), expected, exact=ranks == 1)
        # Two groups, by dim: ids, rows, gradients, squares of each step, and a last call to read.
        # One step of the bags has other ids than were announced, for one group: rows tell that.
        most = 2 * (4 * 4 + 2) + (2 if kind == "bags" else 0)
        assert all(each == [0 if ranks == 1 else most] for each in calls), calls


def refused(rank: int, path: Path, what: str) -> None:
    with distributed.open(path) as store:
        emb = TieredEmbeddingCollection(store, FEATURES)
        ids = batch(0, rank, dist.get_world_size())
        if what == "id" and rank == 1:
            ids["bought"][1, 0] = 300
        if what == "features" and rank == 1:
            ids = dict(reversed(ids.items()))
        if what == "layers":
            (TieredEmbedding(store["item" if rank else "user"]))(ids["word"])
        else:
            emb(ids)


def test_what_a_rank_may_not_ask_for_raises_on_all(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=4).close()
    one, other = run(2, refused, path, "id")
    assert isinstance(one, RanksError)
    assert isinstance(other, RowIndexError)
    assert "id 300 at position 2 of feature 'bought' is outside table 'item'" in str(other)
    for what, text in (("features", "something else"), ("layers", "something else")):
        for each in run(2, refused, path, what):
            assert isinstance(each, InvalidInputError), each
            assert text in str(each)


def same_rows(rank: int, path: Path, other: Path) -> None:
    with distributed.open(path) as store, tierstore.open(other) as plain:
        ids = batch(0, rank, dist.get_world_size())
        one, two = (TieredEmbeddingCollection(each, FEATURES) for each in (store, plain))
        mine, theirs = one(ids), two(ids)
        bags = [TieredEmbeddingBagCollection(each, FEATURES, "max") for each in (store, plain)]
        for name in FEATURES:
            assert torch.equal(mine[name], theirs[name])
            with torch.no_grad():
                assert torch.equal(bags[0](ids)[name], bags[1](ids)[name])
        row = {"item": torch.tensor([[7]])}
        with torch.no_grad():
            assert np.array_equal(one(row)["item"][0], plain["item"].read([7]))


def test_rows_are_those_of_the_plain_store(tmp_path: Path) -> None:
    distributed.create(tmp_path / "parts", specs(), partitions=5).close()
    tierstore.create(tmp_path / "plain", specs()).close()
    values(run(3, same_rows, tmp_path / "parts", tmp_path / "plain"))


def ids_of_rows(rank: int, path: Path) -> None:
    with distributed.open(path) as store:
        for emb in (TieredEmbedding(store["item"]), TieredEmbeddingCollection(store, FEATURES)):
            optimizer = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
            ids = batch(0, rank, dist.get_world_size())["item"]
            found = emb(ids if isinstance(emb, TieredEmbedding) else {"item": ids})
            rows = found if isinstance(found, torch.Tensor) else found["item"]
            rows.sum().backward()
            for rows in emb.parameters():
                if not len(rows):
                    continue  # of the tables of another dim
                names = [rows.tables[each].name for each in rows.table_of.tolist()]
                own = [int(each) for each, name in zip(rows.ids, names, strict=True)]
                mine = [each for each, name in zip(own, names, strict=True) if name == "item"]
                every: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(every, mine)
                assert sorted(itertools.chain(*every)) == batch(0, 0, 1)["item"].unique().tolist()
            optimizer.step()


def test_a_parameter_names_its_rows_by_id(tmp_path: Path) -> None:
    distributed.create(tmp_path / "parts", specs(), partitions=4).close()
    values(run(2, ids_of_rows, tmp_path / "parts"))
