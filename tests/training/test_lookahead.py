"""Reading a loader ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import tierstore
from tests import inside
from tests.pairs import pairs
from tests.training.conftest import DIM, PLACES, Place, rows_of
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer


class Recorder:
    """Stands for a table, and notes what is asked of it."""

    def __init__(self, log: list[Any], name: str = "") -> None:
        self.log = log
        self.name = name

    def prefetch(self, ids: Any, window: int) -> None:
        self.window = window
        self.log.append((self.name, ids))


def test_batches_come_unchanged_and_their_rows_are_asked_for_ahead() -> None:
    log: list[Any] = []
    batches = [{"item": number, "user": -number} for number in range(5)]
    ahead = tierstore.lookahead(
        batches,
        {Recorder(log, "i"): "item", Recorder(log, "u"): lambda batch: batch["user"]},
        depth=2,
    )
    seen = []
    for batch in ahead:
        seen.append(batch)
        log.append("used")
    assert all(one is other for one, other in zip(seen, batches, strict=True))
    asked = [number for name, number in (entry for entry in log if entry != "used") if name == "i"]
    assert asked == [0, 1, 2, 3, 4]
    assert log.index("used") == 6
    assert log[-2:] == ["used", "used"]
    assert len(ahead) == 5


def test_it_can_be_iterated_again_and_left_early() -> None:
    log: list[Any] = []
    ahead = tierstore.lookahead([(1,), (2,), (3,)], {Recorder(log): 0}, depth=1)
    assert list(ahead) == list(ahead) == [(1,), (2,), (3,)]
    log.clear()
    next(iter(ahead))
    assert [ids for _, ids in log] == [1, 2]


@pytest.mark.parametrize("depth", [0, 1, 3, 99])
def test_any_depth_yields_all(depth: int) -> None:
    assert list(tierstore.lookahead(iter(range(7)), {}, depth=depth)) == list(range(7))


def test_rows_are_kept_for_twice_as_many_batches_as_it_looks_ahead() -> None:
    recorder = Recorder([])
    list(tierstore.lookahead([(1,)], {recorder: 0}, depth=40))
    assert recorder.window == 80


@pytest.mark.parametrize(("window", "kept"), [(4, False), (30, True)])
def test_rows_stay_until_so_many_newer_batches(tmp_path: Path, window: int, kept: bool) -> None:
    place = Place(tmp_path)
    table = place.table(torch.randn(200, DIM), host_rows=40)
    table.prefetch([0, 1], window=window)
    for row in range(2, 12):
        table.prefetch([row], window=window)
    inside.state(place.opened[0]).prefetcher.wait()
    table.read(list(range(100, 160)))
    before = table.stats()["host"].hits
    table.read([0, 1])
    assert (table.stats()["host"].hits - before == 2) == kept
    place.close()


def test_what_it_does_not_take() -> None:
    with pytest.raises(InvalidInputError, match="negative"):
        tierstore.lookahead([], {}, depth=-1)
    with pytest.raises(InvalidTypeError, match="depth"):
        tierstore.lookahead([], {}, depth=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="neither a layer nor a table"):
        tierstore.lookahead([], {"item": "item"})


@pytest.mark.variants(1, 1)
@pairs(together=1, place=PLACES, workers=[0, 2])
def test_training_ahead_sees_every_update(place: Place, weights: Tensor, workers: int) -> None:
    """Neighbouring batches share most of their rows: each must see what the last step wrote."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randint(0, 12, (9,), generator=generator) for _ in range(30)]
    found = []
    for depth in (None, 1, 6):
        table = place.table(weights)
        emb = TieredEmbedding(table)
        opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
        loader = DataLoader(data, batch_size=2, num_workers=workers)
        batches: Any = loader
        if depth is not None:
            batches = tierstore.lookahead(loader, {emb: lambda batch: batch}, depth=depth)
        for batch in batches:
            emb(batch.to(place.torch)).square().sum().backward()
            opt.step()
        found.append(rows_of(table))
        place.close()
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
