"""TieredEmbeddingBag beside torch.nn.EmbeddingBag."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairs import pairs
from tests.training.conftest import PLACES, ROWS, Place, randomly, rows_of
from tierstore.errors import InvalidInputError
from tierstore.nn import TieredEmbeddingBag
from tierstore.optim import TieredOptimizer


class Pair:
    """A tiered layer and a plain one with the same rows, trained alike."""

    def __init__(self, place: Place, weights: Tensor, **options: Any) -> None:
        self.table = place.table(weights)
        self.tiered = TieredEmbeddingBag(self.table, **options)
        self.plain = torch.nn.EmbeddingBag(*weights.shape, **options).to(place.torch)
        self.plain.weight.data.copy_(weights)
        self.opt = TieredOptimizer(torch.optim.SGD, [self.tiered], lr=0.5)
        self.plain_opt = torch.optim.SGD(self.plain.parameters(), lr=0.5)

    def check(self, *inputs: Any) -> None:
        """Compare what comes out, and the rows after a step on it."""
        bags, plain = self.tiered(*inputs), self.plain(*inputs)
        torch.testing.assert_close(bags, plain)
        with torch.no_grad():
            torch.testing.assert_close(self.tiered(*inputs), plain)
        factors = randomly(*bags.shape, like=bags)
        for out, optimizer in ((bags, self.opt), (plain, self.plain_opt)):
            (out * factors).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(rows_of(self.table), self.plain.weight.detach().cpu())


@pytest.mark.variants(1, 5)
@pairs(place=PLACES, mode=["sum", "mean", "max"], padding=[None, 2, -1])
def test_bags(place: Place, weights: Tensor, mode: str, padding: int | None) -> None:
    pair = Pair(place, weights, mode=mode, padding_idx=padding)
    pair.check(place.ids(5, 7, rows=8))
    offsets = torch.tensor([0, 3, 3, 9]).to(place.torch)
    pair.check(place.ids(12, rows=5), offsets)
    if padding is not None:
        pair.check(torch.full((2, 3), padding % ROWS).to(place.torch))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_padding_in_order(place: Place, weights: Tensor, mode: str) -> None:
    if mode == "max" and place.torch != "cpu":
        pytest.skip("torch has no maximum in order on a GPU")
    pair = Pair(place, weights, mode=mode, padding_idx=2)
    torch.use_deterministic_algorithms(True)
    try:
        pair.check(place.ids(12, rows=5), torch.tensor([0, 3, 3, 9]).to(place.torch))
    finally:
        torch.use_deterministic_algorithms(False)


def test_offsets_that_end_with_the_number_of_ids(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights, mode="sum", include_last_offset=True)
    pair.check(place.ids(12), torch.tensor([0, 3, 3, 9, 12]).to(place.torch))


@pytest.mark.parametrize("padding", [None, 0])
def test_weights_of_samples(place: Place, weights: Tensor, padding: int | None) -> None:
    pair = Pair(place, weights, mode="sum", padding_idx=padding)
    ids = place.ids(4, 5, rows=9)
    factors = randomly(4, 5, like=pair.plain.weight)
    ours, plain = (factors.clone().requires_grad_() for _ in range(2))
    pair.tiered(ids, None, ours).square().sum().backward()
    pair.plain(ids, None, plain).square().sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)
    pair.opt.step()
    pair.plain_opt.step()
    torch.testing.assert_close(rows_of(pair.table), pair.plain.weight.detach().cpu())


def test_no_bags_at_all(place: Place, weights: Tensor) -> None:
    pair = Pair(place, weights, mode="sum")
    none = place.ids(0)
    assert pair.tiered(none, none).shape == pair.plain(none, none).shape


@pytest.mark.variants(1, 5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_other_types(place: Place, weights: Tensor, dtype: torch.dtype) -> None:
    emb = TieredEmbeddingBag(place.table(weights.to(dtype)), mode="mean")
    ids = place.ids(4, 5)
    plain = torch.nn.functional.embedding_bag(ids, weights.to(place.torch, dtype), mode="mean")
    torch.testing.assert_close(emb(ids).detach(), plain)


def test_what_it_does_not_take(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    with pytest.raises(InvalidInputError, match="median"):
        TieredEmbeddingBag(table, mode="median")
    with pytest.raises(InvalidInputError, match="max_norm"):
        TieredEmbeddingBag(table, max_norm=1.0)
    emb = TieredEmbeddingBag(table)
    with pytest.raises(ValueError, match="offsets"):
        emb(place.ids(4))
    with pytest.raises(InvalidInputError, match="per_sample_weights"):
        emb(place.ids(4, 2), None, torch.ones(4, 2).to(place.torch))
