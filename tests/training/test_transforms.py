"""Layers inside torch.func, nested ids, and what shards or replaces parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap

from tests.training.conftest import DIM, Place, rows_of
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn import TieredEmbedding, TieredEmbeddingBag
from tierstore.optim import TieredOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),  # jvp's first use
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]
IDS = [[1, 2], [3, 2], [5, 5]]


class Pair:
    """A model over a table, the same over a plain layer, and ids."""

    def __init__(self, place: Place, weights: Tensor) -> None:
        head = torch.nn.Linear(DIM, 1).to(place.torch)
        plain = torch.nn.Embedding.from_pretrained(weights, freeze=False).to(place.torch)
        self.emb = TieredEmbedding(place.table(weights))
        self.opt = TieredOptimizer(torch.optim.SGD, [self.emb], lr=1.0)
        self.model = torch.nn.Sequential(self.emb, head)
        self.plain = torch.nn.Sequential(plain, head)
        self.head = dict(self.model.named_parameters())
        del self.head["0.rows"]
        self.ids = torch.tensor(IDS).to(place.torch)


@pytest.fixture
def pair(place: Place, weights: Tensor) -> Pair:
    return Pair(place, weights)


def test_gradients_of_other_layers_for_each_sample(pair: Pair) -> None:
    def loss(model: Any, head: Any, ids: Tensor) -> Tensor:
        found: Tensor = functional_call(model, head, (ids,)).square().sum()
        return found

    for transform in (grad, lambda f: vmap(grad(f), in_dims=(None, 0)), jacrev):
        ours, plain = (
            transform(lambda head, ids, model=model: loss(model, head, ids))(pair.head, pair.ids)
            for model in (pair.model, pair.plain)
        )
        for name, value in ours.items():
            torch.testing.assert_close(value, plain[name])
    assert pair.emb.rows.grad is None


@pytest.mark.parametrize("trained", [True, False])
def test_ids_may_be_mapped_over(pair: Pair, place: Place, trained: bool) -> None:
    pair.emb.requires_grad_(trained)
    expected = pair.plain[0](pair.ids)
    for found in (
        vmap(pair.emb)(pair.ids),
        vmap(pair.emb, in_dims=1, out_dims=1)(pair.ids),
        vmap(vmap(pair.emb))(pair.ids),
    ):
        assert torch.equal(found, expected)
        assert found.requires_grad == trained
    with torch.no_grad():
        assert torch.equal(vmap(pair.emb)(pair.ids), expected)


def test_a_gradient_through_mapped_lookups_trains_the_rows(
    pair: Pair, place: Place, weights: Tensor
) -> None:
    with pytest.raises(InvalidInputError, match=r"torch\.autograd\.grad"):
        torch.autograd.grad(vmap(pair.emb)(pair.ids).sum(), pair.emb.parameters())
    vmap(pair.emb)(pair.ids).sum().backward()
    pair.opt.step()
    counts = torch.bincount(pair.ids.reshape(-1).cpu(), minlength=len(weights))
    torch.testing.assert_close(rows_of(pair.emb.table), weights - counts[:, None])


@pytest.mark.variants(1)
def test_tangents_of_other_layers(pair: Pair) -> None:
    tangents = {name: torch.ones_like(value) for name, value in pair.head.items()}
    ours, plain = (
        jvp(
            lambda head, model=model: functional_call(model, head, (pair.ids,)),
            (pair.head,),
            (tangents,),
        )
        for model in (pair.model, pair.plain)
    )
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected)


def test_transforms_with_respect_to_the_rows_are_refused(pair: Pair) -> None:
    every = dict(pair.model.named_parameters())
    detached = {name: value.detach() for name, value in every.items()}
    tangents = {name: torch.ones_like(value) for name, value in detached.items()}

    def loss(parameters: Any, ids: Tensor) -> Tensor:
        found: Tensor = functional_call(pair.model, parameters, (ids,)).sum()
        return found

    for call in (
        lambda: grad(loss)(every, pair.ids),
        lambda: grad(loss)(detached, pair.ids),
        lambda: vmap(grad(loss), in_dims=(None, 0))(detached, pair.ids),
        lambda: jvp(lambda given: loss(given, pair.ids), (detached,), (tangents,)),
    ):
        with pytest.raises(InvalidInputError, match="replaced the parameter of the layer"):
            call()
    with pytest.raises(InvalidInputError, match="clone needs the values of table 'item'"):
        every["0.rows"].clone()
    assert not functional_call(pair.emb, {"rows": detached["0.rows"]}, (pair.ids,)).requires_grad


def test_a_table_within_a_transform_is_refused(pair: Pair, weights: Tensor) -> None:
    table, values = pair.emb.table, torch.ones(3, 2, DIM)
    for call in (
        lambda: vmap(table.read)(pair.ids),
        lambda: vmap(lambda ids: table[ids])(pair.ids),
        lambda: vmap(table.prefetch)(pair.ids),
        lambda: vmap(lambda given: table.write([1, 2], given))(values),
        lambda: vmap(lambda given: table.topk(given, 3))(values),
        lambda: grad(lambda given: (table.write([1, 2], given), given.sum())[1])(values[0]),
    ):
        with pytest.raises(InvalidTypeError, match=r"within torch\.func"):
            call()
    assert torch.equal(rows_of(table), weights)


def test_nested_ids_give_nested_rows(pair: Pair, place: Place, weights: Tensor) -> None:
    ids = [torch.tensor(each).to(place.torch) for each in ([1, 2, 2], [7], [4, 5])]
    nested = torch.nested.nested_tensor(ids, layout=torch.jagged)
    rows = pair.emb(nested)
    assert rows.is_nested
    for found, each in zip(rows.unbind(), ids, strict=True):
        assert torch.equal(found.cpu(), weights[each.cpu()])
    rows.values().sum().backward()
    pair.opt.step()
    counts = torch.bincount(torch.cat(ids).cpu(), minlength=len(weights))
    torch.testing.assert_close(rows_of(pair.emb.table), weights - counts[:, None])
    with torch.no_grad():
        assert pair.emb(nested).is_nested
    with pytest.raises(InvalidTypeError, match=r"layout torch\.jagged"):
        pair.emb(torch.nested.nested_tensor(ids))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_nested_ids_are_bags(place: Place, weights: Tensor, mode: Any) -> None:
    bag = TieredEmbeddingBag(place.table(weights), mode=mode)
    ids = [torch.tensor(each).to(place.torch) for each in ([1, 2, 2], [7], [4, 5])]
    nested = torch.nested.nested_tensor(ids, layout=torch.jagged)
    plain = torch.nn.functional.embedding_bag(
        torch.cat(ids),
        weights.to(place.torch),
        torch.tensor([0, 3, 4]).to(place.torch),
        mode=mode,
    )
    torch.testing.assert_close(bag(nested).detach(), plain)


@pytest.mark.parametrize("layer", [TieredEmbedding, TieredEmbeddingBag])
def test_ids_that_are_no_tensor_are_refused(place: Place, weights: Tensor, layer: Any) -> None:
    emb = layer(place.table(weights))
    for ids in ([[1, 2]], weights.numpy()):
        with pytest.raises(InvalidTypeError, match=r"ids as a tensor, not (list|ndarray)"):
            emb(ids)


@pytest.fixture
def group() -> Iterator[None]:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch knows no other processes")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_sharding_the_rows_is_refused_and_ignoring_them_works(
    weights: Tensor, tmp_path: Any
) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if "ignored_params" not in inspect.signature(fsdp.fully_shard).parameters:
        pytest.skip("this fully_shard ignores no parameters")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    place = Place(tmp_path)
    sharded = Pair(place, weights).model
    with pytest.raises(InvalidInputError, match=r"ignored_params=set\(emb\.parameters\(\)\)"):
        fsdp.fully_shard(sharded, mesh=mesh)
    pair = Pair(place, weights)
    fsdp.fully_shard(pair.model, mesh=mesh, ignored_params=set(pair.emb.parameters()))
    pair.model(torch.tensor(IDS)).sum().backward()
    pair.opt.step()
    changed = (rows_of(pair.emb.table) != weights).any(1).nonzero().ravel()
    assert changed.tolist() == [1, 2, 3, 5]
    place.close()


@pytest.mark.usefixtures("group")
def test_data_parallel_training_with_one_process(weights: Tensor, tmp_path: Any) -> None:
    place = Place(tmp_path)
    pair = Pair(place, weights)
    model = torch.nn.parallel.DistributedDataParallel(pair.model)
    optimizers = [pair.opt, torch.optim.SGD(pair.plain[0].parameters(), lr=1.0)]
    for ids in (IDS, [[2, 3], [2, 8]]):
        for each, optimizer in zip((model, pair.plain), optimizers, strict=True):
            each(torch.tensor(ids)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            pair.model.zero_grad()
    torch.testing.assert_close(rows_of(pair.emb.table), pair.plain[0].weight.detach())
    place.close()
