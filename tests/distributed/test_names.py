"""External keys that get rows when ranks ask for them, against a plain store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import Killed, in_turn, run, values
from tests.distributed.test_commit import kill_at
from tierstore import distributed
from tierstore.errors import InvalidInputError, InvalidTypeError, RanksError
from tierstore.nn import TieredEmbedding

OWN = {"text": ["b", "", "🙂", "a"], "int64": [5, -7, 2**62, 0]}
ASKED = {
    "text": ["new", "b", "é", "new", "🙂", "z", "é", "", "c", "b", "z", "new"],
    "int64": [9, 5, -1, 9, 2**62, 8, -1, -7, 1, 5, 8, 9],
}
IDS = [4, 0, 5, 4, 2, 6, 5, 1, 7, 0, 6, 4]
SPECS = {"item": tierstore.TableSpec(4, 3, init=tierstore.normal(std=0.5, seed=3))}


def names(kind: str, asked: list[Any]) -> Any:
    return np.array(asked, object if kind == "text" else np.int64)


def dealt(kind: str, rank: int, ranks: int) -> Any:
    """Return the keys of a rank, a part of all in their order, `(n, 1)`."""
    edges = [len(IDS) * each // ranks for each in range(ranks + 1)]
    return names(kind, ASKED[kind])[edges[rank] : edges[rank + 1], None]


def add(rank: int, path: Path, kind: str) -> list[list[int]]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    with distributed.open(path) as store:
        store.set_keys("item", OWN[kind])
        item, version = store["item"], store.version
        emb = TieredEmbedding(item)
        own = names(kind, OWN[kind])
        assert item.get_or_add(own[rank % 4 :]).tolist() == list(range(rank % 4, 4))
        assert store.version == version  # no rank had a new one
        found = item.get_or_add(dealt(kind, rank, ranks))
        assert store.version == version + 1 and item.rows == emb.num_embeddings == 8
        assert item.get_or_add(names(kind, ASKED[kind])).tolist() == IDS
        last = names(kind, ["last"] if kind == "text" else [77])
        assert item.get_or_add(last if rank == ranks - 1 else own[:0]).tolist() == (
            [8] if rank == ranks - 1 else []
        )
        assert item.lookup(last).tolist() == [8] and store.version == version + 2
        item.write(item.lookup(last), np.full((1, 3), 7, np.float32))
        store.rollback()
        assert item.get_or_add(last).tolist() == [8]
        return found.tolist()


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize("kind", ["text", "int64"])
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_new_names_get_the_ids_that_one_process_would_give(
    tmp_path: Path, ranks: int, kind: str
) -> None:
    with tierstore.create(tmp_path / "plain", SPECS) as plain:
        plain.set_keys("item", OWN[kind])
        assert plain["item"].get_or_add(names(kind, ASKED[kind])).tolist() == IDS
        plain["item"].get_or_add(names(kind, ["last"] if kind == "text" else [77]))
        keys, rows = plain["item"].keys[:].tolist(), plain["item"].read(np.arange(9))
    path = tmp_path / "parts"
    distributed.create(path, SPECS, partitions=5).close()
    found = [add(0, path, kind)] if ranks == 1 else values(run(ranks, add, path, kind))
    assert [each for own in found for each in own] == [[each] for each in IDS]
    with tierstore.open(path) as store:
        assert store["item"].keys[:].tolist() == keys
        assert np.array_equal(store["item"].read(np.arange(9)), rows)
    assert tierstore.verify(path).ok


def refused(rank: int, path: Path) -> list[str]:
    told = []

    def tell(error: type[Exception], keys: Any) -> None:
        with pytest.raises(error) as caught:
            store["item"].get_or_add(keys)
        told.append(str(caught.value))

    with distributed.open(path) as store:
        tell(InvalidInputError, ["x"])
        store.set_keys("item", OWN["text"])
        tell(InvalidTypeError, [1.5] if rank else ["x"])
        store["item"].write([1] if rank else [], np.ones((rank, 3), np.float32))
        assert store["item"].get_or_add(["a", "b"]).tolist() == [3, 0]
        tell(InvalidInputError, [] if rank else ["x"])  # as growing commits separately
        assert store["item"].read([1]).tolist() == [[1.0] * 3] and store["item"].rows == 4
        store.rollback()
        with pytest.raises((InvalidInputError, RanksError)):
            store["item"].get_or_add(["x"]) if rank else store["item"].read([0])
        assert store["item"].get_or_add(["x"]).tolist() == [4]
    return told


@pytest.mark.slow
def test_what_no_rank_can_add_is_refused_on_all(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    distributed.create(path, SPECS, partitions=4).close()
    for told in values(run(2, refused, path)):
        assert "has no keys" in told[0]
        assert "float" in told[1]
        assert "not committed" in told[2]
    with tierstore.open(path) as store:
        assert store["item"].keys[:].tolist() == [*OWN["text"], "x"]


def killed_as_it_adds(rank: int, path: Path, victim: int, moment: tuple[str, str]) -> None:
    with distributed.open(path) as store:
        if rank == victim:
            kill_at(moment)
        store["item"].get_or_add(dealt("text", rank, 3))


def add_again(rank: int, path: Path) -> list[int]:
    with distributed.open(path) as store:
        found: list[int] = store["item"].get_or_add(names("text", ASKED["text"])).tolist()
        return found


MOMENTS = [
    ("look up keys of table 'item'", "before"),
    ("look up keys of table 'item'", "told"),
    ("write the keys", "done"),
    ("write its tables", "before"),
    ("change its partitions", "before"),
    ("change its partitions", "told"),
    ("publish the version", "done"),
    ("confirm the version", "before"),
    ("place its tables", "done"),
]


@pytest.mark.slow
def test_a_rank_is_killed_at_each_moment_of_adding(tmp_path: Path) -> None:
    before = tmp_path / "before"
    with distributed.create(before, SPECS, partitions=4) as store:
        store.set_keys("item", OWN["text"])
        first = store["item"].read(np.arange(4))
    seen = set()
    for victim, moment in in_turn(MOMENTS):
        path = tmp_path / " ".join(moment).replace(" ", "-")
        shutil.copytree(before, path)
        found = run(3, killed_as_it_adds, path, victim, moment)
        assert isinstance(found[victim], Killed), (moment, found)
        with tierstore.open(path) as store:
            keys = store["item"].keys[:].tolist()
            assert keys in (OWN["text"], [*OWN["text"], "new", "é", "z", "c"]), moment
            assert store["item"].rows == len(keys)
            assert np.array_equal(store["item"].read(np.arange(4)), first), moment
        seen.add(len(keys))
        assert tierstore.verify(path).ok
        assert values(run(2, add_again, path)) == [IDS, IDS], moment
    assert seen == {4, 8}
