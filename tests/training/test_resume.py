"""A loader read ahead: its position and its random numbers, and runs that go on from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import tierstore
from tierstore.errors import InvalidTypeError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

ROWS, DIM = 60, 4


class Positioned:
    """A loader that knows its position, as torchdata's StatefulDataLoader does."""

    def __init__(self, batches: int) -> None:
        self.batches, self.at = batches, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.batches:
            self.at += 1
            yield torch.tensor([self.at - 1])
        self.at = 0


def negatives(rows: list[int]) -> Tensor:
    """Collate rows with negatives from each of the global generators."""
    drawn = [int(torch.randint(ROWS, ())), np.random.randint(ROWS), random.randrange(ROWS)]
    return torch.tensor([*rows, *drawn])


def sampled() -> Any:
    return DataLoader(list(range(ROWS)), 6, shuffle=True, collate_fn=negatives)


LOADERS = {"knows its position": lambda: Positioned(10), "samples at random": sampled}


class Run:
    """Rows trained with dropout on batches that are read ahead."""

    def __init__(self, path: Path, loader: Any, depth: int) -> None:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        if path.exists():
            self.store = tierstore.open(path, "r+")
        else:
            spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=1, seed=1))
            self.store = tierstore.create(path, {"t": spec})
        self.emb = TieredEmbedding(self.store["t"])
        self.opt = TieredOptimizer(torch.optim.Adam, [self.emb], lr=0.1)
        self.ahead = tierstore.lookahead(loader, {self.emb: lambda ids: ids}, depth=depth)
        self.checkpoint = tierstore.Checkpoint(self.store, opt=self.opt, batches=self.ahead)
        self.step = self.checkpoint.resume()
        self.seen: list[list[int]] = []

    def train(self, *, until: int, commits: tuple[int, ...] = ()) -> None:
        """Train to a step, over as many epochs as that takes; commit after some steps."""
        while self.step < until:
            for ids in self.ahead:
                rows = torch.nn.functional.dropout(self.emb(ids), 0.4)
                rows.square().sum().backward()
                self.opt.step()
                self.seen.append(ids.tolist())
                self.step += 1
                if self.step in commits:
                    self.checkpoint.commit(self.step)
                if self.step == until:
                    break

    def rows(self) -> np.ndarray:
        return self.store["t"].read(np.arange(ROWS))

    def end(self) -> None:
        self.store.rollback()
        self.store.close()


@pytest.mark.parametrize("depth", [0, 1, 30])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.slow
def test_a_run_goes_on_with_the_batch_behind_the_last_one_trained(
    tmp_path: Path, make: Any, depth: int
) -> None:
    whole = Run(tmp_path / "whole", make(), depth)
    whole.train(until=33)
    for number, at in enumerate((4, 10, 29)):
        cut = Run(tmp_path / f"cut{number}", make(), depth)
        cut.train(until=31, commits=(at,))
        cut.end()
        again = Run(tmp_path / f"cut{number}", make(), depth)
        assert again.step == at
        again.train(until=33)
        assert again.seen == whole.seen[at:]
        assert np.array_equal(again.rows(), whole.rows())
        again.end()
    whole.end()


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_results_are_the_same_for_any_depth(tmp_path: Path, make: Any) -> None:
    found = []
    for depth in (0, 1, 4, 30):
        run = Run(tmp_path / str(depth), make(), depth)
        run.train(until=25)
        found.append((run.seen, run.rows().tobytes(), torch.rand(1).item(), random.random()))
        run.end()
    assert found[1:] == found[:1] * 3


def test_epochs_are_counted_and_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ahead = tierstore.lookahead(sampled(), {}, depth=2)
    epochs = [[batch.tolist() for batch in ahead] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert ahead.state_dict()["epoch"] == ahead.epoch == 2
    iterator = iter(ahead)
    next(iterator)
    assert (ahead.state_dict()["given"], ahead.epoch) == (1, 2)


def test_generators_are_parts_of_a_checkpoint(tmp_path: Path) -> None:
    class Shuffler:
        state = 5

        def get_state(self) -> Tensor:
            return torch.tensor([self.state])

        def set_state(self, state: Tensor) -> None:
            self.state = int(state)

    parts = {
        "torch": torch.Generator().manual_seed(3),
        "python": random.Random(4),
        "numpy": np.random.default_rng(5),
        "legacy": np.random.RandomState(6),
        "own": Shuffler(),
    }

    def draw() -> list[float]:
        drawn = [float(torch.rand((), generator=parts["torch"])), parts["python"].gauss(0, 1)]
        drawn += [parts["numpy"].normal(), parts["legacy"].normal(), parts["own"].state]
        return [*drawn, random.random(), np.random.random(), float(torch.rand(()))]

    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(3, 2)}) as store:
        run = tierstore.Checkpoint(store, **parts)
        draw()
        run.commit(7)
        expected = draw()
        parts["own"].state = 9
        assert draw() != expected
        assert run.resume() == 7
        assert draw() == expected
        with pytest.raises(InvalidTypeError, match="is not a random number generator"):
            tierstore.Checkpoint(store, other=object())
