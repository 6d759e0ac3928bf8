"""A rank is killed in a step: all start again from the last commit, on the curve of a whole run."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierstore
from tests.distributed.ranks import CONTROL, Killed, in_turn, run, values, watch
from tests.distributed.test_ranks import assert_same, batch, contents, specs
from tierstore import distributed
from tierstore.errors import RanksError
from tierstore.nn import TieredEmbedding, TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

pytestmark = pytest.mark.slow

STEPS = 6
Batch = dict[str, torch.Tensor]
KINDS = {
    "one": [*in_turn((1, 2, 3, 4)), *in_turn((12, 11, 10, 9))],
    "announced": [*in_turn(range(1, 6)), *in_turn((12, 11, 10, 13))],
    "collection": in_turn((11, 10, 9, 12)),
}
"""For each way to look rows up, which rank is killed at which of its exchanges of rows.

Four a step, before the first commit and behind it: ids, rows, gradients and the squares of these.
With batches that are announced the ids of a batch come before those of another are looked up.
"""


def kill_at(call: int) -> None:
    """Kill this process at an exchange of rows."""
    calls = 0

    def counted(kind: str, _: int) -> None:
        nonlocal calls
        calls += kind != CONTROL
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(counted)


def curve(rank: int, path: Path, kind: str, victim: int, at: int) -> dict[int, float]:
    """Return the losses of the steps from the last commit to the sixth; kill a rank at a call."""
    with distributed.open(path) as store:
        emb: Any
        if kind == "collection":
            emb = TieredEmbeddingCollection(store, ["item", "user"])
        else:
            emb = TieredEmbedding(store["item"])
        optimizer = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
        if rank == victim:
            kill_at(at)
        losses = {}
        steps = range(store.step or 0, STEPS)
        batches: Any = [drawn(step * dist.get_world_size() + rank) for step in steps]
        if kind == "announced":
            batches = tierstore.lookahead(batches, {emb: lambda each: each["item"]}, depth=1)
        for step, each in zip(steps, batches, strict=True):
            loss = loss_of(emb, each)
            loss.backward()
            optimizer.step()
            losses[step] = float(loss)
            if step % 2:
                store.commit(step + 1)
        return losses


def loss_of(emb: Any, each: Batch) -> torch.Tensor:
    if isinstance(emb, TieredEmbedding):
        return (emb(each["item"]) - each["weights"]).square().mean()
    found = emb({name: each[name] for name in ("item", "user")})
    return sum((rows - each["weights"]).square().mean() for rows in found.values())


def drawn(number: int) -> Batch:
    ids, weights, users = batch(number)
    return {"item": ids, "user": users[:, None].expand(-1, 3), "weights": weights}


def goes_on(path: Path, kind: str, expected: list[dict[int, float]]) -> None:
    """Check that ranks reach the end from what is left, on the curve."""
    with tierstore.open(path) as store:
        step = store.step or 0
    found = values(run(2, curve, path, kind, 0, 0))
    for losses, whole in zip(found, expected, strict=True):
        assert losses == {at: whole[at] for at in range(step, STEPS)}


def whole_run(path: Path, kind: str) -> list[dict[int, float]]:
    """Return the losses of ranks that are not killed, by rank."""
    found = values(run(2, curve, path, kind, 0, 0))
    assert all(losses[0] > losses[4] for losses in found)
    return found


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_killed_in_a_step(tmp_path: Path, kind: str) -> None:
    """At each exchange of a step, before the first commit and after it."""
    distributed.create(tmp_path / "new", specs(), partitions=4).close()
    shutil.copytree(tmp_path / "new", tmp_path / "whole")
    expected, reached = whole_run(tmp_path / "whole", kind), set()
    for victim, at in KINDS[kind]:
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "new", path)
        found = run(2, curve, path, kind, victim, at)
        assert isinstance(found[victim], Killed), at
        assert isinstance(found[1 - victim], RanksError), at
        with tierstore.open(path) as store:
            reached.add(store.step or 0)
            assert kind == "announced" or (store.step or 0) == (2 if at > 8 else 0)
        goes_on(path, kind, expected)
        assert_same(contents(path), contents(tmp_path / "whole"), exact=True)
        shutil.rmtree(path)
    assert reached == ({2} if kind == "collection" else {0, 2})


def killed_at_random(place: Path, kind: str, seed: int, kills: int) -> None:
    """Kill ranks again and again, wherever they are, and compare the curve each time."""
    random = np.random.default_rng(seed)
    distributed.create(place / "new", specs(), partitions=4).close()
    shutil.copytree(place / "new", place / "whole")
    expected, killed = whole_run(place / "whole", kind), 0
    while killed < kills:
        path = place / "parts"
        shutil.copytree(place / "new", path)
        for _ in range(2):  # the second time from where the first led
            victim, at = int(random.integers(2)), int(random.integers(1, 19))
            found = run(2, curve, path, kind, victim, at)
            killed += isinstance(found[victim], Killed)
            for losses, whole in zip(found, expected, strict=True):
                if isinstance(losses, dict):
                    assert losses == {at: whole[at] for at in losses}
        goes_on(path, kind, expected)
        assert_same(contents(path), contents(place / "whole"), exact=True)
        shutil.rmtree(path)


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_killed_at_random(tmp_path: Path, kind: str) -> None:
    killed_at_random(tmp_path, kind, 7, 200)
