"""What becomes of a lease, a forward pass and a gradient when their table gets another shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tierstore
from tests.training.conftest import DIM, ROWS, Place, rows_of
from tierstore.errors import ClosedError
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

RESHAPES = {
    "fields": lambda table: table.store.add_fields(table.name, {"more": tierstore.Field(3)}),
    "rows": lambda table: table.store.grow(table.name, ROWS + 5),
}
reshapes = pytest.mark.parametrize("reshape", RESHAPES.values(), ids=RESHAPES)


@reshapes
def test_an_open_lease_ends(place: Place, weights: Tensor, reshape: Any) -> None:
    table = place.table(weights)
    lease = table.lease(place.ids(9))
    reshape(table)
    assert lease.ended
    for use in (
        lambda: lease.read("weight"),
        lambda: lease.expand("weight"),
        lambda: lease.write("weight", torch.zeros(9, DIM)),
    ):
        with pytest.raises(ClosedError, match=r"got other fields or rows.*table\.lease"):
            use()
    lease.release()
    assert torch.equal(rows_of(table)[:ROWS], weights)


@reshapes
def test_a_backward_pass_of_a_forward_pass_from_before(
    place: Place, weights: Tensor, reshape: Any
) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    ids = torch.tensor([4, 2, 4]).to(place.torch)
    loss = emb(ids).sum()
    reshape(table)
    loss.backward()
    opt.step()
    expected = weights.clone()
    expected[2] -= 1
    expected[4] -= 2
    torch.testing.assert_close(rows_of(table)[:ROWS], expected)


@reshapes
def test_a_gradient_from_before_is_applied(place: Place, weights: Tensor, reshape: Any) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=1.0)
    ids = torch.arange(9).to(place.torch)
    emb(ids).sum().backward()
    reshape(table)
    opt.step()
    torch.testing.assert_close(rows_of(table)[:9], weights[:9] - 1)
    assert torch.equal(rows_of(table)[9:ROWS], weights[9:])


def test_an_optimizer_may_be_made_after_a_forward_pass(place: Place, weights: Tensor) -> None:
    table = place.table(weights)
    emb = TieredEmbedding(table)
    kept = emb(place.ids(9))
    opt = TieredOptimizer(torch.optim.Adam, [emb], lr=0.1)
    emb(torch.arange(3).to(place.torch)).sum().backward()
    opt.step()
    assert kept.shape == (9, DIM)
    torch.testing.assert_close(rows_of(table)[:3], weights[:3] - 0.1)
