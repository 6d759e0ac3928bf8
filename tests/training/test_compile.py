"""Layers inside torch.compile, as one graph."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import inside
from tests.training.conftest import DIM, Place, rows_of
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import TieredOptimizer


class Model(torch.nn.Module):
    """Two layers over one table, and a dense one."""

    def __init__(self, emb: Any, bag: Any) -> None:
        super().__init__()
        self.emb, self.bag = emb, bag
        self.linear = torch.nn.Linear(DIM, 3)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.linear(self.emb(ids).tanh() * self.bag(bags)).square().mean()


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.torture)])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    torch.compiler.reset()
    return str(request.param)


@pytest.mark.variants(0, 1)
@pytest.mark.fault(62)
@pytest.mark.slow("emulated")
def test_a_compiled_model_trains_as_an_eager_one(
    place: Place, weights: Tensor, backend: str
) -> None:
    models = []
    for _ in range(2):
        table = place.table(weights)
        emb, bag = TieredEmbedding(table), TieredEmbeddingBag(table, mode="sum", padding_idx=0)
        models.append(Model(emb, bag).to(place.torch))
    models[1].linear.load_state_dict(models[0].linear.state_dict())
    steps = [models[0], torch.compile(models[1], fullgraph=True, backend=backend)]
    tiered = [TieredOptimizer(torch.optim.Adam, [m.emb, m.bag], lr=0.1) for m in models]
    dense = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for number in range(4):
        ids, bags = place.ids(5 + number % 2), place.ids(5 + number % 2, 3)
        losses = [step(ids, bags) for step in steps]
        torch.testing.assert_close(*losses)
        for loss, *optimizers in zip(losses, tiered, dense, strict=True):
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = [rows_of(model.emb.table) for model in models]
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], weights)
    with torch.no_grad():
        torch.testing.assert_close(*[step(ids, bags) for step in steps])


@pytest.mark.variants(1)
def test_a_compiled_layer_that_is_frozen_only_reads(place: Place, weights: Tensor) -> None:
    torch.compiler.reset()
    emb = TieredEmbedding(place.table(weights)).requires_grad_(False)
    compiled = torch.compile(emb, fullgraph=True, backend="aot_eager")
    ids = place.ids(4, 2)
    rows = compiled(ids)
    assert not rows.requires_grad
    assert torch.equal(rows.cpu(), weights[ids.cpu()])


def test_the_operators_keep_their_promises(place: Place, weights: Tensor) -> None:
    emb = TieredEmbedding(place.table(weights))
    TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
    anchor = torch.empty(0, DIM, device=place.torch, requires_grad=True)
    tests = ("test_schema", "test_faketensor")
    for trained in (True, False):
        arguments = (place.ids(4, 2), anchor, inside.number(emb), trained)
        torch.library.opcheck(torch.ops.tierstore.look_up.default, arguments, test_utils=tests)


@pytest.mark.variants(1)
def test_gradients_with_respect_to_others_leave_the_rows_alone(
    place: Place, weights: Tensor
) -> None:
    torch.compiler.reset()
    emb = TieredEmbedding(place.table(weights))
    model = torch.nn.Sequential(emb, torch.nn.Tanh(), torch.nn.Linear(DIM, 1)).to(place.torch)
    opt = TieredOptimizer(torch.optim.SGD, [emb], lr=0.1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, head = place.ids(7), list(model[2].parameters())
    wanted = torch.autograd.grad(model(ids).square().sum(), head)
    torch.testing.assert_close(torch.autograd.grad(compiled(ids).square().sum(), head), wanted)
    compiled(ids).sum().backward(inputs=head)
    assert emb.rows.grad is None
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(compiled(ids).sum(), [*head, emb.rows])
    assert emb.rows.grad is None
    before = rows_of(emb.table)
    opt.step()
    assert torch.equal(rows_of(emb.table), before)
