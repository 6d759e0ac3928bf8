"""Batches that are announced: what the ranks ask each other for is exchanged ahead of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import CONTROL, run, values, watch
from tests.distributed.test_collections import FEATURES, batch, loss_of, specs
from tests.distributed.test_ranks import assert_same, contents
from tierstore import distributed
from tierstore.distributed.known import Known
from tierstore.distributed.ranks import Ranks
from tierstore.errors import InvalidInputError, RanksError, RowIndexError
from tierstore.nn import (
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
)
from tierstore.nn.joint import Coming
from tierstore.optim import TieredOptimizer


class Watched:
    """Counts what this rank sends of rows, and what hosts agree on besides."""

    def __init__(self) -> None:
        self.calls, self.votes = 0, 0
        watch(self._counted)
        self._vote = Ranks.common
        Ranks.common = lambda *given: self._voted(*given)  # type: ignore[method-assign]

    def _counted(self, kind: str, _: int) -> None:
        self.calls += kind != CONTROL

    def _voted(self, *given: Any) -> int:
        self.votes += 1
        return self._vote(*given)


def layer_of(store: Any, kind: str) -> Any:
    if kind == "one":
        return TieredEmbedding(store["item"])
    if kind == "bag":
        return TieredEmbeddingBag(store["item"], mode="sum", padding_idx=3)
    if kind == "padded":
        some = {name: FEATURES[name] for name in ("user", "item", "bought")}
        return TieredEmbeddingBagCollection(store, some, padding_idx=0)
    kinds = {"rows": TieredEmbeddingCollection, "bags": TieredEmbeddingBagCollection}
    return kinds[kind](store, {name: FEATURES[name] for name in ("user", "item", "bought")})


def train(rank: int, path: Path, kind: str, depth: int | None) -> list[list[int]]:
    """Return what each lookup sent, each step, and all of them had hosts agree on."""
    ranks = dist.get_world_size()
    calls: list[list[int]] = [[], [], []]
    with distributed.open(path, average=False, budget=tierstore.Budget(host_rows=90)) as store:
        emb, watched = layer_of(store, kind), Watched()
        optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.05)
        batches: Any = [batch(step, rank, ranks) for step in range(5)]
        for each in batches:
            del each["word"], each["wide"]
        is_one = kind in ("one", "bag")
        choose = (lambda each: each["item"]) if is_one else (lambda each: each)
        if depth is not None:
            batches = tierstore.lookahead(batches, {emb: choose}, depth=depth)
        began = watched.calls
        for step, each in enumerate(batches):
            before = watched.calls
            found = emb(choose(each))
            calls[0].append(watched.calls - before)
            loss_of({"item": found} if is_one else found, step).backward()
            optimizer.step()
            calls[1].append(watched.calls - began)
            began = watched.calls
        calls[2].append(watched.votes)
        store.commit(5)
    return calls


@pytest.mark.variants(0, 2)
@pytest.mark.parametrize("kind", ["one", "bag", "rows", "bags", "padded"])
def test_a_lookup_of_announced_ids_exchanges_rows_alone(tmp_path: Path, kind: str) -> None:
    for depth in (None, 0, 2):
        path = tmp_path / str(depth)
        distributed.create(path, specs(), partitions=4).close()
        for lookups, steps, votes in values(run(2, train, path, kind, depth)):
            # Ids and rows; those of announced batches were exchanged before. Gradients and
            # their squares besides, and no host waits for another to agree.
            assert lookups == [2 if depth is None else 1] * 5, (depth, lookups)
            assert sum(steps) == 5 * 4 and max(steps[1:]) == 4, (depth, steps)
            assert votes == [0]
    for depth in (0, 2):
        assert_same(contents(tmp_path / str(depth)), contents(tmp_path / "None"), exact=True)


def other_batches(rank: int, path: Path, plain: Path) -> None:
    ranks = dist.get_world_size()
    with distributed.open(path) as store, tierstore.open(plain) as reader:
        emb, same = (TieredEmbeddingCollection(each, FEATURES) for each in (store, reader))

        def check(ids: Any) -> None:
            for name, rows in emb(ids).items():
                assert torch.equal(rows, same(ids)[name]), name

        some = [batch(step, rank, ranks) for step in range(8)]
        for each in some[:3]:
            emb.prefetch(each)
        check(some[5])  # of no announced batch, between two
        check(some[1])  # and the first of them is left out
        check(some[0])
        if rank == 1:
            some[2]["item"].clamp_(max=3)  # on one rank alone, after it was announced
        check(some[2])
        for each in some[3:7]:
            emb.prefetch(each, window=2)
        for each in some[3:7]:
            check(each)
        emb.prefetch(some[7])
        store.grow("item", 350)
        check(some[7])
        nothing = {name: ids[:0] for name, ids in some[0].items()}
        for _ in range(2):
            emb.prefetch(some[0] if rank else nothing)
            check(some[0] if rank else nothing)


@pytest.mark.slow
def test_a_lookup_of_other_ids_than_were_announced_is_right(tmp_path: Path) -> None:
    distributed.create(tmp_path / "parts", specs(), partitions=4).close()
    with tierstore.create(tmp_path / "plain", specs()) as store:
        store.grow("item", 350)
    values(run(2, other_batches, tmp_path / "parts", tmp_path / "plain"))


def announce(rank: int, path: Path, what: str) -> Any:
    with distributed.open(path) as store:
        emb = TieredEmbedding(store["item"])
        if what == "one alone" and rank == 0:
            emb.prefetch(torch.arange(5))  # raises
        if what == "bad id":
            emb.prefetch(torch.arange(3))
            emb.prefetch(torch.tensor([1, 300 if rank else 2]))
        try:
            emb.prefetch(torch.arange(4)) if what == "bad id" else emb(torch.arange(5))
        except tierstore.errors.TierStoreError as error:
            if what == "bad id":  # and the ranks go on
                assert len(emb(torch.arange(5))) == 5
            return error
        return None


def one_grows(rank: int, path: Path) -> None:
    """Announce batches of tables by key, of which one rank alone has to make room meanwhile."""
    with distributed.open(path) as store:
        emb = TieredEmbeddingCollection(store, {"user": "user", "site": "site"})
        first = 1 << 16
        keys = np.arange(3 * first)
        here = keys[store["user"].is_here(keys)]
        mine = here[: first + 500] if rank else here[:500]
        rows = np.repeat(mine[:, None], 4, 1).astype(np.float32)
        store["user"].write(mine[:400], rows[:400])
        batches = [torch.from_numpy(mine[at : at + 100]) for at in (0, 100, 200, 300)]
        for each in batches[:3]:
            emb.prefetch({"user": each, "site": each})
        capacity = store["user"].shard.capacity
        store["user"].write(mine[400:], rows[400:])
        assert (store["user"].shard.capacity > capacity) == (rank == 1)
        emb.prefetch({"user": batches[3], "site": batches[3]})
        emb.eval()
        for each in batches:
            found = emb({"user": each, "site": each})["user"]
            assert torch.equal(found, each[:, None].expand(-1, 4).float())


@pytest.mark.slow
def test_one_rank_alone_may_have_to_make_room(tmp_path: Path) -> None:
    by_key = tierstore.TableSpec(dim=4, keys="int64")
    distributed.create(tmp_path / "parts", {"user": by_key, "site": by_key}, partitions=4).close()
    values(run(2, one_grows, tmp_path / "parts"))


@pytest.mark.slow
def test_what_is_wrong_with_an_announcement_raises_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, specs(), partitions=4).close()
    for each in run(2, announce, path, "one alone"):
        assert isinstance(each, InvalidInputError)
        assert "announces the same batches" in str(each)
    one, other = run(2, announce, path, "bad id")
    assert isinstance(one, RanksError)
    assert isinstance(other, RowIndexError)


def test_ids_on_a_device_are_known_by_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.distributed.known.on_host", lambda ids: False)
    monkeypatch.setattr("tierstore.nn.joint.on_host", lambda ids: False)
    whole = torch.randint(0, 99, (2, 8))
    known = Known(whole[0])
    assert known.is_as(whole[0])
    assert known.is_as(whole.detach()[0])
    assert known.is_as(whole[0].view(2, 4))  # of another shape
    for other in (whole[1], whole[0].clone(), whole[0, :7], whole[0].view(torch.float64)):
        assert not known.is_as(other)
    coming = Coming()
    joined = whole.flatten(), [8, 8]
    coming.keep([whole[0], whole[1]], joined, 2)
    assert coming.find([whole[1], whole[0]]) is None
    assert coming.find([whole[0], whole[1]]) is joined
    assert coming.find([whole[0], whole[1]]) is None
    coming.keep([whole[0], whole[1]], joined, 2)
    whole[1, 3] = 100  # written since: no longer what was announced
    assert not known.is_as(whole[0])
    assert coming.find([whole[0], whole[1]]) is None
    with torch.inference_mode():
        own = torch.arange(3)
    assert not Known(own).is_as(own)
    coming.keep([own], (own, [3]), 2)
    assert coming.find([own]) is None
    coming.keep([own], (own, [3]), 0)
    nested, others = (
        torch.nested.nested_tensor([own[:2].clone(), own[2:].clone()], layout=torch.jagged)
        for _ in range(2)
    )
    coming.keep([nested], (own, [3]), 2)
    assert coming.find([others]) is None  # of as many ids, elsewhere
    assert coming.find([nested]) == (own, [3])
    known = Known(nested)
    assert known.is_as(nested)
    nested.values()[1] = 5
    assert not known.is_as(nested)
