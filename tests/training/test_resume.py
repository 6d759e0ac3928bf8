"""A loader read ahead: its position and its random numbers, and runs that go on from them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

import tierstore
from tierstore.errors import InvalidInputError, InvalidTypeError
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


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize("depth", [0, 1, 30])
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
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


@pytest.mark.variants(0, 1)
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


class Noisy(Dataset[int]):
    """Items that a generator of their own picks."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, item: int) -> int:
        return (item + int(self.rng.integers(3))) % ROWS


class Shuffled(Sampler[int]):
    """Shuffles by a generator of Python's or NumPy's."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        order = list(range(ROWS))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return ROWS


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


ITEMS = range(ROWS)
WITH_GENERATORS = {
    "of the loader": lambda: DataLoader(ITEMS, 6, shuffle=True, generator=generator()),
    "of the loader, in order": lambda: DataLoader(ITEMS, 6, generator=generator()),
    "of the sampler": lambda: DataLoader(
        ITEMS, 6, sampler=RandomSampler(ITEMS, generator=generator())
    ),
    "with replacement": lambda: DataLoader(
        ITEMS, 6, sampler=RandomSampler(ITEMS, True, 100, generator=generator())
    ),
    "of the batch sampler": lambda: DataLoader(
        ITEMS,
        batch_sampler=BatchSampler(RandomSampler(ITEMS, generator=generator()), 7, drop_last=True),
    ),
    "of Python": lambda: DataLoader(ITEMS, 6, sampler=Shuffled(random.Random(5))),
    "of NumPy": lambda: DataLoader(ITEMS, 6, sampler=Shuffled(np.random.default_rng(5))),
    "old, of NumPy": lambda: DataLoader(ITEMS, 6, sampler=Shuffled(np.random.RandomState(5))),
    "of the data": lambda: DataLoader(Noisy(), 6, shuffle=True, generator=generator()),
    "with workers": lambda: DataLoader(
        ITEMS, 6, shuffle=True, generator=generator(), num_workers=1, collate_fn=negatives
    ),
}


@pytest.mark.variants(0, 2)
@pytest.mark.parametrize("make", WITH_GENERATORS.values(), ids=WITH_GENERATORS)
@pytest.mark.parametrize(
    "part",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["alone", "the generator a part too"],
)
def test_every_stop_of_three_epochs_draws_the_batches_that_come_next(
    make: Any, part: bool, tmp_path: Path
) -> None:
    """Also where what the loader draws from is a part of the checkpoint itself."""
    loader = make()
    stops = range(1, 3 * len(loader) + 1, 5 if loader.num_workers else 1)

    def began(loader: Any) -> tuple[Any, tierstore.Checkpoint]:
        torch.manual_seed(1)
        ahead = tierstore.lookahead(loader, {}, depth=3)
        own = getattr(loader, "generator", None)
        more = {"own": own} if part and own is not None else {}
        return ahead, tierstore.Checkpoint(store, ahead=ahead, **more)

    with tierstore.create(None, {"t": tierstore.TableSpec(2, 2)}, keep=100) as store:
        ahead, checkpoint = began(loader)
        batches, versions = [], {}
        for _ in range(3):
            for batch in ahead:
                batches.append(batch.tolist())
                if len(batches) in stops:
                    versions[len(batches)] = checkpoint.commit(len(batches))
        for stop, version in versions.items():
            store.restore(version)
            again, checkpoint = began(make())
            assert checkpoint.resume() == stop
            seen = []
            while len(seen) < len(batches) - stop:
                seen += [batch.tolist() for batch in again]
            assert seen == batches[stop:], stop


@pytest.mark.parametrize("draws", [False, True])
def test_workers_that_stay_are_told_where_they_drew_before(draws: bool) -> None:
    def make() -> Any:
        collate = {"collate_fn": negatives} if draws else {}
        more: Any = {"generator": generator(), "num_workers": 1, "persistent_workers": True}
        loader: Any = DataLoader(ITEMS, 20, shuffle=True, **collate, **more)
        return tierstore.lookahead(loader, {}, depth=2)

    torch.manual_seed(1)
    ahead, states, batches = make(), [], []
    for _ in range(2):
        for batch in ahead:
            batches.append(batch.tolist())
            states.append(ahead.state_dict())
    again = make()
    for stop, differs in ((2, False), (4, draws), (5, draws), (1, False)):
        if stop == 4:
            again = make()  # in another process there are no workers yet
        again.load_state_dict(states[stop - 1])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            seen = [batch.tolist() for batch in again]
        assert ["after 1 epoch with persistent" in str(each.message) for each in found] == (
            [True] if stop >= 3 else []
        )
        end = 3 if stop < 3 else 6
        assert [each[:20] for each in seen] == [each[:20] for each in batches[stop:end]]
        assert (seen != batches[stop:end]) == differs


def test_a_stop_between_epochs_keeps_the_generators() -> None:
    ahead = tierstore.lookahead(WITH_GENERATORS["of the loader"](), {}, depth=2)
    list(ahead)
    state = ahead.state_dict()
    want = [batch.tolist() for batch in ahead]
    other = tierstore.lookahead(WITH_GENERATORS["of the loader"](), {}, depth=2)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == want


def test_a_loader_that_draws_from_other_generators_is_refused() -> None:
    ahead = tierstore.lookahead(sampled(), {})
    iterated = tierstore.lookahead(WITH_GENERATORS["of the loader"](), {})
    next(iter(iterated))
    ahead.load_state_dict(iterated.state_dict())
    with pytest.raises(InvalidInputError, match=r"from generator: make it as it was made"):
        next(iter(ahead))


def test_a_loader_that_is_read_ahead_is_no_part_of_its_own() -> None:
    with tierstore.create(None, {"t": tierstore.TableSpec(2, 2)}) as store:
        loader = Positioned(10)
        early = tierstore.Checkpoint(store, loader=loader)
        early.commit(1)
        ahead = tierstore.lookahead(loader, {}, depth=3)
        with pytest.raises(InvalidInputError, match="loader is a loader that a lookahead reads"):
            tierstore.Checkpoint(store, loader=loader, ahead=ahead)
        with pytest.raises(InvalidInputError, match="give the lookahead"):
            early.commit(2)
        del ahead
        early.commit(2)
